"""Carries at the starts of some segments, which a schedule chooses.

A segment is reached from the last checkpoint before it, saving more on the way where slots are
free.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from loopkit._engine.loop import Loop, Operands
from loopkit._engine.steps import LAST_STEP, Steps, goes_on, read_rows
from loopkit._engine.sweeps import tables
from loopkit._engine.sweeps.every_segment import EverySegment
from loopkit._engine.sweeps.step import StepReversal
from loopkit._engine.sweeps.strategy import Backward, Saving
from loopkit.schedules.online import NEVER


class Scheduled(EverySegment):
    @property
    def unit_count(self) -> int:
        return self.laid.slots

    def run(self, loop: Loop, operands: Operands, state: Saving) -> tuple[Any, ...]:
        length, schedule = self.how.plan.segment, tables.Schedule.of(self.how.plan)

        def segments(s: tuple[Steps, list, tables.Slots]) -> tuple[Steps, list, tables.Slots]:
            steps, slots, placed = s
            slot, run, placed = schedule.save(placed)
            run = lax.min(run, lax.div(LAST_STEP - steps.count, jnp.int32(length)))
            return *self.segment(loop, operands, steps, slots, slot, run), placed

        another = lambda s: goes_on(loop, operands, s[0], loop.length)
        first = *state, schedule.start(state[0].count)
        steps, slots, placed = lax.while_loop(another, segments, first)
        return steps, slots, placed.units

    def reverse_segment(self, step: StepReversal, first: Any, count: Any, s: Backward) -> Backward:
        return self.freed(super().reverse_segment(step, first, count, s))

    def load_ahead(self, operands: Operands, slots: list, slot: Any) -> list:
        """Nothing: it is not known which slot is next before what is run again has been saved."""
        return []

    def freed(self, s: Backward) -> Backward:
        """Without the checkpoint of the segment that was reversed, if there was one."""
        return s._replace(units=jnp.where(s.units >= s.unit, NEVER, s.units))

    def reach(self, step: StepReversal, first: Any, end: Any, s: Backward) -> tuple[list, Backward]:
        slot, unit = tables.latest(s.units, s.unit)
        carry = self.loaded(step, slot, unit * self.how.plan.segment, end, s)
        carry, stacks, units = self.climb(step, carry, unit, s)
        return carry, s._replace(stacks=stacks, units=units)

    def climb(
        self, step: StepReversal, carry: list, unit: Any, s: Backward
    ) -> tuple[list, list, Any]:
        """From `unit` to that of `s`, saving on the way: the carry there, slots and their units."""
        how, target = self.how, s.unit
        schedule = tables.Schedule.of(how.plan)

        def advance(climb: tuple[list, Any, list, Any]) -> tuple[list, Any, list, Any]:
            carry, unit, stacks, units = climb
            free, slot = tables.free_slots(units)
            run = schedule.split(target + 1 - unit, free)
            carry = self.segments(step, unit, run, carry)
            unit = unit + run
            # Without a free slot, the row is written over itself.
            save = free > 0
            if how.plan.rows:
                old = read_rows(stacks, slot - how.plan.spared)
                pairs = zip(how.apart(carry)[0], old, strict=True)
                stacks = self.save(stacks, [jnp.where(save, n, o) for n, o in pairs], slot)
            return carry, unit, stacks, tables.saved(units, jnp.where(save, slot, -1), unit)

        climb = carry, unit, s.stacks, s.units
        carry, _, stacks, units = lax.while_loop(lambda c: c[1] < target, advance, climb)
        return carry, stacks, units

    def segments(self, step: StepReversal, unit: Any, run: Any, carry: list) -> list:
        """So many segments, from the carry at the start of the first."""
        length = self.how.plan.segment
        return self.how.advance(step.operands, step.taken, carry, unit * length, run * length)
