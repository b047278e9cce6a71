"""A machine of sets that executes a schedule and believes nothing.

It keeps no numbers, only what is live and what each slot holds. It stops at the first action that
reads what is not there, overfills the storage, or reverses out of order, and else says what the
schedule cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Never

from loopkit.schedules._checks import BUDGET, CARRY, COUNT_UNITS, RESIDUALS, Whole, integer
from loopkit.schedules.actions import (
    Action,
    Advance,
    Discard,
    Record,
    Restore,
    Reverse,
    ReverseRecorded,
    Save,
)


@dataclass(frozen=True)
class Cost:
    """What a schedule took.

    advances: units run without reversing them, forward sweep and recomputation together.
    replays: units run once more to be reversed.
    saves: states and residuals stored.
    restores: states read back.
    peak_slots: the most slots in use at a time.
    peak_size: the most stored at a time, in the unit of the sizes given.
    """

    advances: int
    replays: int
    saves: int
    restores: int
    peak_slots: int
    peak_size: int

    @property
    def evaluations(self) -> int:
        """How many times a unit was run, in all."""
        return self.advances + self.replays


def replay(
    actions: Iterable[Action],
    units: Whole,
    *,
    slots: Whole | None = None,
    positions: Mapping[int, int] | None = None,
    budget: Whole | None = None,
    carry_size: Whole = 1,
    residual_size: Whole = 1,
) -> Cost:
    """Execute `actions`, a schedule that reverses `units` units, and return what it cost.

    Arguments: `slots`, how many there are, if that is limited; `positions`, the unit whose start
    each slot holds to begin with, nothing then being live (by default nothing is stored and the
    start of unit 0 is live); `budget`, how much may be stored, in the unit of `carry_size`, the
    size of a state, and `residual_size`, that of a unit's residuals.
    Raises: ValueError at the first action that cannot be executed, or if units are left over.
    """
    where = "replay.replay"
    machine = _Machine(
        units=integer(where, "units", units, 0, COUNT_UNITS),
        slots=None if slots is None else integer(where, "slots", slots, 0, "count the slots"),
        budget=None if budget is None else integer(where, "budget", budget, 0, BUDGET),
        carry_size=integer(where, "carry_size", carry_size, 0, CARRY),
        residual_size=integer(where, "residual_size", residual_size, 0, RESIDUALS),
    )
    if positions is not None:
        machine.live = None
        machine.held = {slot: Save(unit, slot) for slot, unit in positions.items()}
        machine.measure("what `positions` holds")
    for number, action in enumerate(actions):
        machine.execute(f"action {number}, {action!r}", action)
    return machine.finish()


class _Machine:
    """live: the unit whose start is live. held: for each slot in use, the action that filled it."""

    def __init__(
        self, units: int, slots: int | None, budget: int | None, carry_size: int, residual_size: int
    ):
        self.slots, self.budget = slots, budget
        self.carry_size, self.residual_size = carry_size, residual_size
        self.live: int | None = 0
        self.held: dict[int, Save | Record] = {}
        self.next = units - 1  # to be reversed
        self.advances = self.replays = self.saves = self.restores = 0
        self.peak_slots = self.peak_size = 0

    def fail(self, what: str, why: str) -> Never:
        raise ValueError(f"loopkit.schedules.replay: {what}: {why}")

    def execute(self, what: str, action: Action) -> None:
        match action:
            case Advance(start, stop):
                self.require_live(what, start)
                if stop <= start:
                    self.fail(what, f"must end after {start}, where it begins")
                self.advances += stop - start
                self.live = stop
            case Save(unit, slot) | Record(unit, slot):
                self.require_live(what, unit)
                self.held[slot] = action
                self.saves += 1
                self.measure(what)
                if isinstance(action, Record):
                    self.advances += 1
                    self.live = unit + 1
            case Restore(unit, slot):
                self.require_held(what, Save(unit, slot))
                self.restores += 1
                self.live = unit
            case Discard(slot):
                if self.held.pop(slot, None) is None:
                    self.fail(what, f"slot {slot} is empty already")
            case Reverse(unit):
                self.require_live(what, unit)
                self.require_next(what, unit)
                self.replays += 1
                self.live = None
            case ReverseRecorded(unit, slot):
                self.require_held(what, Record(unit, slot))
                self.require_next(what, unit)
                self.live = None

    def require_live(self, what: str, unit: int) -> None:
        if self.live != unit:
            live = "nothing" if self.live is None else f"the start of unit {self.live}"
            self.fail(what, f"needs the start of unit {unit}, but {live} is live")

    def require_next(self, what: str, unit: int) -> None:
        if unit != self.next:
            due = "none is left" if self.next < 0 else f"unit {self.next} is next"
            self.fail(what, f"reverses unit {unit}, but {due}")
        self.next -= 1

    def require_held(self, what: str, stored: Save | Record) -> None:
        there = self.held.get(stored.slot)
        if there != stored:
            part = "start" if isinstance(there, Save) else "residuals"
            content = "nothing" if there is None else f"the {part} of unit {there.unit}"
            self.fail(what, f"slot {stored.slot} holds {content}")

    def measure(self, what: str) -> None:
        states = sum(isinstance(stored, Save) for stored in self.held.values())
        size = self.carry_size * states + self.residual_size * (len(self.held) - states)
        for slot in self.held:
            if self.slots is not None and not 0 <= slot < self.slots:
                self.fail(what, f"uses slot {slot}, but there are {self.slots} slots")
        if self.budget is not None and size > self.budget:
            self.fail(what, f"stores {size} in all, but the budget is {self.budget}")
        self.peak_slots = max(self.peak_slots, len(self.held))
        self.peak_size = max(self.peak_size, size)

    def finish(self) -> Cost:
        if self.next >= 0:
            self.fail("the end", f"units 0 to {self.next} are not reversed")
        return Cost(
            self.advances, self.replays, self.saves, self.restores, self.peak_slots, self.peak_size
        )
