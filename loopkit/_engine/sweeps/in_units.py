"""A schedule where the host waits for the device in each iteration of a loop of unknown length.

A run of known length saves where it is known to. Climbs go a segment at a time, in one loop that
writes the slot at hand over itself where it saves nothing: so the host waits once a segment. Where
that makes longer segments worth having, their rows lie in slots that a shorter schedule leaves free
(`_plans/waits.py`). Units are counted in segments of the plan at hand meanwhile, and handed on in
those of the plan that laid out the slots: a gradient may go on where hosts do not wait, and back.
"""

from __future__ import annotations

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from loopkit import _jax
from loopkit._engine.loop import Loop, Operands, kept
from loopkit._engine.steps import one_step, read_rows, repeat, write_rows
from loopkit._engine.sweeps import tables
from loopkit._engine.sweeps.scheduled import Scheduled
from loopkit._engine.sweeps.step import Cotangents, StepReversal
from loopkit._engine.sweeps.strategy import Backward, Saving, reverse_segments
from loopkit.schedules.online import NEVER

Climb = tuple[list, Any, Any, list, Any]
"""The carry at hand, its unit, where to save next, the slots, and their units."""


class InUnits(Scheduled):
    def run(self, loop: Loop, operands: Operands, state: Saving) -> tuple[Any, ...]:
        if loop.cond is None:
            steps, stacks, units = self.run_known(loop, operands, state)
        else:
            steps, stacks, number = self.run_flat(loop, operands, state)
            units = tables.Schedule.of(self.how.plan).held(number)
        units = jnp.where(units == NEVER, NEVER, units * self.wider)
        left = jnp.full(self.laid.slots - self.how.plan.slots, NEVER, jnp.int32)
        return steps, stacks, jnp.concatenate([units, _jax.vary_like(left, [jax.typeof(units)])])

    def run_known(self, loop: Loop, operands: Operands, state: Saving) -> tuple[Any, ...]:
        assert loop.length is not None, "a loop without a predicate has a length"
        plan, length = self.how.plan, self.how.plan.segment
        saves = tables.Schedule.of(plan).saves[:-1]
        units = np.full(plan.slots, NEVER, np.int32)
        units[saves[:, 1]] = saves[:, 0]
        step = lambda _, s: one_step(loop, operands, s)

        def segment(unit: Any, state: Saving, count: int = length) -> Saving:
            steps, stacks = state
            due = saves[:, 0] == unit
            slot = jnp.max(jnp.where(due, saves[:, 1], 0))
            carry = kept(steps.carry, self.how.slotted)
            stacks = self.save_if(due.any(), stacks, carry, slot)
            return repeat(count, step, steps, loop.unroll), stacks

        whole, rest = divmod(loop.length, length)
        state = repeat(whole, segment, state)
        state = segment(jnp.int32(whole), state, rest) if rest else state
        return *state, jnp.asarray(units)

    def saved_as(self, number: Any) -> tuple[Any, Any]:
        unit, slot, *_ = tables.Schedule.of(self.how.plan).row(number)
        return unit, slot

    @property
    def wider(self) -> int:
        """How many of the units handed on are one of those counted in."""
        return self.how.plan.segment // self.laid.segment

    def reverse(self, step: StepReversal, steps: Any, s: Backward) -> Cotangents:
        if self.how.laid is None:
            return super().reverse(step, steps, s)
        # What was saved elsewhere may lie between these units, or where their rows will.
        units = s.units[: self.how.plan.slots]
        fits = (units != NEVER) & (units % self.wider == 0)
        s = s._replace(units=jnp.where(fits, lax.div(units, jnp.int32(self.wider)), NEVER))
        segment = ft.partial(self.reverse_segment, step)
        return reverse_segments(segment, self.how.plan.segment, steps, s)

    def reverse_segment(self, step: StepReversal, first: Any, count: Any, s: Backward) -> Backward:
        how = self.how
        if how.laid is None:
            return super().reverse_segment(step, first, count, s)
        carry, s = self.reach(step, first, first + count, s)
        start, place = how.apart(carry)[0], self.laid.rows - how.plan.segment

        def again(k: Any, state: tuple[list, list]) -> tuple[list, list]:
            carry = how.advance(step.operands, step.taken, state[0], first + k, 1)
            return carry, write_rows(state[1], how.apart(carry)[0], place + k + 1)

        def row(k: Any) -> list:
            rows = read_rows(s.stacks, place + k)
            return [jnp.where(k == 0, first, row) for first, row in zip(start, rows, strict=True)]

        carry, stacks = repeat(count - 1, again, (carry, s.stacks), how.loop.unroll)
        s = s._replace(stacks=stacks)
        cts, buffers = step.reverse_rows(first, count, row, s.cts, how.apart(carry)[1])
        return self.freed(s._replace(cts=cts, buffers=buffers))

    def reach(self, step: StepReversal, first: Any, end: Any, s: Backward) -> tuple[list, Backward]:
        how, target, length = self.how, s.unit, self.how.plan.segment
        schedule = tables.Schedule.of(how.plan)

        def advance(climb: Climb) -> Climb:
            carry, unit, stop, stacks, units = climb
            carry = how.advance(step.operands, step.taken, carry, unit * length, length)
            unit, (free, slot) = unit + 1, tables.free_slots(units)
            due = (unit == stop) & (free > 0)
            stacks = self.save_if(due, stacks, how.apart(carry)[0], slot)
            units = tables.saved(units, jnp.where(due, slot, -1), unit)
            # Without a free slot, the next stop is the target.
            following = unit + schedule.split(target + 1 - unit, jnp.maximum(free - 1, 0))
            return carry, unit, jnp.where(unit == stop, following, stop), stacks, units

        slot, unit = tables.latest(s.units, target)
        carry = self.loaded(step, slot, unit * length, end, s)
        stop = unit + schedule.split(target + 1 - unit, tables.free_slots(s.units)[0])
        climb = carry, unit, stop, s.stacks, s.units
        carry, _, _, stacks, units = lax.while_loop(lambda c: c[1] < target, advance, climb)
        return carry, s._replace(stacks=stacks, units=units)
