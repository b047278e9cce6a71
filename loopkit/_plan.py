"""Bytes in, plan out: how many checkpoints, how far apart, and what is stored between them.

Time is cut into segments of `leaf` steps. Going forward, the carry at the start of a segment is
saved in one of `slots`; going back, one segment at a time is replayed, storing one row a step,
and then reversed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

SMALL = 1 << 20
"""Bytes of checkpoints that a loop may always use: about a core's cache."""
WIDE = 6
"""Rows of residuals up to this many carries wide are cheaper to store than a step is to repeat."""
FEW = 32
"""Slots that a loop may always use, however large its carry."""


@dataclass(frozen=True)
class Plan:
    """What the backward pass of a loop keeps."""

    slots: int
    """Carries saved at the starts of segments."""
    leaf: int
    """Steps in a segment, the unit of checkpointing."""
    store: Literal["carries", "residuals"]
    """What a row of the leaf holds for each of its steps."""
    bound: int | None
    """The most steps the loop can take; None if nothing bounds it."""
    keeps_all: bool = False
    """Whether the forward pass itself stores the residuals of every step."""

    thinned: bool = False
    """Whether checkpoints are thinned evenly; else the one that costs least is dropped."""

    @property
    def direct(self) -> bool:
        """Whether every segment has a slot of its own, so that no step is run a third time."""
        return self.bound is not None and self.slots * self.leaf >= self.bound

    @property
    def segments(self) -> int | None:
        return None if self.bound is None else -(-self.bound // self.leaf)


def make_plan(
    checkpoints: int | str | None,
    bound: int | None,
    exact: bool,
    carry_bytes: int,
    residual_bytes: int,
) -> Plan:
    """The plan for a loop.

    **Arguments:**

    - `checkpoints`: None, a number of carries, or "all".
    - `bound`: the most steps; `exact` if it takes just that many.
    - `carry_bytes`: bytes of the carry that a checkpoint holds.
    - `residual_bytes`: bytes that one step's derivative reads, loop constants excluded.
    """
    if checkpoints == "all":
        assert bound is not None
        return Plan(0, bound, "residuals", bound, keeps_all=True)
    carry_bytes = max(carry_bytes, 1)
    store = "residuals" if residual_bytes <= WIDE * carry_bytes else "carries"
    row = max(residual_bytes, 1) if store == "residuals" else carry_bytes
    if isinstance(checkpoints, int):
        return _within(checkpoints, bound, row / carry_bytes, store)
    most = max(FEW, SMALL // carry_bytes)
    if bound is None:
        return Plan(min(most, 64), min(most, 64), store, None, thinned=True)
    slots = max(1, math.isqrt(max(0, bound * row // carry_bytes - 1)) + 1)
    if not exact:
        slots = min(slots, most)
    slots = min(slots, max(bound, 1))
    leaf = max(1, -(-bound // slots))
    if not exact and leaf > 4 * most:
        leaf = most
    return Plan(slots, leaf, store, bound, thinned=True)


def _within(budget: int, bound: int | None, row: float, store: str) -> Plan:
    """At most `budget` carries; a row of the leaf counts as `row` of them."""
    if bound is not None and budget >= bound:
        return Plan(max(bound, 1), 1, store, bound)
    if budget < 4:
        return Plan(budget, 1, store, bound)
    half = budget // 2
    if row > half:
        row, store = 1.0, "carries"
    leaf = int(half / row)
    if bound is not None:
        leaf = min(leaf, max(1, -(-bound // half)))
    return Plan(budget - math.ceil(leaf * row), leaf, store, bound)
