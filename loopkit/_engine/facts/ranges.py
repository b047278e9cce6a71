"""Find the ranges of the integers in a loop, and in the loops inside it.

The lattice is that of `_jaxprs/integers.py`. If a step leads beyond an end of a range, that end
becomes unknown (widening), so that the fixed point is reached soon.

Ranges have two uses. A negative index counts from the end of a buffer, so a counter that starts
below zero may name a row twice. An inner loop has a bound if its limit has a known maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import jax
import numpy as np

from loopkit import _jax
from loopkit._engine.facts.bounds import (
    StepBound,
    asked,
    bound_in,
    find_counters,
    limits_in,
    of_all_steps,
)
from loopkit._engine.leaves import Operands
from loopkit._engine.loop import Loop
from loopkit._engine.primitives import while_p
from loopkit._jaxprs import equations
from loopkit._jaxprs.dataflow import fixed_point
from loopkit._jaxprs.integers import (
    ANY,
    FAR,
    WIDE,
    Range,
    follow,
    is_integer,
    join,
    range_of,
    ranges_after,
    within,
)
from loopkit._programs import with_fields

LARGEST_START = 8
"""The largest start of a counter that has a program of its own; larger starts share one."""


def with_ranges(loop: Loop, operands: Operands) -> Loop:
    """Return the loop with lower bounds of its row counters, and with bounds of its inner loops."""
    inside = loop.derived("holds a while loop", lambda: equations.holds_while_loop(loop.body))
    # If the number of steps is known, it says whether a row is written twice.
    if not inside and (loop.cond is None or not any(loop.is_buffer)):
        return loop
    ranges = [range_of(v) if inside else ANY for v in operands.flat]
    if not inside:  # only the starts of its counters matter
        first = loop.cond_const_count + loop.const_count
        for i, (v, by) in enumerate(zip(operands.init, find_counters(loop), strict=True), first):
            ranges[i] = Range(range_of(v).low, FAR) if by == 1 else ANY
    if not any(map(_jax.is_tracer, map(_jax.innermost, operands.flat))):
        # Outside jit, each range compiles a program of its own: round it to one of a few.
        ranges = [_rounded(r, v) for r, v in zip(ranges, operands.flat, strict=True)]
    return _knowing(loop, ranges)[0]


def _rounded(found: Range, value: jax.Array) -> Range:
    """Return a range, one of a few, that contains this one."""
    if not found.is_known:
        return ANY
    low, high = map(int, found)
    least = min(low, LARGEST_START) if np.ndim(value) == 0 else 0
    low = least if low >= 0 else -(1 << (-low - 1).bit_length())
    return Range(low, 1 << (high - 1).bit_length() if high > 0 else 0)


def _knowing(loop: Loop, ranges: Sequence[Range]) -> tuple[Loop, list[Range]]:
    """Return the loop for operands in these ranges, and the ranges of its results."""

    def make() -> tuple[Loop, list[Range]]:
        of, _ = loop.split(ranges)
        counted = _counted(loop, of)

        def step(now: list[Range]) -> tuple:
            carry = [counted.get(i, r) for i, r in enumerate(now)]
            body, after = follow(loop.body, [*of.consts, *carry, *of.xs], _after)
            handed_on = [now[i] if i in counted else after[i] for i in range(loop.carry_count)]
            return handed_on, body, after, carry

        _, body, after, carry = fixed_point(of.init, step, _widened)
        leaves = zip(loop.carry, loop.carry_types, carry, strict=True)
        known = tuple(c._replace(counter_lower_bound=_least(r, t)) for c, t, r in leaves)
        changed = body is not loop.body or known != loop.carry
        final = [join(pair) for pair in zip(of.init, after, strict=False)]
        ys = [ANY] * loop.ys_count
        return loop.replace(body=body, carry=known) if changed else loop, [*final, *ys]

    return loop.derived(("in", tuple(ranges)), make)


def _widened(before: Range, after: Range) -> Range:
    """Return the range, with each end unknown that a step leads beyond."""
    low = before.low if after.low >= before.low else -inf
    return Range(low, before.high if after.high <= before.high else inf)


def _counted(loop: Loop, of: Operands) -> dict[int, Range]:
    """Return the range of each counter at the start of a step, as far as limits are known."""
    if loop.lanes:
        return {}  # a lane that has stopped may be anywhere
    found = {}
    if loop.cond is None and isinstance(loop.length, int):
        last = max(loop.length - 1, 0)
        for i, (by, start) in enumerate(zip(find_counters(loop), of.init, strict=True)):
            if by is not None and start.is_known:
                end = Range(start.low + last * by, start.high + last * by)
                found[i] = within(join([start, end]), loop.carry_types[i].dtype)
    elif loop.cond is not None and loop.flag is None:
        for limit in limits_in(loop).found:
            found[limit.counter - loop.cond_const_count] = limit.inside(asked(loop, of))
    return {i: r for i, r in found.items() if r.is_known}


def _least(found: Range, aval: _jax.ShapedArray) -> int | None:
    """Return a lower bound of a row counter, at most LARGEST_START; None if it has none."""
    counts = is_integer(aval) and aval.dtype.itemsize >= WIDE and not aval.shape
    return min(int(found.low), LARGEST_START) if counts and 0 <= found.low < FAR else None


def _after(eqn: _jax.Equation, ins: list[Range]) -> tuple[Any, list[Range]]:
    if eqn.primitive is while_p:
        loop, outs = _knowing(eqn.params["loop"], ins)
        bound = _bound(loop, loop.split(ins)[0])
        if bound is not None and bound.exact:
            eqn = eqn.replace(invars=eqn.invars[loop.cond_const_count :])
            loop = of_all_steps(loop, bound.steps)
        elif bound is not None:
            loop = with_fields(loop, length=bound.steps)
        if loop is not eqn.params["loop"]:
            eqn = eqn.replace(params=eqn.params | {"loop": loop})
        return eqn, outs
    return eqn, ranges_after(eqn, ins)


def _bound(loop: Loop, of: Operands) -> StepBound | None:
    """Return a bound of an inner loop, if it has none yet, or a larger one.

    Only limits of counters with a known start count. A counter that goes on from the last run of
    the inner loop has no known start.
    """
    if loop.cond is None or loop.lanes or loop.lane is not None or loop.xs or loop.ys:
        return None
    if loop.progress is not None:
        return None  # the bar would show the bound
    limits, ranges = limits_in(loop), asked(loop, of)
    found = (limit for limit in limits.found if ranges[limit.counter].is_point)
    bound = bound_in(limits._replace(found=tuple(found)), ranges)
    if bound is None or not bound.is_planned_for(loop.checkpoints):
        return None
    return bound if bound.exact or loop.length is None or bound.steps < loop.length else None
