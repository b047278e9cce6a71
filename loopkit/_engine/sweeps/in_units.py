"""A schedule where the host waits for the device in each iteration of a loop of unknown length.

Runs and climbs go a segment of known length at a time. Where it costs less than to wait, the slot
at hand is written over itself wherever nothing is saved: then a run of known length does not wait
at all, and a climb in one loop once a segment. Elsewhere a loop over segments ends at each save.
Longer segments may be worth having; their rows lie in slots that a shorter schedule leaves free
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
from loopkit._engine.steps import Steps, read_rows, repeat, take, write_rows
from loopkit._engine.sweeps import tables
from loopkit._engine.sweeps.scheduled import Scheduled
from loopkit._engine.sweeps.step import Cotangents, StepReversal
from loopkit._engine.sweeps.strategy import Backward, Saving, reverse_segments
from loopkit._plans.waits import writes_in_passing
from loopkit.schedules.online import NEVER

Climb = tuple[list, Any, Any, list, Any]
"""The carry at hand, its unit, where to save next, the slots, and their units."""


class InUnits(Scheduled):
    @property
    def schedule(self) -> tables.Schedule:
        return tables.Schedule.of(self.how.plan)

    @property
    def predicated_store(self) -> bool:
        return writes_in_passing(self.how.plan)

    def run(self, loop: Loop, operands: Operands, state: Saving) -> tuple[Any, ...]:
        if loop.cond is None:
            run = self.run_in_passing if self.predicated_store else self.run_between_saves
            steps, stacks, units = run(loop, operands, state)
        elif self.predicated_store:
            steps, stacks, number = self.run_flat(loop, operands, state)
            units = self.schedule.held(number)
        else:
            steps, stacks, units = super().run(loop, operands, state)
        units = jnp.where(units == NEVER, NEVER, units * self.wider)
        left = jnp.full(self.layout_plan.slots - self.how.plan.slots, NEVER, jnp.int32)
        return steps, stacks, jnp.concatenate([units, _jax.vary_like(left, [jax.typeof(units)])])

    def saved_as(self, number: Any) -> tuple[Any, Any]:
        unit, slot, *_ = self.schedule.row(number)
        return unit, slot

    def run_in_passing(self, loop: Loop, operands: Operands, state: Saving) -> tuple[Any, ...]:
        """A known number of steps, in a loop over all segments."""
        whole, rest, saves = self.cut(loop)

        def segment(unit: Any, state: Saving, count: int = self.how.plan.segment) -> Saving:
            steps, stacks = state
            due = saves[:, 0] == unit
            slot = jnp.max(jnp.where(due, saves[:, 1], 0))
            stacks = self.save_if(due.any(), stacks, kept(steps.carry, self.how.slotted), slot)
            return run_known(loop, operands, count, steps), stacks

        state = repeat(whole, segment, state)
        # Of a choice that it knows, a compiler would make a copy of all slots.
        state = segment(lax.optimization_barrier(jnp.int32(whole)), state, rest) if rest else state
        return *state, self.schedule.held(len(saves))

    def run_between_saves(self, loop: Loop, operands: Operands, state: Saving) -> tuple[Any, ...]:
        """A known number of steps, in a loop over saves of loops over segments."""
        whole, rest, saves = self.cut(loop)
        length = self.how.plan.segment

        def stretch(number: Any, state: Saving) -> Saving:
            steps, stacks = state
            unit, slot, _, run = self.schedule.row(number)
            stacks = self.save(stacks, kept(steps.carry, self.how.slotted), slot)
            one = lambda _, s: run_known(loop, operands, length, s)
            return repeat(lax.min(run, whole - unit), one, steps), stacks

        steps, stacks = repeat(len(saves), stretch, state)
        return run_known(loop, operands, rest, steps), stacks, self.schedule.held(len(saves))

    def cut(self, loop: Loop) -> tuple[int, int, np.ndarray]:
        """Segments that are whole, the steps beyond them, and what is saved."""
        assert loop.length is not None, "a loop without a predicate has a length"
        return *divmod(loop.length, self.how.plan.segment), self.schedule.saves[:-1]

    @property
    def wider(self) -> int:
        """How many of the units handed on are one of those counted in."""
        return self.how.plan.segment // self.layout_plan.segment

    def reverse(self, step: StepReversal, steps: Any, s: Backward) -> Cotangents:
        # Of a climb whose length it knows, too, a compiler would make copies.
        units = lax.optimization_barrier(s.units)
        if self.how.layout_plan is None:
            return super().reverse(step, steps, s._replace(units=units))
        # What was saved elsewhere may lie between these units, or where their rows will.
        units = units[: self.how.plan.slots]
        fits = (units != NEVER) & (units % self.wider == 0)
        units = jnp.where(fits, lax.div(units, jnp.int32(self.wider)), NEVER)
        s = s._replace(units=units, rows=self.rows(step) if self.how.plan.host else [])
        segment = ft.partial(self.reverse_segment, step)
        return reverse_segments(segment, self.how.plan.segment, steps, s)

    def reverse_segment(self, step: StepReversal, first: Any, count: Any, s: Backward) -> Backward:
        how = self.how
        if how.layout_plan is None or how.plan.host:
            return super().reverse_segment(step, first, count, s)
        carry, s = self.reach(step, first, first + count, s)
        start, place = how.split_saved(carry)[0], self.layout_plan.rows - how.plan.segment

        def again(k: Any, state: tuple[list, list]) -> tuple[list, list]:
            carry = how.advance(step.operands, step.taken, state[0], first + k, 1)
            return carry, write_rows(state[1], how.split_saved(carry)[0], place + k + 1)

        def row(k: Any) -> list:
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
        self, step: StepReversal, carry: list, unit: Any, s: Backward
    ) -> tuple[list, list, Any]:
        climb = self.climb_in_passing if self.predicated_store else super().climb
        return climb(step, carry, unit, s)

    def climb_in_passing(
        self, step: StepReversal, carry: list, unit: Any, s: Backward
    ) -> tuple[list, list, Any]:
        """In a loop over all segments."""
        target, schedule = s.unit, self.schedule

        def advance(climb: Climb) -> Climb:
            carry, unit, stop, stacks, units = climb
            carry = self.segments(step, unit, 1, carry)
            unit, (free, slot) = unit + 1, tables.free_slots(units)
            due = (unit == stop) & (free > 0)
            stacks = self.save_if(due, stacks, self.how.split_saved(carry)[0], slot)
            units = tables.saved(units, jnp.where(due, slot, -1), unit)
            # Without a free slot, the next stop is the target.
            following = unit + schedule.split(target + 1 - unit, jnp.maximum(free - 1, 0))
            return carry, unit, jnp.where(unit == stop, following, stop), stacks, units

        stop = unit + schedule.split(target + 1 - unit, tables.free_slots(s.units)[0])
        climb = carry, unit, stop, s.stacks, s.units
        carry, _, _, stacks, units = lax.while_loop(lambda c: c[1] < target, advance, climb)
        return carry, stacks, units

    def segments(self, step: StepReversal, unit: Any, run: Any, carry: list) -> list:
        one = super().segments
        if isinstance(run, int):
            return one(step, unit, run, carry)
        return repeat(run, lambda k, c: one(step, unit + k, 1, c), carry)


def run_known(loop: Loop, operands: Operands, count: int, steps: Steps) -> Steps:
    return take(loop, operands, count, steps)
