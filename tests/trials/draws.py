"""Random choices and the types of values, in terms that hypothesis can shrink."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st

NARROW = ("float32", "bfloat16", "float16")
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
INTEGERS = ("int32", "int64", "int8", "uint8", "int16", "uint32")


@dataclass(frozen=True)
class Type:
    """The type of one array."""

    dtype: str = "float64"
    shape: tuple[int, ...] = ()
    rough: bool = False
    """Whether it may come from numbers with few bits, on which no decision can hang."""

    @property
    def kind(self) -> str:
        if self.dtype in ("bool", "key"):
            return self.dtype
        return {"f": "float", "b": "float", "c": "complex"}.get(self.dtype[0], "int")

    @property
    def inexact(self) -> bool:
        return self.kind in ("float", "complex")

    def of(self, shape: tuple[int, ...]) -> Type:
        return Type(self.dtype, shape, self.rough)

    def fits(self, other: Type) -> bool:
        """Whether a value of this type can stand where the other is asked for."""
        same = self.dtype == other.dtype and self.shape == other.shape
        return same and (other.rough or not self.rough)


FLOAT, INT, BOOL, KEY = Type(), Type("int32"), Type("bool"), Type("key")


class Draws:
    """Choices of hypothesis. It shrinks to the first of several, and to no chance taken."""

    def __init__(self, draw: Any):
        self.draw = draw
        self.counts: Counter[str] = Counter()

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def choice(self, items: Sequence[Any]) -> Any:
        return items[self.number(0, len(items) - 1)]

    def chance(self, percent: int) -> bool:
        return self.number(0, 99) >= 100 - percent

    def weighted(self, items: dict[Any, int]) -> Any:
        at = self.number(0, sum(items.values()) - 1)
        for item, weight in items.items():
            at -= weight
            if at < 0:
                return item
        raise AssertionError("not reached")

    def constant(self) -> str:
        return str(self.choice((0.5, 1.0, -0.5, 0.3, 0.8, -1.2, 2.0)))

    def some(self, constructs: Iterable[str]) -> frozenset[str]:
        """Half of them."""
        return frozenset(name for name in sorted(constructs) if self.chance(50))

    def note(self, what: str) -> None:
        self.counts[what] += 1
