"""The keywords of loops, for their overloads. `Info` says whether they return a `LoopInfo`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Literal, Required, TypeAlias, TypedDict, TypeVar

from loopkit._types import (
    Axes,
    C,
    Checkpoints,
    Debug,
    DebugLoop,
    Lanes,
    Memory,
    Progress,
    Reduce,
    Unroll,
    Until,
    Y,
)

Info = TypeVar("Info", bound=bool)
Yes: TypeAlias = Literal[True]
No: TypeAlias = Literal[False]
# For a bool, overloads return `Any`: untyped code matches each of them, and would get a union.


class Kw(TypedDict, Generic[Info], total=False):
    checkpoints: Checkpoints
    return_info: Info


class LoopKw(Kw[Info], total=False):
    memory: Memory
    buffers: Any  # a BufferSpec has an overload of its own; other trees of bools end here
    lanes: Lanes
    progress: Progress
    debug: DebugLoop


class WhileKw(LoopKw[Info], total=False):
    max_steps: int | None
    unroll: Unroll
    throw: bool


class ForiKw(LoopKw[Info], total=False):
    max_steps: int | None
    unroll: Unroll | None


class ScanKw(LoopKw[Info], Generic[C, Y, Info], total=False):
    length: int | None
    reverse: bool
    unroll: Unroll
    _split_transpose: bool
    until: Until[C, Y] | None
    in_axes: Axes
    out_axes: Axes
    every: int | None
    reduce: Reduce
    truncate: int | None


class UnboundedKw(Kw[Info], Generic[C, Y, Info], total=False):
    until: Required[Until[C, Y]]
    segment: int
    max_segments: int | None
    growth: float
    progress: Progress | Callable[[int], Any]
    debug: Debug


class BlockedKw(TypedDict, total=False):
    block: int | None
    in_axes: Axes
    out_axes: Axes
    progress: Progress


class RaggedKw(Kw[Info], Generic[C, Y, Info], total=False):
    memory: Memory
    until: Until[C, Y] | None
    batch: int
    growth: float
    progress: Progress
    debug: Debug
