"""Is there room for what is to be kept of every step?"""

from __future__ import annotations

import os

import jax

from loopkit._arguments import errors


def check_room(name: str, steps: int, step_bytes: int) -> None:
    """Raise where all memory there is does not hold so many steps."""
    needed, there = steps * step_bytes, all_memory()
    if there is None or needed <= there:
        return
    raise errors.wrong_value(
        name,
        "checkpoints",
        f'can be "all" only where there is room for {steps:,} steps of {step_bytes:,} bytes, '
        f"which are {errors.size(needed)}",
        f"{errors.size(there)} of memory",
        "Lower `max_steps` to what the loop may take, or leave `checkpoints` out and give "
        "`memory`, which keeps as much as fits.",
    )


def all_memory() -> int | None:
    """Bytes of all devices, used or not; None where nobody says."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is not None:
        return limit * jax.device_count()
    try:  # a CPU keeps no account: all that the machine has
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * jax.process_count()
    except (AttributeError, ValueError, OSError):
        return None
