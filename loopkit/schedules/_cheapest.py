"""The choices of `online.cheapest`: which checkpoint to drop, and when.

Suppose that a loop leaves checkpoints at p[0] = 0 < p[1] < ... < p[k] and runs to n. Reversing it
from them costs, with p[k + 1] = n,

    sum over i of advances(p[i + 1] - p[i], slots - 1 - i)

since the stretch that begins at the i-th checkpoint is reversed when all later ones are gone.
Dropping p[j] merges two stretches and gives every later one another free slot. At each segment
there are two choices: run on, so that the last stretch grows; or drop the p[j] whose loss costs
least, and save here. The placement makes the choice that is cheaper for a loop that ends one
segment later; in a tie, it saves. Between two saves only the last stretch grows, and the gain from
saving grows with it, so bisection finds the next save.

Long loops would save too often: the last stretch has no free slot, and its cost is quadratic. If
saves are closer than segments / (RARE * slots), beyond RICH * slots segments, the placement gives
up a checkpoint that is hardly missed, and leaves its slot free for the reversal of the last
stretch. There are then about slots * log(segments) saves, so that the table for 2**31 segments
stays small.
"""

from __future__ import annotations

from bisect import bisect_left
from math import isqrt
from typing import Any, NamedTuple

import numpy as np

RICH = 100
"""Up to this many segments per slot, every slot holds a checkpoint."""

RARE = 16
"""In longer loops, saves closer than segments / (RARE * slots) are too frequent."""

DEAR = 50
"""A checkpoint is given up only if that costs less than 1 / DEAR of all advances."""


class Entry(NamedTuple):
    """A save into `slot` at the start of `segment`; `cleared` is emptied (`slots`: none is)."""

    segment: int
    slot: int
    cleared: int


class Prices:
    """`binomial.advances` for arrays; `of` is for a pair of integers.

    For each number of free slots the optimum is piecewise linear in the length, and its slope is
    the number of breakpoints below. The breakpoints for all numbers of free slots lie in one sorted
    array, `stride` apart, with their partial sums.
    """

    def __init__(self, free: int, segments: int):
        """Prepare for up to `segments` segments and up to `free` free slots."""
        self._stride = segments + 2
        first, points, sums = [], [], []
        for slots in range(1, free + 2):
            first.append(len(points))
            repetitions, point, total = 0, 1, 0
            while point <= segments and slots > 1:  # without a free slot the formula is used
                points.append((slots - 1) * self._stride + point)
                sums.append(total)
                total += point
                repetitions += 1
                point = point * (slots + repetitions) // repetitions
            points.append(slots * self._stride - 1)
            sums.append(total)
        self._lists = first, points, sums
        self._first, self._points, self._sums = (
            np.array(column, np.int64) for column in self._lists
        )

    def __call__(self, segments: Any, free: Any) -> Any:
        """Return the advances for each pair of `segments` and `free`, arrays or integers."""
        at = np.searchsorted(self._points, free * self._stride + segments)
        linear = segments * (at - self._first[free]) - self._sums[at]
        return np.where(free == 0, segments * (segments - 1) // 2, linear)

    def of(self, segments: int, free: int) -> int:
        """Return the advances for two integers, in a tenth of the time."""
        if free == 0:
            return segments * (segments - 1) // 2
        first, points, sums = self._lists
        at = bisect_left(points, free * self._stride + segments)
        return segments * (at - first[free]) - sums[at]


def cheapest_saves(slots: int, segments: int) -> list[Entry]:
    """Return every save of a loop of up to `segments` segments, in order of time."""
    saves = [Entry(0, 0, slots)]
    if slots == 1:
        return saves
    saves += [Entry(segment, segment, slots) for segment in range(1, min(slots, segments))]
    if segments <= slots:
        return saves
    price = Prices(slots, segments + 1)
    held = list(range(slots))  # segments, oldest first
    slot_of = {segment: segment for segment in range(slots)}
    while True:
        loss = _Loss(price, held, slots)
        last = held[-1]
        due = loss.due(segments - last)
        segment = last + max(due, _least_distance(last, len(held)))
        if segment >= segments:
            return saves
        frequent = last > RICH * slots and due * RARE * slots < last
        spare = loss.inner > 0 and loss.inner_loss * DEAR < last + loss.kept
        if frequent and spare and saves[-1].cleared == slots:
            saves[-1] = saves[-1]._replace(cleared=slot_of.pop(held.pop(loss.inner)))
            continue
        slot = slot_of.pop(held.pop(loss.cheapest(segment - last)))
        slot_of[segment] = slot
        held.append(segment)
        saves.append(Entry(segment, slot, slots))


def _least_distance(segment: int, held: int) -> int:
    """Return the least distance between saves with which the last stretch costs at most about 1 %.

    A last stretch of g segments costs at most g**2 / 2. The whole costs at least `segment`. With
    two states held, where only this distance makes saves rarer, it costs about segment**1.5.
    """
    if held == 2:
        return max(1, isqrt(segment * isqrt(segment)) // 8)
    return max(1, isqrt(segment) // 8 - 3)


class _Loss:
    """The cost of dropping a checkpoint, as a function of the length of the last stretch.

    inner: the checkpoint that is cheapest to drop, without the first and the last; 0 if none is.
    inner_loss: what dropping it costs, without the gain of a free slot for the last stretch.
    kept: what reversing all but the last stretch costs if no checkpoint is dropped.
    """

    def __init__(self, price: Prices, held: list[int], slots: int):
        count = len(held) - 1
        free = slots - 1 - np.arange(count)
        lengths = np.diff(held)
        # as they are; with one more free slot; two merged
        of = np.concatenate([lengths, lengths, lengths[:-1] + lengths[1:]])
        prices = price(of, np.concatenate([free, free + 1, free[:-1]]))
        kept, freer, both = prices[:count], prices[count : 2 * count], prices[2 * count :]
        self._price = price.of
        self._free = slots - 1 - count
        self._before = int(lengths[-1])
        self._kept_before = int(kept[-1])
        self.kept = int(kept.sum())
        self.inner, self.inner_loss = 0, 0
        if count > 1:
            # dropping j merges stretches j - 1 and j; those after j gain a free slot
            merged = both - kept[:-1] - kept[1:]
            gained = (kept - freer)[::-1].cumsum()[::-1]
            losses = merged
            losses[:-1] -= gained[2:]
            self.inner = 1 + int(losses.argmin())
            self.inner_loss = int(losses[self.inner - 1])

    def _drop_inner(self, length: int) -> int:
        return self.inner_loss + self._price(length, self._free + 1)

    def _drop_last(self, length: int) -> int:
        return self._price(self._before + length, self._free + 1) - self._kept_before

    def _saves(self, length: int) -> bool:
        """Return whether saving costs no more than running on, with a last stretch this long."""
        run_on = self._price(length + 1, self._free)
        return self._drop_last(length) <= run_on or (
            self.inner > 0 and self._drop_inner(length) <= run_on
        )

    def due(self, most: int) -> int:
        """Return the least length at which saving costs no more than running on, or `most`."""
        enough = 1
        while enough < most and not self._saves(enough):
            enough *= 2
        lengths = range(min(enough, most))
        return bisect_left(lengths, True, lo=enough // 2 + 1, key=self._saves)

    def cheapest(self, length: int) -> int:
        """Return the index of the checkpoint to drop after a last stretch of `length` segments."""
        if not self.inner or self._drop_last(length) < self._drop_inner(length):
            return -1
        return self.inner
