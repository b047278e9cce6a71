"""Loops of equinox, whose lanes go on together while one of them does.

Their predicates ask whether any lane goes on, and their steps keep stopped lanes as they are. So
each lane may stop by itself instead. What all lanes share, such as a counter of steps, then has to
be taken from the lane that stops last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loopkit import _jax
from loopkit._engine.facts.bounds import find_counters
from loopkit._engine.loop import Loop
from loopkit._jaxprs import equations
from loopkit._jaxprs.dataflow import interpret

TOGETHER = "unvmap_any"
"""The primitive of equinox that returns whether something holds in any lane."""


def asking_each(loop: Loop) -> Loop | None:
    """Return the loop without the equinox primitives that make its lanes go on together.

    Return None if the predicate holds none, or if steps may change a lane that has stopped.
    """
    cond = loop.cond
    if cond is None or not _holds_stopped_lanes(loop):
        return None
    if not any(eqn.primitive.name == TOGETHER for eqn in equations.all_equations(cond)):
        return None

    def rule(eqn: _jax.Equation, ins: list) -> Any:
        return ins if eqn.primitive.name in (TOGETHER, "nonbatchable") else None

    def make() -> Loop:
        run = lambda *values: interpret(_jax.open_jaxpr(cond), values, rule)
        return loop.replace(cond=_jax.trace_closed(run, cond.in_avals, "loop_cond"))

    return loop.derived("asking each", make)


def _holds_stopped_lanes(loop: Loop) -> bool:
    """Return whether each step is one of equinox, which keeps stopped lanes as they are.

    Such a step carries whether the lane goes on, and selects by it between new and old values.
    """
    j = _jax.open_jaxpr(loop.body)
    maker, carry = equations.maker_of(j), j.invars[loop.const_count :]
    copies = lambda eqn: eqn.primitive.name in ("copy", "convert_element_type")
    flags = [
        before
        for before, after in zip(carry, j.outvars, strict=False)
        if (made := maker(after)) is not None
        and made.primitive.name == "and"
        and any(equations.source(v, maker, copies) is before for v in made.invars)
    ]
    selects = [e.invars[0] for e in j.eqns if e.primitive.name == "select_if_vmap"]
    return any(equations.source(v, maker, copies) is f for v in selects for f in flags)


def shared_results(loop: Loop, axes: Sequence[int | None]) -> tuple[tuple[int, int], ...] | None:
    """Return the results that are the same in all lanes, and what a step adds to each.

    `axes` has the lane axis of each result, None for one that is the same in all lanes. Return None
    if one of these is neither a counter nor passed on by each step. If lanes stopped by themselves,
    none of them would have its last value.
    """
    source, counters = equations.forwarded(loop.body), find_counters(loop)
    found = []
    for i, place in enumerate(axes):
        if place is None:
            same = i < loop.carry_count and source[i] == loop.const_count + i
            by = 0 if same else dict(enumerate(counters)).get(i)
            if by is None:
                return None
            found.append((i, by))
    return tuple(found)
