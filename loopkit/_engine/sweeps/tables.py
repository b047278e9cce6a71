"""Schedules as tables that a compiled loop steps through.

A slot holds the carry at the start of a segment, or nothing. `loopkit.schedules` decides in advance
what to save, and where. This module reads its tables.
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
from jax import lax

from loopkit import _jax
from loopkit._engine.steps import LAST_STEP
from loopkit._plans.plan import Plan
from loopkit.schedules.binomial import SplitTable, split_from, split_table
from loopkit.schedules.online import NEVER, Mark, Table, cheapest, record, thinning
from loopkit.schedules.reversal import Restore, Save, gradient

COLUMNS = 32
"""The columns of a table of splits; XLA sums this many in one kernel."""


class Slots(NamedTuple):
    """The position of a sweep in its schedule."""

    segments: Any
    """The segment that each slot holds, int32[slots]; NEVER for a free slot."""
    count: Any
    """The number of saves so far."""
    save: Any
    """The row of the table for the next save, int32[4]."""


@dataclass(frozen=True)
class Schedule:
    """The tables of a plan's forward and backward sweeps.

    A row is read whole, because each number that a compiled loop carries or reads costs a kernel.
    """

    slots: int
    saves: np.ndarray
    """[saves, 4]: segment, slot, cleared, run, as in `online.Mark`."""
    splits: np.ndarray
    """[free slots, 2, columns]: starts and widths, as in `binomial.SplitTable`."""

    @staticmethod
    def of(plan: Plan) -> Schedule:
        bound = LAST_STEP if plan.bound is None else plan.bound
        return _schedule(plan.slots, max(1, -(-bound // plan.segment)), plan.thinned, plan.exact)

    def start(self, like: jax.Array) -> Slots:
        """Return the state with no slot taken; integers vary over the devices as `like` does."""
        start = Slots(jnp.full(self.slots, NEVER, jnp.int32), jnp.int32(0), self.saves[0])
        return Slots(*(_jax.vary_like(jnp.asarray(v), [jax.typeof(like)]) for v in start))

    def save(self, state: Slots) -> tuple[Any, Any, Slots]:
        """Return the slot to save into, the segments to run until the next save, and the state."""
        segment, slot, cleared, run = _numbers_in(state.save)
        segments = record(state.segments, Mark(state.count, segment, slot, cleared, run), jnp)
        return slot, run, Slots(segments, state.count + 1, _row(self.saves, state.count + 1))

    def row(self, number: _jax.Whole) -> list:
        """Return segment, slot, cleared and run of the save after `number` others."""
        return _numbers_in(_row(self.saves, number))

    def held(self, count: _jax.Whole) -> Any:
        """Return the segments that slots hold after `count` saves."""
        number = np.arange(len(self.saves), dtype=np.int32)
        slots = np.arange(self.slots, dtype=np.int32)[:, None]
        last = lambda where: jnp.max(jnp.where((where == slots) & (number < count), number, -1), 1)
        saved, cleared = last(self.saves[:, 1]), last(self.saves[:, 2])
        return jnp.where(saved > cleared, jnp.asarray(self.saves[:, 0])[saved], NEVER)

    def split(self, remaining: _jax.Whole, free: _jax.Whole) -> Any:
        """Return the number of segments to advance before the next save.

        The last of the `remaining` segments is the one to reverse.
        """
        starts, widths = _row(self.splits, free)
        return split_from(SplitTable(starts[None], widths[None]), remaining, 0, jnp)


def _numbers_in(row: jax.Array) -> list:
    return [lax.index_in_dim(row, k, 0, False) for k in range(row.shape[0])]


def _row(table: np.ndarray, number: _jax.Whole) -> Any:
    return lax.dynamic_index_in_dim(
        jnp.asarray(table), number, keepdims=False, allow_negative_indices=False
    )


@lru_cache(maxsize=256)
def _schedule(slots: int, segments: int, thinned: bool, exact: bool) -> Schedule:
    segments = min(segments, NEVER)
    # Spare slots make the last run cheap to reverse. The cheapest placement takes longer to find.
    spare = isqrt(slots) if slots > 2 else 0
    if exact:
        table = _best(slots, segments)
    elif thinned:
        table = thinning(slots, segments, spare=spare).table
    else:
        table = cheapest(slots, segments).table
    splits = split_table(segments, slots - 1, columns=COLUMNS)
    segment, slot, cleared = (np.asarray(column, np.int32) for column in table)
    saves = np.stack([segment[:-1], slot[:-1], cleared[:-1], np.diff(segment)], axis=1)
    return Schedule(slots, saves, np.stack([np.asarray(rows, np.int32) for rows in splits], axis=1))


def _best(slots: int, segments: int) -> Table:
    """Return the saves of a forward sweep over a known number of segments: a climb to the end."""
    sweep = takewhile(lambda a: not isinstance(a, Restore), gradient(segments, slots))
    saves = [(a.segment, a.slot, slots) for a in sweep if isinstance(a, Save)]
    return Table(*zip(*saves, (segments, slots, slots), (segments, slots, slots), strict=True))


def latest(segments: jax.Array, target: _jax.Whole) -> tuple[Any, Any]:
    """Return the slot that holds the last segment not after `target`, and that segment."""
    segment = jnp.max(jnp.where(segments <= target, segments, -1))
    return _place(segments == segment), segment


def free_slots(segments: jax.Array) -> tuple[Any, Any]:
    """Return how many slots are free, and one of them."""
    free = segments == NEVER
    return free.sum(dtype=jnp.int32), _place(free)


def saved(segments: jax.Array, slot: _jax.Whole, segment: _jax.Whole) -> Any:
    """Return the segments of slots, with `segment` for `slot`; unchanged without such a slot."""
    return jnp.where(_numbers(segments) == slot, segment, segments)


def _place(flags: jax.Array) -> Any:
    """Return the index of the last true flag, or 0 if there is none."""
    return jnp.max(jnp.where(flags, _numbers(flags), 0))


def _numbers(slots: jax.Array) -> Any:
    return lax.iota(jnp.int32, slots.shape[0])
