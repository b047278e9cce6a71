"""Turn the index in the brackets of `b[...]` into a window, starts and a layout.

Indexing follows numpy: `b[i, :, None, rows]` with integers, slices, ellipses, None, arrays of
integers and masks that are not traced, in any combination.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loopkit import _jax
from loopkit._buffers.keywords import wrong
from loopkit._buffers.window import Window

INDEX_ADVICE = "Index with integers, slices, None, an ellipsis, or arrays of integers."


@dataclass(frozen=True)
class Place:
    """The place that an index points to, and the layout of the entries there."""

    window: Window
    starts: Any
    shape: tuple[int, ...]
    """The shape of what the index selects."""
    dropped: tuple[int, ...]
    """Axes of the stacked slices, all of size one, that the result does not have."""
    order: tuple[int, ...]
    """The order of the other axes in the result."""
    new: tuple[int, ...]
    """Axes of the result that come from None."""
    unique: bool
    """Whether no two slices are the same."""

    @property
    def batch(self) -> tuple[int, ...]:
        return tuple(self.starts.shape[:-1])

    def outward(self, slices: jax.Array) -> Any:
        """Bring stacked slices into the shape that the index selects."""
        found = jnp.transpose(jnp.squeeze(slices, self.dropped), self.order)
        return jnp.expand_dims(found, self.new)

    def inward(self, value: jax.typing.ArrayLike) -> Any:
        """Broadcast a value to the shape that the index selects, and cut it into stacked slices."""
        return self._stacked(jnp.broadcast_to(value, self.shape))

    def inward_mask(self, mask: jax.typing.ArrayLike) -> Any:
        """Turn a mask that broadcasts against the selected entries into one for the slices."""
        mask = jnp.reshape(mask, (*[1] * (len(self.shape) - jnp.ndim(mask)), *jnp.shape(mask)))
        stacked = self._stacked(mask)
        rest = stacked.shape[len(self.batch) :]
        return jnp.broadcast_to(stacked, (*self.batch, *rest))

    def _stacked(self, value: jax.Array) -> Any:
        value = jnp.transpose(jnp.squeeze(value, self.new), tuple(map(int, np.argsort(self.order))))
        return jnp.expand_dims(value, self.dropped)

    def last_of_equals(self, shape: Sequence[int], mask: jax.Array | None) -> Any:
        """Return a mask of the slices in `mask` (None: all) that no later slice overwrites."""
        at, inside = self.window.starts_in(shape, self.starts)
        room = [shape[a] for a in self.window.axes]
        if all(isinstance(n, int) for n in room) and math.prod(room) < 2**31:
            # Single numbers are faster to sort; for larger buffers they would overflow.
            strides = np.array([math.prod(room[i + 1 :]) for i in range(len(room))], at.dtype)
            at = (at * strides).sum(-1, keepdims=True)
        written = jnp.ones(self.batch, bool) if mask is None else mask.reshape(self.batch)
        written = written if inside is None else written & inside
        last = written & _last(jnp.where(written[..., None], at, -1))
        return last.reshape(*self.batch, *[1] * len(shape))

    def by_element(self, value: jax.Array, mask: jax.Array) -> tuple[Place, Any, Any]:
        """Split a write into slices of one element; return place, stacked slices and mask."""
        window, batch, ndim = self.window, self.batch, len(self.window.sizes)
        rest = [a for a in range(ndim) if a not in window.axes]
        sizes = [window.sizes[a] for a in rest]
        grid = np.moveaxis(np.indices(sizes, self.starts.dtype), 0, -1)
        grid = grid + np.array([window.offsets[a] for a in rest], grid.dtype)
        starts = self.starts.reshape(*batch, *[1] * len(sizes), len(window.axes))
        starts = jnp.broadcast_to(starts, (*batch, *sizes, len(window.axes)))
        grid = jnp.broadcast_to(grid, (*batch, *grid.shape))
        axes, stacked = (*window.axes, *rest), (*batch, *sizes, *[1] * ndim)
        ones = replace(window, axes=axes, offsets=(0,) * ndim, sizes=(1,) * ndim)
        place = replace(self, window=ones, starts=jnp.concatenate([starts, grid], -1))
        return place, value.reshape(stacked), jnp.broadcast_to(mask, value.shape).reshape(stacked)


def _last(places: jax.Array) -> Any:
    """Mark the places (tuples of integers along the last axis) that do not occur again later."""
    flat = places.reshape(-1, places.shape[-1])
    if len(flat) <= 64:
        later = np.triu(np.ones((len(flat), len(flat)), bool), 1)
        last = ~((flat[:, None] == flat).all(-1) & later).any(1)
    else:
        order = jnp.lexsort(flat.T)
        ordered = flat[order]
        ends = jnp.append((ordered[1:] != ordered[:-1]).any(-1), True)
        last = jnp.zeros(len(flat), bool).at[order].set(ends, unique_indices=True)
    return last.reshape(places.shape[:-1])


def place(shape: Sequence[int], index: Any, mode: str | None = None, unique: bool = False) -> Place:
    """Find where `index` points in a buffer of this shape.

    `mode` is for slices out of bounds, as in `Window`; None is that of `jax.numpy` for reads.
    `unique` promises that the index has no duplicates."""
    index = index if isinstance(index, tuple) else (index,)
    items = _expanded(shape, index)
    arrays = [v for kind, v, _ in items if kind == "array"]
    has_arrays = any(np.ndim(a) for a in arrays)
    mode, wrap = _mode(mode, index, arrays, has_arrays)
    together = jnp.broadcast_shapes(*[np.shape(a) for a in arrays]) if arrays else ()
    steps = [v for kind, v, _ in items if kind == "steps"]
    batch = (*together, *map(len, steps))
    axes, columns = [], []
    offsets, sizes = [0] * len(shape), list(shape)
    tokens: list[Any] = []  # the axes of the result, as numbers of axes of the stacked slices
    # If anything else stands between integers and arrays, numpy puts their axes first.
    places = [i for i, (kind, _, _) in enumerate(items) if kind == "array"]
    front = bool(places) and places[-1] - places[0] + 1 > len(places)
    placed, step = False, 0
    for kind, v, axis in items:
        if kind == "array":
            if has_arrays and not placed:
                block = list(range(len(together)))
                tokens = block + tokens if front else tokens + block
                placed = True
            sizes[axis] = 1
            fixed = _known_start(v, shape[axis])
            if fixed is not None:
                offsets[axis] = fixed
                continue
            axes.append(axis)
            columns.append(jnp.asarray(v).reshape(*np.shape(v), *[1] * len(steps)))
        elif kind == "steps":
            axes.append(axis)
            columns.append(jnp.asarray(v).reshape(len(v), *[1] * (len(steps) - step - 1)))
            tokens.append(len(together) + step)
            sizes[axis], step = 1, step + 1
        elif kind == "slice":
            offsets[axis], sizes[axis] = v
            tokens.append(len(batch) + axis)
        elif kind == "new":
            tokens.append(None)
    dtype = np.int32 if all(_jax.volume([n]) < 2**31 for n in shape) else np.int64
    if columns:
        columns = [jnp.broadcast_to(c.astype(dtype), batch) for c in columns]
        starts = jnp.stack(columns, -1) if len(columns) > 1 else columns[0][..., None]
    else:
        starts = np.zeros((0,), dtype)
    order = [t for t in tokens if t is not None]
    stacked = (*batch, *sizes)
    dropped = tuple(i for i in range(len(stacked)) if i not in order)
    rows = [(v, shape[axis]) for kind, v, axis in items if kind == "array" and np.ndim(v)]
    return Place(
        Window(tuple(axes), tuple(offsets), tuple(sizes), mode, wrap),
        starts,
        tuple(1 if t is None else stacked[t] for t in tokens),
        dropped,
        tuple(map(sorted(order).index, order)),
        tuple(i for i, t in enumerate(tokens) if t is None),
        unique or not has_arrays or _all_differ(rows),
    )


def _mode(mode: str | None, index: tuple, arrays: list, has_arrays: bool) -> tuple[str, bool]:
    """Return the mode for slices out of bounds, and whether negative starts count from the end."""
    # An unsigned index never counts from the end, however large, ...
    wrap = not arrays or any(a.dtype.kind == "i" for a in arrays)
    if mode is not None:
        return mode, wrap
    # ... except where jax.numpy reads one slice instead of gathering.
    strided = any(isinstance(v, slice) and v.step not in (None, 1, -1) for v in index)
    gathers = has_arrays or (strided and bool(arrays))
    return ("promise_in_bounds", wrap) if gathers else ("clip", True)


def _expanded(shape: Sequence[int], index: tuple) -> list[tuple[str, Any, int]]:
    """Return (kind, value, axis) for each entry of an index, with masks and ellipses expanded."""
    plain = [_item(v) for v in index]
    used = sum(v.ndim if _is_mask(v) else v is not None and v is not Ellipsis for v in plain)
    if used > len(shape):
        problem = f"an index must have at most {len(shape)} entries, one for each axis of a buffer "
        raise IndexError(wrong(f"{problem}of shape {tuple(shape)}", f"{used}", INDEX_ADVICE))
    ellipses = [i for i, v in enumerate(plain) if v is Ellipsis]
    if len(ellipses) > 1:
        problem = "an index must have at most one ellipsis"
        raise IndexError(wrong(problem, f"{len(ellipses)}", INDEX_ADVICE))
    if not ellipses:
        plain.append(Ellipsis)
    items: list[tuple[str, Any, int]] = []
    for v in plain:
        axis = sum(of >= 0 for _, _, of in items)
        if v is None:
            items.append(("new", None, -1))
        elif v is Ellipsis:
            rest = range(axis, axis + len(shape) - used)
            items += [("ellipsis", None, -1), *(("slice", (0, shape[a]), a) for a in rest)]
        elif isinstance(v, slice):
            items.append((*_slice(v, shape[axis]), axis))
        elif _is_mask(v):
            want = tuple(shape[axis : axis + v.ndim])
            if any(n not in (0, size) for n, size in zip(v.shape, want, strict=True)):
                problem = f"a mask must have the shape {want} of the axes that it covers, from "
                problem += f"axis {axis} of a buffer of shape {tuple(shape)}"
                advice = "Put `:` or an ellipsis before the mask to move it to other axes."
                raise IndexError(wrong(problem, f"{v.shape}", advice))
            items += [("array", rows, axis + i) for i, rows in enumerate(np.nonzero(v))]
        else:
            items.append(("array", v, axis))
    return items


def _item(v: Any) -> Any:
    """Check one entry of an index: None, an ellipsis, a slice, or an array of integers or bools."""
    if v is None or v is Ellipsis or isinstance(v, slice):
        return v
    if isinstance(v, (list, tuple)):
        v = np.asarray(v, np.int32 if not len(v) else None)
    if isinstance(v, int) and not isinstance(v, bool):
        v = np.asarray(v)
    got = repr(v)
    if isinstance(v, (np.ndarray, np.generic, jax.Array)) and not isinstance(v, np.bool_):
        traced, is_mask = _jax.is_tracer(v), v.dtype == np.dtype(bool) and v.ndim
        got = f"an array of {v.dtype}"
        if is_mask and traced:
            problem = "a mask used as an index must be known when the loop is traced, since it "
            problem += "decides how many entries there are"
            advice = "Write with `pred=mask`, or read all entries and use jnp.where."
            raise IndexError(wrong(problem, f"a traced bool{list(v.shape)}", advice))
        if is_mask or jnp.issubdtype(v.dtype, jnp.integer):
            return v if traced else np.asarray(v)
    raise TypeError(wrong("an index must consist of integers", got, INDEX_ADVICE))


def _is_mask(v: object) -> bool:
    return isinstance(v, np.ndarray) and v.dtype == bool


def _slice(v: slice, size: int) -> tuple[str, Any]:
    if v == slice(None):
        return "slice", (0, size)  # which may be symbolic
    try:
        start, stop, step = v.indices(size)
    except (TypeError, jax.errors.JAXTypeError):
        problem = "a slice must have static ends, since they decide its length"
        advice = "Index with `start + jnp.arange(length)`."
        raise IndexError(wrong(problem, f"{v}", advice)) from None
    if step == 1:
        return "slice", (start, max(0, stop - start))
    return "steps", np.arange(start, stop, step, dtype=np.int32)


def _known_start(v: Any, size: int) -> int | None:
    """Return where a known integer points to; None if it is traced, an array or out of bounds."""
    if _jax.is_tracer(v) or np.ndim(v):
        return None
    start = int(v) + size if int(v) < 0 else int(v)
    return start if 0 <= start < size else None


def _all_differ(rows: Sequence[tuple[Any, int]]) -> bool:
    """Return whether index arrays (each with its axis size) are known and repeat no place."""
    if any(_jax.is_tracer(a) or (a < 0).any() or (a >= size).any() for a, size in rows):
        return False
    points = np.stack([a.ravel() for a in np.broadcast_arrays(*(a for a, _ in rows))], -1)
    return len(np.unique(points, axis=0)) == len(points)
