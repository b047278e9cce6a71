"""A scan that stores the residuals of every step: that of lax."""

from __future__ import annotations

import functools as ft

import jax
from jax import lax

from loopkit import _jax
from loopkit._capture import Traced
from loopkit.engine.loop import Loop, kept, parts, spread
from loopkit.engine.unrolling import settled


def run_stored(traced: Traced, init: list, xs: list, split_transpose: bool) -> tuple[list, list]:
    """A scan that stores every step is lax.scan, of the step as it was traced."""
    init = traced.converted(init)
    constants = [*traced.consts, *kept(init, traced.fixed)]
    moving = kept(init, [not f for f in traced.fixed])
    carry, ys = _stored_scan(traced.loop, split_transpose, constants, moving, xs)
    return spread(carry, [not f for f in traced.fixed], init), ys


@ft.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _stored_scan(
    loop: Loop, split_transpose: bool, constants: list, init: list, xs: list
) -> tuple[list, list]:
    def step(carry: list, x: list) -> tuple[list, list]:
        outs = _jax.call_jaxpr(loop.body)(*constants, *carry, *x)
        new, y = parts(outs, loop.carry_count)
        return new, y

    return lax.scan(
        step,
        init,
        xs,
        None if xs else loop.length,  # which may be symbolic
        reverse=loop.reverse,
        unroll=settled(loop),
        _split_transpose=split_transpose,
    )
