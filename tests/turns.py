"""Products of values of which a part is quick: there the values take turns."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def in_turn(
    *axes: Iterable, of: int = 2, slow: int | None = None, often: Callable = lambda *_: False
) -> list:
    """Every combination, for `parametrize`: one in `of` is quick, and all that are `often(...)`.

    Of the others, `slow` in `of` are slow (by default half of them, and of two all), and the rest
    exhaustive. Each value is in a quick one, if another axis has as many as `of`; each pair of
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


def name_of(value: Any) -> str:
    return getattr(value, "name", None) or getattr(value, "__name__", None) or str(value)
