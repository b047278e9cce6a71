"""What is said when a loop that grows has filled the memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax

from loopkit import _jax
from loopkit._arguments.errors import size


def ran_out(error: BaseException) -> bool:
    """Whether a run-time error of JAX says that memory ran out."""
    return "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()


def ran_out_after(steps: int, segment: int, y_bytes: int, carry_bytes: int, room: int) -> str:
    """How far the loop got, what it keeps, and how much of that would fit into so many bytes."""
    carries = f"{room // max(carry_bytes, 1):,} carries of {size(carry_bytes, 'bytes')}"
    # The rows are in chunks, and once joined in one piece.
    rows = f"the `ys` of {room // max(2 * y_bytes, 1):,} steps, {size(y_bytes, 'bytes')} each"
    return (
        f"loopkit.unbounded_scan: out of memory after {steps:,} steps, in a segment of {segment:,}."
        f" The device had {size(room, 'bytes')} for it: enough for {rows}, or for {carries}. "
        "Return less from `f` to be stacked, pass `max_segments` or a smaller `segment`; under "
        "differentiation pass a small int for `checkpoints`."
    )


def memory_left(carry: Sequence[Any]) -> int:
    """Bytes not in use where the carry lies, on the fullest of its devices."""
    values = map(_jax.innermost, carry)
    arrays = [v for v in values if isinstance(v, jax.Array) and not _jax.is_tracer(v)]
    placed = [v for v in arrays if v.committed] or arrays
    devices = {device for array in placed for device in array.sharding.addressable_devices}
    return min(map(_left_on, devices or jax.local_devices()[:1]))


def _left_on(device: _jax.Device) -> int:
    stats = memory_stats(device)
    if "bytes_limit" in stats:
        return max(stats["bytes_limit"] - stats.get("bytes_in_use", 0), 0)
    # A CPU keeps no account: all that the machine has.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_stats(device: _jax.Device) -> dict[str, int]:
    return device.memory_stats() or {}
