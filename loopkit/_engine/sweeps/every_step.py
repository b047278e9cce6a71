"""Sweeps that save the residuals or the carry of every step.

Going back over residuals, nothing is computed again. From its carry, each step runs once more.
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
from loopkit._engine.sweeps.step import Cotangents, StepReversal
from loopkit._engine.sweeps.strategy import Backward, Saving, Sweep, run_steps, write_if


class EveryResidual(Sweep):
    @property
    def stack_types(self) -> list[_jax.ShapedArray]:
        return self.stacked(self.how.row_types, self.how.plan.segment)

    def stack_axes(self, batched: Reversal, carry: Sequence[int | None]) -> list[int | None]:
        return row_axes(self.how, batched)

    @property
    def blank_stacks(self) -> list:
        how = self.how
        here = kept(how.row_types, [not there for there in how.on_host])
        check_room(how.loop.name, how.plan.segment, _jax.byte_count(*here))
        return super().blank_stacks

    def run(self, loop: Loop, operands: Operands, state: Saving) -> Saving:
        return run_steps(loop, operands, recorded(self, loop, operands), state)


def row_axes(how: Reversal, batched: Reversal) -> list[int | None]:
    """Return the axis of the batched loop in stacks of rows."""
    return [1 if f else None for f in how.drop_counters(batched.split.stored_batched)]


def recorded(sweep: Sweep, loop: Loop, operands: Operands, first: int = 0) -> Callable:
    """Return the function that takes a step, and writes its residuals, from step `first` on."""
    how = sweep.how
    safe: Any = EveryInput(operands.consts)
    if loop.lanes:
        active = stepping.is_active(loop, operands, operands.init)
        every = [True] * loop.carry_count
        safe = SafeInputs.of(loop, operands, active, every, how.split.forward)

    def step(s: Saving, go: jax.Array | None = None) -> Saving:
        if go is not None and (loop.effects or loop.shows_within):
            return lax.cond(go, step, lambda s: s, s)
        steps, rows = s
        at = stepping.row_of(loop, steps.count) if loop.xs_count or steps.ys else steps.count
        x, carry = stepping.read_rows(operands.xs, at, loop.x_axes), steps.carry
        active: Any = stepping.is_active(loop, operands, carry) if loop.lanes else None
        consts, x = safe.apart_from_carry(active, x)
        outs = safe.call(how.split.forward, active, consts, safe.carries(active, carry), x)
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
        place = steps.count - first if first else steps.count
        row = sweep.leaving(how.drop_counters(stored), place)
        return done, write_if(go, rows, row, place)

    return step


class EveryCarry(Sweep):
    @property
    def blank_stacks(self) -> list:
        if self.how.plan.segment == 1 or self.how.plan.host:
            return super().blank_stacks
        # Deferred products read rows a segment at a time.
        return list(map(_jax.zeros, self.stack_types))

    def run(self, loop: Loop, operands: Operands, state: Saving) -> Saving:
        def step(s: Saving, go: jax.Array | None = None) -> Saving:
            steps, slots = s
            row = self.leaving(kept(steps.carry, self.how.slotted), steps.count)
            if self.how.plan.host:  # sent before the step, not in one kernel with it
                row, carry = _jax.barrier((row, steps.carry))
                steps = steps._replace(carry=carry)
            slots = strategy.write_if(go, slots, row, steps.count)
            if go is None:
                return stepping.one_step(loop, operands, steps), slots
            return stepping.guarded_step(loop, operands, loop.length, steps), slots

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
                rows = stepping.select(taken, rows, list(map(jnp.zeros_like, rows)))
            cts, buffers = step.reverse_segment(first, count, rows, s.cts, s.buffers)
            return s._replace(cts=cts, buffers=buffers)

        # Each segment sums its products once.
        return strategy.reverse_segments(reverse_one, length, steps, s).cts
