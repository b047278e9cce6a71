"""Turns: which cases of a test are quick. Values take turns, and so do the two pairs of Python and
JAX."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import jax
import pytest

MANY = 4
"""Quick cases of one test, of which one in `SHARE` stays quick."""
SHARE = 3
NEWER = jax.__version_info__ >= (0, 11)
WHOLE = (
    *("test_architecture.py", "test_docs.py", "test_prose.py"),
    *("test_reference.py", "test_release.py"),
)
"""Tests of the code and the docs as they stand, with a case for each file."""
LATE = "slow", "exhaustive", "programs", "trials", "accelerators", "site"


def in_turn(
    *axes: Iterable, of: int = 2, slow: int | None = None, often: Callable = lambda *_: False
) -> list:
    """Every combination, for `parametrize`: one in `of` is quick, and all that are `often(...)`.

    `slow` in `of` of the others are slow (by default half of them, and all of two), and the rest
    are exhaustive. Each value is in a quick one, if another axis has as many as `of`; each pair of
    values of two axes, if a third has as many.
    """
    cases, some = [], of // 2 if slow is None else slow
    for numbered in itertools.product(*map(enumerate, axes)):
        at, values = zip(*numbered, strict=True)
        turn = sum(at) % of
        late = pytest.mark.slow if turn <= some else pytest.mark.exhaustive
        marks = () if turn == 0 or often(*values) else late
        cases.append(pytest.param(*values, marks=marks, id="-".join(map(name_of, values))))
    return cases


def take_turns(items: list[pytest.Item]) -> None:
    """Make a third of many quick cases quick with the oldest JAX, one with newer ones, one slow."""
    quick = defaultdict(list)
    for item in items:
        if item.path.name in WHOLE:
            continue
        if "[" in item.name and not any(map(item.get_closest_marker, LATE)):
            quick[item.nodeid.partition("[")[0]].append(item)
    for cases in quick.values():
        for at, item in enumerate(cases):
            if len(cases) >= MANY and at % SHARE != NEWER:
                item.add_marker(getattr(pytest.mark, "slow" if at % SHARE == 2 else "exhaustive"))


def name_of(value: Any) -> str:
    return getattr(value, "name", None) or getattr(value, "__name__", None) or str(value)
