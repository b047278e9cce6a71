"""Sweeps that save the residuals of every step or of the last ones, or the carry of every step.

From residuals, the backward sweep recomputes nothing. From carries, each step runs once more. If
only the last segments leave residuals, each earlier one leaves a carry: the backward sweep copies
out and reverses the stored rows, one segment at a time. Then the memory of the copy holds the rows
of each segment that runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from loopkit import _jax
from loopkit._engine import steps as stepping
from loopkit._engine.derivative.pieces import Reversal
from loopkit._engine.lanes.safe_inputs import EveryInput, SafeInputs
from loopkit._engine.loop import Loop, Operands, kept, parts
from loopkit._engine.lowering.memory import check_room
from loopkit._engine.sweeps import strategy
from loopkit._engine.sweeps.segments import EverySegment
from loopkit._engine.sweeps.step import Cotangents, StepReversal
from loopkit._engine.sweeps.strategy import Backward, Saving, Sweep, write_if
from loopkit._engine.sweeps.window import is_seen_in_parts, rows_from, run_part, take_segment
from loopkit._jaxprs.kernels import ONE_THREAD, rows_at_a_time


class EveryResidual(Sweep):
    @property
    def part(self) -> int:
        """The number of steps whose rows are copied together; 0 without copies."""
        how, types = self.how, self.how.row_types
        if how.loop.cond is not None or any(how.on_host) or any(map(_jax.is_spread, types)):
            return 0
        largest = max(map(_jax.byte_count, types), default=0)
        return rows_at_a_time(how.plan.segment, largest) if how.plan.step.pooled else 0

    @property
    def stack_types(self) -> list[_jax.ShapedArray]:
        return self.stacked(self.how.row_types, self.how.plan.segment)

    def stack_axes(self, batched: Reversal, carry: Sequence[int | None]) -> list[int | None]:
        return _row_axes(self.how, batched)

    def blank_stacks(self, after: Any = 0) -> list:
        how = self.how
        here = kept(how.row_types, [not there for there in how.on_host])
        check_room(how.loop.name, how.plan.segment, _jax.byte_count(*here))
        return super().blank_stacks(after)

    def run(self, loop: Loop, operands: Operands, state: Saving) -> Saving:
        if loop.cond is None:
            return _record(self, loop, operands, state, self.how.plan.segment, 0, self.part)
        step = recorded(self, loop, operands)
        return stepping.while_it_goes_on(loop, operands, step, state, loop.length)

    def reverse(self, step: StepReversal, steps: _jax.Whole, s: Backward) -> Cotangents:
        length = 0 if _jax.for_accelerators() else self.part
        length = self.how.plan.summed if step.products else length
        if not length:
            return super().reverse(step, steps, s)
        reverse_one = _stored_reversal(step, s.stacks, length)
        types = _jax.stack_types(self.how.row_types, length)
        rows = [_jax.blank(t, step.after) for t in types]
        return strategy.reverse_segments(reverse_one, length, steps, s._replace(rows=rows)).cts


def _row_axes(how: Reversal, batched: Reversal) -> list[int | None]:
    """Return the axis that the batched loop adds to each stack of rows."""
    return [1 if f else None for f in how.drop_counters(batched.split.stored_batched)]


def _record(
    sweep: Sweep,
    loop: Loop,
    operands: Operands,
    state: Saving,
    count: int,
    first: int,
    length: int,
) -> Saving:
    """Run `count` steps from step `first` on, and write their residuals from the first row on.

    With a `length`, steps write to small arrays of that many rows, which are then copied.
    """
    if not length or _jax.for_accelerators():
        return stepping.repeat_step(loop, count, recorded(sweep, loop, operands, first), state)
    how, (_, rows) = sweep.how, state
    total, types = _length_of(rows, length), _jax.stack_types(how.row_types, length)
    zero = how.products is not None and not how.plan.keeps_all  # reads rows not written
    empty = list(map(_jax.zeros if zero else _jax.blank, types))

    def run_one(part: _jax.Whole, s: tuple) -> tuple:
        steps, rows, some = s
        row = part * length
        taken = length if not count % length else jnp.minimum(length, count - row)
        place, axes = rows_from(row, length, total), [0] * len(rows)
        some = empty if zero else place.read(rows, axes) if total % length else some

        def run(loop: Loop, operands: Operands, steps: stepping.Steps) -> Saving:
            step = recorded(sweep, loop, operands, steps.count - row + place.low)
            return stepping.repeat_step(loop, taken, step, (steps, some))

        if is_seen_in_parts(how, length):
            steps, some = run_part(loop, operands, first + row, length, steps, run)
        else:
            steps, some = run(loop, operands, steps)
        return steps, place.write(rows, some, axes), some

    return stepping.repeat(-(-count // length), run_one, (*state, empty))[:2]


def _length_of(stacks: list, default: int) -> int:
    """Return the number of rows, or `default` if nothing is stored."""
    return stacks[0].shape[0] if stacks else default


def _stored_reversal(step: StepReversal, stored: list, length: int, first: int = 0) -> Callable:
    """Return a function that reverses up to `length` steps, whose rows it copies out first.

    Each part sums its deferred products once.
    """
    total = _length_of(stored, length)

    def reverse(step: StepReversal, row: _jax.Whole, count: _jax.Whole, s: Backward) -> Backward:
        place = rows_from(row, length, total)
        some = place.read(stored, [0] * len(stored))
        if total % length:
            rows = lambda k: stepping.read_rows(some, k + (row - place.low))
            cts, _ = step.reverse_rows(first + row, count, rows, s.cts, [])
        else:
            cts, _ = step.reverse_segment(first + row, count, some, s.cts, [])
        return s._replace(rows=some, cts=cts)

    return strategy.in_parts(step, length, reverse, first)


def recorded(sweep: Sweep, loop: Loop, operands: Operands, first: _jax.Whole = 0) -> Callable:
    """Return a function that takes a step and writes its residuals; step `first` writes row 0."""
    how, half = sweep.how, sweep.half or sweep.how.split.forward
    safe: Any = EveryInput(operands.consts)
    if loop.lanes:
        active = stepping.is_active(loop, operands, operands.init)
        every = [True] * loop.carry_count
        safe = SafeInputs.of(loop, operands, active, every, half)

    def step(s: Saving, go: jax.Array | None = None) -> Saving:
        if go is not None and (loop.effects or loop.shows_within):
            return lax.cond(go, step, lambda s: s, s)
        steps, rows = s
        at = stepping.row_of(loop, steps.count) if loop.xs_count or steps.ys else steps.count
        x, carry = stepping.read_rows(operands.xs, at, loop.x_axes), steps.carry
        active: Any = stepping.is_active(loop, operands, carry) if loop.lanes else None
        consts, x = safe.apart_from_carry(active, x)
        outs = safe.call(half, active, consts, safe.carries(active, carry), x)
        new, y, stored = parts(outs, loop.carry_count, loop.ys_count)
        new, y = safe.hold(active, new, carry, safe.buffers), safe.hold(active, y, None)
        lane_counts = None
        if loop.lanes:
            counts = active if go is None else active & go
            lane_counts = steps.lane_counts + counts.astype(jnp.int32)
        ys = write_if(go, steps.ys, y, at, loop.y_axes) if steps.ys else []
        count = steps.count + 1
        if go is not None:
            new, (count,) = (
                stepping.select(go, new, carry),
                stepping.select(go, [count], [steps.count]),
            )
        done = stepping.Steps(count, new, ys, lane_counts, steps.bar)
        place = steps.count if isinstance(first, int) and not first else steps.count - first
        row = sweep.leaving(how.drop_counters(stored), place)
        return done, write_if(go, rows, row, place)

    return step


class EveryCarry(Sweep):
    def blank_stacks(self, after: Any = 0) -> list:
        if self.how.plan.segment == 1 or self.how.plan.host:
            return super().blank_stacks(after)
        # Deferred products read whole segments, and so the rows of steps not taken.
        return [_jax.zeros_after(t, after) for t in self.stack_types]

    def run(self, loop: Loop, operands: Operands, state: Saving) -> Saving:
        def step(s: Saving, go: jax.Array | None = None) -> Saving:
            steps, slots = s
            row = self.leaving(kept(steps.carry, self.how.slotted), steps.count)
            if self.how.plan.host:  # sent before the step, not in one kernel with it
                row, carry = _jax.barrier((row, steps.carry))
                steps = steps._replace(carry=carry)
            slots = strategy.write_if(go, slots, row, steps.count)
            return stepping.one_step(loop, operands, steps, go), slots

        if loop.cond is None:
            return stepping.repeat_step(loop, loop.length, step, state)
        return stepping.while_it_goes_on(loop, operands, step, state, loop.length)

    def reverse(self, step: StepReversal, steps: _jax.Whole, s: Backward) -> Cotangents:
        if step.products is None:
            return super().reverse(step, steps, s)
        length = self.how.plan.segment

        def reverse_one(first: _jax.Whole, count: _jax.Whole, s: Backward) -> Backward:
            slices = (lax.dynamic_slice_in_dim(v, first, length) for v in s.stacks)
            rows = list(map(_jax.placed, slices))
            if self.how.plan.host:  # filling host memory would go through the device's memory
                taken = jnp.arange(length, dtype=jnp.int32) < count
                rows = stepping.select(taken, rows, list(map(jnp.zeros_like, rows)))
            cts, buffers = step.reverse_segment(first, count, rows, s.cts, s.buffers)
            return s._replace(cts=cts, buffers=buffers)

        # Each segment sums its products once.
        return strategy.reverse_segments(reverse_one, length, steps, s).cts


class LastSegments(EverySegment):
    @property
    def stack_types(self) -> list[_jax.ShapedArray]:
        plan, rows = self.how.plan, self.how.plan.keeps_last * self.how.plan.segment
        slots = (_jax.stack_type(t, plan.rows) for t in self.how.slot_types)
        return [*slots, *(_jax.stack_type(t, rows) for t in self.how.row_types)]

    def stack_axes(self, batched: Reversal, carry: Sequence[int | None]) -> list[int | None]:
        return [*super().stack_axes(batched, carry), *_row_axes(self.how, batched)]

    def blank_stacks(self, after: Any = 0) -> list:
        # Deferred products read whole segments, including steps not taken.
        zero = self.how.products is not None and (self.how.plan.bound or 0) % self.how.plan.segment
        if not zero:
            return super().blank_stacks(after)
        return [_jax.zeros_after(t, after) for t in self.stack_types]

    def leaving(self, values: list[Any], number: _jax.Whole) -> list[Any]:
        return values  # nothing is on the host

    def run(self, loop: Loop, operands: Operands, state: Saving) -> Saving:
        how, plan = self.how, self.how.plan
        steps, stacks = state
        slots, rows = parts(stacks, sum(how.slotted))

        def save_and_run(segment: _jax.Whole, s: Saving) -> Saving:
            steps, slots = s
            slots = self.save(slots, kept(steps.carry, how.slotted), segment)
            first = segment * plan.segment
            return take_segment(how, loop, operands, first, plan.segment, steps), slots

        steps, slots = stepping.repeat(plan.rerun // plan.segment, save_and_run, (steps, slots))
        small = plan.segment * max(map(_jax.byte_count, how.row_types), default=0) <= ONE_THREAD
        length = plan.segment if small and plan.step.pooled else 0
        last = (plan.bound or 0) - plan.rerun
        steps, rows = _record(self, loop, operands, (steps, rows), last, plan.rerun, length)
        return steps, [*slots, *rows]

    def reverse(self, step: StepReversal, steps: _jax.Whole, s: Backward) -> Cotangents:
        first, length = self.how.plan.rerun, self.how.plan.segment
        slots, rows = parts(s.stacks, sum(self.how.slotted))
        s = s._replace(stacks=slots, rows=self.rows(step), ahead=[])
        reverse_stored = _stored_reversal(step, rows, length, first)
        s = strategy.reverse_segments(reverse_stored, length, steps - first, s)
        return strategy.reverse_segments(self.reversal(step), length, first, s).cts
