"""A carry leaf that is read and written in slices, in place."""

from __future__ import annotations

import contextlib
import functools as ft
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Never, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PyTree

from loopkit import _jax
from loopkit._arguments import errors, validate
from loopkit._buffers import indexing, run_time_checks, slices
from loopkit._buffers.keywords import (
    How,
    Index,
    WriteKw,
    cast,
    check_keywords,
    fill_value_of,
    mode_name,
    without_operators,
    wrong,
)

AT = "Buffer.at[...]."


@dataclass(frozen=True, eq=False)
class Owner:
    """The carry leaf that a buffer stands for, while a step is traced."""

    leaf: int
    """Its index among the leaves of the carry."""
    mask: Any
    """Whether the step counts, since writes in stopped lanes do nothing; None if it always does."""
    step: Any = None
    """The number of the step, if reads and writes are checked."""
    name: str = ""
    """The name of the buffer in errors."""


@jax.tree_util.register_pytree_node_class
@without_operators
class Buffer:
    """An array that a loop reads and writes in slices, in place.

    In the body of a loop, the carry leaves that `buffers` names are `Buffer`s. Read one with
    `b[i]`, and write it with `b.at[i].set(x)`, which returns the updated buffer, as for arrays.
    Indices are those of `jax.numpy`. The gradient costs as much as the slices, not as much as the
    buffer.

    - `b[i]`: read; `jnp.asarray(b)` reads everything.
    - `b.at[i].set(x)`, `add`, `subtract`, `multiply`, `divide`, `power`, `min`, `max`, `apply`:
      write, with the keyword arguments of `jax.numpy.ndarray.at`, and `pred`: a bool, or an array
      of them that broadcasts against `b[i]`, which says what is written.
    - `b.at[i].get(mode=..., fill_value=...)`: read.
    - `b.shape`, `b.dtype`, `b.ndim`, `b.size`, `len(b)`.

    As for arrays, reads out of bounds are moved inside and writes are dropped, unless `mode` says
    otherwise. If index arrays name a row twice, the last value set is kept.

    `Buffer(array)` makes one outside a loop, to try a body by hand."""

    __slots__ = ("_owner", "_seen", "_value", "_written")
    _is_whole = True

    def __init__(self, value: ArrayLike | Buffer):
        is_array = not isinstance(value, Buffer)
        self._value = validate.as_array("Buffer", "value", value) if is_array else value._value
        self._owner: Owner | None = None if is_array else value._owner
        self._written: Any = None if is_array else value._written
        self._seen: tuple[Any, Any] = (None, None)

    @staticmethod
    def _of(value: jax.Array, owner: Owner | None, written: jax.Array | None = None) -> Buffer:
        """Make a buffer. `written` is a mask of what has been written, if that is checked."""
        new = object.__new__(Buffer)
        new._value, new._owner, new._written = value, owner, written
        new._seen = (None, None)  # the value after all entries were read, and these entries
        return new

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        return (self._value,), self._owner

    @classmethod
    def tree_unflatten(cls, owner: Owner | None, children: Sequence[Any]) -> Buffer:
        return cls._of(children[0], owner)

    # ---------------------------------------------------------------- as an array

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._value.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._value.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __len__(self) -> int:
        if not self.shape:
            problem, got = "`len` needs a buffer with an axis", "a buffer of shape ()"
            raise TypeError(wrong(problem, got, "Read the number with `b[()]`."))
        return self.shape[0]

    def __iter__(self) -> Iterator[Array]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"Buffer({errors.short_type(jax.typeof(self._value))})"

    def __jax_array__(self) -> Array:
        return self._read(indexing.place(self.shape, ...))

    # ---------------------------------------------------------------- slices

    def __getitem__(self, index: Index) -> Array:
        place = indexing.place(self.shape, index)
        return run_time_checks.check_read(self, self._read(place), place, True)

    def __setitem__(self, index: Index, value: Never) -> None:
        advice = "Write `b = b.at[i].set(x)`."
        raise TypeError(wrong("a buffer cannot be assigned to", "`b[i] = x`", advice))

    if not TYPE_CHECKING:  # type checkers know what a buffer lacks

        def __getattr__(self, name: str) -> Any:
            advice = "Read the entries with `b[i]`, or all of them, as an array, with `b[...]`."
            raise AttributeError(wrong(f"a buffer has no `{name}`", f"`b.{name}`", advice))

    @property
    def at(self) -> At:
        """`b.at[i]`: what to read or write, as for arrays."""
        return At(self)

    def _read(self, place: indexing.Place) -> Any:
        whole = place.window.sizes == self.shape and not place.batch
        value, entries = self._seen
        if whole and value is self._value:  # else a step would store all entries twice
            return place.outward(entries)
        found, after = slices.read(self._value, place.starts, place.window)
        if _jax.same_trace(after, self._value):
            # Order the next read or write after this read.
            self._value = after
            self._seen = (after, found) if whole else self._seen
        return place.outward(found)

    def _write(self, place: indexing.Place, value: Any, pred: Any, add: bool = False) -> Buffer:
        masks = [] if pred is None else [place.inward_mask(pred)]
        if self._owner is not None and self._owner.mask is not None:
            masks.append(place.inward_mask(self._owner.mask))
        mask = ft.reduce(jnp.logical_and, masks) if masks else None
        stacked = place.inward(value)
        if not add and not place.unique:
            if mask is not None and mask.size > math.prod(place.batch):
                place, stacked, mask = place.by_element(stacked, mask)
            mask = place.last_of_equals(self.shape, mask)
        new = slices.write(self._value, stacked, place.starts, place.window, mask, add)
        written = self._written
        if written is not None:
            yes = jnp.ones(stacked.shape, bool)
            written = slices.write(written, yes, place.starts, place.window, mask)
        return Buffer._of(new, self._owner, written)


