"""Records and values for the leaves of a loop's operands, carry and results."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Operands(NamedTuple):
    """The operands of a loop, or one value per operand (types, flags, axes, tangents)."""

    cond_consts: list
    consts: list
    init: list
    xs: list

    @property
    def flat(self) -> list:
        return [*self.cond_consts, *self.consts, *self.init, *self.xs]


class Active(NamedTuple):
    """Flags for the leaves that have a tangent, or a cotangent.

    The carry's flags are a fixed point of the body.
    """

    consts: tuple[bool, ...]
    carry: tuple[bool, ...]
    xs: tuple[bool, ...]
    ys: tuple[bool, ...]

    @property
    def inputs(self) -> tuple[bool, ...]:
        return self.consts + self.carry + self.xs

    @property
    def outputs(self) -> tuple[bool, ...]:
        return self.carry + self.ys


class Const(NamedTuple):
    """An operand that is the same in every step."""

    lanes: int = 0
    """The number of lane axes that it begins with."""


class CarryLeaf(NamedTuple):
    name: str = ""
    """Its name in reports, such as its path in the initial carry."""
    buffer: bool = False
    """Whether steps read and write it in slices."""
    flag: bool = False
    """Whether it is the flag that says if a step is active, and that masks writes to buffers."""
    outer: bool = False
    """Whether it is also a buffer of an enclosing loop."""
    counter_lower_bound: int | None = None
    """A lower bound on its values, if it counts rows."""


class Input(NamedTuple):
    """One of the xs."""

    axis: int = 0
    """The axis along which it is sliced."""
    lanes: int = 0
    """The number of lane axes that a slice begins with."""


class Output(NamedTuple):
    """One of the ys."""

    axis: int = 0
    """The axis along which it is stacked."""
    log: bool = False
    """Whether it logs what a step overwrites in buffers, in stopped lanes too. Logs are the last
    ys."""


def kept(values: Sequence[T], flags: Sequence[bool]) -> list[T]:
    return [v for v, keep in zip(values, flags, strict=True) if keep]


def spread(values: Sequence[Any], flags: Sequence[bool], default: Sequence[Any]) -> list[Any]:
    """Return `values` in the flagged places, `default` in the others."""
    it = iter(values)
    return [next(it) if keep else d for keep, d in zip(flags, default, strict=True)]


def parts(values: Sequence[T], *counts: int) -> list[list[T]]:
    """Return `values` cut into consecutive parts of the given sizes, and the rest."""
    values_ = iter(values)
    return [*(list(islice(values_, count)) for count in counts), list(values_)]
