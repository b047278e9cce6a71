"""Bytes in, plan out: how many checkpoints, how far apart, and what is stored between them.

Time is cut into segments of `leaf` steps. Going forward, the carry at the start of a segment is
saved in one of `slots`; going back, one segment at a time is replayed, storing one row a step,
and then reversed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from loopkit.schedules.binomial import advances

SMALL = 1 << 19
"""Bytes of checkpoints, and of rows, that a loop may use whose steps are not known: what a core's
cache holds, and what is set to zero in no time."""
FEW = 32
"""Slots that such a loop may use, however large its carry."""
MANY = 1024
"""Slots, and steps to a segment, that it needs at most, however small its carry."""
PLACED = 128
"""Slots at most where a schedule places the checkpoints: its tables grow with them."""
WIDE = 6
"""Rows of residuals up to this many carries wide are cheaper to store than a step is to repeat."""
REACH = 100
"""Steps to a carry of its budget for which a loop without a bound is planned."""
OVERHEAD = 2
"""What a segment costs beyond its steps, in steps."""


Store = Literal["carries", "residuals"]


@dataclass(frozen=True)
class Bytes:
    """A budget in bytes."""

    count: int


@dataclass(frozen=True)
class Plan:
    """What the backward pass of a loop keeps."""

    slots: int
    """Carries saved at the starts of segments."""
    leaf: int
    """Steps in a segment, the unit of checkpointing."""
    store: Store
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
    def every_carry(self) -> bool:
        """Whether the forward pass stores the carry of every step."""
        return self.bound is not None and self.store == "carries" and self.slots >= self.bound

    @property
    def segments(self) -> int | None:
        return None if self.bound is None else -(-self.bound // self.leaf)


Budget = int | str | Bytes | Plan | None


def make_plan(
    checkpoints: Budget,
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
    if isinstance(checkpoints, Plan):
        return replace(checkpoints, bound=bound)
    carry_bytes = max(carry_bytes, 1)
    store: Store = "residuals" if residual_bytes <= WIDE * carry_bytes else "carries"
    row = max(residual_bytes, 1) if store == "residuals" else carry_bytes
    if isinstance(checkpoints, int):
        return _within(checkpoints, bound, row / carry_bytes, store)
    if exact:
        assert bound is not None, "a loop that takes just so many steps has a length"
        slots = min(bound, _root(bound * row / carry_bytes))
        return Plan(max(slots, 1), max(1, -(-bound // max(slots, 1))), store, bound)
    most = min(MANY, max(FEW, SMALL // carry_bytes))
    rows = min(MANY, max(FEW // 4, SMALL // row))
    if bound is not None and bound <= 16 * most * rows:
        slots = max(1, min(bound, 2 * most, _root(bound * row / carry_bytes)))
        return Plan(slots, max(1, -(-bound // slots)), store, bound)
    return Plan(min(most, PLACED), min(rows, PLACED), store, bound, thinned=True)


def _root(value: float) -> int:
    """The square root, rounded up."""
    return math.isqrt(max(0, math.ceil(value) - 1)) + 1


def _within(budget: int, bound: int | None, row: float, store: Store) -> Plan:
    """At most `budget` carries; a row of the leaf counts as `row` of them.

    Of the ways to share the budget between slots and rows, the one with the fewest steps to run.
    """
    if bound is not None and budget >= bound:
        return Plan(max(bound, 1), 1, store, bound)
    steps = bound or REACH * budget
    best = None
    kinds: list[tuple[Store, float]] = [("carries", 1.0), (store, row)]
    for kind, width in kinds:
        for leaf in range(1, budget):
            used = 0 if leaf == 1 else math.ceil(leaf * width)
            if used >= budget:
                break
            units = -(-steps // leaf)
            cost = leaf * advances(units, budget - used - 1) + OVERHEAD * units
            # Rows of carries are gone through again for their residuals.
            cost += steps if leaf > 1 and kind == "carries" else 0
            if best is None or cost < best[0]:
                best = cost, Plan(budget - used, leaf, kind, bound)
    return Plan(1, 1, store, bound) if best is None else best[1]
