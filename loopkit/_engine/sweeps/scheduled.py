"""Carries at the starts of some segments, which a schedule chooses.

A segment is reached from the last checkpoint before it, saving more on the way where slots are
free.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from loopkit._engine.loop import Loop, Operands
from loopkit._engine.steps import Steps, read_rows, start
from loopkit._engine.sweeps import tables
from loopkit._engine.sweeps.every_segment import EverySegment
from loopkit._engine.sweeps.step import StepReversal
from loopkit._engine.sweeps.strategy import Backward, Forward, is_under_way

LAST_STEP = jnp.iinfo(jnp.int32).max
"""What a counter of steps can hold."""


class Climb(NamedTuple):
    """On the way from a checkpoint to the segment to reverse."""

    carry: list
    unit: Any
    stacks: list
    units: Any


class Scheduled(EverySegment):
    @property
    def unit_count(self) -> int:
        return self.how.plan.slots

    def run(self, loop: Loop, operands: Operands) -> Forward:
        length, schedule = self.how.plan.segment, tables.Schedule.of(self.how.plan)

        def segments(s: tuple[Steps, list, tables.Slots]) -> tuple[Steps, list, tables.Slots]:
            steps, slots, placed = s
            slot, run, placed = schedule.save(placed)
            run = lax.min(run, lax.div(LAST_STEP - steps.count, jnp.int32(length)))
            return *self.segment(loop, operands, steps, slots, slot, run), placed

        first = start(loop, operands)
        state = first, self.blank_stacks, schedule.start(first.count)
        another = lambda s: is_under_way(loop, operands, s[0])
        steps, slots, placed = lax.while_loop(another, segments, state)
        return Forward(steps, slots, placed.units)

    def reverse_segment(self, step: StepReversal, first: Any, count: Any, s: Backward) -> Backward:
        s = super().reverse_segment(step, first, count, s)
        return s._replace(units=tables.release(s.units, s.unit))

    def reach(self, step: StepReversal, first: Any, end: Any, s: Backward) -> tuple[list, Backward]:
        how, target, length = self.how, s.unit, self.how.plan.segment
        schedule = tables.Schedule.of(how.plan)

        def advance(s: Climb) -> Climb:
            free, slot = tables.free_slots(s.units)
            run = schedule.split(target + 1 - s.unit, free)
            carry = how.advance(step.operands, step.taken, s.carry, s.unit * length, run * length)
            unit = s.unit + run
            # Without a free slot, the row is written over itself.
            save, stacks = free > 0, s.stacks
            if how.plan.rows:
                old = read_rows(stacks, slot - how.plan.spared)
                pairs = zip(how.apart(carry)[0], old, strict=True)
                stacks = self.save(stacks, [jnp.where(save, n, o) for n, o in pairs], slot)
            units = tables.saved(s.units, jnp.where(save, slot, -1), unit)
            return Climb(carry, unit, stacks, units)

        slot, unit = tables.latest(s.units, target)
        carry = self.loaded(step, slot, unit * length, end, s)
        done = lax.while_loop(
            lambda s: s.unit < target, advance, Climb(carry, unit, s.stacks, s.units)
        )
        return done.carry, s._replace(stacks=done.stacks, units=done.units)
