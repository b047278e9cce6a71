"""A machine of sets that executes a schedule and believes nothing.

It keeps no numbers, only what is live and what each slot holds. It stops at the first action that
reads what is not there, overfills the storage, or reverses out of order, and else says what the
schedule cost.
"""

from __future__ import annotations

from dataclasses import dataclass

from loopkit.schedules.reversal import Advance, Discard, Restore, Reverse, Save


@dataclass(frozen=True)
class Cost:
    """The cost of a schedule.

    advances: segments run without reversing them, forward sweep and recomputation together.
    replays: segments run once more to be reversed.
    saves: states stored.
    restores: states read back.
    peak_slots: the most slots in use at a time.
    """

    advances: int
    replays: int
    saves: int
    restores: int
    peak_slots: int

    @property
    def evaluations(self):
        """The number of times that a segment was run, in all."""
        return self.advances + self.replays


def replay(actions, segments, *, slots=None, positions=None):
    """Execute `actions`, a schedule that reverses `segments` segments, and return what it cost.

    `slots` says how many there are, if that is limited. `positions` has the segment whose start
    each slot holds to begin with, nothing then being live; by default nothing is stored and the
    start of segment 0 is live. The first action that cannot be executed raises ValueError.
    """
    machine = _Machine(segments, slots)
    if positions is not None:
        machine.live = None
        machine.held = {slot: Save(segment, slot) for slot, segment in positions.items()}
        machine.measure(f"positions={positions}")
    for number, action in enumerate(actions):
        machine.execute(f"action {number}, {action!r}", action)
    return machine.finish()


class _Machine:
    """live: the segment whose start is live. held: for each slot in use, its last save."""

    def __init__(self, segments, slots):
        self.slots = slots
        self.live = 0
        self.held = {}
        self.next = segments - 1  # to be reversed
        self.advances = self.replays = self.saves = self.restores = 0
        self.peak_slots = 0

    def fail(self, what, why):
        raise ValueError(f"{why}: {what}")

    def execute(self, what, action):
        match action:
            case Advance(start, stop):
                self.require_live(what, start)
                if stop <= start:
                    self.fail(what, f"an advance must end after {start}, where it begins")
                self.advances += stop - start
                self.live = stop
            case Save(segment, slot):
                self.require_live(what, segment)
                self.held[slot] = action
                self.saves += 1
                self.measure(what)
            case Restore(segment, slot):
                self.require_held(what, Save(segment, slot))
                self.restores += 1
                self.live = segment
            case Discard(slot):
                if self.held.pop(slot, None) is None:
                    self.fail(what, f"slot {slot} must hold a state, but is empty already")
            case Reverse(segment):
                self.require_live(what, segment)
                self.require_next(what, segment)
                self.replays += 1
                self.live = None

    def require_live(self, what, segment):
        if self.live != segment:
            live = "nothing" if self.live is None else f"the start of segment {self.live}"
            self.fail(what, f"the start of segment {segment} must be live, but {live} is")

    def require_next(self, what, segment):
        if segment != self.next:
            due = "none is left" if self.next < 0 else f"segment {self.next} is next"
            self.fail(what, f"segments must be reversed once each, the last one first, and {due}")
        self.next -= 1

    def require_held(self, what, stored):
        there = self.held.get(stored.slot)
        if there != stored:
            content = "nothing" if there is None else f"that of segment {there.segment}"
            said = f"must hold the start of segment {stored.segment}, but holds {content}"
            self.fail(what, f"slot {stored.slot} {said}")

    def measure(self, what):
        for slot in self.held:
            if self.slots is not None and not 0 <= slot < self.slots:
                self.fail(what, f"slot {slot} must not be used, as there are {self.slots} slots")
        self.peak_slots = max(self.peak_slots, len(self.held))

    def finish(self):
        if self.next >= 0:
            left = f"the end, with segments 0 to {self.next} left"
            self.fail(left, "a schedule must reverse all segments")
        return Cost(self.advances, self.replays, self.saves, self.restores, self.peak_slots)
