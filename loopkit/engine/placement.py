"""Checkpoints in slots, while the length of the loop is not known.

Units are segments of the plan's `leaf` steps. A slot holds the carry at the start of its unit, or
nothing (unit -1). The same integer arithmetic runs on Python ints and inside a compiled loop.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp


class Slots(NamedTuple):
    """Which unit each slot holds."""

    units: Any
    """int32[slots], -1 where free."""
    spacing: Any
    """Units between checkpoints that are to stay."""


def empty_slots(slots: int, like: Any) -> Slots:
    return Slots(jnp.full(slots, -1, jnp.int32) + like * 0, 1 + like * 0)


def place(slots: Slots, unit: Any) -> tuple[Any, Any, Slots]:
    """The slot that takes `unit`, the units to run until the next checkpoint, and the new slots.

    When every slot is taken, the spacing doubles: every second checkpoint may be overwritten.
    """
    full = ((slots.units >= 0) & (slots.units % slots.spacing == 0)).all()
    spacing = jnp.where(full, 2 * slots.spacing, slots.spacing)
    slot = jnp.argmax((slots.units < 0) | (slots.units % spacing != 0)).astype(jnp.int32)
    run = spacing - unit % spacing
    return slot, run, Slots(slots.units.at[slot].set(unit), spacing)


def latest(units: Any, target: Any) -> Any:
    """The slot that holds the last unit not after `target`."""
    return jnp.argmax(jnp.where(units <= target, units, -1)).astype(jnp.int32)


def release(units: Any, target: Any) -> Any:
    """The slots after units from `target` on have been reversed."""
    return jnp.where(units >= target, -1, units)


def split(remaining: Any, free: Any) -> Any:
    """Units to advance before saving, when `remaining` units end at the target."""
    return jnp.where(free > 0, jnp.maximum(remaining // 2, 1), remaining - 1)
