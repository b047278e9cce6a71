"""A loop of many lanes that knows the loop of one lane, and the widths to which it narrows.

A stopped lane costs as much time as an active one. So a loop of many lanes runs in phases, each
with fewer lanes than the one before (phases.py).

Nothing is decided while vmap adds axes: the lanes of each further axis join the others. All of them
narrow together when the loop runs or is differentiated (phases.py). If the loop is rewritten in any
other way, its lanes wait for each other.
"""

from __future__ import annotations

import functools as ft
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from loopkit import _jax
from loopkit._engine.lanes.batched_loop import Batched, batch_loop, waiting
from loopkit._engine.lanes.going_together import (
    asking_each,
    reads_other_lanes,
    shared_results,
)
from loopkit._engine.loop import Loop, Operands, Rewritten
from loopkit._jaxprs import equations
from loopkit._jaxprs.cost import nanoseconds
from loopkit._plans.budget import Bytes

LEAST = 8
"""The number of lanes below which a loop gets no faster."""
LAST = 12
"""The most lanes in the last phase."""
SHRINK = 4.5
"""The largest factor by which phases narrow, as the geometric mean of all. Each is compiled
separately."""
LATER = 1.2
"""The exponent that shapes the widths. Early phases narrow less, because many lanes stop then."""
WORTH_NARROWING = 64
"""The fewest lanes that narrow by default."""
ENOUGH = 1e4
"""The fewest nanoseconds of a step of all lanes with which phases gain more than they cost."""
STEPS, RUNS = 1000, 1000
"""The assumed steps of a loop, if its bound is not lower, and the runs of a compiled loop."""
COMPILE_NANOSECONDS = 3e8, 5e6
"""The nanoseconds to compile a phase and its gradient, and those for each equation of a step."""


def widths(loop: Loop, count: int) -> tuple[int, ...]:
    """Return the widths to which a loop of `count` lanes narrows; none if its lanes wait.

    The widths depend on the loop of one lane, so that all its derivatives agree. Widths from the
    user may exceed the number of lanes, in case others join.
    """
    asked = loop.lane_policy
    if asked == "wait":
        return ()
    if asked is None or asked == "flatten":
        return () if why_waiting(loop, count) else _narrower(count)
    if isinstance(asked, tuple):
        return asked[asked[0] == count :]
    return _narrower(count)


def may_narrow(loop: Loop, axis: _jax.AxisData) -> bool:
    """Return whether a loop with this axis of lanes narrows, or may once others join."""
    if loop.lane_policy == "wait" or waiting.value or not _apart(loop, axis):
        return False
    if loop.reads_lanes or reads_other_lanes(loop):
        return False
    return loop.lane_policy not in (None, "flatten") or not why_never(loop)


