"""A scan that stores the residuals of every step: that of lax."""

from __future__ import annotations

import functools as ft

import jax

from loopkit._engine import steps
from loopkit._engine.loop import Loop, Operands, kept, parts, spread
from loopkit._engine.trials.unrolling import settled
from loopkit._tracing.trace import Traced


def run_stored(traced: Traced, init: list, xs: list, split_transpose: bool) -> tuple[list, list]:
    """A scan that stores every step is lax.scan, of the step as it was traced."""
    init, moves = traced.converted(init), [not f for f in traced.fixed]
    consts = [*traced.consts, *kept(init, traced.fixed)]
    operands = Operands([], consts, kept(init, moves), xs)
    carry, ys = parts(_stored_scan(traced.loop, split_transpose, operands), sum(moves))
    return spread(carry, moves, init), ys


@ft.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _stored_scan(loop: Loop, split_transpose: bool, operands: Operands) -> list:
    return steps.scan(loop.unrolled(settled(loop)), operands, split_transpose)
