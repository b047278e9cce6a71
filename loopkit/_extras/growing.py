"""Segments of a loop that grows: their lengths, their programs, the rows they read and write.

Segments that together need little memory run as one, because checking the predicate on the host
between them would take longer than they do.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from loopkit import _jax
from loopkit._arguments import errors
from loopkit._engine.loop import parts
from loopkit._engine.passes import ready
from loopkit._tracing.spec import LoopSpec
from loopkit._tracing.trace import Traced, trace

LONGEST_SEGMENT = 4096
"""The number of steps up to which segments grow."""

LIGHT = 1 << 16
"""The bytes of rows and checkpoints to reserve without knowing whether the loop needs them."""

AT_ONCE = 4 * LONGEST_SEGMENT
"""The most steps of segments that run as one."""


def segment(spec: LoopSpec) -> tuple[Traced, _jax.TreeDef]:
    """Trace a segment of a loop, without its length; return it and the tree of its carry.

    `Hidden.left` says how many of its steps to take.
    """
    asked = None if spec.predicate is None else on_device(True, bool)
    none = on_device(0, np.int32)
    hidden = spec.hidden(go=asked, steps=none if spec.counts else None, left=none)
    traced, _, tree = trace(spec, hidden)
    return traced, tree


def segment_lengths(first: int, growth: float, most: int | None) -> Iterator[int]:
    """Yield the lengths of segments: first, first * growth, first * growth**2, ..., up to a cap."""
    size, cap = float(first), max(first, LONGEST_SEGMENT)
    for _ in itertools.count() if most is None else range(most):
        yield int(size) if size < cap else cap
        size *= growth


def together(sizes: Iterator[int], light: int, rows: int) -> Iterator[int]:
    """Yield segment lengths, merged up to `light` steps or until they cover the `rows` to read."""
    total, left = 0, rows
    for size in sizes:
        if total and (total >= left or total + size > light):
            yield total
            total, left = 0, left - total
        total += size
    yield total


def light_steps(traced: Traced, operands: list) -> int:
    """Return how many steps need no more than `LIGHT` bytes of rows and checkpoints."""
    operands = [*operands, *traced.closed_over]
    lanes = max((_lanes(v) for v in operands if _jax.is_tracer(v)), default=1)
    loop, _ = ready(traced.loop)

    def find() -> int:
        row = _jax.byte_count(*loop.xs_types, *loop.ys_types)
        carry = _jax.byte_count(*loop.carry_types)
        needed = lambda steps: lanes * (steps * row + math.isqrt(steps) * carry)
        return bisect.bisect_right(range(AT_ONCE + 1), LIGHT, key=needed) - 1

    return loop.derived(("light steps", lanes, LIGHT), find)


def _lanes(tracer: jax.Array) -> int:
    """Return how many lanes `jax.vmap` has put into one value."""
    return jax.typeof(_jax.innermost(tracer)).size // max(tracer.size, 1)


def compiled(traced: Traced, size: int, counts: bool = False) -> Callable:
    """Return a segment as one program, which JAX also differentiates only once.

    `counts` says whether the loop carries the number of the step.
    """

    def make() -> Callable:
        segment = traced.with_fields(length=size).closing_over([None] * len(traced.closed_over))

        def run(
            closed_over: list,
            carry: list,
            steps: jax.Array,
            stopped: jax.Array,
            left: jax.Array,
            x: list,
        ) -> tuple:
            number = [steps] if counts else []
            hidden = [~stopped, *number, left]
            leaves, ys = segment.closing_over(closed_over).run([*carry, *hidden], x)
            carry, (go, *_, unused) = parts(leaves, len(carry))
            taken = left - unused  # none in a lane that had stopped
            return carry, steps + taken, ~go, taken, ys

        return jax.jit(run)

    types = traced.init_types
    key = ("segment", size, *types, *(t.weak_type for t in types))
    return traced.loop.derived(key, make)


@lru_cache(256)
def on_device(number: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return a number as an array on the device, cached for later calls."""
    return moved(np.asarray(number, dtype))


def moved(value: np.ndarray[Any, Any]) -> jax.Array:
    """Return an array on the device. `jax.transfer_guard` allows that, since it is explicit."""
    with jax.ensure_compile_time_eval():
        return jax.device_put(value)


