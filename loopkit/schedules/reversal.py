"""Reversing a loop from whatever checkpoints its forward sweep has left.

Units are reversed newest first. The youngest checkpoint at or before the unit is restored, and
from there the sweep *climbs*: it advances to the optimal split, saves, and goes on, until the
unit's start is live. When the unit that begins at a checkpoint has been reversed, its slot is
free, so the stretch between the i-th checkpoint and the next is reversed with `slots - 1 - i` free
slots, each stretch at the binomial optimum (`loopkit.schedules.binomial`). Given the checkpoints,
only one thing can be better: to give some up before reversal begins, for the sake of the later
stretches. To give one up later gains no more, so the best choice is a shortest path over the
checkpoints, and `kept` finds it.

A forward sweep of known length is the same climb, towards the end of the last unit; forward and
reverse sweep together then take `binomial.evaluations(units, slots)` advances, the fewest there
are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from loopkit.schedules import binomial
from loopkit.schedules._checks import COUNT_UNITS, SLOTS, Whole, integer
from loopkit.schedules.actions import Action, Advance, Discard, Restore, Reverse, Save
from loopkit.schedules.online import Placement


def gradient(units: Whole, slots: Whole) -> Iterator[Action]:
    """The optimal schedule for a loop of known length: forward sweep, then reversal.

    Arguments: `units` >= 0; `slots` >= 1, the initial state's included.
    Returns: actions that begin with the start of unit 0 live.

    >>> for action in gradient(3, 2): print(action)
    Save(unit=0, slot=0)
    Advance(start=0, stop=1)
    Save(unit=1, slot=1)
    Advance(start=1, stop=3)
    Restore(unit=1, slot=1)
    Advance(start=1, stop=2)
    Reverse(unit=2)
    Restore(unit=1, slot=1)
    Reverse(unit=1)
    Discard(slot=1)
    Restore(unit=0, slot=0)
    Reverse(unit=0)
    Discard(slot=0)
    """
    units = integer("reversal.gradient", "units", units, 0, COUNT_UNITS)
    slots = integer("reversal.gradient", "slots", slots, 1, SLOTS)
    return _gradient(units, _Stack({}, slots))


def online_gradient(placement: Placement, units: Whole) -> Iterator[Action]:
    """The schedule of a loop that placed its checkpoints by `placement` and ended after `units`.

    Returns: actions that begin with the start of unit 0 live. The checkpoints left behind are
    reversed from as they are, none given up.
    """
    positions = placement.positions(units)  # checks `units`
    return _online_gradient(placement, int(units), positions)


def reverse(positions: Mapping[int, int], units: Whole, slots: Whole) -> Iterator[Action]:
    """Reverse `units` units from the checkpoints in `positions`.

    Arguments: `positions`, for each slot in use the unit whose start it holds, in any order, with
    unit 0 among them; `units` >= 0; `slots` >= 1, slots in all.
    Returns: actions that begin with nothing live. They advance `advances(positions, units, slots)`
    times.

    >>> for action in reverse({0: 0, 1: 2}, 4, 2): print(action)
    Restore(unit=2, slot=1)
    Advance(start=2, stop=3)
    Reverse(unit=3)
    Restore(unit=2, slot=1)
    Reverse(unit=2)
    Discard(slot=1)
    Restore(unit=0, slot=0)
    Advance(start=0, stop=1)
    Reverse(unit=1)
    Restore(unit=0, slot=0)
    Reverse(unit=0)
    Discard(slot=0)
    """
    units, slots = _check("reverse", positions, units, slots)
    return _Stack(positions, slots).reverse(units)


def advances(positions: Mapping[int, int], units: Whole, slots: Whole) -> int:
    """How many advances `reverse(positions, units, slots)` takes; the replays are not counted.

    >>> advances({0: 0, 1: 2}, 4, 2)
    2
    """
    units, slots = _check("advances", positions, units, slots)
    starts = [*sorted(positions.values()), units]
    return sum(
        binomial.advances(starts[i + 1] - starts[i], slots - 1 - i) for i in range(len(positions))
    )


def kept(
    positions: Mapping[int, int], units: Whole, slots: Whole, *, give_up: Whole = 16
) -> dict[int, int]:
    """The checkpoints worth keeping: those of `positions` from which reversal is cheapest.

    Arguments: as for `reverse`; `give_up`, the most checkpoints to give up. The time it takes
    grows with the number of checkpoints and the square of `give_up`.
    Returns: the part of `positions` to reverse from, exactly the best that gives up so many.

    >>> kept({0: 0, 1: 10, 2: 20}, 40, 3)      # the last stretch is worth a free slot
    {0: 0, 2: 20}
    """
    units, slots = _check("kept", positions, units, slots)
    give_up = integer("reversal.kept", "give_up", give_up, 0, "0 keeps every checkpoint")
    by_age = sorted((unit, slot) for slot, unit in positions.items())
    starts = [unit for unit, _ in by_age] + [units]
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
    return {slot: unit for unit, slot in reversed(chain)}


def _check(
    function: str, positions: Mapping[int, int], units: Whole, slots: Whole
) -> tuple[int, int]:
    where = f"reversal.{function}"
    units = integer(where, "units", units, 0, COUNT_UNITS)
    slots = integer(where, "slots", slots, 1, SLOTS)
    prefix = f"loopkit.schedules.{where}: `positions` must"
    for slot, unit in positions.items():
        if not 0 <= slot < slots:
            raise ValueError(
                f"{prefix} use slots 0 to {slots - 1}, got slot {slot}; number the slots from 0, "
                "or give all of them in `slots`"
            )
        if not 0 <= unit < max(units, 1):
            raise ValueError(
                f"{prefix} hold units 0 to {units - 1}, got unit {unit} in slot {slot}; leave out "
                "a state at which nothing is reversed"
            )
    got = f"got units {sorted(positions.values())}"
    if units and 0 not in positions.values():
        raise ValueError(f"{prefix} hold unit 0, {got}; keep the initial state")
    if len(set(positions.values())) != len(positions):
        raise ValueError(f"{prefix} hold each unit once, {got}; leave out the second copy")
    return units, slots


class _Stack:
    """The checkpoints by age, youngest on top, and the free slots."""

    def __init__(self, positions: Mapping[int, int], slots: int):
        self.by_age = sorted((unit, slot) for slot, unit in positions.items())
        self.free = [slot for slot in reversed(range(slots)) if slot not in positions]

    def climb(self, unit: int, target: int) -> Iterator[Action]:
        """From the start of `unit`, live and on top of the stack, make that of `target` live."""
        while unit < target:
            stop = unit + binomial.split(target + 1 - unit, len(self.free))
            yield Advance(unit, stop)
            unit = stop
            if unit < target:
                yield self.save(unit)

    def save(self, unit: int) -> Save:
        slot = self.free.pop()
        self.by_age.append((unit, slot))
        return Save(unit, slot)

    def reverse(self, units: int) -> Iterator[Action]:
        for target in reversed(range(units)):
            unit, slot = self.by_age[-1]
            yield Restore(unit, slot)
            yield from self.climb(unit, target)
            yield Reverse(target)
            unit, slot = self.by_age[-1]
            if unit == target:
                self.by_age.pop()
                self.free.append(slot)
                yield Discard(slot)


def _gradient(units: int, stack: _Stack) -> Iterator[Action]:
    if units:
        yield stack.save(0)
        yield from stack.climb(0, units)
        yield from stack.reverse(units)


def _online_gradient(
    placement: Placement, units: int, positions: Mapping[int, int]
) -> Iterator[Action]:
    for mark in placement.marks(units):
        yield Save(mark.unit, mark.slot)
        if mark.cleared != placement.slots:
            yield Discard(mark.cleared)
        yield Advance(mark.unit, min(units, mark.unit + mark.run))
    yield from _Stack(positions, placement.slots).reverse(units)
