"""The carry of every step: each is run once more, where it is reversed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from loopkit import _jax
from loopkit._engine.loop import Loop, Operands, kept
from loopkit._engine.steps import guarded_step, one_step, select
from loopkit._engine.sweeps import strategy
from loopkit._engine.sweeps.step import Cotangents, StepReversal
from loopkit._engine.sweeps.strategy import Backward, Saving, Sweep


class EveryCarry(Sweep):
    @property
    def blank_stacks(self) -> list:
        if self.how.plan.segment == 1 or self.how.plan.host:
            return super().blank_stacks
        # Where products are put off, rows are read a segment at a time.
        return list(map(_jax.zeros, self.stack_types))

    def run(self, loop: Loop, operands: Operands, state: Saving) -> Saving:
        def step(s: Saving, go: jax.Array | None = None) -> Saving:
            steps, slots = s
            row = self.leaving(kept(steps.carry, self.how.slotted), steps.count)
            if self.how.plan.host:  # on its way before the step, not made in one kernel with it
                row, carry = _jax.barrier((row, steps.carry))
                steps = steps._replace(carry=carry)
            slots = strategy.write_if(go, slots, row, steps.count)
            if go is None:
                return one_step(loop, operands, steps), slots
            return guarded_step(loop, operands, loop.length, steps), slots

        return strategy.run_steps(loop, operands, step, state)

    def reverse(self, step: StepReversal, steps: _jax.Whole, s: Backward) -> Cotangents:
        if step.products is None:
            return super().reverse(step, steps, s)
        length = self.how.plan.segment

        def reverse_one(first: _jax.Whole, count: _jax.Whole, s: Backward) -> Backward:
            slices = (lax.dynamic_slice_in_dim(v, first, length) for v in s.stacks)
            rows = list(map(_jax.placed, slices))
            if self.how.plan.host:  # filling them there would go through the device's memory
                taken = jnp.arange(length, dtype=jnp.int32) < count
                rows = select(taken, rows, list(map(jnp.zeros_like, rows)))
            cts, buffers = step.reverse_segment(first, count, rows, s.cts, s.buffers)
            return s._replace(cts=cts, buffers=buffers)

        # Products are summed once in each.
        return strategy.reverse_segments(reverse_one, length, steps, s)
