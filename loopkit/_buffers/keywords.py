"""Types in the signatures of buffers, and the keywords of `.at[...]`, which are jax.numpy's."""

from __future__ import annotations

import functools as ft
from collections.abc import Mapping
from types import EllipsisType
from typing import Any, Protocol, TypeAlias, TypedDict, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Int

from loopkit._arguments import errors

T = TypeVar("T")
E = TypeVar("E")
"""An element: an array or a tree of arrays."""
Tree: TypeAlias = tuple[Any, ...] | list[Any] | dict[Any, Any]
"""Containers that may hold numbers or types instead of arrays."""
Integer: TypeAlias = int | np.integer[Any] | Int[Array, ""]
"""One integer."""
Many: TypeAlias = tuple[Any, ...] | list[Any] | np.ndarray[Any, Any] | Int[Array, "*slices"]
Index: TypeAlias = Integer | slice | EllipsisType | Many | None
"""An index in brackets: as for arrays, but JAX arrays in it must hold integers."""
How: TypeAlias = Mapping[str, Any]
"""A `WriteKw`, in functions that take it apart."""


class ArrayType(Protocol):
    """A `jax.ShapeDtypeStruct`, whose attributes checkers do not know."""

    shape: Any
    dtype: Any


class WriteKw(TypedDict, total=False):
    """Keywords of a write."""

    pred: bool | np.bool_ | np.ndarray[Any, Any] | Bool[Array, "*slice"] | None
    mode: Any
    unique_indices: bool
    indices_are_sorted: bool
    wrap_negative_indices: bool


MODES = ("drop", "fill", "clip", "promise_in_bounds")

wrong = ft.partial(errors.message, "Buffer")


def mode_name(name: str, mode: object) -> str | None:
    """Return the name of an indexing mode."""
    if mode is None:
        return None
    label = str(getattr(mode, "name", mode)).lower()
    label = {"fill_or_drop": "drop"}.get(label, label)
    if label not in MODES:
        problem = f"`mode` of `.at[...].{name}` must be one of {', '.join(MODES)}"
        raise ValueError(wrong(problem, repr(mode), "Pass a mode of jax.numpy."))
    return "drop" if label == "fill" else label


def check_keywords(name: str, other: dict) -> None:
    other = {k: v for k, v in other.items() if not (k == "wrap_negative_indices" and v in (True,))}
    if other:
        problem = f"`.at[...].{name}` takes mode, pred, unique_indices and indices_are_sorted"
        raise TypeError(wrong(problem, ", ".join(other), "Leave the others out."))


OF_ONE = ("neg", "pos", "abs", "invert", "bool", "int", "float", "complex", "index", "round")
OF_TWO = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow")
OF_TWO += ("lshift", "rshift", "and", "xor", "or")
OPERATORS = (*OF_ONE, "lt", "le", "eq", "ne", "gt", "ge", *OF_TWO, *(f"r{name}" for name in OF_TWO))


def without_operators(cls: type[T]) -> type[T]:
    """Make the operators of a class raise an error that says what to write instead."""

    def refuse(name: str) -> None:
        advice = "Read entries with `b[i]`, or all of them with `b[...]`. Write with `b.at[i].set`."
        raise TypeError(wrong("a buffer has no operators", f"`{name}` of a buffer", advice))

    for name in OPERATORS:
        setattr(cls, f"__{name}__", lambda *_, name=f"__{name}__": refuse(name))
    return cls


def fill_value_of(dtype: np.dtype[Any], fill_value: ArrayLike | None) -> Any:
    """Return what jax.numpy reads out of bounds in mode "fill"."""
    if fill_value is None and jnp.issubdtype(dtype, jnp.inexact):
        fill_value = jnp.nan
    elif fill_value is None and jnp.issubdtype(dtype, jnp.integer):
        unsigned = jnp.issubdtype(dtype, jnp.unsignedinteger)
        fill_value = jnp.iinfo(dtype).max if unsigned else jnp.iinfo(dtype).min
    return jnp.asarray(True if fill_value is None else fill_value, dtype)


def cast(name: str, values: ArrayLike, dtype: np.dtype[Any]) -> Any:
    """Return values in the dtype of a buffer, if that loses nothing but precision."""
    values = jnp.asarray(values)
    if values.dtype == dtype:
        return values
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    have, want = (
        next((i for i, k in enumerate(kinds) if jnp.issubdtype(d, k)), -1)
        for d in (values.dtype, dtype)
    )
    if -1 in (have, want) or have > want:
        problem = f"`.at[...].{name}` needs values of the dtype of the buffer, {dtype}"
        advice = f"Cast them with .astype, or start from a buffer of {values.dtype}."
        raise TypeError(wrong(problem, f"{values.dtype}", advice))
    return jax.lax.convert_element_type(values, dtype)
