"""The residuals of every step: going back, nothing is computed again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from loopkit import _jax
from loopkit._engine.derivative.pieces import Reversal
from loopkit._engine.loop import Loop, Operands, kept, parts
from loopkit._engine.lowering.room import check_room
from loopkit._engine.steps import Steps, hold, is_active, read_rows, row_of, select
from loopkit._engine.sweeps.lanes import SafeInputs
from loopkit._engine.sweeps.strategy import Saving, Sweep, run_steps, write_if


class EveryResidual(Sweep):
    @property
    def stack_types(self) -> list[_jax.ShapedArray]:
        return self.stacked(self.how.row_types, self.how.plan.segment)

    def stack_axes(self, batched: Reversal, carry: Sequence[int | None]) -> list[int | None]:
        return [1 if f else None for f in self.how.drop_counters(batched.split.stored_batched)]

    @property
    def blank_stacks(self) -> list:
        how = self.how
        here = kept(how.row_types, [not there for there in how.on_host])
        check_room(how.loop.name, how.plan.segment, _jax.byte_count(*here))
        return super().blank_stacks

    def run(self, loop: Loop, operands: Operands, state: Saving) -> Saving:
        how, safe = self.how, None
        if loop.lanes:
            active = is_active(loop, operands, operands.init)
            every = [True] * loop.carry_count
            safe = SafeInputs.of(loop, operands, active, every, how.split.forward)

        def step(s: Saving, go: jax.Array | None = None) -> Saving:
            if go is not None and (loop.effects or loop.shows_within):
                return lax.cond(go, step, lambda s: s, s)
            steps, rows = s
            at = row_of(loop, steps.count) if loop.xs_count or steps.ys else steps.count
            consts, carry = operands.consts, steps.carry
            x = read_rows(operands.xs, at, loop.x_axes)
            active: Any = None if safe is None else is_active(loop, operands, carry)
            if safe is None:
                outs = _jax.call_jaxpr(how.split.forward)(*consts, *carry, *x)
            else:
                consts, x = safe.apart_from_carry(active, x)
                outs = safe.call(how.split.forward, active, consts, safe.carries(active, carry), x)
            new, y, stored = parts(outs, loop.carry_count, loop.ys_count)
            lane_counts = None
            if safe is not None:
                new = hold(active, new, steps.carry, safe.buffers)
                y = select(active, y, [_jax.zeros(jax.typeof(v)) for v in y])
                counts = active if go is None else active & go
                lane_counts = steps.lane_counts + counts.astype(jnp.int32)
            ys = write_if(go, steps.ys, y, at, loop.y_axes) if steps.ys else []
            count = steps.count + 1
            if go is not None:
                new, (count,) = select(go, new, steps.carry), select(go, [count], [steps.count])
            done = Steps(count, new, ys, lane_counts, steps.bar)
            row = self.leaving(how.drop_counters(stored), steps.count)
            return done, write_if(go, rows, row, steps.count)

        return run_steps(loop, operands, step, state)
