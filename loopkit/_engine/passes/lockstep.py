"""Lanes that read each other's values, by the name of the axis of `jax.vmap` that they are.

What a lane holds once it has stopped is still read, and has a derivative. So the lanes of such a
loop go on together while one of them does, and its step keeps those that have stopped as they are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from loopkit import _jax
from loopkit._engine.loop import Const, Loop, parts
from loopkit._engine.passes.rewritten import Rewritten
from loopkit._engine.steps import hold, select
from loopkit._jaxprs import equations


def axes_between_lanes(loop: Loop) -> tuple:
    """The axes of `jax.vmap` along which a step reads what others have."""
    axes = _jax.vmapped_axes() if loop.axis_names and loop.cond is not None else set()
    return tuple(axes & equations.axis_names(loop.body, others=True)) if axes else ()


def lockstep(loop: Loop) -> Loop | Rewritten:
    """The loop of the lanes together, whose body takes the predicate's constants first."""
    axes, cond, body = axes_between_lanes(loop), loop.cond, loop.body
    if cond is None or not axes:
        return loop
    k, c, n = loop.cond_const_count, loop.const_count, loop.carry_count
    asks, steps = _jax.call_jaxpr(cond), _jax.call_jaxpr(body)
    # Writes to buffers are masked already.
    source = equations.forwarded(body)
    same = [leaf.buffer or source[i] == c + i for i, leaf in enumerate(loop.carry)]

    def any_goes_on(*values: jax.Array) -> list:
        return [lax.psum(asks(*values)[0].astype(int), axes) > 0]

    def held(*values: jax.Array) -> list:
        own, carry, x = parts(values, k + c, n)
        active = asks(*own[:k], *carry)[0]
        new, y = parts(steps(*own[k:], *carry, *x), n)
        return [*hold(active, new, carry, same), *select(active, y, list(map(jnp.zeros_like, y)))]

    types = [*cond.in_avals[:k], *body.in_avals]
    new = loop.replace(
        cond=_jax.trace(any_goes_on, cond.in_avals, "any_lane")[0],
        body=_jax.trace(held, types, "lanes_in_step")[0],
        consts=(Const(),) * k + loop.consts,
    )
    map_operands = lambda operands: [*operands[:k], *operands]
    return Rewritten(new, map_operands, lambda results, _=(): list(results))