def _narrower(size: int) -> tuple[int, ...]:
    """Return widths that shrink by about the same factor in each phase."""
    if size <= LEAST:
        return ()
    last = min(LAST, max(LEAST, size // 2))
    count = max(1, math.ceil(math.log(size / last, SHRINK)))
    shares = [(last / size) ** ((k / count) ** LATER) for k in range(1, count)]
    return (*(4 * round(size * share / 4) for share in shares), last)


def why_waiting(loop: Loop, count: int) -> str:
    """Return why `count` lanes wait by default, or an empty string if they narrow.

    Phases have to save more time than they take to compile.
    """
    if (why := why_never(loop)) or count < WORTH_NARROWING:
        return why or f"are fewer than {WORTH_NARROWING}"
    step = count * loop.derived("nanoseconds", lambda: nanoseconds(loop.body))
    if step < ENOUGH:
        return f"take a step in {step / 1e3:.1f} microseconds, of {ENOUGH / 1e3:.0f} or more"
    steps = STEPS if loop.length is None else min(loop.length, STEPS)
    equation_count = sum(1 for _ in equations.all_equations(loop.body))
    a_phase = COMPILE_NANOSECONDS[0] + COMPILE_NANOSECONDS[1] * equation_count
    gains = RUNS * steps * step / 2 >= len(_narrower(count)) * a_phase
    return "" if gains else "would gain less than phases take to compile"


def why_never(loop: Loop) -> str:
    """Return why lanes wait by default, however many there are; empty if they may narrow.

    Tracing does not show whether lanes are spread over devices. On a GPU, few lanes take almost as
    long as many. Memory that is enough for one loop may not be enough for several.
    """
    reasons = {
        "have steps that call the host": bool(loop.effects),
        "are given `memory`, for one loop": isinstance(loop.checkpoints, Bytes),
        "are not run by a CPU": jax.default_backend() != "cpu",
        "may be spread over devices": jax.device_count() > 1,
    }
    return next((why for why, holds in reasons.items() if holds), "")


def _apart(loop: Loop, axis: _jax.AxisData) -> bool:
    """Return whether lanes can be gathered: a known number, on one device, not communicating."""
    spread = axis.spmd_name or axis.explicit_mesh_axis
    speak = axis.name in loop.axis_names
    # If the predicate tests more than a flag, the flag does not say which lanes write to buffers.
    masked = loop.flag is None or not loop.cond_const_count
    return isinstance(axis.size, int) and masked and not spread and not speak


COPIED_FOR_LANES = 1 << 16
"""The bytes that may be copied when lanes join, even if all carries together have fewer bytes."""


@dataclass(frozen=True)
class OneLane:
    """The loop of one lane, of which another loop has many along one axis."""

    loop: Loop
    count: int
    """The number of lanes along the axis."""
    flags: Operands
    """Which operands have the axis."""
    shared: tuple[tuple[int, int], ...] = ()
    """Results that are the same in all lanes: the number of a carry leaf, and what a step adds."""

    @property
    def many(self) -> Loop:
        """The loop of all lanes."""
        key = ("many lanes", self.count, waiting.value, *map(tuple, self.flags))
        make = lambda: LoopOfLanes(**_fields(waiting_lanes(self).loop, self))
        return self.loop.derived(key, make)

    def replaced(self, loop: Loop, flags: Operands | None = None) -> Loop:
        """Return the loop of as many lanes of another loop."""
        return replace(self, loop=loop, flags=flags or self.flags).many

    def in_common(self, results: Sequence[Any], axes: Sequence[int]) -> list:
        """Return the results, with those that are shared taken from the lane that ran longest."""
        found = list(results)
        for i, by in self.shared:
            first = ft.partial(lax.index_in_dim, index=0, keepdims=False)
            last = jnp.max if by > 0 else jnp.min if by else first
            found[i] = last(found[i], axis=axes[i])
        return found

    def unshared(self, axes: Sequence[int]) -> list[int | None]:
        """Return the axes, None for a result that is shared."""
        shared = dict(self.shared)
        return [None if i in shared else axis for i, axis in enumerate(axes)]


@dataclass(frozen=True, eq=False)
class LoopOfLanes(Loop):
    """A loop of lanes that wait for each other; others may join them, and they may narrow."""

    def replace(self, **changes: Any) -> Loop:
        """Return a loop with other fields, whose lanes wait for each other and cannot be joined."""
        return Loop(**_fields(self, None) | changes)

    def map_jaxprs(self, change: Callable[[_jax.Jaxpr], _jax.Jaxpr]) -> Loop:
        same = super().map_jaxprs(change) is self
        return self if same else self.lane.replaced(self.lane.loop.map_jaxprs(change))

    def unshown(self, backward: bool = True) -> Loop:
        return self.lane.replaced(self.lane.loop.unshown(backward)) if self.shows else self


def _fields(loop: Loop, lane: OneLane | None) -> dict:
    """Return the fields of a loop, with nothing cached."""
    kept = {f.name: getattr(loop, f.name) for f in fields(Loop)}
    return kept | {"memory": {}, "step_memory": {}, "lane": lane}


def waiting_lanes(lane: OneLane) -> Batched:
    """Return the loop of many lanes that wait for each other."""
    return batch_loop(lane.loop, _jax.axis(lane.count), lane.flags, whole=True)


@dataclass(frozen=True)
class ManyLanes(Rewritten):
    """The loops of many lanes and of one. `map_operands` takes pairs: a value and its lane axis."""

    lane: OneLane
    results: list
    """The lane axis of each result; None if all lanes have the same."""


@dataclass(frozen=True)
class AxisPair:
    """Two lane axes merged into one, the outer axis first."""

    outer: int
    inner: int

    def joined(
        self, value: jax.Array, place: int | None, outer: int | None, inner: int | None
    ) -> Any:
        """Merge the axes at `outer` and `inner` of a value into one at `place`."""
        if place is None:
            return value
        # `inner` does not count the outer axis.
        value = _jax.move(value, outer, place, self.outer)
        value = _jax.move(value, None if inner is None else place + 1, place + 1, self.inner)
        return value.reshape(*value.shape[:place], -1, *value.shape[place + 2 :])

    def apart(self, value: jax.Array, place: int) -> Any:
        shape = value.shape
        return value.reshape(*shape[:place], self.outer, self.inner, *shape[place + 1 :])


def with_lanes(loop: Loop, axis: _jax.AxisData, dims: Sequence[int | None]) -> ManyLanes | None:
    """Return the loop with an axis of lanes that narrow, or may narrow later; None if they do not.

    `dims` has the position of the axis in each operand.
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
    if apart is None or not widths(apart, axis.size) or not _stops_apart(apart, axis, flags):
        return None
    shared = shared_results(loop, batch_loop(loop, axis, flags).results)
    return None if shared is None else _lanes(apart, axis, flags, shared)


def _stops_apart(loop: Loop, axis: _jax.AxisData, flags: Operands) -> bool:
    """Return whether each lane may stop by itself.

    In some loops of equinox the number of steps must be the same in all lanes. Such a loop raises
    an error if it gets an axis.
    """
    with suppress(ValueError):
        return _adds_lanes(loop, axis, flags)
    return False


def _adds_lanes(loop: Loop, axis: _jax.AxisData, flags: Operands) -> bool:
    return len(batch_loop(loop, axis, flags).loop.lanes) > len(loop.lanes)


def _lanes(
    loop: Loop, axis: _jax.AxisData, flags: Operands, shared: tuple[tuple[int, int], ...] = ()
) -> ManyLanes:
    lane = OneLane(loop, axis.size, flags, shared)
    new = waiting_lanes(lane)
    map_results = lambda results, _=(): lane.in_common(results, new.results)
    return ManyLanes(lane.many, new.map_operands, map_results, lane, lane.unshared(new.results))


def join(lane: OneLane, axis: _jax.AxisData, dims: Sequence[int | None]) -> OneLane | None:
    """Merge two axes of lanes; return None if they do not narrow, or would copy too much.

    `dims` has the position of the outer axis in each operand of the inner lanes.
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
    return replace(lane, count=count, flags=flags)


def _joined(lane: OneLane, new: OneLane, two: AxisPair) -> ManyLanes:
    old, one = waiting_lanes(lane), waiting_lanes(new)

    def map_operands(given: Sequence[tuple]) -> list:
        places = zip(given, one.axes.flat, old.axes.flat, strict=True)
        return [two.joined(v, place, d, inner) for (v, d), place, inner in places]

    def map_results(results: Sequence[Any], _: object = ()) -> list:
        found = lane.in_common(results, one.results)
        for i, place in enumerate(new.unshared(one.results)):
            if place is None:  # each inner lane has what all lanes share
                found[i] = jnp.stack([found[i]] * two.inner, axis=old.results[i])
            else:
                found[i] = two.apart(found[i], place)
        return found

    return ManyLanes(new.many, map_operands, map_results, new, new.unshared(one.results))
