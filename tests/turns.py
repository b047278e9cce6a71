"""Turns: which cases of a test run always, with `-m slow`, or in the nightly run alone.

The cases and their order decide that, and nothing that is installed does.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest

MANY = {"quick": 4, "slow": 2}
"""A test with so many cases in one tier keeps the first and every nth of them there."""
SHARE = {"quick": 5, "slow": 15}
"""That n. Axes of two, three, four or six values still take turns."""
WHOLE = "every_case", "exhaustive", "programs", "trials", "accelerators", "site"
"""Marks of tests all of whose cases run with the first."""


def in_turn(*axes: Iterable, of: int = 2, often: Callable = lambda *_: False) -> list:
    """Every combination, for `parametrize`: one in `of` is quick, and all that are `often(...)`.

    The others are exhaustive. Each value is in a quick one, if another axis has as many as `of`;
    each pair of values of two axes, if a third has as many.
    """
    cases = []
    for numbered in itertools.product(*map(enumerate, axes)):
        at, values = zip(*numbered, strict=True)
        marks = () if sum(at) % of == 0 or often(*values) else pytest.mark.exhaustive
        cases.append(pytest.param(*values, marks=marks, id="-".join(map(name_of, values))))
    return cases


def later(*values: Any) -> Any:
    """An exhaustive case of these values."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def take_turns(items: list[pytest.Item]) -> None:
    """Make most cases of a test exhaustive that has many in one tier.

    A test marked `every_case` keeps all: its cases take no time, and each says something else.
    """
    many = defaultdict(list)
    for item in items:
        if not any(map(item.get_closest_marker, WHOLE)):
            tier = "slow" if item.get_closest_marker("slow") else "quick"
            many[item.nodeid.partition("[")[0], tier].append(item)
    for (_, tier), cases in many.items():
        for at, item in enumerate(cases):
            if len(cases) >= MANY[tier] and at % SHARE[tier]:
                item.add_marker(pytest.mark.exhaustive)


def name_of(value: Any) -> str:
    value = getattr(value, "func", value)  # the text of a partial has an address in it
    return getattr(value, "name", None) or getattr(value, "__name__", None) or str(value)
