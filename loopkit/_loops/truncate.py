"""Truncated backpropagation through time: blocks of steps, and no gradient between them.

All blocks but the last are steps of an outer loop, whose carry is stopped after each. The last
runs on its own, so that the gradient of the final carry, which reaches no further back, reverses
that block alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from loopkit import _jax
from loopkit._arguments import errors
from loopkit._loops.info import LoopInfo
from loopkit._loops.request import Scan
from loopkit._loops.run_scan import run
from loopkit._loops.some_ys import ReductionState
from loopkit._plans.budget import Budget, Bytes, Policy, stores_every_step
from loopkit._plans.plan import Plan
from loopkit._progress.open_bars import closing_if_it_fails
from loopkit._tracing.axes import SCAN, Inputs, block_axes, joined

FEW_ROWS = 4
"""Rows of residuals to a carry kept, up to which a block stores the residuals of all its steps."""


class Blocks(NamedTuple):
    """The carry of the outer loop."""

    carry: Any
    steps: Any
    stopped: Any


def truncated(scan: Scan) -> tuple[Any, Any, LoopInfo]:
    """A scan of more than `truncate` steps."""
    inputs, until, out_axes = scan.inputs, scan.until, scan.out_axes
    assert scan.truncate is not None, "asked for"
    truncate, count = scan.truncate, -(-inputs.length // scan.truncate) - 1
    outer, inner = _shared(scan.budget, count, truncate)

    # One bar: steps are counted by blocks, or, where a block may end before its last, in each.
    shown = None if scan.progress is None else replace(scan.progress, whole=inputs.length)
    weight = truncate if until is None else 0
    of_blocks = shown and shown.part(True, False, weight=weight)
    in_block = None if shown is None or weight else shown.part(False, False)
    in_tail = shown and shown.part(False, True)

    def of_block(
        init: PyTree[Any], inputs: Inputs, state: Blocks | None = None, **changes: Any
    ) -> Scan:
        before = 0 if state is None or scan.body is None else state.steps
        changes = {"stopped": False, "progress": in_tail, **changes}
        own = {"budget": inner, "before": before, "return_info": True, **changes}
        own["unroll"] = min(scan.unroll, truncate)
        return scan.over(init, scan.buffers, inputs, **own)

    def block(state: Blocks, x: list) -> tuple[Blocks, Any]:
        here = inputs._replace(leaves=x, length=truncate)
        carry, y, info = run(of_block(state.carry, here, state, progress=in_block))
        carry = _cut(carry, None if until is None else info.stopped)
        return Blocks(carry, state.steps + info.steps, info.stopped), y

    head, tail = inputs.divided(count, truncate, scan.reverse)
    # All that a block does, but for its inputs.
    of_inputs = truncate, inputs.tree, *inputs.axes
    made_of = ("truncated", of_inputs, inner, scan.checking, scan.body, scan.carried.flags)
    blocks = scan.over(
        Blocks(scan.init, jnp.int32(0), jnp.array(False)),
        None if scan.some is None else Blocks(scan.some.buffers(None), False, False),
        head,
        some=None,
        f=block,
        until=None if until is None else lambda state, _: state.stopped,
        out_axes=block_axes(out_axes),
        budget=outer,
        unroll=1,  # an iteration is a loop already: several would be long programs
        progress=of_blocks,
        checking=False,
        body=None,
        rest=(*scan.rest, *made_of),
    )
    with closing_if_it_fails():
        before, ys, _ = run(blocks)
        stopped = None if until is None else before.stopped
        rest = of_block(_cut(before.carry, stopped), tail, before, stopped=before.stopped)
        carry, rest, info = run(rest)
    ys = joined(SCAN, ys, rest, out_axes, scan.reverse, stopped)
    return scan.carried.returned(carry), ys, LoopInfo(before.steps + info.steps, info.stopped)


def _shared(budget: Budget, count: int, truncate: int) -> tuple[Any, Any]:
    """What the loop over blocks keeps, and what each block does."""
    if isinstance(budget, Plan):
        advice = (
            "A truncated scan is a loop over blocks, each a loop of its own, and a plan is of one "
            "loop. Give the number of carries, or `memory`."
        )
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
    """The carry without its gradient, but for a loop that has ended in it, and but for ys."""

    def cut(value: jax.Array) -> Any:
        if isinstance(value, ReductionState) or not _jax.is_differentiable(jax.typeof(value)):
            return value
        still = lax.stop_gradient(value)
        return still if stopped is None else jnp.where(stopped, value, still)

    return jax.tree.map(cut, carry, is_leaf=lambda v: isinstance(v, ReductionState))
