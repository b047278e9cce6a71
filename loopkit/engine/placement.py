"""The schedules, as a compiled loop steps through them.

A slot holds the carry at the start of a unit (a segment of the plan's `leaf` steps), or nothing.
What to save, and where, is chosen ahead in `loopkit.schedules`; here the tables are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from math import isqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from loopkit import _jax
from loopkit._plan import Plan
from loopkit.schedules.actions import Restore, Save
from loopkit.schedules.binomial import SplitTable, split_from, split_table
from loopkit.schedules.online import (
    NEVER,
    Mark,
    Table,
    cheapest,
    first_mark,
    next_mark,
    record,
    thinning,
)
from loopkit.schedules.reversal import gradient

UNBOUNDED = 2**31 - 1
"""Steps are counted in int32."""


class Slots(NamedTuple):
    """A sweep's place in its schedule."""

    units: Any
    """int32[slots]: the unit that each slot holds, NEVER where it is free."""
    mark: Mark
    """The next save."""


@dataclass(frozen=True)
class Schedule:
    """The tables of a plan's forward and backward sweep."""

    slots: int
    placed: Table
    splits: SplitTable

    @staticmethod
    def of(plan: Plan) -> Schedule:
        bound = UNBOUNDED if plan.bound is None else plan.bound
        return _schedule(plan.slots, max(1, -(-bound // plan.leaf)), plan.thinned, plan.exact)

    def start(self, like: Any) -> Slots:
        """No slot taken; integers vary over the devices as `like` does."""
        mark = Mark(*(jnp.int32(v) for v in first_mark(self.placed)))
        mark = Mark(*(_jax.vary_like(v, [jax.typeof(like)]) for v in mark))
        units = _jax.vary_like(jnp.full(self.slots, NEVER, jnp.int32), [jax.typeof(like)])
        return Slots(units, mark)

    def save(self, state: Slots) -> tuple[Any, Any, Slots]:
        """The slot to save into, the units to run until the next save, and what follows."""
        mark = state.mark
        table = Table(*map(jnp.asarray, self.placed))
        return mark.slot, mark.run, Slots(record(state.units, mark, jnp), next_mark(table, mark))

    def split(self, remaining: Any, free: Any) -> Any:
        """Units to advance before saving, where `remaining` units end with the one to reverse."""
        table = SplitTable(*map(jnp.asarray, self.splits))
        return split_from(table, remaining, free, jnp)


@lru_cache(maxsize=256)
def _schedule(slots: int, units: int, thinned: bool, exact: bool) -> Schedule:
    units = min(units, NEVER)
    # Spare slots keep the last stretch short; the cheapest placement takes longer to make.
    spare = isqrt(slots) if slots > 2 else 0
    if exact:
        table = _best(slots, units)
    elif thinned:
        table = thinning(slots, units, spare=spare).table
    else:
        table = cheapest(slots, units).table
    splits = split_table(units, slots - 1, columns=64)
    return Schedule(
        slots,
        Table(*(np.asarray(column, np.int32) for column in table)),
        SplitTable(*(np.asarray(rows, np.int32) for rows in splits)),
    )


def _best(slots: int, units: int) -> Table:
    """The saves of the forward sweep where the number of units is known: a climb to their end."""
    sweep = takewhile(lambda a: not isinstance(a, Restore), gradient(units, slots))
    saves = [(a.unit, a.slot, slots) for a in sweep if isinstance(a, Save)]
    return Table(*zip(*saves, (units, slots, slots), (units, slots, slots), strict=True))


def latest(units: Any, target: Any) -> Any:
    """The slot that holds the last unit not after `target`."""
    return jnp.argmax(jnp.where(units <= target, units, -1)).astype(jnp.int32)


def release(units: Any, target: Any) -> Any:
    """The slots once the units from `target` on have been reversed."""
    return jnp.where(units >= target, NEVER, units)


def free_slots(units: Any) -> tuple[Any, Any]:
    """How many slots are free, and the first of them."""
    free = units == NEVER
    return free.sum(dtype=jnp.int32), jnp.argmax(free).astype(jnp.int32)
