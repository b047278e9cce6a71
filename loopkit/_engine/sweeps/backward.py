"""The backward sweep: segments, newest first.

Each segment is reached from the last checkpoint before it, saving more on the way where slots are
free; it is replayed once, a row stored for each step; and the rows are reversed. No step is in a
branch, and a slot is touched once a segment, not once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopkit import _jax
from loopkit._engine.derivative.reversal import Reversal
from loopkit._engine.derivative.write_log import Rewind
from loopkit._engine.loop import Active, Loop, Operands, kept, parts
from loopkit._engine.steps import read_rows, repeat
from loopkit._engine.sweeps import tables
from loopkit._engine.sweeps.step import Cotangents, StepReversal

LARGE = 1 << 20
"""Bytes of zeros from which on filling them shows."""


class Backward(NamedTuple):
    """The sweep between two segments."""

    unit: Any
    """The segment to reverse next."""
    slots: list
    units: Any
    """The unit that each slot holds."""
    rows: list
    """One for each step of a segment: carries or residuals."""
    cts: Cotangents
    buffers: list
    """Those that are brought back, as they were after the segment to reverse next."""


class Climb(NamedTuple):
    """On the way from a checkpoint to the segment to reverse."""

    carry: list
    unit: Any
    slots: list
    units: Any


def backward_sweep(
    how: Reversal, operands: Operands, residuals: Sequence[Any], cts: Sequence[Any], batch: Any
) -> list:
    """Cotangents of the active constants, initial carry and xs.

    `batch` is None or the size of a leading batch of cotangents.
    """
    loop, plan, active = how.loop, how.plan, how.active
    stacks, log, buffers, (units, taken) = how.unpacked(residuals)
    steps = taken if loop.length is None or loop.cond is not None else loop.length
    steps = taken.max(initial=0) if loop.lanes else steps
    ct_carry, ct_ys = parts(cts, sum(active.carry))
    flowing = _no_cotangents(loop, active, ct_carry, batch)
    if loop.length == 0:
        return [v for group in flowing for v in group]
    rewind = Rewind.of(how.undo, loop, operands, log)
    step = StepReversal.of(how, operands, taken, batch, ct_ys, rewind)
    if step.products is not None:
        types = _jax.stack_types(step.products.factor_types, plan.segment)
        flowing = flowing._replace(factors=list(map(_jax.zeros, types)))
    if plan.keeps_all or (plan.every_carry and step.products is None):
        flowing, _ = step.reverse_rows(0, steps, stacks, flowing, buffers)
        return [*flowing.consts, *flowing.carry, *flowing.xs]

    def reach(s: Backward, end: Any) -> tuple[list, list, Any]:
        if not plan.direct:
            return _climb(how, operands, taken, rewind, s, end)
        first, slot = s.unit * plan.segment, how.load(operands, s.slots, s.unit)
        before = rewind.steps(first, end - first, s.buffers)
        return how.together(how.counts(operands, first, taken), slot, before), s.slots, s.units

    def segment(s: Backward) -> Backward:
        first = s.unit * plan.segment
        even = isinstance(steps, int) and not steps % plan.segment
        count = plan.segment if even else jnp.minimum(steps - first, plan.segment)
        if plan.every_carry:
            slices = (lax.dynamic_slice_in_dim(v, first, plan.segment) for v in s.slots)
            rows = list(map(_jax.placed, slices))
            cts, buffers = step.reverse_segment(first, count, rows, s.cts, s.buffers)
            return s._replace(unit=s.unit - 1, cts=cts, buffers=buffers)
        carry, slots, units = reach(s, first + count)
        if plan.segment == 1:
            rows, (cts, buffers) = s.rows, step.reverse_carry(first, carry, s.cts)
        else:
            carry, rows = step.replay(first, count, carry, s.rows)
            buffers = how.apart(carry)[1]
            cts, buffers = step.reverse_segment(first, count, rows, s.cts, buffers)
        if not plan.direct:
            units = tables.release(units, s.unit)
        return Backward(s.unit - 1, slots, units, rows, cts, buffers)

    rows: list = []
    if plan.segment > 1 and not plan.every_carry:
        rows = list(map(_jax.zeros, _jax.stack_types(how.row_types, plan.segment)))
    if isinstance(steps, int):
        last = -(-steps // plan.segment) - 1
    else:  # traced steps are not negative: no sign to mind
        last = lax.div(steps + (plan.segment - 1), jnp.int32(plan.segment)) - 1
    state = Backward(jnp.asarray(last, jnp.int32), stacks, units, rows, flowing, buffers)
    if isinstance(steps, int):
        done = repeat(last + 1, lambda _, s: segment(s), state)
    else:
        done = lax.while_loop(lambda s: s.unit >= 0, segment, state)
    return [*done.cts.consts, *done.cts.carry, *done.cts.xs]


def _no_cotangents(loop: Loop, active: Active, ct_carry: list, batch: int | None) -> Cotangents:
    """The cotangents before any step is reversed."""

    def zeros(types: Sequence[Any]) -> list:
        types = [t.to_tangent_aval() for t in types]
        return list(map(_jax.zeros, _jax.stack_types(types, batch)))

    def distinct(v: Any) -> Any:
        # Of equal zeros XLA makes one and copies it: more memory traffic than to fill each.
        if _jax.byte_count(jax.typeof(v)) < LARGE:
            return v
        return v + lax.optimization_barrier(jnp.zeros((), v.dtype))

    consts = list(map(distinct, zeros(kept(loop.const_types, active.consts))))
    xs = zeros(kept(loop.xs_types, active.xs) if loop.xs_count else [])
    if loop.cond is None:
        # Every row will be written.
        xs = [rows + k for k, rows in enumerate(xs)]
    return Cotangents(consts, ct_carry, xs, [])


def _climb(
    how: Reversal, operands: Operands, taken: Any, rewind: Rewind, s: Backward, end: Any
) -> tuple[list, list, Any]:
    """The carry at the start of the segment that ends at step `end`.

    And the slots, with what was saved on the way.
    """
    leaf, schedule, target = how.plan.segment, tables.Schedule.of(how.plan), s.unit

    def advance(s: Climb) -> Climb:
        free, slot = tables.free_slots(s.units)
        run = schedule.split(target + 1 - s.unit, free)
        carry = how.advance(operands, taken, s.carry, s.unit * leaf, run * leaf)
        unit = s.unit + run
        # Without a free slot, the row is written over itself.
        save, slots = free > 0, s.slots
        if how.plan.rows:
            old = read_rows(slots, slot - how.plan.spared)
            rows = [jnp.where(save, n, o) for n, o in zip(how.apart(carry)[0], old, strict=True)]
            slots = how.save(slots, rows, slot)
        units = tables.saved(s.units, jnp.where(save, slot, -1), unit)
        return Climb(carry, unit, slots, units)

    slot, unit = tables.latest(s.units, target)
    buffers = rewind.steps(unit * leaf, end - unit * leaf, s.buffers)
    counts = how.counts(operands, unit * leaf, taken)
    carry = how.together(counts, how.load(operands, s.slots, slot), buffers)
    start = Climb(carry, unit, s.slots, s.units)
    done = lax.while_loop(lambda s: s.unit < target, advance, start)
    return done.carry, done.slots, done.units
