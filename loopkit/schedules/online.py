"""Place checkpoints while a loop of unknown length runs.

A placement is a fixed program: which state to save at which segment into which slot, whatever the
loop computes. So it is made ahead of time, with Python integers, and a running loop only reads a
table:

```python
from loopkit.schedules.online import cheapest

program = cheapest(slots=8, segments=100_000)
print(program.marks(3)[-1])  # Mark(count=2, segment=2, slot=2, cleared=8, run=1)
print(program.positions(1000))  # {0: 0, 3: 271, 4: 554, 5: 761, 6: 895, 2: 952, 7: 973}
```

A mark is acted on only if the loop goes on, so nothing is dropped for a state at which the loop
has ended. The stretch that begins at the k-th stored state is reversed with `slots - 1 - k` free
slots.

There are two placements: `thinning` doubles the spacing whenever the slots are full, and saves
seldom; `cheapest` drops the checkpoint whose loss costs least. Below reach(slots, 2) segments, with
up to 50 slots, `cheapest` is optimal, like algorithm I of Stumm & Walther. Below reach(slots, 3),
the range of algorithm II, it is within 5 % of the optimum. Beyond, where Wang, Moin & Iaccarino
bound the repetitions, it stays near the optimum: docs/schedules.md has the figures.

Source: Stumm & Walther 2010, "New algorithms for optimal online checkpointing", SIAM Journal on
Scientific Computing 32(2); Wang, Moin & Iaccarino 2009, "Minimal repetition dynamic checkpointing
algorithm for unsteady adjoint calculation", SIAM Journal on Scientific Computing 31(4).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from loopkit.schedules._cheapest import Entry, cheapest_saves
from loopkit.schedules._checks import SLOTS, Whole, integer

NEVER = 2**31 - 1
"""The segment recorded for a slot that holds nothing; no loop counted in int32 runs as long."""

_BOUND = "give a bound on the segments the loop can run, or leave it out for 2**31 - 1"


class Table(NamedTuple):
    """The columns of a placement, one entry per save: tuples of ints, or arrays of any library.

    segment: the segment whose start is saved. The last two entries, never acted on, are the bound.
    slot: the slot it is saved into.
    cleared: another slot that is empty from then on, or `slots` if there is none.
    """

    segment: Any
    slot: Any
    cleared: Any


class Mark(NamedTuple):
    """At the start of `segment` save into `slot`, forget `cleared`, then run `run` segments.

    count: how many saves came before, which is the index into the table.
    segment, slot, cleared: the table's entries.
    run: segments until the next mark.
    """

    count: Any
    segment: Any
    slot: Any
    cleared: Any
    run: Any


def record(positions: Any, mark: Mark, xp: Any) -> Any:
    """Return the segment that each slot holds after `mark`.

    Arguments: `positions`, [slots] integers of the library `xp` (numpy or jax.numpy), NEVER if
    a slot is empty.
    Returns: an array like `positions`.
    """
    slots = xp.arange(positions.shape[-1], dtype=positions.dtype)
    positions = xp.where(slots == mark.cleared, NEVER, positions)
    return xp.where(slots == mark.slot, mark.segment, positions)


@dataclass(frozen=True)
class Placement:
    """A program of saves for a loop of unknown length of at most `segments` segments.

    slots: the number of slots, including the initial state's.
    segments: the bound it was made for.
    table: its saves, in order of time.
    """

    slots: int
    segments: int
    table: Table

    def __repr__(self) -> str:
        saves = len(self.table.segment) - 2
        return f"Placement(slots={self.slots}, segments={self.segments}, saves={saves})"

    def marks(self, segments: Whole) -> list[Mark]:
        """Return the saves that a loop of `segments` segments performs."""
        segments = self._within("marks", segments)
        segment, slot, cleared = self.table
        return [
            Mark(k, segment[k], slot[k], cleared[k], segment[k + 1] - segment[k])
            for k in range(bisect_left(segment, segments))
        ]

    def positions(self, segments: Whole) -> dict[int, int]:
        """Return the segment that each slot in use holds after a loop of `segments` segments.

        >>> thinning(4).positions(11)
        {0: 0, 1: 4, 3: 6, 2: 8}
        """
        held: dict[int, int] = {}
        for mark in self.marks(self._within("positions", segments)):
            held.pop(mark.cleared, None)
            held.pop(mark.slot, None)
            held[mark.slot] = mark.segment
        return held

    def _within(self, method: str, segments: Whole) -> int:
        where = f"online.Placement.{method}"
        segments = integer(where, "segments", segments, 0, "count the segments that the loop ran")
        if segments > self.segments:
            raise ValueError(
                f"loopkit.schedules.{where}: `segments` must be <= {self.segments}, the bound of "
                f"this placement. Make a placement for more segments. Got: {segments}."
            )
        return segments


def _placement(slots: int, segments: int, saves: Sequence[Entry]) -> Placement:
    bound = Entry(max(1, segments), slots, slots)
    segment, slot, cleared = zip(*saves, bound, bound, strict=True)
    return Placement(slots, segments, Table(segment, slot, cleared))


@lru_cache(maxsize=256)
def thinning(slots: Whole, segments: Whole = NEVER, *, spare: Whole = 0) -> Placement:
    """Save at an even spacing; when the slots are full, double it and overwrite what is between.

    Arguments: `slots` >= 1, including the initial state's; `segments`, a bound on the loop's
    length; `spare`, below `slots`, how many of them are left free for the reversal.
    Returns: a Placement. It saves slots / 2 states for each doubling of the length, the fewest of
    the placements here. The stretches are even, but the last is reversed with `spare` free slots,
    so without a spare slot it costs the square of a stretch. With sqrt(slots) spare slots, loops
    of up to 100 segments per slot stay within 1.25 of the optimum. With none, every state of a
    loop of up to `slots` segments is held.

    >>> [(mark.segment, mark.slot) for mark in thinning(4).marks(11)]
    [(0, 0), (1, 1), (2, 2), (3, 3), (4, 1), (6, 3), (8, 2)]
    """
    slots = integer("online.thinning", "slots", slots, 1, SLOTS)
    segments = integer("online.thinning", "segments", segments, 0, _BOUND)
    spare = integer("online.thinning", "spare", spare, 0, "pass 0 to fill all slots")
    if spare >= slots:
        raise ValueError(
            f"loopkit.schedules.online.thinning: `spare` must be < `slots`, which is {slots}. "
            f"Leave a slot for the initial state. Got: {spare}."
        )
    saves = [Entry(0, 0, slots)]
    held = {0: 0}  # segment -> slot
    between: list[int] = []  # held segments that are not on the spacing, oldest first
    segment = spacing = 1
    while segment < segments:
        slot = len(held)
        if slot == slots - spare:
            if not between:
                spacing *= 2
                between = [other for other in sorted(held) if other % spacing]
                segment = -(-segment // spacing) * spacing
                continue
            slot = held.pop(between.pop(0))
        held[segment] = slot
        saves.append(Entry(segment, slot, slots))
        segment += spacing
    return _placement(slots, segments, saves)


@lru_cache(maxsize=256)
def cheapest(slots: Whole, segments: Whole = NEVER) -> Placement:
    """Save as soon as dropping the checkpoint that is missed least beats running on.

    Arguments: `slots` >= 1, including the initial state's; `segments`, a bound on the loop's
    length.
    Returns: a Placement. Each choice is the best one for a loop that ends one segment later and is
    reversed optimally from the stored states. It saves about one state per segment up to twice the
    slots, then fewer and fewer.

    >>> cheapest(4, 400)
    Placement(slots=4, segments=400, saves=58)
    """
    slots = integer("online.cheapest", "slots", slots, 1, SLOTS)
    segments = integer("online.cheapest", "segments", segments, 0, _BOUND)
    return _placement(slots, segments, cheapest_saves(slots, segments))
