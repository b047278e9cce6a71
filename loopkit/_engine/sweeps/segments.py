"""Sweeps that save the carry at the start of every segment, or of those that a schedule chooses.

The backward sweep runs each segment again from its own carry. With a schedule, it reaches the
segment from the last checkpoint before it, and saves more carries on the way if slots are free.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from loopkit import _jax
from loopkit._engine import steps as stepping
from loopkit._engine.loop import Loop, Operands, kept
from loopkit._engine.sweeps import tables
from loopkit._engine.sweeps.step import Cotangents, StepReversal
from loopkit._engine.sweeps.strategy import (
    Backward,
    Saving,
    Sweep,
    in_parts,
    reverse_segments,
    write_if,
)
from loopkit._engine.sweeps.window import take_segment
from loopkit._plans.plan import Plan
from loopkit._plans.planner import RECORDED
from loopkit.schedules.online import NEVER

LARGE_CARRY = 1 << 23
"""The most bytes of a carry that take less time to write than a wait of the host."""


def writes_in_passing(plan: Plan) -> bool:
    """Return whether a slot is rewritten with its own value if nothing is saved, to avoid a wait.

    Slots in the host's memory and large slots are not rewritten.
    """
    return not plan.host and plan.step.carry_bytes <= LARGE_CARRY


class EverySegment(Sweep):
    def run(self, loop: Loop, operands: Operands, state: Saving) -> tuple[Any, ...]:
        length = self.how.plan.segment

        def known(segment: _jax.Whole, state: Saving, count: _jax.Whole = length) -> Saving:
            steps, slots = state
            assert loop.length is not None, "a loop without a predicate has a length"
            slots = self.save(slots, kept(steps.carry, self.how.slotted), segment)
            if loop.length % length and not _jax.host_waits.value:
                count = jnp.minimum((segment + 1) * length, loop.length) - steps.count
            first = segment * length
            return take_segment(self.how, loop, operands, first, count, steps), slots

        def take_next(state: Saving) -> Saving:
            return self.take_segments(
                loop, operands, *state, lax.div(state[0].count, jnp.int32(length))
            )

        if loop.cond is None and _jax.host_waits.value:
            assert loop.length is not None, "a loop without a predicate has a length"
            whole, rest = divmod(loop.length, length)
            state = stepping.repeat(whole, known, state)
            return known(jnp.int32(whole), state, rest) if rest else state
        if loop.cond is None:
            return stepping.repeat(self.how.plan.segments, known, state)
        if self.how.plan.segments == 1:
            return self.take_segments(loop, operands, *state, jnp.int32(0))
        if _jax.host_waits.value and writes_in_passing(self.how.plan):
            return self.run_flat(loop, operands, state)[:2]
        another = lambda s: stepping.goes_on(loop, operands, s[0], loop.length)
        return lax.while_loop(another, take_next, state)

    def run_flat(self, loop: Loop, operands: Operands, state: Saving) -> tuple[Any, ...]:
        """Run in one loop, whose predicate the host reads once per iteration; also count the saves.

        A step that saves nothing rewrites a slot with its own value.
        """
        length = jnp.int32(self.how.plan.segment)

        def step(s: Any, go: jax.Array | None = None) -> Any:
            steps, (slots, number) = s
            segment, slot = self.saved_as(number)
            due = (lax.div(steps.count, length) == segment) & (lax.rem(steps.count, length) == 0)
            due = due if go is None else due & go
            slots = self.save_if(due, slots, kept(steps.carry, self.how.slotted), slot)
            saved = slots, number + due.astype(jnp.int32)
            return stepping.one_step(loop, operands, steps, go), saved

        steps, slots = state
        first = steps, (slots, steps.count)
        done = stepping.while_it_goes_on(loop, operands, step, first, loop.length)
        steps, (slots, number) = done
        return steps, slots, number

    def saved_as(self, number: _jax.Whole) -> tuple[Any, Any]:
        """Return the segment whose starting carry is saved after `number` others, and its slot."""
        return number, number

    def save_if(self, due: jax.Array, slots: list, carry: list, slot: _jax.Whole) -> list:
        return (
            write_if(due, slots, carry, slot - self.layout_plan.spared)
            if self.layout_plan.rows
            else slots
        )

    def take_segments(
        self,
        loop: Loop,
        operands: Operands,
        steps: stepping.Steps,
        slots: list,
        slot: _jax.Whole,
        segments: _jax.Whole = 1,
    ) -> Saving:
        """Save the carry in `slot`, and run the given number of segments."""
        slots = self.save(slots, kept(steps.carry, self.how.slotted), slot)
        stop = steps.count + segments * self.how.plan.segment
        if loop.length is not None:
            stop = lax.min(stop, jnp.int32(loop.length))
        return stepping.advance(loop, operands, steps, stop), slots

    def reverse(self, step: StepReversal, steps: _jax.Whole, s: Backward) -> Cotangents:
        reverse_one, length = self.reversal(step), self.how.plan.segment
        last = stepping.quotient(steps + (length - 1), length) - 1
        s = s._replace(rows=self.rows(step), ahead=self.load_ahead(step.operands, s.stacks, last))
        # If no step was taken, a segment of one step would still be reversed, and products of rows
        # that were never written would be wrong.
        may_be_empty = not isinstance(steps, int) and (length == 1 or step.products is not None)
        if self.how.plan.segments == 1 and not may_be_empty:
            return reverse_one(0, steps, s._replace(segment=jnp.int32(0))).cts
        return reverse_segments(reverse_one, length, steps, s).cts

    def reversal(self, step: StepReversal) -> Callable:
        """Return the function that reverses a segment: `reverse(first, count, state)`."""
        return in_parts(step, self.how.plan.segment, self.reverse_segment)

    def rows(self, step: StepReversal) -> list:
        """Return arrays to hold the rows of a segment."""
        plan = self.how.plan
        stored = self.how.row_types if plan.segment > 1 or plan.keeps_last else []
        types = _jax.stack_types(stored, plan.segment)
        # Deferred products read whole segments, including steps not taken.
        made = _jax.blank if step.products is None else _jax.zeros_after
        return [made(t, step.after) for t in types]

    def reverse_segment(
        self, step: StepReversal, first: _jax.Whole, count: _jax.Whole, s: Backward
    ) -> Backward:
        """Reverse the segment of `count` steps that begins with step `first`."""
        if self.how.plan.segment == 1:
            carry, s = self.reach(step, first, first + count, s)
            cts, buffers = step.reverse_carry(first, carry, s.cts)
            return s._replace(cts=cts.after(self.how.loop, 1), buffers=buffers)
        carry, s = self.replayed(step, first, count, s)
        buffers = self.how.split_saved(carry)[1]
        cts, buffers = step.reverse_segment(first, count, s.rows, s.cts, buffers)
        return s._replace(cts=cts, buffers=buffers)

    def replayed(
        self, step: StepReversal, first: _jax.Whole, count: _jax.Whole, s: Backward
    ) -> tuple[list, Backward]:
        """Run a segment again; return the carry after it, and the state with its rows."""
        carry, s = self.reach(step, first, first + count, s)
        carry, rows = step.replay(first, count, carry, s.rows)
        return carry, s._replace(rows=rows)

    def reach(
        self, step: StepReversal, first: _jax.Whole, end: _jax.Whole, s: Backward
    ) -> tuple[list, Backward]:
        """Return the carry before step `first`, which begins a segment that ends at step `end`."""
        carry = self.loaded(step, s.segment, first, end, s)
        return carry, s._replace(ahead=self.load_ahead(step.operands, s.stacks, s.segment - 1))

    def loaded(
        self, step: StepReversal, slot: _jax.Whole, first: _jax.Whole, end: _jax.Whole, s: Backward
    ) -> list:
        """Return the carry before step `first`, from a slot and the buffers at step `end`."""
        held = [*s.ahead] or self.load(step.operands, s.stacks, slot)
        before = step.rewind(first, end - first, s.buffers)
        return self.how.merge_saved(step.counters(first), held, before)

    def save(self, slots: list, carry: list[Any], slot: _jax.Whole) -> list:
        """Return the slots, with `carry` written to one of them.

        If the first slot has no memory, its carry goes to the next slot and is overwritten later.
        """
        plan = self.layout_plan
        if not plan.rows:
            return slots
        return stepping.write_rows(slots, self.leaving(list(carry), slot), slot - plan.spared)

    def load_ahead(self, operands: Operands, slots: list, slot: _jax.Whole) -> list:
        """Return the carry in a slot, if loading it early saves time; else return nothing."""
        slot = jnp.maximum(slot, 0)
        return self.load(operands, slots, slot) if self.how.plan.host else []

    def load(self, operands: Operands, slots: list, slot: _jax.Whole) -> list:
        """Return the carry that a slot holds."""
        plan, first = self.layout_plan, kept(operands.init, self.how.slotted)
        if not plan.rows:
            return first
        rows = stepping.read_rows(slots, slot - plan.spared)
        if not plan.spared:
            return rows
        return [jnp.where(slot == 0, f, row) for f, row in zip(first, rows, strict=True)]


class Scheduled(EverySegment):
    def reversal(self, step: StepReversal) -> Callable:
        return ft.partial(self.reverse_segment, step)  # which also runs steps of other segments

    @property
    def segment_count(self) -> int:
        return self.layout_plan.slots

    def run(self, loop: Loop, operands: Operands, state: Saving) -> tuple[Any, ...]:
        length, schedule = self.how.plan.segment, tables.Schedule.of(self.how.plan)

        def run_on(
            s: tuple[stepping.Steps, list, tables.Slots],
        ) -> tuple[stepping.Steps, list, tables.Slots]:
            steps, slots, placed = s
            slot, run, placed = schedule.save(placed)
            run = lax.min(run, lax.div(stepping.LAST_STEP - steps.count, jnp.int32(length)))
            return *self.take_segments(loop, operands, steps, slots, slot, run), placed

        another = lambda s: stepping.goes_on(loop, operands, s[0], loop.length)
        first = *state, schedule.start(state[0].count)
        steps, slots, placed = lax.while_loop(another, run_on, first)
        return steps, slots, placed.segments

    def reverse_segment(
        self, step: StepReversal, first: _jax.Whole, count: _jax.Whole, s: Backward
    ) -> Backward:
        return self.freed(super().reverse_segment(step, first, count, s))

    def load_ahead(self, operands: Operands, slots: list, slot: _jax.Whole) -> list:
        """Return nothing: the next slot is known only after the segment has run again."""
        return []

    def freed(self, s: Backward) -> Backward:
        """Free the slot of the segment that was reversed, if it had one."""
        return s._replace(segments=jnp.where(s.segments >= s.segment, NEVER, s.segments))

    def reach(
        self, step: StepReversal, first: _jax.Whole, end: _jax.Whole, s: Backward
    ) -> tuple[list, Backward]:
        carry, segment = self.nearest(step, end, s)
        carry, stacks, segments = self.climb(step, carry, segment, s)
        return carry, s._replace(stacks=stacks, segments=segments)

    def nearest(self, step: StepReversal, end: _jax.Whole, s: Backward) -> tuple[list, Any]:
        """Return the last checkpoint up to the segment that ends at step `end`, and its segment."""
        slot, segment = tables.latest(s.segments, s.segment)
        return self.loaded(step, slot, segment * self.how.plan.segment, end, s), segment

    def climb(
        self, step: StepReversal, carry: list, segment: _jax.Whole, s: Backward
    ) -> tuple[list, list, Any]:
        """Advance from `segment` to `s.segment`, and save carries on the way.

        Return the carry there, the slots, and their segments.
        """
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
            return super().replayed(step, first, count, s)  # products also read rows past `count`
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
        """Whether steps on the way to a segment also store rows, which are overwritten.

        Then these steps and those of the segment run in one loop, which saves compiling the step
        once more. With small rows and many slots, this costs little.
        """
        plan = self.how.plan
        small = plan.step.residual_bytes <= RECORDED
        return plan.thinned and plan.store == "residuals" and small and not plan.host

    def following(
        self, segment: _jax.Whole, target: _jax.Whole, segments: jax.Array
    ) -> tuple[Any, Any]:
        """Return how many segments to run from `segment`, and the slot to save in then, or -1."""
        free, slot = tables.free_slots(segments)
        run = tables.Schedule.of(self.how.plan).split(target + 1 - segment, free)
        return run, jnp.where(free > 0, slot, -1)

    def saved(
        self, slot: _jax.Whole, carry: list, segment: _jax.Whole, stacks: list, segments: jax.Array
    ) -> tuple[list, Any]:
        """Return the slots and their segments, with `carry` in `slot`; unchanged if `slot` < 0."""
        how, save = self.how, slot >= 0
        if how.plan.rows:
            # Without a free slot, some slot is rewritten with its own value.
            place = jnp.maximum(slot, 0)
            old = stepping.read_rows(stacks, place - how.plan.spared)
            pairs = zip(how.split_saved(carry)[0], old, strict=True)
            stacks = self.save(stacks, [jnp.where(save, n, o) for n, o in pairs], place)
        return stacks, tables.saved(segments, slot, segment)

    def advance_segments(
        self, step: StepReversal, segment: _jax.Whole, run: _jax.Whole, carry: list
    ) -> list:
        """Advance `run` segments from the carry at the start of `segment`."""
        length = self.how.plan.segment
        return step.advance(carry, segment * length, run * length)
