"""A loop of many lanes that knows what they are lanes of.

As long as a loop is only given axes, nothing is decided: lanes of another axis join those that
there are, and all of them narrow together once the loop is run or differentiated (phases.py). They
wait for each other in every other loop that is made of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loopkit import _jax
from loopkit._engine.facts.widths import asking_each, may_narrow, widths
from loopkit._engine.loop import Loop, OneLane, Operands
from loopkit._engine.passes.batched_loop import Batched, batch_loop, move
from loopkit._engine.passes.rewritten import Rewritten

SMALL = 1 << 16
"""Bytes that may be copied for lanes that share them, if their carry is not more anyway."""


def many_lanes(loop: Loop, count: int, flags: Operands) -> Loop:
    """The loop of so many lanes, where operands have them that `flags` says."""
    lane = OneLane(loop, count, Operands(*map(tuple, flags)), many_lanes)
    make = lambda: waiting_lanes(lane).loop.replace(lane=lane)
    return loop.derived(("many lanes", count, *lane.flags), make)


def waiting_lanes(lane: OneLane) -> Batched:
    """The loop of many lanes that wait for each other."""
    return batch_loop(lane.loop, _jax.axis(lane.count), lane.flags, whole=True)


@dataclass(frozen=True)
class Lanes(Rewritten):
    """Lanes, and what they are made of. Operands are pairs of a value and where it has an axis."""

    results: list
    """Where results have it."""


def with_lanes(loop: Loop, axis: Any, dims: Sequence[int | None]) -> Lanes | None:
    """The loop with an axis of lanes that narrow, or may where others join them; None if not.

    `dims`: where the axis is in the operands.
    """
    if (lane := loop.lane) is not None:
        if may_narrow(lane.loop, axis) and (found := _joined(lane, axis, dims)) is not None:
            return found
        if widths(lane.loop, lane.count):
            return None
    if not may_narrow(loop, axis):
        return None
    flags = loop.split([d is not None for d in dims])[0]
    if _adds_lanes(loop, axis, flags):
        return None if loop.lanes and not widths(loop, axis.size) else _lanes(loop, axis, flags)
    apart = asking_each(loop)
    if apart is None or not _adds_lanes(apart, axis, flags) or not widths(apart, axis.size):
        return None
    return _lanes(apart, axis, flags)


def _adds_lanes(loop: Loop, axis: Any, flags: Operands) -> bool:
    return len(batch_loop(loop, axis, flags).loop.lanes) > len(loop.lanes)


def _lanes(loop: Loop, axis: Any, flags: Operands) -> Lanes:
    new = many_lanes(loop, axis.size, flags)
    assert new.lane is not None, "it has lanes"
    waiting = waiting_lanes(new.lane)
    back = lambda results, _=(): list(results)
    return Lanes(new, waiting.into, back, waiting.results)


def _joined(lane: OneLane, axis: Any, dims: Sequence[int | None]) -> Lanes | None:
    """One set of lanes of two axes; None if they would not narrow, or have to share much."""
    loop, inner = lane.loop, lane.count
    outer, count = axis.size, axis.size * lane.count
    pairs = list(zip(lane.flags.flat, (d is not None for d in dims), strict=True))
    flags = loop.split([a or b for a, b in pairs])[0]
    if not _adds_lanes(loop, axis, loop.split([b for _, b in pairs])[0]):
        return None
    if not widths(loop, count):
        return None
    read = loop.split(list(zip(loop.operand_types, pairs, strict=True)))[0]._replace(init=[])
    copied = _jax.byte_count(*(t for t, (a, b) in read.flat if a != b))
    if count * copied > max(SMALL, count * _jax.byte_count(*loop.carry_types)):
        return None
    joined = many_lanes(loop, count, flags)
    assert joined.lane is not None, "it has lanes"
    old, new = waiting_lanes(lane), waiting_lanes(joined.lane)

    def into(given: Sequence[tuple]) -> list:
        places = zip(given, old.axes.flat, new.axes.flat, strict=True)
        return [_together(v, d, a, g, outer, inner) for (v, d), a, g in places]

    def back(results: Sequence[Any], _: Any = ()) -> list:
        apart = lambda v, p: v.reshape(*v.shape[:p], outer, inner, *v.shape[p + 1 :])
        return [apart(v, p) for v, p in zip(results, new.results, strict=True)]

    return Lanes(joined, into, back, new.results)


def _together(
    value: Any, outer: int | None, inner: int | None, place: int | None, *sizes: int
) -> Any:
    """Both axes as one at `place`. `inner` is where the other is in what has no outer one."""
    if place is None:
        return value
    value = move(value, outer, place, sizes[0])
    value = move(value, None if inner is None else place + 1, place + 1, sizes[1])
    return value.reshape(*value.shape[:place], math.prod(sizes), *value.shape[place + 2 :])