def divided(xs: list, rows: int, sizes: Iterator[int]) -> Iterator[tuple[int, int, list]]:
    """Yield, for each segment, its length, the steps it may take, and its rows of `xs`."""
    if not xs:
        yield from ((size, size, []) for size in sizes)
        return
    lengths = []
    while sum(lengths) < rows and (size := next(sizes, None)) is not None:
        lengths.append(size)
    starts = [sum(lengths[:k]) for k in range(len(lengths))]
    steps = [min(size, rows - start) for size, start in zip(lengths, starts, strict=True)]
    if any(map(_jax.is_tracer, xs)):
        # The transpose of a split is one concatenation. That of each slice is as long as `xs`.
        parts = [lax.split(x, [*steps, rows - sum(steps)])[:-1] for x in xs]
        slices = [list(x) for x in zip(*parts, strict=True)]
    else:
        spans = zip(starts, steps, strict=True)
        slices = ([_sliced(x, *span) for x in xs] for span in spans)
    if not lengths:
        yield 0, 0, xs
    for size, left, x in zip(lengths, steps, slices, strict=True):
        x = [_lengthened(row, size - left) for row in x] if left < size else x
        yield size, left, [moved(row) if isinstance(row, np.ndarray) else row for row in x]


def _sliced(x: Any, start: int, count: int) -> Any:
    if _is_host_array(x) and not x.committed:
        return np.asarray(x)[start : start + count]
    return _slice_of(x, on_device(start, np.int32), count)


@partial(jax.jit, static_argnums=2)
def _slice_of(x: jax.Array, start: jax.Array, count: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, start, count)


def _lengthened(x: Any, rows: int) -> Any:
    """Pad rows at the end with rows that no step reads."""
    made = np if isinstance(x, np.ndarray) else jnp
    return made.concatenate([x, made.broadcast_to(x[-1:], (rows, *x.shape[1:]))])


def joined(chunks: list[tuple[Any, int]]) -> Any:
    """Join chunks, and keep only as many first rows of each as the number beside it says."""
    if all(_is_host_array(chunk) for chunk, _ in chunks):  # this compiles nothing
        rows = [np.asarray(chunk)[:most] for chunk, most in chunks]
        return _jax.put_beside(np.concatenate(rows) if len(rows) > 1 else rows[0], chunks[0][0])
    parts = [
        chunk if most == len(chunk) else lax.slice_in_dim(chunk, 0, most) for chunk, most in chunks
    ]
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def _is_host_array(value: Any) -> bool:
    """Return whether the host can read the array in place."""
    return (
        not _jax.is_tracer(value)
        and isinstance(value.dtype, np.dtype)
        and isinstance(value.sharding, jax.sharding.SingleDeviceSharding)
        and next(iter(value.devices())).platform == "cpu"
    )


def ran_out(error: BaseException) -> bool:
    """Return whether a run-time error of JAX says that memory ran out."""
    return "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()


def ran_out_after(steps: int, segment: int, y_bytes: int, carry_bytes: int, room: int) -> str:
    """Say how far the loop got, what it keeps, and how much of that fits in `room` bytes."""
    size = partial(errors.size, unit="bytes")
    carries = f"{room // max(carry_bytes, 1):,} carries of {size(carry_bytes)}"
    # Each row needs memory twice: in a chunk, and in the array that joins the chunks.
    rows = f"the `ys` of {room // max(2 * y_bytes, 1):,} steps, {size(y_bytes)} each"
    got = f"{steps:,} steps, then a segment of {segment:,}, with {size(room)} on the device, which "
    got += f"is enough for {rows}, or for {carries}"
    advice = "Return less from `f` to be stacked, or pass `max_segments` or a smaller `segment`. "
    advice += "For a derivative, pass a small int as `checkpoints`."
    return errors.message("unbounded_scan", "the device ran out of memory", got, advice)


def memory_left(carry: Sequence[Any]) -> int:
    """Return the free bytes on the fullest of the devices that hold the carry."""
    values = map(_jax.innermost, carry)
    arrays = [v for v in values if isinstance(v, jax.Array) and not _jax.is_tracer(v)]
    placed = [v for v in arrays if v.committed] or arrays
    devices = {device for array in placed for device in array.sharding.addressable_devices}
    return min(map(_left_on, devices or jax.local_devices()[:1]))


def _left_on(device: _jax.Device) -> int:
    stats = memory_stats(device)
    if "bytes_limit" in stats:
        return max(stats["bytes_limit"] - stats.get("bytes_in_use", 0), 0)
    # A CPU reports no memory statistics: take all memory of the machine.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_stats(device: _jax.Device) -> dict[str, int]:
    return device.memory_stats() or {}