@dataclass(frozen=True)
class At:
    """`b.at`, waiting for its index."""

    buffer: Buffer

    def __getitem__(self, index: Index) -> Ref:
        return Ref(self.buffer, index)


@without_operators
@dataclass(frozen=True)
class Ref:
    """`b.at[i]`: part of a buffer."""

    buffer: Buffer
    index: Index

    def get(
        self,
        *,
        mode: Any = None,
        fill_value: ArrayLike | None = None,
        indices_are_sorted: bool = False,
        unique_indices: bool = False,
        **other: Any,
    ) -> Array:
        """Read the entries at the index."""
        check_keywords("get", other)
        if not isinstance(fill_value, (int, float, complex, type(None))):
            validate.as_array(f"{AT}get", "fill_value", fill_value)
        validate.check_flag(f"{AT}get", "unique_indices", unique_indices)
        validate.check_flag(f"{AT}get", "indices_are_sorted", indices_are_sorted)
        how = mode_name("get", mode)
        # The promise makes no difference to reads.
        how = None if how == "promise_in_bounds" else how
        place = indexing.place(self.buffer.shape, self.index, how)
        found = self.buffer._read(place)
        found = run_time_checks.check_read(self.buffer, found, place, mode is None)
        if how != "drop":
            return found
        _, inside = place.window.starts_in(self.buffer.shape, place.starts)
        if inside is None:
            return found
        inside = inside.reshape(*inside.shape, *[1] * self.buffer.ndim)
        inside = place.outward(jnp.broadcast_to(inside, (*place.batch, *place.window.sizes)))
        return jnp.where(inside, found, fill_value_of(self.buffer.dtype, fill_value))

    def set(self, values: ArrayLike, **how: Unpack[WriteKw]) -> Buffer:
        """Return the buffer with `values` at the index."""
        return self._put("set", values, how)

    def add(self, values: ArrayLike, **how: Unpack[WriteKw]) -> Buffer:
        """Return the buffer with `values` added; if an index occurs twice, both are added."""
        return self._put("add", values, how, add=True)

    def subtract(self, values: ArrayLike, **how: Unpack[WriteKw]) -> Buffer:
        return self.add(-validate.as_array(f"{AT}subtract", "values", values), **how)

    def multiply(self, values: ArrayLike, **how: Unpack[WriteKw]) -> Buffer:
        return self._write("multiply", jnp.multiply, values, how)

    def divide(self, values: ArrayLike, **how: Unpack[WriteKw]) -> Buffer:
        return self._write("divide", jnp.divide, values, how)

    def power(self, values: ArrayLike, **how: Unpack[WriteKw]) -> Buffer:
        return self._write("power", jnp.power, values, how)

    def min(self, values: ArrayLike, **how: Unpack[WriteKw]) -> Buffer:
        return self._write("min", jnp.minimum, values, how)

    def max(self, values: ArrayLike, **how: Unpack[WriteKw]) -> Buffer:
        return self._write("max", jnp.maximum, values, how)

    def apply(self, func: Callable[[Array], ArrayLike], **how: Unpack[WriteKw]) -> Buffer:
        """Return the buffer with `func` applied to the entries at the index."""
        validate.check_callable(f"{AT}apply", "func", func)
        return self._write("apply", lambda old, _: func(old), 0, how)

    mul = multiply

    def _put(self, name: str, values: ArrayLike, how: How, add: bool = False) -> Buffer:
        place, pred = self._place(name, how)
        return self.buffer._write(place, self._checked(name, place, pred, how, values), pred, add)

    def _write(self, name: str, combine: Callable[..., Any], values: ArrayLike, how: How) -> Buffer:
        place, pred = self._place(name, how)
        self._check_shape(name, "values", place, values)
        if not place.unique:
            return self._all_at_once(name, combine, place, values, how, pred)
        old = self.buffer._read(place)
        new = self._checked(name, place, pred, how, combine(old, values))
        return self.buffer._write(place, new, pred)

    def _checked(self, name: str, place: indexing.Place, pred: Any, how: How, values: Any) -> Any:
        """Return the values to write, in the dtype of the buffer."""
        self._check_shape(name, "values", place, values)
        return self._in_bounds(name, place, pred, how, cast(name, values, self.buffer.dtype))

    def _in_bounds(self, name: str, place: indexing.Place, pred: Any, how: How, values: Any) -> Any:
        """Return the values, with a run-time error for writes out of bounds if they are checked."""
        if how.get("mode") is not None:
            return values
        verb = f"written with .{name}"
        return run_time_checks.check_bounds(self.buffer, values, place, pred, verb)

    def _all_at_once(
        self,
        name: str,
        combine: Callable[..., Any],
        place: indexing.Place,
        values: ArrayLike,
        how: How,
        pred: Any,
    ) -> Buffer:
        """Write at index arrays that may name a row twice, as jax.numpy does on the whole array."""
        whole = indexing.place(self.buffer.shape, ...)
        array = self.buffer._read(whole)
        index = np.asarray(self.index) if isinstance(self.index, list) else self.index
        ref, given = array.at[index], {k: v for k, v in how.items() if k != "pred"}
        if pred is not None:
            # Write single elements, and move those that are not to be written out of bounds.
            numbers = jnp.arange(array.size).reshape(array.shape).at[index]
            numbers = numbers.get(mode=how.get("mode") or "fill", fill_value=array.size)
            ref, given = array.reshape(-1).at[jnp.where(pred, numbers, array.size)], {}
            values = jnp.broadcast_to(values, place.shape)
        what = (lambda old: combine(old, None)) if name == "apply" else values
        new = getattr(ref, name)(what, **given).reshape(array.shape)
        new = self.buffer._write(whole, self._in_bounds(name, place, pred, how, new), None)
        if new._written is not None:  # mark only the entries at the index
            blank = jnp.zeros(place.shape, self.buffer.dtype)
            new._written = self.buffer._write(place, blank, pred)._written
        return new

    def _place(self, name: str, how: How) -> tuple[indexing.Place, Any]:
        how = dict(how)
        pred, mode = how.pop("pred", None), mode_name(name, how.pop("mode", None))
        flags = "unique_indices", "indices_are_sorted"
        unique, _ = (validate.check_flag(AT + name, k, how.pop(k, False)) for k in flags)
        check_keywords(name, how)
        place = indexing.place(self.buffer.shape, self.index, mode or "drop", unique)
        if pred is None:
            return place, None
        pred = validate.as_array(AT + name, "pred", pred)
        if pred.dtype != bool:
            problem, got = f"`pred` of `.at[...].{name}` must be bools", jax.typeof(pred)
            raise TypeError(wrong(problem, errors.short_type(got), "Compare with a number."))
        self._check_shape(name, "`pred`", place, pred)
        return place, pred

    def _check_shape(self, name: str, what: str, place: indexing.Place, value: object) -> None:
        have, want = validate.as_array(AT + name, "values", value).shape, place.shape
        with contextlib.suppress(ValueError):
            if jnp.broadcast_shapes(have, want) == want:
                return
        problem = f"{what} of `.at[...].{name}` must broadcast to {list(want)}, the shape of the "
        problem += f"indexed entries of {errors.short_type(self.buffer)}"
        advice = "Reshape the values, or index the entries that they are for."
        raise ValueError(wrong(problem, f"{list(have)}", advice))


def is_buffer(value: object) -> bool:
    return isinstance(value, Buffer)


def plain(tree: PyTree[Any]) -> Any:
    """Return the tree with an array for every buffer."""
    return jax.tree.map(lambda v: v._value if is_buffer(v) else v, tree, is_leaf=is_buffer)
