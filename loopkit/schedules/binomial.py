"""The offline optimum: reversing a known number of segments with a fixed number of slots.

Time is counted in *segments* of steps, and states are kept in *slots*. Slots are counted in two
ways:

- `slots` counts every stored state, including the one at the start;
- `free` counts the slots besides that of the start, so `slots = free + 1` for a single stretch.

Only *advances* are counted: evaluations of a segment that carry a state forward. Reversing a
segment replays it once more from its stored start while residuals are recorded; that replay happens
once per segment under every schedule and is not counted.

Everything follows from one function, `reach(s, r) = binomial(s + r, s)`: the most segments that `s`
slots reverse when no segment is advanced over more than `r` times. The optimum is convex and
piecewise linear in the length, its slope growing by one at each `reach(s, r)`. With s = free + 1,

    advances(l, free) = sum over r >= 1 of max(0, l - reach(s, r - 1))
    split(l, free)    = sum over r >= 1 of min(max(0, l - start(r)), reach(s - 1, r - 1))
    start(1) = 1,   start(r) = reach(s, r - 2) + reach(s - 1, r)

The last two lines have no branch and no search, so a traced loop evaluates them on one row of a
small table:

```python
import jax
import jax.numpy as jnp
from loopkit.schedules.binomial import SplitTable, split, split_from, split_table

table = SplitTable(*(jnp.asarray(t, jnp.int32) for t in split_table(segments=1000, free=7)))
traced = jax.jit(lambda segments, free: split_from(table, segments, free, jnp))
print(traced(1000, 7), split(1000, 7))  # 208 208
```

Source: Griewank & Walther 2000, "Algorithm 799: revolve", ACM Transactions on Mathematical
Software 26(1); Grimm, Pottier & Rostaing-Schmidt 1996, "Optimal time and minimum space-time
product for reversing a certain class of programs".
"""

from __future__ import annotations

from bisect import bisect_left
from math import comb
from typing import Any, NamedTuple

from loopkit.schedules._checks import COUNT_SEGMENTS, SLOTS, Whole, integer

LARGEST_COUNT = 2**31 - 1
"""Entries of a table saturate here, so that int32 holds them."""

_FREE_SLOT = "count the slots beside the one that holds the start"


def reach(slots: Whole, repetitions: Whole) -> int:
    """Return the most segments that `slots` slots reverse with at most `repetitions` advances over
    each.

    >>> reach(3, 2)
    10
    """
    where = "binomial.reach"
    slots = integer(where, "slots", slots, 0, SLOTS)
    repetitions = integer(where, "repetitions", repetitions, 0, "count advances over one segment")
    return comb(slots + repetitions, slots)


def repetition_number(segments: Whole, slots: Whole) -> int:
    """Return the smallest r with `reach(slots, r) >= segments`.

    An optimal reversal advances over no segment more than r times.

    >>> repetition_number(10, 3), repetition_number(11, 3)
    (2, 3)
    """
    segments = integer("binomial.repetition_number", "segments", segments, 0, COUNT_SEGMENTS)
    slots = integer("binomial.repetition_number", "slots", slots, 1, SLOTS)
    reached = lambda repetitions: comb(slots + repetitions, slots)
    enough = 1
    while reached(enough) < segments:
        enough *= 2
    return bisect_left(range(enough), segments, key=reached)


def advances(segments: Whole, free: Whole) -> int:
    """Return the fewest advances that reverse `segments` segments from a stored start with `free`
    more slots.

    Arguments: `segments` >= 0; `free` >= 0, the slots besides the start's.
    Returns: segment evaluations, without the `segments` replays. With r the repetition number and
    s = free + 1 it is r * segments - binomial(s + r, r - 1); without a free slot that is
    segments * (segments - 1) / 2.

    >>> advances(10, 2), advances(5, 0)
    (15, 10)
    """
    segments = integer("binomial.advances", "segments", segments, 0, COUNT_SEGMENTS)
    free = integer("binomial.advances", "free", free, 0, _FREE_SLOT)
    repetitions = repetition_number(segments, free + 1)
    if repetitions == 0:
        return 0
    return repetitions * segments - comb(free + 1 + repetitions, repetitions - 1)


