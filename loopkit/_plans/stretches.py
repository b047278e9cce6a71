"""Choose which code between loops runs again in a gradient, with integers instead of JAX values.

A program is a list of consecutive blocks of equations. A stretch is a group of consecutive blocks.
If a stretch is kept, what its derivative reads lives until it is reversed. If it runs again, only
what it reads lives until then, and what is worth storing at a given price; the rest is made while
the stretch is reversed. A limit on the bytes that one stretch makes determines where stretches end:
a lower limit gives more of them, and more values between them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from loopkit._plans.one_price import Moment, fastest_first, without_dominated

LIMITS = 16
"""The number of limits to try."""
PRICES = 12
"""The most finite prices per byte at which to choose whether each stretch runs again."""

Values = frozenset[Hashable]
Sizes = Mapping[Any, int]


class Row(NamedTuple):
    """A choice of what a block stores if it runs again, the best one from a price per byte on."""

    price: float
    nanoseconds: float
    """The time to make again what its derivative reads."""
    stored: Values


@dataclass(frozen=True)
class Block:
    """Consecutive equations of a program."""

    reads: Values
    """The values that it reads from earlier blocks."""
    makes: Values
    """The values that later blocks read from it."""
    kept: Values
    """The values that its derivative reads, its own and those of earlier blocks."""
    rows: tuple[Row, ...]
    """The choices of what to store if it runs again; empty if it cannot."""
    through: float
    """The time to make again what later blocks read but its derivative does not."""
    moments: tuple[Moment, ...]
    """The moments at which it runs and is reversed, without the bytes of what is kept."""
    loops: tuple[tuple[Hashable, int], ...] = ()
    """Its loops that save something, and how often each counts."""
    summed: int = 0
    """The bytes of its cotangents of arguments that later blocks also read."""

    def row(self, price: float) -> Row:
        return [row for row in self.rows if row.price <= price][-1]


class Stretch(NamedTuple):
    """The blocks from `start` up to, not including, `stop`."""

    start: int
    stop: int
    again: bool = False
    stored: Values = frozenset()
    """The values that it stores although it runs again."""
    nanoseconds: float = 0.0
    """The time to run it again."""


@dataclass(frozen=True)
class Division:
    """A program in stretches, and what its gradient needs."""

    stretches: tuple[Stretch, ...]
    moments: tuple[Moment, ...]

    @property
    def nanoseconds(self) -> float:
        """The time of what runs again."""
        return sum(stretch.nanoseconds for stretch in self.stretches)

    @property
    def bytes(self) -> int:
        """The most bytes of values that live at once, without what loops need."""
        return max(moment.values for moment in self.moments)


def divisions(blocks: Sequence[Block], sizes: Sizes) -> list[Division]:
    """Return the undivided program, then the ways to divide it, the fastest first.

    They do not depend on a budget, so what fits in one budget fits in every larger one.
    """
    made: dict[tuple[Stretch, ...], None] = {}
    for bounds in _bounds(blocks, sizes):
        pairs = list(zip(bounds, (*bounds[1:], len(blocks)), strict=True))
        for price in _prices(blocks, pairs, sizes):
            *some, last = [_at(price, blocks, *pair, sizes) for pair in pairs]
            made[(*some, Stretch(*pairs[-1]))] = None  # the last one is reversed at once
            if price == inf:
                made[(*some, last)] = None
    passing = [_total(values, sizes) for values in _passing(blocks)]
    make = lambda stretches: Division(stretches, _moments(stretches, blocks, sizes, passing))
    whole = make((Stretch(0, len(blocks)),))
    return [whole, *fastest_first(map(make, made), lambda division: division.bytes)]


def _total(values: Iterable[Hashable], sizes: Sizes) -> int:
    return sum(sizes.get(v, 0) for v in values)


def _union(values: Iterable[Values]) -> Values:
    return frozenset().union(*values)


def _bounds(blocks: Sequence[Block], sizes: Sizes) -> Iterator[list[int]]:
    """Yield where stretches start, for one limit after another."""
    made = [_total(b.kept - b.reads, sizes) for b in blocks]
    crossing = [
        _total(past | block.reads, sizes)
        for block, past in zip(blocks, _passing(blocks), strict=True)
    ]
    most, least = max(1, sum(made)), max(1, *made)
    for k in range(LIMITS):
        limit = most * (least / most) ** (k / (LIMITS - 1))
        yield _cheapest_bounds(blocks, made, crossing, max(limit, least))


def _cheapest_bounds(
    blocks: Sequence[Block], made: Sequence[int], crossing: Sequence[int], limit: float
) -> list[int]:
    """Return where stretches start so that the fewest bytes of values go from one to the next."""
    costs, starts = [0.0], [0]
    for stop in range(1, len(blocks) + 1):
        best, where, bytes_made = inf, stop - 1, 0
        for start in range(stop - 1, -1, -1):
            bytes_made += made[start]
            alone = start == stop - 1
            if not alone and (bytes_made > limit or not blocks[start].rows):
                break
            if costs[start] + crossing[start] < best:
                best, where = costs[start] + crossing[start], start
            if not blocks[start].rows:
                break
        costs.append(best)
        starts.append(where)
    bounds, stop = [], len(blocks)
    while stop:
        stop = starts[stop]
        bounds.append(stop)
    return bounds[::-1]


def _prices(blocks: Sequence[Block], pairs: Sequence[tuple[int, int]], sizes: Sizes) -> list[float]:
    """Return prices at which the choice for a stretch changes, then infinity."""
    found = {row.price for block in blocks for row in block.rows}
    for pair in pairs:
        for price in [row.price for block in blocks[slice(*pair)] for row in block.rows][-1:]:
            stretch, saved = _again(price, blocks, *pair, sizes)
            if saved > 0:
                found.add(stretch.nanoseconds / saved)
    some = sorted(found)
    if len(some) > PRICES:
        some = [some[round(k * (len(some) - 1) / (PRICES - 1))] for k in range(PRICES)]
    return [*some, inf]


def _at(price: float, blocks: Sequence[Block], start: int, stop: int, sizes: Sizes) -> Stretch:
    """Return a stretch that is kept or runs again, whichever is better at a price."""
    if not all(block.rows for block in blocks[start:stop]):
        return Stretch(start, stop)
    stretch, saved = _again(price, blocks, start, stop, sizes)
    return stretch if saved > 0 and stretch.nanoseconds < price * saved else Stretch(start, stop)


def _again(
    price: float, blocks: Sequence[Block], start: int, stop: int, sizes: Sizes
) -> tuple[Stretch, int]:
    """Return a stretch that runs again, and how many bytes that saves over keeping it."""
    some = blocks[start:stop]
    rows = [block.row(price) for block in some]
    stored = _union(row.stored for row in rows)
    time = sum(row.nanoseconds for row in rows) + sum(block.through for block in some[:-1])
    stretch = Stretch(start, stop, True, stored, time)
    kept = _total(_union(block.kept for block in some), sizes)
    return stretch, kept - _total(_held(stretch, blocks), sizes)


def _held(stretch: Stretch, blocks: Sequence[Block]) -> Values:
    """Return the values that live from a stretch until it is reversed."""
    some = blocks[stretch.start : stretch.stop]
    if not stretch.again:
        return _union(block.kept for block in some)
    inside = _union(block.makes for block in some)
    return stretch.stored | (_union(block.reads for block in some) - inside)


def _moments(
    stretches: Sequence[Stretch],
    blocks: Sequence[Block],
    sizes: Sizes,
    passing: Sequence[int],
) -> tuple[Moment, ...]:
    """Return what lives while each block runs and is reversed."""
    live: set[Hashable] = set()
    loops: list[tuple[Hashable, int]] = []
    found, total = [], 0
    for stretch in stretches:
        before = _held(stretch, blocks) if stretch.again else frozenset()
        total += _total(before - live, sizes)
        live |= before
        there, values = set(live), total
        # The compiler may keep all cotangents of an argument in a stretch before it sums them.
        summed = sum(block.summed for block in blocks[stretch.start : stretch.stop])
        for k in range(stretch.start, stretch.stop):
            block = blocks[k]
            values += _total(block.kept - there, sizes)
            there |= block.kept
            beside = values + passing[k] + summed
            summed -= block.summed
            for m in block.moments:
                held = (*loops, *m.held)
                found.append(Moment(m.what, beside + m.values, held, m.reversed))
            loops += block.loops
        if not stretch.again:
            live, total = there, values
    return tuple(without_dominated(found))


def _passing(blocks: Sequence[Block]) -> list[Values]:
    """Return, for each block, the values that earlier blocks make and later ones read."""
    before, made = [], frozenset[Hashable]()
    for block in blocks:
        before.append(made)
        made |= block.makes
    after, read = [], frozenset[Hashable]()
    for block in reversed(blocks):
        after.append(read)
        read |= block.reads
    return [a & b for a, b in zip(before, reversed(after), strict=True)]
