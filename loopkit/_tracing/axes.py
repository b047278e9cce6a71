"""Choose the axis along which each leaf of a tree is sliced or stacked, and whether in place.

loopkit slices an array where it lies, with one exception. If each step would use only a few bytes
of every cache line, and of more lines than stay cached until the next step, loopkit transposes the
array first. docs/choosing.md has the measurements.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import keystr, tree_leaves_with_path
from jaxtyping import PyTree

from loopkit import _jax
from loopkit._arguments import errors, validate
from loopkit._arguments.errors import short_type
from loopkit._arguments.static_leaves import is_static

LINE = 64
"""The size of a cache line, in bytes."""
SHORT_RUN_BYTES = 16
"""Runs of fewer contiguous bytes than this make poor use of a cache line."""
SCANNED_BYTES = 1 << 13
"""How many bytes of cache lines stay cached from one step to the next."""

SCAN = "scan"

Axes = Any
"""The type of a tree prefix of ints and Nones."""


class Inputs(NamedTuple):
    """The leaves of `xs`, and how each is sliced."""

    tree: Any
    leaves: list
    axes: Sequence[int | None]
    """The axis along which each leaf is sliced; None if each step gets it whole."""
    length: Any
    """The number of rows; None if the caller does not know it."""

    @staticmethod
    def of(
        xs: PyTree[Any],
        in_axes: Axes,
        length: int | None = None,
        function: str = SCAN,
        argument: str = "xs",
    ) -> Inputs:
        """Check `xs`, and that `length` and every leaf agree on the number of steps."""
        if length is not None:
            expected = "an int >= 0 (steps)"
            length = validate.check_whole(function, "length", length, 0, expected)
        leaves = tree_leaves_with_path(xs)
        axes = leaf_axes("in_axes", in_axes, xs, f"`{argument}`", function)
        wrong = ft.partial(errors.wrong_value, function, argument)
        for (path, leaf), axis in zip(leaves, axes, strict=True):
            if leaf.ndim == 0 and axis is not None:
                advice = "Give it an axis with a row for each step, or close over it."
                expected = "must have a leading axis to scan over"
                raise wrong(expected, short_type(jax.typeof(leaf)), advice, path)
        axes = normalised("in_axes", axes, xs, function)
        first = None
        for (path, leaf), axis in zip(leaves, axes, strict=True):
            if axis is None:
                continue
            rows, called = leaf.shape[axis], f"axis {axis}" if axis else "leading axis"
            if length is not None and rows != length:
                advice = "Leave `length` out, or slice `xs`."
                got = f"{called} {rows} and length={length}"
                raise wrong("must have `length` rows", got, advice, path)
            if first is not None and rows != first[1]:
                advice = "Slice or pad the leaves, since each step takes a row of every leaf."
                got = f"{rows} rows, and {first[1]} in `{argument}{keystr(first[0])}`"
                raise wrong("must have equally many rows in every leaf", got, advice, path)
            first = (path, rows)
        if first is not None:
            length = first[1]
        if length is None:
            if function != SCAN:
                advice = "Pass at least one array to be sliced."
                raise wrong("must have an array with rows", "none", advice)
            raise _no_length(function, argument, xs, bool(leaves))
        return Inputs(jax.tree.structure(xs), [leaf for _, leaf in leaves], axes, length)

    @property
    def sliced(self) -> list[tuple[Any, int]]:
        """The leaves that are sliced, each with its axis."""
        return [(x, a) for x, a in zip(self.leaves, self.axes, strict=True) if a is not None]

    @property
    def whole(self) -> list:
        return [x for x, a in zip(self.leaves, self.axes, strict=True) if a is None]

    @property
    def places(self) -> tuple[int, ...]:
        """The axes along which arrays are sliced, after transposing those that gain from it."""
        return tuple(in_place(jax.typeof(x), a) for x, a in self.sliced)

    @property
    def arrays(self) -> list:
        pairs = zip(self.sliced, self.places, strict=True)
        return [x if a == place else jnp.moveaxis(x, a, place) for (x, a), place in pairs]

    @property
    def slice_types(self) -> list:
        if not self.leaves:
            return []
        context = _jax.trace_context()
        return [_slice_type(validate.type_of(x), a, context) for x, a in self.sliced]

    def join(self, slices: Sequence[Any], whole: Sequence[Any]) -> Any:
        """Assemble the input of a step from slices and whole leaves."""
        of_slices, of_whole = iter(slices), iter(whole)
        return self.tree.unflatten(next(of_whole if a is None else of_slices) for a in self.axes)

    def slices(self, t: int) -> list:
        """Return the slices for step `t`."""
        return [lax.index_in_dim(x, t, a, keepdims=False) for x, a in self.sliced]

    def divided(self, count: int, size: int, reverse: bool = False) -> tuple[Inputs, Inputs]:
        """Return inputs of `count` blocks of `size` rows, a block per step, and of the other rows.

        The blocks are the first rows, or the last rows if `reverse`.
        """
        whole, left = count * size, self.length - count * size
        first, after = (left, 0) if reverse else (0, whole)

        def blocks(x: jax.Array, axis: int) -> Any:
            rows = lax.slice_in_dim(x, first, first + whole, axis=axis) if left else x
            return rows.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])

        def each(part: Callable[[Any, int], Any]) -> list:
            pairs = zip(self.leaves, self.axes, strict=True)
            return [x if a is None else part(x, a) for x, a in pairs]

        head = Inputs(jax.tree.structure(self.leaves), each(blocks), self.axes, count)
        rest = each(lambda x, axis: lax.slice_in_dim(x, after, after + left, axis=axis))
        return head, self._replace(leaves=rest, length=left)


NO_INPUTS = Inputs(jax.tree.structure(None), [], [], None)


def _no_length(function: str, argument: str, xs: PyTree[Any], whole: bool) -> ValueError:
    """Make the error for xs without a row for each step; `whole` says if they have arrays."""
    found = jax.tree.leaves(xs, is_leaf=is_static)
    got = f"`{argument}` without leaves{' to scan over' if whole else ''} and length=None"
    advice = f"Pass `length`, or an array in `{argument}`."
    if found and not whole:
        got = f"`{argument}` with leaves that are no arrays, such as {found[0]!r}, and length=None"
        advice = f"Make an array of `{argument}`, as in jnp.array([1.0, 2.0])."
    expected = "must say how many steps to take"
    return errors.wrong_value(function, "length", expected, got, advice)


@ft.lru_cache(1024)
def _slice_type(aval: _jax.ShapedArray, axis: int, _: object) -> Any:
    """Return `_jax.slice_type`, cached because it would otherwise dominate the time of a call."""
    return _jax.slice_type(aval, axis)


def in_place(aval: _jax.ShapedArray, axis: int) -> int:
    """Return the axis to slice along: `axis`, or 0 if transposing the array first is faster."""
    item = getattr(aval.dtype, "itemsize", LINE)
    run = _jax.volume(aval.shape[axis + 1 :]) * item
    lines = _jax.volume(aval.shape[:axis])
    return 0 if run < SHORT_RUN_BYTES and lines * LINE > SCANNED_BYTES else axis


def leaf_axes(
    argument: str, axes: Axes, tree: PyTree[Any], of: str, function: str = SCAN
) -> list[int | None]:
    """Expand a prefix of a tree to the axis of each of its leaves; `of` names it in errors."""
    advice = "Give an int or None for each leaf, or for whole subtrees."
    flat = validate.from_prefix(function, argument, axes, tree, of, advice)
    for (path, _), axis in zip(tree_leaves_with_path(tree), flat, strict=True):
        if isinstance(axis, bool) or not isinstance(axis, (int, np.integer, type(None))):
            expected, advice = "must hold ints or None", "Pass the number of an axis, or None."
            got = errors.shown(axis)
            raise errors.wrong_type(function, argument, expected, got, advice, path)
    return flat


def normalised(
    argument: str,
    axes: Sequence[int | None],
    tree: PyTree[Any],
    function: str = SCAN,
    extra: int = 0,
) -> list[int | None]:
    """Check axes, and count negative ones from the start; the leaves lack `extra` axes so far."""
    new = []
    for (path, leaf), axis in zip(tree_leaves_with_path(tree), axes, strict=True):
        rank = len(leaf.shape) + extra
        if axis is not None and not -rank <= axis < rank:
            expected, got = "must name axes of the arrays", f"axis {axis} for {short_type(leaf)}"
            advice = f"Pass {f'an axis from {-rank} to {rank - 1}, or ' if rank else ''}None."
            raise errors.wrong_value(function, argument, expected, got, advice, path)
        new.append(axis if axis is None else int(axis) % rank)
    return new


def has_none(axes: Axes) -> bool:
    if type(axes) is int:
        return False
    return any(a is None for a in jax.tree.leaves(axes, is_leaf=lambda a: a is None))


def y_axes(out_axes: Axes, y: PyTree[Any], no_rows: Sequence[bool] = ()) -> list[int | None]:
    """Return the axis along which each leaf of y (or its type) is stacked, None for not stacked."""
    axes = leaf_axes("out_axes", out_axes, y, "what `f` returns as y")
    if no_rows:
        axes = [None if no else axis for axis, no in zip(axes, no_rows, strict=True)]
    return normalised("out_axes", axes, y, extra=1)


def stacks(
    tree: _jax.TreeDef, types: Sequence[Any], out_axes: Axes
) -> tuple[list[int], tuple[int, ...]]:
    """Return, for each leaf of ys, the requested axis, and the axis along which rows are written.

    `types` are the types of ys stacked along the leading axis.
    """
    if type(out_axes) is int and out_axes == 0:
        return [0] * len(types), (0,) * len(types)
    rows = [_jax.slice_type(t) for t in types]
    axes = [a for a in y_axes(out_axes, tree.unflatten(rows)) if a is not None]
    shapes = [_jax.stack_type(r, t.shape[0], a) for r, t, a in zip(rows, types, axes, strict=True)]
    return axes, tuple(in_place(t, a) for t, a in zip(shapes, axes, strict=True))


def block_axes(out_axes: Axes) -> Axes:
    """Return the axes along which to stack blocks: just before `out_axes`."""
    before = lambda axis: axis - 1 if isinstance(axis, (int, np.integer)) and axis < 0 else axis
    return jax.tree.map(before, out_axes)


def joined(
    function: str, head: PyTree[Any], tail: PyTree[Any], out_axes: Axes, reverse: bool = False
) -> Any:
    """Join the ys of blocks and the ys of the remaining rows, in the order of the rows."""
    leaves, tree = jax.tree.flatten(tail)
    axes = leaf_axes("out_axes", out_axes, tail, "what is returned", function)

    def join(blocks: jax.Array, rest: jax.Array, axis: int | None) -> Any:
        if axis is None:
            return rest
        rows = merged(blocks, axis % rest.ndim)
        return lax.concatenate([rest, rows] if reverse else [rows, rest], axis % rest.ndim)

    return tree.unflatten(map(join, jax.tree.leaves(head), leaves, axes))


def merged(blocks: jax.Array, axis: int) -> Any:
    """Merge the axis of blocks with the axis of rows that follows it."""
    rows = blocks.shape[axis] * blocks.shape[axis + 1]  # -1 would fail for empty rows
    return blocks.reshape(*blocks.shape[:axis], rows, *blocks.shape[axis + 2 :])