def evaluations(segments: Whole, slots: Whole) -> int:
    """Return the fewest evaluations of a forward sweep and its reversal with `slots` slots, without
    replays.

    The forward sweep returns the state after the last segment, and only stored states survive it.
    Reaching that state counts as one more segment: this is the reversal of `segments + 1` segments
    from a stored start, whose first `segments` advances are the forward sweep. With replays, a
    gradient evaluates segments `evaluations + segments` times in all.

    >>> evaluations(3, 3), evaluations(200, 8)      # three slots hold three states: no repetition
    (3, 584)
    """
    segments = integer("binomial.evaluations", "segments", segments, 0, COUNT_SEGMENTS)
    slots = integer("binomial.evaluations", "slots", slots, 1, SLOTS)
    return advances(segments + 1, slots - 1)


def split(segments: Whole, free: Whole) -> int:
    """Return how many segments to advance from a stored start before saving: the optimal split.

    Arguments: `segments` >= 2, the length of the stretch from the stored start to the end of the
    segment reversed next; in a forward sweep to a known end, one more than is left (see
    `evaluations`). `free` >= 0, the slots besides the start's.
    Returns: m with advances(segments, free) == m + advances(segments - m, free - 1) + advances(m,
    free). With no free slot it is `segments - 1`, the start of the last segment, reached without
    saving. It is the smallest of the optimal splits, which saves fewer states than the largest.

    >>> split(10, 2), split(5, 0)
    (4, 4)
    """
    where = "binomial.split"
    segments = integer(where, "segments", segments, 2, "replay a stretch of one segment as it is")
    free = integer(where, "free", free, 0, _FREE_SLOT)
    s = free + 1
    r = repetition_number(segments, s)
    return max(1 if r == 1 else comb(s + r - 2, s), segments - comb(s - 1 + r, r))


class SplitTable(NamedTuple):
    """The table that `split_from` reads: a row for each number of free slots, in any array type.

    starts: [free + 1, columns], start(r) of the module's formula in column r - 1.
    widths: [free + 1, columns], reach(f, r - 1). The last column is unbounded, so that stretches
        longer than the table was made for still get a split.
    """

    starts: Any
    widths: Any


def split_table(segments: Whole, free: Whole, *, columns: Whole = 256) -> SplitTable:
    """Return the table with which `split_from` splits up to `segments` segments with up to `free`
    free slots.

    Arguments: `columns`, the most columns to make. Up to reach(f + 1, columns) segments with f free
    slots the split is optimal; beyond, where some segment would be advanced over more than
    `columns` times, it is valid but costs a little more. Row 0 is exact at every length, and 256
    columns are exact up to 33,153 segments for f = 1 and 2.8 million for f = 2.
    Returns: a SplitTable of tuples of Python ints, none above 2**31 - 1.
    """
    where = "binomial.split_table"
    segments = integer(where, "segments", segments, 1, COUNT_SEGMENTS)
    free = integer(where, "free", free, 0, _FREE_SLOT)
    columns = integer(where, "columns", columns, 1, "pass 256, say")
    needed = (
        1 if free == 0 else repetition_number(segments, 2)
    )  # row 0 is linear, so one column is enough
    columns = max(1, min(columns, needed))
    rows = []
    for s in range(1, free + 2):
        start = [1] + [comb(s + r - 2, s) + comb(s - 1 + r, r) for r in range(2, columns + 1)]
        width = [comb(s - 1 + r - 1, r - 1) for r in range(1, columns)] + [LARGEST_COUNT]
        rows.append([tuple(min(LARGEST_COUNT, entry) for entry in row) for row in (start, width)])
    return SplitTable(*zip(*rows, strict=True))


def split_from(table: SplitTable, segments: Any, free: Any, xp: Any) -> Any:
    """Compute `split(segments, free)` with any array library: one row of the table, no branch.

    Arguments: `table`, a SplitTable of arrays of `xp`; `segments` and `free`, integers or arrays of
    one shape, traced or not; `xp`, numpy or jax.numpy. Lanes may differ.
    Returns: as `split` for segments >= 2, of the type of `segments`. For segments <= 1 it is 0, so
    a loop may evaluate it once too often.
    """
    segments = xp.asarray(segments)
    beyond = xp.expand_dims(segments, -1) - table.starts[free]
    pieces = xp.minimum(xp.maximum(beyond, 0), table.widths[free])
    return xp.sum(pieces, axis=-1, dtype=segments.dtype)
