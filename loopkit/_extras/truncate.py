"""Truncated backpropagation through time: blocks of steps, and no gradient between them.

All blocks but the last are steps of an outer loop, which stops the gradient of the carry after each
block. The last block runs on its own. The gradient of the final carry reaches no further back, so
it reverses only that block.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32, PyTree

from loopkit import _jax
from loopkit._arguments import errors
from loopkit._plans.budget import Budget, Bytes, Policy, stores_every_step
from loopkit._plans.plan import Plan
from loopkit._progress.open_bars import closing_if_it_fails
from loopkit._tracing.axes import SCAN, Inputs, block_axes, joined
from loopkit._tracing.run import run_scan
from loopkit._tracing.spec import CarryWithYs, LoopInfo, LoopSpec

FEW_ROWS = 4
"""A block stores all its residuals if they have at most this many rows for each kept carry."""


class Blocks(NamedTuple):
    """The carry of the outer loop."""

    carry: Any
    steps: Int32[Array, ""]
    stopped: Bool[Array, ""]


def truncated(spec: LoopSpec, truncate: int | None) -> tuple[Any, Any, LoopInfo | None]:
    """Run a scan that stops the gradient of the carry every `truncate` steps, or never if None."""
    inputs, out_axes, stopping = spec.inputs, spec.out_axes, spec.predicate is not None
    if truncate is None or truncate >= inputs.length:
        return run_scan(spec)
    count = -(-inputs.length // truncate) - 1
    outer, inner = _shared(spec.budget, count, truncate)

    # One bar counts the steps by blocks or, if a block may end early, within each block.
    shown = None if spec.progress is None else replace(spec.progress, whole=inputs.length)
    weight = 0 if stopping else truncate
    of_blocks = shown and shown.part(True, False, weight=weight)
    in_block = None if shown is None or weight else shown.part(False, False)
    in_tail = shown and shown.part(False, True)
    unroll = min(spec.unroll, truncate)

    def of_block(init: PyTree[Any], inputs: Inputs, before: Any, **changes: Any) -> LoopSpec:
        changes |= {"before": before if spec.finite else 0, "return_info": True}
        return spec.over(init, spec.buffers, inputs, budget=inner, unroll=unroll, **changes)

    def block(state: Blocks, x: list) -> tuple[Blocks, Any, Any]:
        here = inputs._replace(leaves=x, length=truncate)
        part = of_block(state.carry, here, state.steps, stopped=False, progress=in_block)
        carry, y, info = run_scan(part)
        carry = _cut(carry, info.stopped if stopping else None)
        go = ~info.stopped if stopping else None
        return Blocks(carry, state.steps + info.steps, info.stopped), y, go

    head, tail = inputs.divided(count, truncate, spec.reverse)
    # All settings of a block, but not the values of its inputs.
    of_inputs = truncate, inputs.tree, *inputs.axes
    of_ys = jax.tree.structure(out_axes), *jax.tree.leaves(out_axes)
    made_of = of_ys, inner, unroll, spec.checking, spec.finite, spec.carried.flags
    rows = (lambda state: [v.rows for v in state.carry.ys.leaves]) if spec.keeps_some else None
    blocks = spec.over(
        Blocks(spec.init, jnp.int32(0), jnp.array(False)),
        rows,
        head,
        body=block,
        made=True,
        predicate=(lambda state, _: state.stopped) if stopping else None,
        out_axes=block_axes(out_axes),
        budget=outer,
        unroll=1,  # each iteration holds a loop: several would make a long program
        progress=of_blocks,
        checking=False,
        finite=None,
        rest=(*spec.rest, "truncated", of_inputs, *made_of),
    )
    with closing_if_it_fails():
        before, ys, _ = run_scan(blocks)
        stopped = before.stopped if stopping else None
        init = _cut(before.carry, stopped)
        last = of_block(init, tail, before.steps, stopped=before.stopped, progress=in_tail)
        carry, rest, info = run_scan(last)
    ys = joined(SCAN, ys, rest, out_axes, spec.reverse)
    info = LoopInfo(before.steps + info.steps, info.stopped)
    return spec.carried.returned(carry), ys, info


def _shared(budget: Budget, count: int, truncate: int) -> tuple[Any, Any]:
    """Return the budget of the loop over blocks, and that of each block."""
    if isinstance(budget, Plan):
        advice = "Pass a number of carries, or `memory`, since each block is a loop of its own."
        expected, got = "cannot be a Plan together with `truncate`", f"truncate={truncate}"
        raise errors.wrong_value(SCAN, "checkpoints", expected, got, advice)
    if isinstance(budget, Bytes):
        half = replace(budget, loops=2)
        return half, half
    if isinstance(budget, int):
        outer = min(count, max(1, budget // 2))
        return outer, max(1, budget - outer)
    if isinstance(budget, Policy):
        return count, budget
    stores = stores_every_step(budget) or truncate <= FEW_ROWS * count
    return count, "all" if stores else None


def _cut(carry: PyTree[Any], stopped: jax.Array | None) -> Any:
    """Stop the gradient of a carry, except for ys and for lanes that ended in the block."""
    if type(carry) is CarryWithYs:
        return CarryWithYs(_cut(carry.carry, stopped), carry.ys)

    def cut(value: jax.Array) -> Any:
        if not _jax.is_differentiable(jax.typeof(value)):
            return value
        still = lax.stop_gradient(value)
        return still if stopped is None else jnp.where(stopped, value, still)

    return jax.tree.map(cut, carry)
