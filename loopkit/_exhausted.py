"""What is said when a loop that grows has filled the memory."""

from __future__ import annotations

import os

import jax


def ran_out(error: BaseException) -> bool:
    """Whether a run-time error of JAX says that memory ran out."""
    return "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()


def ran_out_after(function: str, steps: int, segment: int, y_bytes: int, carry_bytes: int) -> str:
    """How far the loop got, what it keeps, and how much of that would fit."""
    limit = memory_limit()
    carries = f"{limit // max(carry_bytes, 1):,} carries of {_size(carry_bytes)}"
    # The rows are in chunks, and once joined in one piece.
    rows = f"the `ys` of {limit // max(2 * y_bytes, 1):,} steps, {_size(y_bytes)} each"
    return (
        f"loopkit.{function}: out of memory after {steps:,} steps, in a segment of {segment:,}. "
        f"The {_size(limit)} of the device hold {rows}, or {carries}. Return less from `f` "
        "to be stacked, pass `max_segments` or a smaller `segment`; under differentiation pass a "
        "small int for `checkpoints`."
    )


def memory_limit() -> int:
    """Bytes that the default device may use; for the CPU, what the machine has."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _size(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:,.3g} {unit}"
    return f"{count} bytes"
