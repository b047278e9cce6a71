"""Truncated backpropagation through time: blocks of steps, and no gradient between them.

All blocks but the last are steps of an outer loop, whose carry is stopped after each. The last
runs on its own, so that the gradient of the final carry, which reaches no further back, reverses
that block alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopkit import _errors, _jax
from loopkit._axes import SCAN, Inputs, block_axes, joined
from loopkit._info import LoopInfo
from loopkit._plan import Budget, Bytes, Plan

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
    budget: Budget,
    of_block: dict[str, Any],
) -> tuple[Any, Any, LoopInfo]:
    """A scan over `inputs` of more than `truncate` steps, by a `scan` that does not truncate.

    `of_block`: settings of the loops over the steps of a block.
    """
    count = -(-inputs.length // truncate) - 1
    outer, inner = _shared(budget, count, truncate)

    def part(f: Callable, init: Any, inputs: Inputs, **settings: Any) -> Any:
        return scan(f, init, inputs, None, reverse=reverse, return_info=True, **settings)

    # All that a block does, but for its inputs.
    chosen = of_block["buffers"]
    by_function = callable(chosen)
    functions = (f, until, chosen if by_function else None)
    named = () if by_function else (jax.tree.structure(chosen), *jax.tree.leaves(chosen))
    made_of = (functions, "truncated", inner, of_block["checks"], inputs.tree, *inputs.axes, *named)

    def block(state: Blocks, x: list) -> tuple[Blocks, Any]:
        here = inputs._replace(leaves=x, length=truncate)
        carry, y, info = part(
            f, state.carry, here, until=until, out_axes=out_axes, checkpoints=inner, **of_block
        )
        carry = _cut(carry, None if until is None else info.stopped)
        return Blocks(carry, state.steps + info.steps, info.stopped), y

    head, tail = inputs.divided(count, truncate, reverse)
    first = Blocks(init, jnp.int32(0), jnp.array(False))
    before, ys, _ = part(
        block,
        first,
        head,
        until=None if until is None else _has_stopped,
        out_axes=block_axes(out_axes),
        checkpoints=outer,
        made_of=made_of,
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
        **of_block,
    )
    ys = joined(SCAN, ys, rest, out_axes, reverse, stopped)
    return carry, ys, LoopInfo(before.steps + info.steps, info.stopped)


def _has_stopped(state: Blocks, _: Any) -> Any:
    return state.stopped


def _shared(budget: Budget, count: int, truncate: int) -> tuple[Any, Any]:
    """What the loop over blocks keeps, and what each block does."""
    if isinstance(budget, Plan):
        raise _errors.wrong_value(
            SCAN,
            "checkpoints",
            "cannot be a Plan together with `truncate`",
            f"truncate={truncate}",
            "A truncated scan is a loop over blocks, each a loop of its own, and a plan is of "
            "one loop. Give the number of carries, or `memory`.",
        )
    if isinstance(budget, Bytes):
        half = replace(budget, loops=2)
        return half, half
    if isinstance(budget, int):
        outer = min(count, max(1, budget // 2))
        return outer, max(1, budget - outer)
    stores = budget == "all" or truncate <= ROWS * count
    return count, "all" if stores else None


def _cut(carry: Any, stopped: Any) -> Any:
    """The carry without its gradient, but for a loop that has ended in it."""

    def cut(value: Any) -> Any:
        if not _jax.is_differentiable(jax.typeof(value)):
            return value
        still = lax.stop_gradient(value)
        return still if stopped is None else jnp.where(stopped, value, still)

    return jax.tree.map(cut, carry)
