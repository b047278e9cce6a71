"""A schedule for a host that waits in each iteration of a loop of unknown length.

Runs, and climbs from a checkpoint to the segment to reverse, advance one segment of known length at
a time. Where nothing is saved, the current slot is rewritten with its own value, if that costs less
than a wait. Then a run of known length never waits, and a climb is one loop that waits once per
segment. Otherwise, a loop over segments ends at each save. Longer segments may be worth their cost:
their rows lie in slots that their shorter schedule leaves free (`for_waiting_hosts`). Inside the
sweeps, segments are numbered by the current plan, but between the sweeps by the plan that laid out
the slots, because hosts may wait in one sweep and not in the other.
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
from loopkit._engine.steps import read_rows, repeat, take, write_rows
from loopkit._engine.sweeps import tables
from loopkit._engine.sweeps.segments import Scheduled, writes_in_passing
from loopkit._engine.sweeps.step import Cotangents, StepReversal
from loopkit._engine.sweeps.strategy import Backward, Saving, reverse_segments
from loopkit.schedules.online import NEVER

Climb = tuple[list, Any, Any, list, Any]
"""The current carry, its segment, the segment to save next, the slots, and their segments."""


class InSegments(Scheduled):
    @property
    def schedule(self) -> tables.Schedule:
        return tables.Schedule.of(self.how.plan)

    @property
    def predicated_store(self) -> bool:
        return writes_in_passing(self.how.plan)

    def run(self, loop: Loop, operands: Operands, state: Saving) -> tuple[Any, ...]:
        if loop.cond is None:
            run = self.run_in_passing if self.predicated_store else self.run_between_saves
            steps, stacks, segments = run(loop, operands, state)
        elif self.predicated_store:
            steps, stacks, number = self.run_flat(loop, operands, state)
            segments = self.schedule.held(number)
        else:
            steps, stacks, segments = super().run(loop, operands, state)
        segments = jnp.where(segments == NEVER, NEVER, segments * self.wider)
        left = jnp.full(self.layout_plan.slots - self.how.plan.slots, NEVER, jnp.int32)
        return (
            steps,
            stacks,
            jnp.concatenate([segments, _jax.vary_like(left, [jax.typeof(segments)])]),
        )

    def saved_as(self, number: _jax.Whole) -> tuple[Any, Any]:
        segment, slot, *_ = self.schedule.row(number)
        return segment, slot

    def run_in_passing(self, loop: Loop, operands: Operands, state: Saving) -> tuple[Any, ...]:
        """Run a known number of steps, in one loop over all segments."""
        whole, rest, saves = self.cut(loop)

        def take_next(
            segment: _jax.Whole, state: Saving, count: int = self.how.plan.segment
        ) -> Saving:
            steps, stacks = state
            due = saves[:, 0] == segment
            slot = jnp.max(jnp.where(due, saves[:, 1], 0))
            stacks = self.save_if(due.any(), stacks, kept(steps.carry, self.how.slotted), slot)
            return take(loop, operands, count, steps), stacks

        state = repeat(whole, take_next, state)
        # If the compiler knew this number, it would copy all slots.
        state = (
            take_next(lax.optimization_barrier(jnp.int32(whole)), state, rest) if rest else state
        )
        return *state, self.schedule.held(len(saves))

    def run_between_saves(self, loop: Loop, operands: Operands, state: Saving) -> tuple[Any, ...]:
        """Run a known number of steps, in a loop over saves, each with a loop over segments."""
        whole, rest, saves = self.cut(loop)
        length = self.how.plan.segment

        def stretch(number: _jax.Whole, state: Saving) -> Saving:
            steps, stacks = state
            segment, slot, _, run = self.schedule.row(number)
            stacks = self.save(stacks, kept(steps.carry, self.how.slotted), slot)
            one = lambda _, s: take(loop, operands, length, s)
            return repeat(lax.min(run, whole - segment), one, steps), stacks

        steps, stacks = repeat(len(saves), stretch, state)
        return take(loop, operands, rest, steps), stacks, self.schedule.held(len(saves))

    def cut(self, loop: Loop) -> tuple[int, int, np.ndarray]:
        """Return the number of whole segments, the steps after them, and the saves."""
        assert loop.length is not None, "a loop without a predicate has a length"
        return *divmod(loop.length, self.how.plan.segment), self.schedule.saves[:-1]

    @property
    def wider(self) -> int:
        """The number of segments of the layout plan in one segment of the current plan."""
        return self.how.plan.segment // self.layout_plan.segment

    def reverse(self, step: StepReversal, steps: _jax.Whole, s: Backward) -> Cotangents:
        # If the compiler knew the length of this climb, it would make copies.
        segments = lax.optimization_barrier(s.segments)
        if self.how.layout_plan is None:
            return super().reverse(step, steps, s._replace(segments=segments))
        # Carries saved by the layout plan may start between these segments, or lie where rows will.
        segments = segments[: self.how.plan.slots]
        fits = (segments != NEVER) & (segments % self.wider == 0)
        segments = jnp.where(fits, lax.div(segments, jnp.int32(self.wider)), NEVER)
        s = s._replace(segments=segments, rows=self.rows(step) if self.how.plan.host else [])
        reverse_one = ft.partial(self.reverse_segment, step)
        return reverse_segments(reverse_one, self.how.plan.segment, steps, s).cts

    def reverse_segment(
        self, step: StepReversal, first: _jax.Whole, count: _jax.Whole, s: Backward
    ) -> Backward:
        how = self.how
        if how.layout_plan is None or how.plan.host:
            return super().reverse_segment(step, first, count, s)
        carry, s = self.reach(step, first, first + count, s)
        start, place = how.split_saved(carry)[0], self.layout_plan.rows - how.plan.segment

        def again(k: _jax.Whole, state: tuple[list, list]) -> tuple[list, list]:
            carry = step.advance(state[0], first + k, 1)
            return carry, write_rows(state[1], how.split_saved(carry)[0], place + k + 1)

        def row(k: _jax.Whole) -> list:
            rows = read_rows(s.stacks, place + k)
            return [jnp.where(k == 0, first, row) for first, row in zip(start, rows, strict=True)]

        carry, stacks = repeat(count - 1, again, (carry, s.stacks), how.loop.unroll)
        s = s._replace(stacks=stacks)
        cts, buffers = step.reverse_rows(first, count, row, s.cts, how.split_saved(carry)[1])
        return self.freed(s._replace(cts=cts, buffers=buffers))

    @property
    def records_on_the_way(self) -> bool:
        return False  # runs between saves are of known length here

    def climb(
        self, step: StepReversal, carry: list, segment: _jax.Whole, s: Backward
    ) -> tuple[list, list, Any]:
        climb = self.climb_in_passing if self.predicated_store else super().climb
        return climb(step, carry, segment, s)

    def climb_in_passing(
        self, step: StepReversal, carry: list, segment: _jax.Whole, s: Backward
    ) -> tuple[list, list, Any]:
        """Climb in one loop over all segments."""
        target, schedule = s.segment, self.schedule

        def advance(climb: Climb) -> Climb:
            carry, segment, stop, stacks, segments = climb
            carry = self.advance_segments(step, segment, 1, carry)
            segment, (free, slot) = segment + 1, tables.free_slots(segments)
            due = (segment == stop) & (free > 0)
            stacks = self.save_if(due, stacks, self.how.split_saved(carry)[0], slot)
            segments = tables.saved(segments, jnp.where(due, slot, -1), segment)
            # Without a free slot, the next stop is the target.
            following = segment + schedule.split(target + 1 - segment, jnp.maximum(free - 1, 0))
            return carry, segment, jnp.where(segment == stop, following, stop), stacks, segments

        stop = segment + schedule.split(target + 1 - segment, tables.free_slots(s.segments)[0])
        climb = carry, segment, stop, s.stacks, s.segments
        carry, _, _, stacks, segments = lax.while_loop(lambda c: c[1] < target, advance, climb)
        return carry, stacks, segments

    def advance_segments(
        self, step: StepReversal, segment: _jax.Whole, run: _jax.Whole, carry: list
    ) -> list:
        one = super().advance_segments
        if isinstance(run, int):
            return one(step, segment, run, carry)
        return repeat(run, lambda k, c: one(step, segment + k, 1, c), carry)
