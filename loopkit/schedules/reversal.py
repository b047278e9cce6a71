"""Schedules as actions, which act on one live state and on numbered slots.

The *live* state is the one being computed with. A schedule begins with the start of segment 0 live.
Every action prints as it is written, and names its segment or slot.

Segments are reversed from the last to the first. The latest checkpoint at or before the segment is
restored, and from there the sweep *climbs*: it advances to the optimal split, saves, and goes on,
until the segment's start is live. When the segment that begins at a checkpoint has been reversed,
its slot is free, so the stretch between the i-th checkpoint and the next is reversed with
`slots - 1 - i` free slots, each stretch at the binomial optimum (`loopkit.schedules.binomial`).

A forward sweep of known length is the same climb, towards the end of the last segment. Together,
the forward and the reverse sweep then take `binomial.evaluations(segments, slots)` advances, the
fewest possible.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from loopkit.schedules import binomial
from loopkit.schedules._checks import COUNT_SEGMENTS, SLOTS, Whole, integer
from loopkit.schedules.online import Placement


@dataclass(frozen=True)
class Advance:
    """Run the segments from `start` up to, not including, `stop`, whose start is then live."""

    start: int
    stop: int


@dataclass(frozen=True)
class Save:
    """Store the live state, the start of `segment`, in `slot`. The old state is lost."""

    segment: int
    slot: int


@dataclass(frozen=True)
class Restore:
    """Make the start of `segment`, which `slot` holds, the live state. It stays stored."""

    segment: int
    slot: int


@dataclass(frozen=True)
class Discard:
    """Empty `slot`."""

    slot: int


@dataclass(frozen=True)
class Reverse:
    """Replay `segment` from the live state, its start, and reverse it; then nothing is live."""

    segment: int


Action = Advance | Save | Restore | Discard | Reverse


def gradient(segments: Whole, slots: Whole) -> Iterator[Action]:
    """Return the optimal schedule for a loop of known length: forward sweep, then reversal.

    Arguments: `segments` >= 0; `slots` >= 1, including the initial state's.
    Returns: actions that begin with the start of segment 0 live.

    >>> for action in gradient(3, 2): print(action)
    Save(segment=0, slot=0)
    Advance(start=0, stop=1)
    Save(segment=1, slot=1)
    Advance(start=1, stop=3)
    Restore(segment=1, slot=1)
    Advance(start=1, stop=2)
    Reverse(segment=2)
    Restore(segment=1, slot=1)
    Reverse(segment=1)
    Discard(slot=1)
    Restore(segment=0, slot=0)
    Reverse(segment=0)
    Discard(slot=0)
    """
    segments = integer("reversal.gradient", "segments", segments, 0, COUNT_SEGMENTS)
    slots = integer("reversal.gradient", "slots", slots, 1, SLOTS)
    return _Stack({}, slots).gradient(segments)


def online_gradient(placement: Placement, segments: Whole) -> Iterator[Action]:
    """Return the schedule of a loop that placed its checkpoints by `placement` and ended after
    `segments`.

    Returns: actions that begin with the start of segment 0 live. The reversal uses the checkpoints
    that the loop left, and gives up none of them.
    """
    positions = placement.positions(segments)  # checks `segments`
    return _online_gradient(placement, int(segments), positions)


def _online_gradient(
    placement: Placement, segments: int, positions: Mapping[int, int]
) -> Iterator[Action]:
    for mark in placement.marks(segments):
        yield Save(mark.segment, mark.slot)
        if mark.cleared != placement.slots:
            yield Discard(mark.cleared)
        yield Advance(mark.segment, min(segments, mark.segment + mark.run))
    yield from _Stack(positions, placement.slots).reverse(segments)


class _Stack:
    """The checkpoints by age, the latest on top, and the free slots.

    `positions` has, for each slot in use, the segment whose start it holds.
    """

    def __init__(self, positions: Mapping[int, int], slots: int):
        self.by_age = sorted((segment, slot) for slot, segment in positions.items())
        self.free = [slot for slot in reversed(range(slots)) if slot not in positions]

    def gradient(self, segments: int) -> Iterator[Action]:
        if segments:
            yield self.save(0)
            yield from self.climb(0, segments)
            yield from self.reverse(segments)

    def climb(self, segment: int, target: int) -> Iterator[Action]:
        """Advance from the start of `segment`, live and on top of the stack, to `target`'s."""
        while segment < target:
            stop = segment + binomial.split(target + 1 - segment, len(self.free))
            yield Advance(segment, stop)
            segment = stop
            if segment < target:
                yield self.save(segment)

    def save(self, segment: int) -> Save:
        slot = self.free.pop()
        self.by_age.append((segment, slot))
        return Save(segment, slot)

    def reverse(self, segments: int) -> Iterator[Action]:
        for target in reversed(range(segments)):
            segment, slot = self.by_age[-1]
            yield Restore(segment, slot)
            yield from self.climb(segment, target)
            yield Reverse(target)
            segment, slot = self.by_age[-1]
            if segment == target:
                self.by_age.pop()
                self.free.append(slot)
                yield Discard(slot)
