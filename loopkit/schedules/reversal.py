"""Reversing a loop from whatever checkpoints its forward sweep has left.

Segments are reversed newest first. The youngest checkpoint at or before the segment is restored,
and from there the sweep *climbs*: it advances to the optimal split, saves, and goes on, until the
segment's start is live. When the segment that begins at a checkpoint has been reversed, its slot is
free, so the stretch between the i-th checkpoint and the next is reversed with `slots - 1 - i` free
slots, each stretch at the binomial optimum (`loopkit.schedules.binomial`). Given the checkpoints,
only one thing can be better: to give some up before reversal begins, for the sake of the later
stretches. To give one up later gains no more, so the best choice is a shortest path over the
checkpoints, and `kept` finds it.

A forward sweep of known length is the same climb, towards the end of the last segment; forward and
reverse sweep together then take `binomial.evaluations(segments, slots)` advances, the fewest there
are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from loopkit.schedules import binomial
from loopkit.schedules._checks import COUNT_SEGMENTS, SLOTS, Whole, integer
from loopkit.schedules.actions import Action, Advance, Discard, Restore, Reverse, Save
from loopkit.schedules.online import Placement


def gradient(segments: Whole, slots: Whole) -> Iterator[Action]:
    """Return the optimal schedule for a loop of known length: forward sweep, then reversal.

    Arguments: `segments` >= 0; `slots` >= 1, the initial state's included.
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
    return _gradient(segments, _Stack({}, slots))


def online_gradient(placement: Placement, segments: Whole) -> Iterator[Action]:
    """Return the schedule of a loop that placed its checkpoints by `placement` and ended after
    `segments`.

    Returns: actions that begin with the start of segment 0 live. The checkpoints left behind are
    reversed from as they are, none given up.
    """
    positions = placement.positions(segments)  # checks `segments`
    return _online_gradient(placement, int(segments), positions)


def reverse(positions: Mapping[int, int], segments: Whole, slots: Whole) -> Iterator[Action]:
    """Reverse `segments` segments from the checkpoints in `positions`.

    Arguments: `positions`, for each slot in use the segment whose start it holds, in any order,
    with segment 0 among them; `segments` >= 0; `slots` >= 1, slots in all.
    Returns: actions that begin with nothing live. They advance `advances(positions, segments,
    slots)` times.

    >>> for action in reverse({0: 0, 1: 2}, 4, 2): print(action)
    Restore(segment=2, slot=1)
    Advance(start=2, stop=3)
    Reverse(segment=3)
    Restore(segment=2, slot=1)
    Reverse(segment=2)
    Discard(slot=1)
    Restore(segment=0, slot=0)
    Advance(start=0, stop=1)
    Reverse(segment=1)
    Restore(segment=0, slot=0)
    Reverse(segment=0)
    Discard(slot=0)
    """
    segments, slots = _check("reverse", positions, segments, slots)
    return _Stack(positions, slots).reverse(segments)


def advances(positions: Mapping[int, int], segments: Whole, slots: Whole) -> int:
    """Count the advances of `reverse(positions, segments, slots)`, without its replays.

    >>> advances({0: 0, 1: 2}, 4, 2)
    2
    """
    segments, slots = _check("advances", positions, segments, slots)
    starts = [*sorted(positions.values()), segments]
    return sum(
        binomial.advances(starts[i + 1] - starts[i], slots - 1 - i) for i in range(len(positions))
    )


def kept(
    positions: Mapping[int, int], segments: Whole, slots: Whole, *, give_up: Whole = 16
) -> dict[int, int]:
    """Return the checkpoints worth keeping: those of `positions` from which reversal is cheapest.

    Arguments: as for `reverse`; `give_up`, the most checkpoints to give up. The time it takes
    grows with the number of checkpoints and the square of `give_up`.
    Returns: the part of `positions` to reverse from, exactly the best that gives up so many.

    >>> kept({0: 0, 1: 10, 2: 20}, 40, 3)      # the last stretch is worth a free slot
    {0: 0, 2: 20}
    """
    segments, slots = _check("kept", positions, segments, slots)
    give_up = integer("reversal.kept", "give_up", give_up, 0, "pass 0 to keep every checkpoint")
    by_age = sorted((segment, slot) for slot, segment in positions.items())
    starts = [segment for segment, _ in by_age] + [segments]
    # best[i][e]: the cost of all stretches before checkpoint i, e older ones having been given up;
    # checkpoint i is then the (i - e)-th. The end counts as a checkpoint, the last.
    best: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for i in range(1, len(starts)):
        reached: dict[int, tuple[int, int]] = {}
        for before in range(max(0, i - 1 - give_up), i):
            for given, (cost, _) in best[before].items():
                now = given + i - 1 - before
                if now > give_up:
                    continue
                stretch = starts[i] - starts[before]
                total = cost + binomial.advances(stretch, slots - 1 - (before - given))
                if now not in reached or total < reached[now][0]:
                    reached[now] = (total, before)
        best.append(reached)
    i = len(starts) - 1
    given = min(best[i], key=lambda e: (best[i][e][0], e))
    chain = []
    while i > 0:
        before = best[i][given][1]
        given -= i - 1 - before
        i = before
        chain.append(by_age[i])
    return {slot: segment for segment, slot in reversed(chain)}


def _check(
    function: str, positions: Mapping[int, int], segments: Whole, slots: Whole
) -> tuple[int, int]:
    where = f"reversal.{function}"
    segments = integer(where, "segments", segments, 0, COUNT_SEGMENTS)
    slots = integer(where, "slots", slots, 1, SLOTS)
    prefix = f"loopkit.schedules.{where}: `positions` must"
    for slot, segment in positions.items():
        if not 0 <= slot < slots:
            raise ValueError(
                f"{prefix} use slots 0 to {slots - 1}. Number the slots from 0, or pass a larger "
                f"number as `slots`. Got: slot {slot}."
            )
        if not 0 <= segment < max(segments, 1):
            raise ValueError(
                f"{prefix} hold segments 0 to {segments - 1}. Leave out a state from which nothing "
                f"is reversed. Got: segment {segment} in slot {slot}."
            )
    got = f"Got: segments {sorted(positions.values())}."
    if segments and 0 not in positions.values():
        raise ValueError(f"{prefix} hold segment 0. Keep the initial state. {got}")
    if len(set(positions.values())) != len(positions):
        raise ValueError(f"{prefix} hold each segment once. Leave out the second copy. {got}")
    return segments, slots


class _Stack:
    """The checkpoints by age, youngest on top, and the free slots."""

    def __init__(self, positions: Mapping[int, int], slots: int):
        self.by_age = sorted((segment, slot) for slot, segment in positions.items())
        self.free = [slot for slot in reversed(range(slots)) if slot not in positions]

    def climb(self, segment: int, target: int) -> Iterator[Action]:
        """From the start of `segment`, live and on top of the stack, make that of `target` live."""
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


def _gradient(segments: int, stack: _Stack) -> Iterator[Action]:
    if segments:
        yield stack.save(0)
        yield from stack.climb(0, segments)
        yield from stack.reverse(segments)


def _online_gradient(
    placement: Placement, segments: int, positions: Mapping[int, int]
) -> Iterator[Action]:
    for mark in placement.marks(segments):
        yield Save(mark.segment, mark.slot)
        if mark.cleared != placement.slots:
            yield Discard(mark.cleared)
        yield Advance(mark.segment, min(segments, mark.segment + mark.run))
    yield from _Stack(positions, placement.slots).reverse(segments)
