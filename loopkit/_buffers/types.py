"""Names for the types in the signatures of buffers."""

from __future__ import annotations

from collections.abc import Mapping
from types import EllipsisType
from typing import Any, Protocol, TypeAlias, TypedDict, TypeVar

import numpy as np
from jaxtyping import Array, Bool, Int

E = TypeVar("E")
"""An element: an array or a tree of arrays."""
Tree: TypeAlias = tuple[Any, ...] | list[Any] | dict[Any, Any]
"""Containers that may hold numbers or types instead of arrays."""
Integer: TypeAlias = int | np.integer[Any] | Int[Array, ""]
"""One integer."""
Many: TypeAlias = tuple[Any, ...] | list[Any] | np.ndarray[Any, Any] | Int[Array, "*slices"]
Index: TypeAlias = Integer | slice | EllipsisType | Many | None
"""An index between brackets: as for arrays, but without arrays of bools."""
How: TypeAlias = Mapping[str, Any]
"""A `WriteKw`, where it is taken apart."""


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
