"""Carries at the starts of some segments, which a schedule chooses.

A segment is reached from the last checkpoint before it, saving more on the way where slots are
free.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from loopkit import _jax
from loopkit._engine.loop import Loop, Operands
from loopkit._engine.steps import LAST_STEP, Steps, goes_on, read_rows
from loopkit._engine.sweeps import tables
from loopkit._engine.sweeps.every_segment import EverySegment
from loopkit._engine.sweeps.step import StepReversal
from loopkit._engine.sweeps.strategy import Backward, Saving
from loopkit._plans.planner import RECORDED
from loopkit.schedules.online import NEVER


class Scheduled(EverySegment):
    @property
    def segment_count(self) -> int:
        return self.layout_plan.slots

    def run(self, loop: Loop, operands: Operands, state: Saving) -> tuple[Any, ...]:
        length, schedule = self.how.plan.segment, tables.Schedule.of(self.how.plan)

        def run_on(s: tuple[Steps, list, tables.Slots]) -> tuple[Steps, list, tables.Slots]:
            steps, slots, placed = s
            slot, run, placed = schedule.save(placed)
            run = lax.min(run, lax.div(LAST_STEP - steps.count, jnp.int32(length)))
            return *self.take_segments(loop, operands, steps, slots, slot, run), placed

        another = lambda s: goes_on(loop, operands, s[0], loop.length)
        first = *state, schedule.start(state[0].count)
        steps, slots, placed = lax.while_loop(another, run_on, first)
        return steps, slots, placed.segments

    def reverse_segment(
        self, step: StepReversal, first: _jax.Whole, count: _jax.Whole, s: Backward
    ) -> Backward:
        return self.freed(super().reverse_segment(step, first, count, s))

    def load_ahead(self, operands: Operands, slots: list, slot: _jax.Whole) -> list:
        """Nothing: it is not known which slot is next before what is run again has been saved."""
        return []

    def freed(self, s: Backward) -> Backward:
        """Without the checkpoint of the segment that was reversed, if there was one."""
        return s._replace(segments=jnp.where(s.segments >= s.segment, NEVER, s.segments))

    def reach(
        self, step: StepReversal, first: _jax.Whole, end: _jax.Whole, s: Backward
    ) -> tuple[list, Backward]:
        carry, segment = self.nearest(step, end, s)
        carry, stacks, segments = self.climb(step, carry, segment, s)
        return carry, s._replace(stacks=stacks, segments=segments)

    def nearest(self, step: StepReversal, end: _jax.Whole, s: Backward) -> tuple[list, Any]:
        """The last checkpoint before a segment that ends at step `end`, and its segment."""
        slot, segment = tables.latest(s.segments, s.segment)
        return self.loaded(step, slot, segment * self.how.plan.segment, end, s), segment

    def climb(
        self, step: StepReversal, carry: list, segment: _jax.Whole, s: Backward
    ) -> tuple[list, list, Any]:
        """From `segment` to that of `s`, saving on the way: the carry there, slots and their
        segments."""
        target = s.segment

        def advance(climb: tuple[list, Any, list, Any]) -> tuple[list, Any, list, Any]:
            carry, segment, stacks, segments = climb
            run, slot = self.following(segment, target, segments)
            carry = self.advance_segments(step, segment, run, carry)
            stacks, segments = self.saved(slot, carry, segment + run, stacks, segments)
            return carry, segment + run, stacks, segments

        climb = carry, segment, s.stacks, s.segments
        carry, _, stacks, segments = lax.while_loop(lambda c: c[1] < target, advance, climb)
        return carry, stacks, segments

    def replayed(
        self, step: StepReversal, first: _jax.Whole, count: _jax.Whole, s: Backward
    ) -> tuple[list, Backward]:
        if not self.records_on_the_way or step.products is not None:
            return super().replayed(step, first, count, s)  # products read rows not taken, too
        target, length = s.segment, self.how.plan.segment

        def advance(climb: tuple[list, Any, list, Any, list]) -> tuple[list, Any, list, Any, list]:
            carry, segment, stacks, segments, rows = climb
            run, slot = self.following(segment, target, segments)
            there = segment == target
            steps = jnp.where(there, count, run * length)
            carry, rows = step.replay(segment * length, steps, carry, rows, within=False)
            segment = jnp.where(there, target + 1, segment + run)
            slot = jnp.where(there, -1, slot)
            return carry, segment, *self.saved(slot, carry, segment, stacks, segments), rows

        climb = *self.nearest(step, first + count, s), s.stacks, s.segments, s.rows
        climb = lax.while_loop(lambda c: c[1] <= target, advance, climb)
        carry, _, stacks, segments, rows = climb
        return carry, s._replace(stacks=stacks, segments=segments, rows=rows)

    @property
    def records_on_the_way(self) -> bool:
        """Whether steps that lead to a segment also store rows, to be written over.

        They are then the same loop as those of the segment, and the step is compiled once less.
        Where rows are small, and all slots are many, such steps are few.
        """
        plan = self.how.plan
        small = plan.step.residual_bytes <= RECORDED
        return plan.thinned and plan.store == "residuals" and small and not plan.host

    def following(
        self, segment: _jax.Whole, target: _jax.Whole, segments: jax.Array
    ) -> tuple[Any, Any]:
        """How many segments to run from `segment`, and the slot to save in then; -1 without one."""
        free, slot = tables.free_slots(segments)
        run = tables.Schedule.of(self.how.plan).split(target + 1 - segment, free)
        return run, jnp.where(free > 0, slot, -1)

    def saved(
        self, slot: _jax.Whole, carry: list, segment: _jax.Whole, stacks: list, segments: jax.Array
    ) -> tuple[list, Any]:
        """Slots and their segments, with the carry at a start; as they are if `slot` < 0."""
        how, save = self.how, slot >= 0
        if how.plan.rows:
            # Without a free slot, a row is written over itself.
            place = jnp.maximum(slot, 0)
            old = read_rows(stacks, place - how.plan.spared)
            pairs = zip(how.split_saved(carry)[0], old, strict=True)
            stacks = self.save(stacks, [jnp.where(save, n, o) for n, o in pairs], place)
        return stacks, tables.saved(segments, slot, segment)

    def advance_segments(
        self, step: StepReversal, segment: _jax.Whole, run: _jax.Whole, carry: list
    ) -> list:
        """So many segments, from the carry at the start of the first."""
        length = self.how.plan.segment
        return self.how.advance(step.operands, step.taken, carry, segment * length, run * length)
