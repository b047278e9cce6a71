"""Flags of leaves that a step hands on to one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def fixed_point(
    flags: Sequence[bool], step: Callable[[list[bool]], Sequence[Any]]
) -> tuple[list[bool], *tuple[Any, ...]]:
    """The least flags, with these, to which `step(flags)` adds none; and what else that finds."""
    now = list(flags)
    while True:
        more, *found = step(now)
        new = [a or b for a, b in zip(now, more, strict=True)]
        if new == now:
            return now, *found
        now = new
