"""Products of values of which a part is quick: there the values take turns."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def in_turn(*axes: Iterable, of: int = 2, often: Callable = lambda *_: False) -> list:
    """Every combination, for `parametrize`: one in `of` is quick, and all that are `often(...)`.

    Each value is in a quick one, if another axis has as many as `of`.
    """
    cases = []
    for numbered in itertools.product(*map(enumerate, axes)):
        at, values = zip(*numbered, strict=True)
        marks = () if sum(at) % of == 0 or often(*values) else pytest.mark.slow
        cases.append(pytest.param(*values, marks=marks, id="-".join(map(name_of, values))))
    return cases


def name_of(value: Any) -> str:
    return getattr(value, "name", None) or getattr(value, "__name__", None) or str(value)
