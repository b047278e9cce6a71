"""Lanes that go on together while one of them does, and lanes that read each other.

The predicates of equinox's loops ask whether any lane goes on, and their steps keep stopped lanes
as they are. So each lane may stop by itself instead. What all lanes share, such as a counter of
steps, then has to be taken from the lane that stops last.

Steps of other loops may read lanes that have stopped, so these have to be as they are in lax.
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
OF_ALL_LANES = frozenset((TOGETHER, "unvmap_all", "unvmap_max"))
"""The primitives of equinox that return something of all lanes."""
WITH_A_BATCH = frozenset(("custom_vmap_call", "rng_bit_generator"))
"""Primitives whose results in one lane may depend on the other lanes."""


def asking_each(loop: Loop) -> Loop | None:
    """Return the loop without the equinox primitives that make its lanes go on together.

    Return None if the predicate holds none, or if steps may change a lane that has stopped.
    """
    cond = loop.cond
    if cond is None or not _holds_stopped_lanes(loop):
        return None
    # A second one is the user's, and asks what it says.
    if sum(eqn.primitive.name == TOGETHER for eqn in equations.all_equations(cond)) != 1:
        return None

    def rule(eqn: _jax.Equation, ins: list) -> Any:
        return ins if eqn.primitive.name in (TOGETHER, "nonbatchable") else None

    def make() -> Loop:
        run = lambda *values: interpret(_jax.open_jaxpr(cond), values, rule)
        return loop.replace(cond=_jax.trace_closed(run, cond.in_avals, "loop_cond"))

    return loop.derived("asking each", make)


def reads_other_lanes(loop: Loop) -> bool:
    """Return whether a step may read the values of other lanes, but not by the name of their axis.

    Steps of equinox's own loops ask all lanes only to save work, which changes no result.
    """
    found = lambda: _reads(loop.body, _holds_stopped_lanes(loop))
    return loop.derived("reads other lanes", found)


def asks_all_lanes(loop: Loop) -> bool:
    """Return whether the loop, or one in its steps, asks something of all lanes."""
    every = (eqn for j in loop.jaxprs for eqn in equations.all_equations(j))
    return any(eqn.primitive.name in OF_ALL_LANES for eqn in every)


def _reads(jaxpr: _jax.Jaxpr, of_equinox: bool) -> bool:
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        name = eqn.primitive.name
        if name in WITH_A_BATCH or _draws_for_a_batch(eqn):
            return True
        if name in OF_ALL_LANES and not of_equinox:
            return True
        within = of_equinox or _is_loop_of_equinox(eqn)
        if any(_reads(inner, within) for inner in equations.jaxprs_in(eqn)):
            return True
    return False


def _draws_for_a_batch(eqn: _jax.Equation) -> bool:
    """Return whether an equation draws with a generator that draws for all keys of a batch."""
    if not eqn.primitive.name.startswith("random_"):
        return False
    kinds = (getattr(v.aval.dtype, "_impl", None) for v in (*eqn.invars, *eqn.outvars))
    return any("rbg" in getattr(kind, "name", "") for kind in kinds)


def _is_loop_of_equinox(eqn: _jax.Equation) -> bool:
    loop = eqn.params.get("loop")
    if loop is not None:
        return _holds_stopped_lanes(loop)
    if eqn.primitive is not _jax.lax_while_p:
        return False
    return _holds(eqn.params["body_jaxpr"], eqn.params["body_nconsts"])


def _holds_stopped_lanes(loop: Loop) -> bool:
    return _holds(loop.body, loop.const_count)


def _holds(body: _jax.Jaxpr, const_count: int) -> bool:
    """Return whether each step is one of equinox, which keeps stopped lanes as they are.

    Such a step carries whether the lane goes on, and selects by it between new and old values.
    """
    j = _jax.open_jaxpr(body)
    maker, carry = equations.maker_of(j), j.invars[const_count:]
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
