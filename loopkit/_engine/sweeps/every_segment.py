"""The carry at the start of every segment: going back, a segment is run again from its own."""

from __future__ import annotations

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from loopkit import _jax
from loopkit._engine.loop import Loop, Operands, kept
from loopkit._engine.steps import (
    Steps,
    advance,
    goes_on,
    guarded_step,
    one_step,
    quotient,
    read_rows,
    repeat,
    take,
    write_rows,
)
from loopkit._engine.sweeps.step import Cotangents, StepReversal
from loopkit._engine.sweeps.strategy import (
    Backward,
    Saving,
    Sweep,
    reverse_segments,
    run_steps,
    write_if,
)
from loopkit._plans.waits import writes_in_passing


class EverySegment(Sweep):
    def run(self, loop: Loop, operands: Operands, state: Saving) -> tuple[Any, ...]:
        length = self.how.plan.segment

        def known(segment: _jax.Whole, state: Saving, count: _jax.Whole = length) -> Saving:
            steps, slots = state
            assert loop.length is not None, "a loop without a predicate has a length"
            slots = self.save(slots, kept(steps.carry, self.how.slotted), segment)
            if loop.length % length and not _jax.host_waits.value:
                count = jnp.minimum((segment + 1) * length, loop.length) - steps.count
            return take(loop, operands, count, steps), slots

        def take_next(state: Saving) -> Saving:
            return self.take_segments(
                loop, operands, *state, lax.div(state[0].count, jnp.int32(length))
            )

        if loop.cond is None and _jax.host_waits.value:
            assert loop.length is not None, "a loop without a predicate has a length"
            whole, rest = divmod(loop.length, length)
            state = repeat(whole, known, state)
            return known(jnp.int32(whole), state, rest) if rest else state
        if loop.cond is None:
            return repeat(self.how.plan.segments, known, state)
        if self.how.plan.segments == 1:
            return self.take_segments(loop, operands, *state, jnp.int32(0))
        if _jax.host_waits.value and writes_in_passing(self.how.plan):
            return self.run_flat(loop, operands, state)[:2]
        another = lambda s: goes_on(loop, operands, s[0], loop.length)
        return lax.while_loop(another, take_next, state)

    def run_flat(self, loop: Loop, operands: Operands, state: Saving) -> tuple[Any, ...]:
        """In one loop, of which a host reads the predicate once a step; also: how often it saved.

        A step that saves nothing writes a slot over itself.
        """
        length = jnp.int32(self.how.plan.segment)

        def step(s: Any, go: jax.Array | None = None) -> Any:
            steps, (slots, number) = s
            segment, slot = self.saved_as(number)
            due = (lax.div(steps.count, length) == segment) & (lax.rem(steps.count, length) == 0)
            due = due if go is None else due & go
            slots = self.save_if(due, slots, kept(steps.carry, self.how.slotted), slot)
            saved = slots, number + due.astype(jnp.int32)
            if go is None:
                return one_step(loop, operands, steps), saved
            return guarded_step(loop, operands, loop.length, steps), saved

        steps, slots = state
        steps, (slots, number) = run_steps(loop, operands, step, (steps, (slots, steps.count)))
        return steps, slots, number

    def saved_as(self, number: _jax.Whole) -> tuple[Any, Any]:
        """The segment whose start is saved after `number` others, and where."""
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
        steps: Steps,
        slots: list,
        slot: _jax.Whole,
        segments: _jax.Whole = 1,
    ) -> Saving:
        """Save the carry, and run so many segments."""
        slots = self.save(slots, kept(steps.carry, self.how.slotted), slot)
        stop = steps.count + segments * self.how.plan.segment
        if loop.length is not None:
            stop = lax.min(stop, jnp.int32(loop.length))
        return advance(loop, operands, steps, stop), slots

    def reverse(self, step: StepReversal, steps: _jax.Whole, s: Backward) -> Cotangents:
        reverse_one = ft.partial(self.reverse_segment, step)
        length = self.how.plan.segment
        last = quotient(steps + (length - 1), length) - 1
        s = s._replace(rows=self.rows(step), ahead=self.load_ahead(step.operands, s.stacks, last))
        # It may have no step. Products of what was not written would then be wrong.
        if self.how.plan.segments == 1 and (step.products is None or isinstance(steps, int)):
            return reverse_one(0, steps, s._replace(segment=jnp.int32(0))).cts
        return reverse_segments(reverse_one, length, steps, s)

    def rows(self, step: StepReversal) -> list:
        """Where those of a segment are stored."""
        length = self.how.plan.segment
        types = _jax.stack_types(self.how.row_types, length) if length > 1 else []
        # Products that are put off read whole segments, taken or not.
        return list(map(_jax.blank if step.products is None else _jax.zeros, types))

    def reverse_segment(
        self, step: StepReversal, first: _jax.Whole, count: _jax.Whole, s: Backward
    ) -> Backward:
        """Back over the segment of `count` steps that begins with step `first`."""
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
        """The carry after a segment that is run again, and its rows."""
        carry, s = self.reach(step, first, first + count, s)
        carry, rows = step.replay(first, count, carry, s.rows)
        return carry, s._replace(rows=rows)

    def reach(
        self, step: StepReversal, first: _jax.Whole, end: _jax.Whole, s: Backward
    ) -> tuple[list, Backward]:
        """The carry before step `first`, where a segment begins that ends at step `end`."""
        carry = self.loaded(step, s.segment, first, end, s)
        return carry, s._replace(ahead=self.load_ahead(step.operands, s.stacks, s.segment - 1))

    def loaded(
        self, step: StepReversal, slot: _jax.Whole, first: _jax.Whole, end: _jax.Whole, s: Backward
    ) -> list:
        """The carry before step `first`, of a slot, and of buffers as they were at step `end`."""
        held = [*s.ahead] or self.load(step.operands, s.stacks, slot)
        before = step.rewind(first, end - first, s.buffers)
        counts = self.how.counts(step.operands, first, step.taken)
        return self.how.merge_saved(counts, held, before)

    def save(self, slots: list, carry: list[Any], slot: _jax.Whole) -> list:
        """Return the slots, with a carry in one of them.

        A first slot without memory is written to the next, which is written over.
        """
        plan = self.layout_plan
        if not plan.rows:
            return slots
        return write_rows(slots, self.leaving(list(carry), slot), slot - plan.spared)

    def load_ahead(self, operands: Operands, slots: list, slot: _jax.Whole) -> list:
        """Bring what the segment before will begin with; nothing where that is no gain."""
        slot = jnp.maximum(slot, 0)
        return self.load(operands, slots, slot) if self.how.plan.host else []

    def load(self, operands: Operands, slots: list, slot: _jax.Whole) -> list:
        """Return what a slot holds."""
        plan, first = self.layout_plan, kept(operands.init, self.how.slotted)
        if not plan.rows:
            return first
        rows = read_rows(slots, slot - plan.spared)
        if not plan.spared:
            return rows
        return [jnp.where(slot == 0, f, row) for f, row in zip(first, rows, strict=True)]
