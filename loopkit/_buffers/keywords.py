"""The keywords of a buffer's `.at[...]`, which mean what they mean in jax.numpy."""

from __future__ import annotations

import functools as ft
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from loopkit._arguments import errors

T = TypeVar("T")

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
    """Return the class, whose operators then raise an error that says what to write instead."""

    def refuse(name: str) -> None:
        advice = "Read entries with `b[i]`, or all of them with `b[...]`. Write with `b.at[i].set`."
        raise TypeError(wrong("a buffer has no operators", f"`{name}` of a buffer", advice))

    for name in OPERATORS:
        setattr(cls, f"__{name}__", lambda *_, name=f"__{name}__": refuse(name))
    return cls


def fill_value_of(dtype: np.dtype[Any], fill_value: jax.typing.ArrayLike | None) -> Any:
    """Return what jax.numpy reads out of bounds in mode "fill"."""
    if fill_value is None and jnp.issubdtype(dtype, jnp.inexact):
        fill_value = jnp.nan
    elif fill_value is None and jnp.issubdtype(dtype, jnp.integer):
        unsigned = jnp.issubdtype(dtype, jnp.unsignedinteger)
        fill_value = jnp.iinfo(dtype).max if unsigned else jnp.iinfo(dtype).min
    return jnp.asarray(True if fill_value is None else fill_value, dtype)
