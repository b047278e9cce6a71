"""Sweeps that store the residuals of the last segments, and only a carry for each earlier one.

The backward sweep copies out and reverses the stored rows, one segment at a time. Then the memory
of the copy holds the rows of each segment that runs again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loopkit import _jax
from loopkit._engine import steps as stepping
from loopkit._engine.derivative.pieces import Reversal
from loopkit._engine.loop import Loop, Operands, kept, parts
from loopkit._engine.sweeps.every_step import record, row_axes, stored_reversal
from loopkit._engine.sweeps.segments import EverySegment
from loopkit._engine.sweeps.step import Cotangents, StepReversal
from loopkit._engine.sweeps.strategy import Backward, Saving, reverse_segments
from loopkit._engine.sweeps.window import take_segment
from loopkit._jaxprs.kernels import ONE_THREAD


class LastSegments(EverySegment):
    @property
    def stack_types(self) -> list[_jax.ShapedArray]:
        plan, rows = self.how.plan, self.how.plan.keeps_last * self.how.plan.segment
        slots = (_jax.stack_type(t, plan.rows) for t in self.how.slot_types)
        return [*slots, *(_jax.stack_type(t, rows) for t in self.how.row_types)]

    def stack_axes(self, batched: Reversal, carry: Sequence[int | None]) -> list[int | None]:
        return [*super().stack_axes(batched, carry), *row_axes(self.how, batched)]

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
        steps, rows = record(self, loop, operands, (steps, rows), last, plan.rerun, length)
        return steps, [*slots, *rows]

    def reverse(self, step: StepReversal, steps: _jax.Whole, s: Backward) -> Cotangents:
        first, length = self.how.plan.rerun, self.how.plan.segment
        slots, rows = parts(s.stacks, sum(self.how.slotted))
        s = s._replace(stacks=slots, rows=self.rows(step), ahead=[])
        reverse_stored = stored_reversal(step, rows, length, first)
        s = reverse_segments(reverse_stored, length, steps - first, s)
        return reverse_segments(self.reversal(step), length, first, s).cts
