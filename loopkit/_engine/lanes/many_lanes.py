"""A loop of many lanes that knows the loop of one lane.

As long as a loop only gets axes, nothing is decided. Lanes of another axis join the others, and all
of them narrow together when the loop runs or is differentiated (phases.py). In any other loop that
is made of it, the lanes wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax

from loopkit import _jax
from loopkit._engine.lanes.batched_loop import Batched, batch_loop, move
from loopkit._engine.lanes.widths import asking_each, may_narrow, widths
from loopkit._engine.loop import Loop, Operands, Rewritten

COPIED_FOR_LANES = 1 << 16
"""The bytes that may be copied for lanes that share them, even if their carry has fewer bytes."""


@dataclass(frozen=True)
class OneLane:
    """A loop without lanes, of which another loop has many."""

    loop: Loop
    count: int
    """The number of lanes, which are a single axis."""
    flags: Operands
    """Which operands have lanes."""

    @property
    def many(self) -> Loop:
        """The loop of so many lanes."""
        key = ("many lanes", self.count, *map(tuple, self.flags))
        return self.loop.derived(key, lambda: LoopOfLanes.made_of(self))

    def replaced(self, loop: Loop, flags: Operands | None = None) -> Loop:
        """Return as many lanes of another loop."""
        return OneLane(loop, self.count, flags or self.flags).many


@dataclass(frozen=True, eq=False)
class LoopOfLanes(Loop):
    """A loop of lanes that wait for each other, which others may join, or which may narrow."""

    @classmethod
    def made_of(cls, lane: OneLane) -> Loop:
        return cls(**_fields(waiting_lanes(lane).loop, lane))

    def replace(self, **changes: Any) -> Loop:
        """Return a loop with other fields. Its lanes wait for each other, and none joins them."""
        return Loop(**_fields(self, None) | changes)

    def map_jaxprs(self, change: Callable[[_jax.Jaxpr], _jax.Jaxpr]) -> Loop:
        same = super().map_jaxprs(change) is self
        return self if same else self.lane.replaced(self.lane.loop.map_jaxprs(change))

    def unshown(self, backward: bool = True) -> Loop:
        return self.lane.replaced(self.lane.loop.unshown(backward)) if self.shows else self


def _fields(loop: Loop, lane: OneLane | None) -> dict:
    return {f.name: getattr(loop, f.name) for f in fields(Loop)} | {"memory": {}, "lane": lane}


def waiting_lanes(lane: OneLane) -> Batched:
    """Return the loop of many lanes that wait for each other."""
    return batch_loop(lane.loop, _jax.axis(lane.count), lane.flags, whole=True)


@dataclass(frozen=True)
class ManyLanes(Rewritten):
    """The loops of many lanes and of one. Operands are pairs of a value and its lane axis."""

    lane: OneLane
    results: list
    """The lane axis of each result."""


@dataclass(frozen=True)
class AxisPair:
    """Two axes of lanes as one, with the outer axis before the inner."""

    outer: int
    inner: int

    def joined(
        self, value: jax.Array, place: int | None, outer: int | None, inner: int | None
    ) -> Any:
        """Return a value with the merged axis at `place`, from the places of the two axes."""
        if place is None:
            return value
        # `inner` does not count the outer axis.
        value = move(value, outer, place, self.outer)
        value = move(value, None if inner is None else place + 1, place + 1, self.inner)
        return value.reshape(*value.shape[:place], -1, *value.shape[place + 2 :])

    def apart(self, value: jax.Array, place: int) -> Any:
        shape = value.shape
        return value.reshape(*shape[:place], self.outer, self.inner, *shape[place + 1 :])


def with_lanes(loop: Loop, axis: _jax.AxisData, dims: Sequence[int | None]) -> ManyLanes | None:
    """Return the loop with an axis of lanes that narrow, or may narrow later; None if they do not.

    `dims` has the place of the axis in the operands.
    """
    if (lane := loop.lane) is not None:
        if (new := join(lane, axis, dims)) is not None:
            return _joined(lane, new, AxisPair(axis.size, lane.count))
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


def _adds_lanes(loop: Loop, axis: _jax.AxisData, flags: Operands) -> bool:
    return len(batch_loop(loop, axis, flags).loop.lanes) > len(loop.lanes)


def _lanes(loop: Loop, axis: _jax.AxisData, flags: Operands) -> ManyLanes:
    lane = OneLane(loop, axis.size, flags)
    new, map_results = waiting_lanes(lane), lambda results, _=(): list(results)
    return ManyLanes(lane.many, new.map_operands, map_results, lane, new.results)


def join(lane: OneLane, axis: _jax.AxisData, dims: Sequence[int | None]) -> OneLane | None:
    """Merge two axes of lanes; return None if they do not narrow, or would copy too much.

    `dims` has the place of the outer axis in the operands of the inner lanes.
    """
    if not may_narrow(loop := lane.loop, axis):
        return None
    count, outer = axis.size * lane.count, [d is not None for d in dims]
    if not widths(loop, count) or not _adds_lanes(loop, axis, loop.split(outer)[0]):
        return None
    pairs = list(zip(lane.flags.flat, outer, strict=True))
    read = loop.split(list(zip(loop.operand_types, pairs, strict=True)))[0]._replace(init=[])
    copied = _jax.byte_count(*(t for t, (a, b) in read.flat if a != b))
    if count * copied > max(COPIED_FOR_LANES, count * _jax.byte_count(*loop.carry_types)):
        return None
    flags = loop.split([a or b for a, b in pairs])[0]
    return OneLane(loop, count, flags)


def _joined(lane: OneLane, new: OneLane, two: AxisPair) -> ManyLanes:
    old, one = waiting_lanes(lane), waiting_lanes(new)

    def map_operands(given: Sequence[tuple]) -> list:
        places = zip(given, one.axes.flat, old.axes.flat, strict=True)
        return [two.joined(v, place, d, inner) for (v, d), place, inner in places]

    def map_results(results: Sequence[Any], _: object = ()) -> list:
        return list(map(two.apart, results, one.results))

    return ManyLanes(new.many, map_operands, map_results, new, one.results)
