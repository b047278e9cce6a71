"""Storing states and residuals side by side, in one budget.

A slot may hold the start of a unit, from which units can be run again, or a unit's residuals, from
which it is reversed without running it again. They differ in size, and near the end of the loop,
or with much memory, residuals are often the better buy. The optimum is a recursion on the first
unit of a stretch whose start is live, with s of the budget left, c and r the sizes of a state and
of residuals, and e(l, s) the fewest evaluations that reverse a stretch of l units:

    e(0, s) = 0,  e(1, s) = 1
    e(l, s) = min of  m + e(l - m, s - c) + e(m, s)   save the start, advance by m < l, come back
                      1 + e(l - 1, s - r)             record the first unit

A forward sweep has to reach the loop's end, where nothing more is to be reversed:

    f(0, s) = 0
    f(l, s) = min of  m + f(l - m, s - c) + e(m, s)   with m <= l
                      1 + f(l - 1, s - r)

Unlike `loopkit.schedules.binomial` this counts replays as well, as a recorded unit has none; and
the residuals of the one unit being reversed are not part of the budget. Where residuals do not fit,
f(l, s) = binomial.evaluations(l, s // c) + l.

Time and memory: about units**2 * budget / gcd(carry_size, residual_size) operations on integers,
about half a second for 2,000 units and a budget of 100. For longer loops take larger units.

Source: Maddison 2024, "Step-based checkpointing with high-level algorithmic differentiation",
Journal of Computational Science 82.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import gcd
from typing import Any

import numpy as np

from loopkit.schedules._checks import BUDGET, CARRY, COUNT_UNITS, RESIDUALS, Whole, integer
from loopkit.schedules.actions import (
    Action,
    Advance,
    Discard,
    Record,
    Restore,
    Reverse,
    ReverseRecorded,
    Save,
)

_IMPOSSIBLE = 2**60


def evaluations(units: Whole, budget: Whole, carry_size: Whole, residual_size: Whole) -> int:
    """The fewest unit evaluations of a gradient, forward sweep, recomputation and replays together.

    Arguments: `units` >= 0; `budget`, the sizes of all that is stored at a time; `carry_size` and
    `residual_size`, of a state and of the residuals of one unit, in the same measure.
    Raises: ValueError if the budget holds neither a state nor the residuals of all units.

    >>> evaluations(10, 4, 1, 2), evaluations(10, 4, 1, 1), evaluations(10, 10, 1, 1)
    (22, 18, 10)
    """
    return _optimum("evaluations", units, budget, carry_size, residual_size).evaluations


def gradient(
    units: Whole, budget: Whole, carry_size: Whole, residual_size: Whole
) -> Iterator[Action]:
    """The schedule that takes `evaluations(...)` evaluations. Arguments as there.

    Returns: actions that begin with the start of unit 0 live. Slots are numbered as they are
    needed, and differ in size.

    >>> for action in gradient(3, 2, 1, 1): print(action)
    Record(unit=0, slot=0)
    Save(unit=1, slot=1)
    Advance(start=1, stop=3)
    Restore(unit=1, slot=1)
    Discard(slot=1)
    Record(unit=1, slot=1)
    Reverse(unit=2)
    ReverseRecorded(unit=1, slot=1)
    Discard(slot=1)
    ReverseRecorded(unit=0, slot=0)
    Discard(slot=0)
    """
    return _optimum("gradient", units, budget, carry_size, residual_size).gradient()


def _optimum(
    function: str, units: Whole, budget: Whole, carry_size: Whole, residual_size: Whole
) -> _Optimum:
    where = f"mixed.{function}"
    units = integer(where, "units", units, 0, COUNT_UNITS)
    budget = integer(where, "budget", budget, 0, BUDGET)
    carry_size = integer(where, "carry_size", carry_size, 1, CARRY)
    residual_size = integer(where, "residual_size", residual_size, 1, RESIDUALS)
    needed = min(carry_size, units * residual_size)
    if budget < needed:
        raise ValueError(
            f"loopkit.schedules.{where}: `budget` must be >= {needed}, got {budget}; it has to "
            f"hold a state ({carry_size}) or the residuals of all units ({units * residual_size})"
        )
    measure = gcd(carry_size, residual_size)
    most = units * max(carry_size, residual_size)  # more is never used
    sizes = min(budget, most), carry_size, residual_size
    return _solved(units, *(size // measure for size in sizes))


class _Optimum:
    """The tables e (`_middle`) and f (`_sweep`) of the module, [budget + 1, units + 1]."""

    def __init__(self, units: int, budget: int, carry_size: int, residual_size: int):
        self._units, self._budget = units, budget
        self._carry_size, self._residual_size = carry_size, residual_size
        shape = (budget + 1, units + 1)
        self._middle = np.full(shape, _IMPOSSIBLE, np.int64)
        self._middle[:, 0] = 0
        self._sweep = self._middle.copy()
        for length in range(1, units + 1):
            self._middle[:, length] = self._best(self._middle, length, length - 1)
            if length == 1:
                self._middle[:, 1] = 1
            self._sweep[:, length] = self._best(self._sweep, length, length)
        self.evaluations = int(self._sweep[budget, units])

    def _best(self, ahead: Any, length: int, longest: int) -> Any:
        """One column of `ahead`: the cheaper of recording a unit and saving its start."""
        best = np.full(self._budget + 1, _IMPOSSIBLE, np.int64)
        recording = best[self._residual_size :]
        recording[:] = 1 + ahead[: len(recording), length - 1]
        saving = best[self._carry_size :]
        if longest and len(saving):
            costs = self._save(ahead, length, longest, self._carry_size, self._budget)
            np.minimum(saving, costs.min(axis=1), out=saving)
        return np.minimum(best, _IMPOSSIBLE)

    def _save(self, ahead: Any, length: int, longest: int, lowest: int, highest: int) -> Any:
        """The cost of advancing by 1 to `longest` from a saved start, with each of the budgets."""
        left = slice(lowest - self._carry_size, highest + 1 - self._carry_size)
        beyond = ahead[left, length - longest : length][:, ::-1]
        back = self._middle[lowest : highest + 1, 1 : longest + 1]
        return np.arange(1, longest + 1) + beyond + back

    def gradient(self) -> Iterator[Action]:
        """Walk the tables, choosing anew at each stretch."""
        free: list[int] = []
        used = 0
        # what is left to do, last first: a stretch (unit, length, budget, sweep), or actions
        todo: list[tuple[int, int, int, bool] | Action] = [(0, self._units, self._budget, True)]
        while todo:
            task = todo.pop()
            if not isinstance(task, tuple):
                yield task
                if isinstance(task, Discard):
                    free.append(task.slot)
                continue
            unit, length, budget, sweep = task
            if length == 0:
                continue
            if length == 1 and not sweep:
                yield Reverse(unit)
                continue
            if not free:
                free.append(used)
                used += 1
            slot = free.pop()
            advance = self._advance(length, budget, sweep)
            if advance == 0:
                yield Record(unit, slot)
                todo += [Discard(slot), ReverseRecorded(unit, slot)]
                todo.append((unit + 1, length - 1, budget - self._residual_size, sweep))
            else:
                yield Save(unit, slot)
                yield Advance(unit, unit + advance)
                todo += [(unit, advance, budget, False), Discard(slot), Restore(unit, slot)]
                beyond = budget - self._carry_size
                todo.append((unit + advance, length - advance, beyond, sweep))

    def _advance(self, length: int, budget: int, sweep: bool) -> int:
        """How far to advance from a saved start, or 0 to record the first unit."""
        ahead = self._sweep if sweep else self._middle
        if budget >= self._residual_size:
            record = 1 + ahead[budget - self._residual_size, length - 1]
            if record == ahead[budget, length]:
                return 0
        longest = length if sweep else length - 1
        costs = self._save(ahead, length, longest, budget, budget)
        return 1 + int(np.argmin(costs))


_solved = lru_cache(maxsize=16)(_Optimum)
