"""A machine of sets that executes a schedule and believes nothing.

It keeps no numbers, only what is live and what each slot holds. It stops at the first action that
reads what is not there, overfills the storage, or reverses out of order, and else says what the
schedule cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Never, SupportsIndex

from loopkit.schedules._checks import integer
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

_RESIDUALS = "give the size of a unit's residuals"


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
    units: SupportsIndex,
    *,
    slots: SupportsIndex | None = None,
    positions: Mapping[int, int] | None = None,
    budget: SupportsIndex | None = None,
    carry_size: SupportsIndex = 1,
    residual_size: SupportsIndex = 1,
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
        units=integer(where, "units", units, 0, "count the units to be reversed"),
        slots=None if slots is None else integer(where, "slots", slots, 0, "count the slots"),
        budget=None if budget is None else integer(where, "budget", budget, 0, "give a total size"),
        carry_size=integer(where, "carry_size", carry_size, 0, "give the size of a state"),
        residual_size=integer(where, "residual_size", residual_size, 0, _RESIDUALS),
    )
    if positions is not None:
        machine.live = None
        machine.states.update(positions)
        machine.measure("what `positions` holds")
    for number, action in enumerate(actions):
        machine.execute(f"action {number}, {action!r}", action)
    return machine.finish()


class _Machine:
    """live: the unit whose start is live. states, residuals: the unit each slot in use is about."""

    def __init__(
        self, units: int, slots: int | None, budget: int | None, carry_size: int, residual_size: int
    ):
        self.slots, self.budget = slots, budget
        self.carry_size, self.residual_size = carry_size, residual_size
        self.live: int | None = 0
        self.states: dict[int, int] = {}
        self.residuals: dict[int, int] = {}
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
            case Save(unit, slot):
                self.require_live(what, unit)
                self.residuals.pop(slot, None)
                self.states[slot] = unit
                self.saves += 1
                self.measure(what)
            case Restore(unit, slot):
                if self.states.get(slot) != unit:
                    self.fail(what, f"slot {slot} holds {self.content(slot)}")
                self.restores += 1
                self.live = unit
            case Discard(slot):
                if slot not in self.states and slot not in self.residuals:
                    self.fail(what, f"slot {slot} is empty already")
                self.states.pop(slot, None)
                self.residuals.pop(slot, None)
            case Reverse(unit):
                self.require_live(what, unit)
                self.require_next(what, unit)
                self.replays += 1
                self.live = None
            case Record(unit, slot):
                self.require_live(what, unit)
                self.states.pop(slot, None)
                self.residuals[slot] = unit
                self.advances += 1
                self.saves += 1
                self.live = unit + 1
                self.measure(what)
            case ReverseRecorded(unit, slot):
                if self.residuals.get(slot) != unit:
                    self.fail(what, f"slot {slot} holds {self.content(slot)}")
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

    def content(self, slot: int) -> str:
        if slot in self.states:
            return f"the start of unit {self.states[slot]}"
        if slot in self.residuals:
            return f"the residuals of unit {self.residuals[slot]}"
        return "nothing"

    def measure(self, what: str) -> None:
        used = self.states.keys() | self.residuals.keys()
        size = self.carry_size * len(self.states) + self.residual_size * len(self.residuals)
        if self.slots is not None:
            outside = [slot for slot in used if not 0 <= slot < self.slots]
            if outside:
                self.fail(what, f"uses slot {outside[0]}, but there are {self.slots} slots")
        if self.budget is not None and size > self.budget:
            self.fail(what, f"stores {size} in all, but the budget is {self.budget}")
        self.peak_slots = max(self.peak_slots, len(used))
        self.peak_size = max(self.peak_size, size)

    def finish(self) -> Cost:
        if self.next >= 0:
            self.fail("the end", f"units 0 to {self.next} are not reversed")
        return Cost(
            self.advances, self.replays, self.saves, self.restores, self.peak_slots, self.peak_size
        )
