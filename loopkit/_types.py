"""Names for the types in the signatures of public functions.

`T` and `C` are carries, `X` and `Y` rows of `xs` and of `ys`: any pytrees of arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, Union
from typing import TypeAlias as Alias

import numpy as np
from jaxtyping import Array, Bool, Int

from loopkit._plans.plan import Plan

T = TypeVar("T")
C = TypeVar("C")
X = TypeVar("X")
Y = TypeVar("Y")
R = TypeVar("R")
P = ParamSpec("P")
Like: Alias = Union[  # noqa: UP007  # a bare type variable has no `|` that checkers read
    T, complex, np.generic, np.ndarray[Any, Any], tuple[Any, ...], list[Any], dict[Any, Any], None
]
"""A `T`, or numbers, NumPy arrays and containers of them, which the loop turns into a `T`. The
loop's functions say what `T` is, so `0.0` may start a carry that is a `jax.Array`."""
Bit: Alias = bool | np.bool_ | Bool[Array, ""]
"""One bool."""
Bound: Alias = int | np.integer[Any] | Int[Array, ""]
"""One integer, static or traced."""
Predicate: Alias = Callable[[T], Bit]
"""Whether to go on."""
Body: Alias = Callable[[T], T]
"""A step of a while loop."""
Indexed: Alias = Callable[[Any, T], T]
"""A body that is also given the number of the step."""
Step: Alias = Callable[[C, X], tuple[C, Y]]
"""A step of a scan: from the carry and a row of `xs`, the next carry and a row of `ys`."""
Until: Alias = Callable[[C, Y], Bit]
"""Whether to stop after a step, by the carry and the row of `ys` that it returned."""
Checkpoints: Alias = int | Literal["all"] | Callable[..., Any] | Plan | None
"""The number of carries that the backward pass keeps, "all", a policy of `jax.checkpoint`, or a
plan that says what it keeps."""
Memory: Alias = int | str | Mapping[str, int | str] | None
"""A number of bytes, as an int or as in "64 MB"; or a dict of those for "device" and "host"."""
Lanes: Alias = Literal["wait", "compact", "flatten"] | tuple[int, ...] | None
"""What happens to lanes that have stopped, or the widths that a loop narrows to."""
Debug: Alias = Literal["finite"] | None
"""The mistakes to look for while a loop runs."""
DebugLoop: Alias = Literal["finite", "bounds"] | Sequence[Literal["finite", "bounds"]] | None
"""The mistakes to look for in a loop that may have buffers."""
Unroll: Alias = int
"""The number of steps in an iteration; a bool as in lax."""
Axes: Alias = Any
"""An axis, None, or a tree of these that is a prefix of the arrays' tree."""


class Bars(Protocol):
    """An object that shows how far a loop is. `start` may return another for its bar alone."""

    def start(self, total: int | None, /) -> Any: ...
    def update(self, steps: int, /) -> Any: ...
    def close(self) -> Any: ...


Progress: Alias = Literal["tqdm", "line"] | Bars | None
"""The way in which a loop shows how far it is."""
Reduce: Alias = Any
"""How to reduce ys: "sum", "mean", "last", None, or a tree of these that is a prefix of a y."""
BufferSpec: Alias = Callable[[Any], Any] | bool | tuple[Any, ...] | list[Any] | dict[Any, Any]
"""A function of the carry that returns leaves of it, or a tree of bools."""


class Decorator(Protocol):
    """A decorator that keeps the signature of a function."""

    def __call__(self, fn: Callable[P, R], /) -> Callable[P, R]: ...
