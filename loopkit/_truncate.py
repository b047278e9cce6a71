"""Truncated backpropagation through time: blocks of steps, and no gradient between them.

All blocks but the last are steps of an outer loop, whose carry is stopped after each. The last
runs on its own, so that the gradient of the final carry, which reaches no further back, reverses
that block alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopkit import _jax
from loopkit._axes import Inputs, leaf_axes
from loopkit._info import LoopInfo

ROWS = 4
"""Rows of residuals to a carry kept, up to which a block stores the residuals of all its steps."""


class Blocks(NamedTuple):
    """The carry of the outer loop."""

    carry: Any
    steps: Any
    stopped: Any


def truncated(
    scan: Callable,
    f: Callable,
    init: Any,
    inputs: Inputs,
    reverse: bool,
    until: Callable | None,
    out_axes: Any,
    truncate: int,
    checkpoints: Any,
) -> tuple[Any, Any, LoopInfo]:
    """A scan over `inputs` of more than `truncate` steps, by a `scan` that does not truncate."""
    count = -(-inputs.length // truncate) - 1
    outer, inner = _shared(checkpoints, count, truncate)

    def part(f: Callable, init: Any, inputs: Inputs, **settings: Any) -> Any:
        axes = inputs.tree.unflatten(inputs.axes)
        xs = inputs.tree.unflatten(inputs.leaves)
        common = {"in_axes": axes, "reverse": reverse, "return_info": True}
        return scan(f, init, xs, inputs.length, **common, **settings)

    def block(state: Blocks, x: list) -> tuple[Blocks, Any]:
        here = inputs._replace(leaves=x, length=truncate)
        carry, y, info = part(
            f, state.carry, here, until=until, out_axes=out_axes, checkpoints=inner
        )
        carry = _cut(carry, None if until is None else info.stopped)
        return Blocks(carry, state.steps + info.steps, info.stopped), y

    head, tail = _divided(inputs, count, truncate, reverse)
    first = Blocks(init, jnp.int32(0), jnp.array(False))
    before, ys, _ = part(
        block,
        first,
        head,
        until=None if until is None else lambda state, _: state.stopped,
        out_axes=jax.tree.map(_outer_axis, out_axes),
        checkpoints=outer,
    )
    stopped = None if until is None else before.stopped
    carry, rest, info = part(
        f,
        _cut(before.carry, stopped),
        tail,
        until=until,
        out_axes=out_axes,
        checkpoints=inner,
        stopped=before.stopped,
    )
    ys = _joined(ys, rest, out_axes, reverse, stopped)
    return carry, ys, LoopInfo(before.steps + info.steps, info.stopped)


def _shared(checkpoints: Any, count: int, truncate: int) -> tuple[Any, Any]:
    """What the loop over blocks keeps, and what each block does."""
    if isinstance(checkpoints, int):
        outer = min(count, max(1, checkpoints // 2))
        return outer, max(1, checkpoints - outer)
    stores = checkpoints == "all" or truncate <= ROWS * count
    return count, "all" if stores else None


def _cut(carry: Any, stopped: Any) -> Any:
    """The carry without its gradient, but for a loop that has ended in it."""

    def cut(value: Any) -> Any:
        if not _jax.is_differentiable(jax.typeof(value)):
            return value
        still = lax.stop_gradient(value)
        return still if stopped is None else jnp.where(stopped, value, still)

    return jax.tree.map(cut, carry)


def _divided(inputs: Inputs, count: int, size: int, reverse: bool) -> tuple[Inputs, Inputs]:
    """The inputs of `count` blocks, as one step each, and those of the steps left over."""
    total, whole = inputs.length, count * size

    def blocks(x: Any, axis: int | None) -> Any:
        if axis is None:
            return x
        first = total - whole if reverse else 0
        rows = lax.slice_in_dim(x, first, first + whole, axis=axis)
        return rows.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])

    def rest(x: Any, axis: int | None) -> Any:
        if axis is None:
            return x
        first = 0 if reverse else whole
        return lax.slice_in_dim(x, first, first + total - whole, axis=axis)

    pairs = list(zip(inputs.leaves, inputs.axes, strict=True))
    tree = jax.tree.structure(inputs.leaves)
    head = Inputs(tree, [blocks(*p) for p in pairs], inputs.axes, count)
    return head, inputs._replace(leaves=[rest(*p) for p in pairs], length=total - whole)


def _outer_axis(axis: int) -> int:
    """Where to stack blocks that were stacked along `axis`: just before that axis."""
    return axis if axis >= 0 else axis - 1


def _joined(head: Any, tail: Any, out_axes: Any, reverse: bool, stopped: Any) -> Any:
    """ys of the blocks and ys of the last of them, in the order of the rows."""
    axes = leaf_axes("out_axes", out_axes, tail, "what `f` returns as y")

    def join(blocks: Any, rest: Any, axis: int | None) -> Any:
        if axis is None:
            return rest if stopped is None else jnp.where(stopped, blocks, rest)
        axis %= rest.ndim
        shape = blocks.shape
        rows = blocks.reshape(*shape[:axis], -1, *shape[axis + 2 :])
        return lax.concatenate([rest, rows] if reverse else [rows, rest], axis)

    leaves, tree = jax.tree.flatten(tail)
    return tree.unflatten(map(join, jax.tree.leaves(head), leaves, axes))
