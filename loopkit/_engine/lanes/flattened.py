"""Flatten a loop and the loops in its step into one, in which each lane is in a step of its own.

Under vmap, an inner loop runs until its slowest lane has stopped, in every step of the outer loop.
In the flat loop, a lane goes on as soon as it has finished an inner loop itself (nest.py). Only
inner loops that have a predicate, and are in no branch, are flattened.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from loopkit import _jax
from loopkit._engine.lanes.going_together import asks_all_lanes, reads_other_lanes
from loopkit._engine.lanes.nest import Inside, Nest, steps_nanoseconds
from loopkit._engine.loop import Loop, Rewritten, run_rewritten
from loopkit._engine.primitives import while_p
from loopkit._jaxprs import equations
from loopkit._jaxprs.cost import UNKNOWN_TRIPS, nanoseconds
from loopkit._jaxprs.dataflow import interpret
from loopkit._jaxprs.prices import EQUATION

LEAF = 15.0
"""The assumed nanoseconds for each array in the state of a lane, beside its steps."""
STEPS_BETWEEN_CHECKS = 64
"""The most steps of an inner loop between two checks of which lanes have finished."""


def flattened(loop: Loop) -> Loop | Rewritten:
    """Return the flat loop; the loop itself if nobody asks for one or no inner loop can be cut."""
    nest = _cut(loop) if loop.lane_policy == "flatten" else None
    return loop if nest is None else nest.flat()


def _ends_by_itself(eqn: Any) -> bool:
    """Return whether an equation is a loop with a predicate, without lanes, xs and ys."""
    loop = eqn.params.get("loop")
    if eqn.primitive is not while_p or loop.cond is None:
        return False
    return loop.length != 1 and not (loop.lanes or loop.xs or loop.ys)


def _with_loops_in_sight(body: _jax.Jaxpr) -> Any:
    """Return a body with calls around inner loops inlined, and these flattened where it pays."""

    def holds_loops(jaxpr: _jax.Jaxpr) -> bool:
        return any(eqn.primitive is while_p for eqn in equations.all_equations(jaxpr))

    def rule(eqn: _jax.Equation, ins: list) -> Sequence[Any] | None:
        if equations.is_call(eqn) and holds_loops(eqn.params["jaxpr"]):
            return None
        if eqn.primitive is while_p and not eqn.params["loop"].masks_itself:
            nest = _cut(eqn.params["loop"])
            if nest is not None and nest.is_worth_it:
                flat = nest.flat()
                with _jax.context_of(eqn):
                    return run_rewritten(lambda *v: while_p.bind(*v, loop=flat.loop), [flat], ins)
        return _jax.bind_equation(eqn, ins)

    if not holds_loops(body):
        return body
    again = lambda *values: interpret(_jax.open_jaxpr(body), values, rule)
    return _jax.trace_closed(again, body.in_avals, "flattened")


def _cut(loop: Loop) -> Nest | None:
    """Return the step cut at its inner loops; None if it cannot be cut."""
    if loop.lanes or loop.length == 0:  # a loop of no steps has no rows
        return None
    if reads_other_lanes(loop) or asks_all_lanes(loop):  # each lane is in a step of its own
        return None
    if any(map(_jax.varying, (t for j in loop.jaxprs for t in (*j.in_avals, *j.out_avals)))):
        return None  # inner loops may vary over fewer devices than the state would
    loop = loop.replace(body=_with_loops_in_sight(loop.body))
    step = _jax.open_jaxpr(loop.body)
    pieces, cut = [[]], []
    for eqn in step.eqns:
        if _ends_by_itself(eqn):
            cut.append(eqn)
            pieces.append([])
        else:
            pieces[-1].append(eqn)
    if not cut:
        return None
    made = []
    for number, piece in enumerate(pieces):
        later = (eqn for after in pieces[number + 1 :] for eqn in after)
        read = {v for eqn in (*cut[number:], *later) for v in equations.variables(eqn)}
        read.update(_jax.variables(step.outvars))
        last = number == len(cut)
        made.append([v for eqn in piece for v in eqn.outvars if v in read and not last])
    leaf_count = sum(map(len, made)) + sum(e.params["loop"].carry_count for e in cut)
    around = (leaf_count + loop.carry_count) * LEAF + sum(map(steps_nanoseconds, pieces))
    return Nest(loop, pieces, [Inside.of(eqn, _few(eqn, around)) for eqn in cut], made)


def _few(eqn: _jax.Equation, around: float) -> int:
    """Return how many steps an inner loop takes between two checks of which lanes have finished.

    If it takes n, an inner loop of m steps runs the rest of the outer step m / n times, and a lane
    waits for n / 2 steps on average.
    """
    step = max(nanoseconds(eqn.params["loop"].body), EQUATION)
    return math.ceil(min(STEPS_BETWEEN_CHECKS, math.sqrt(2 * UNKNOWN_TRIPS * around / step)))
