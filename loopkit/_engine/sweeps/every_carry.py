"""The carry of every step: each is run once more, where it is reversed."""

from __future__ import annotations

from typing import Any

from jax import lax

from loopkit import _jax
from loopkit._engine.loop import Loop, Operands, kept
from loopkit._engine.steps import Steps, guarded_step, one_step, start
from loopkit._engine.sweeps.step import Cotangents, StepReversal
from loopkit._engine.sweeps.strategy import (
    Backward,
    Forward,
    Handed,
    Strategy,
    reverse_segments,
    run_steps,
    write_if,
)


class EveryCarry(Strategy):
    def run(self, loop: Loop, operands: Operands) -> Forward:
        def step(s: tuple[Steps, list], go: Any = None) -> tuple[Steps, list]:
            steps, slots = s
            slots = write_if(go, slots, kept(steps.carry, self.how.slotted), steps.count)
            if go is None:
                return one_step(loop, operands, steps), slots
            return guarded_step(loop, operands, loop.length, steps), slots

        return run_steps(loop, operands, step, (start(loop, operands), self.blank_stacks))

    def reverse(self, step: StepReversal, given: Handed, cts: Cotangents) -> Cotangents:
        if step.products is None:
            return step.reverse_rows(0, given.steps, given.stacks, cts, given.buffers)[0]
        length = self.how.plan.segment

        def segment(first: Any, count: Any, s: Backward) -> Backward:
            slices = (lax.dynamic_slice_in_dim(v, first, length) for v in s.stacks)
            rows = list(map(_jax.placed, slices))
            cts, buffers = step.reverse_segment(first, count, rows, s.cts, s.buffers)
            return s._replace(cts=cts, buffers=buffers)

        return reverse_segments(segment, length, given, cts)  # products are summed once in each
