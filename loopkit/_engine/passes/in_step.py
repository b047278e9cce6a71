"""Lanes that read each other's values, by the name of the axis of `jax.vmap` that they are.

What a lane holds once it has stopped is still read, and has a derivative. So the lanes of such a
loop go on together while one of them does, and its step keeps those that have stopped as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from loopkit import _jax
from loopkit._engine.loop import parts
from loopkit._engine.steps import hold, select
from loopkit._jaxprs import equations


def axes_between_lanes(body: _jax.Jaxpr) -> tuple:
    """The axes of `jax.vmap` along which a step reads what others have."""
    axes = _jax.vmapped_axes()
    return tuple(axes & equations.axis_names(body, others=True)) if axes else ()


def in_step(
    cond: _jax.Jaxpr, k: int, body: _jax.Jaxpr, c: int, buffers: Sequence[bool], axes: tuple
) -> tuple[_jax.Jaxpr, _jax.Jaxpr]:
    """Predicate and body of the lanes together; the body takes the predicate's constants first.

    `k` and `c`: how many constants they have. Writes to `buffers` are masked already.
    """
    asks, steps, n = _jax.call_jaxpr(cond), _jax.call_jaxpr(body), len(buffers)
    source = equations.forwarded(body)
    same = [b or source[i] == c + i for i, b in enumerate(buffers)]

    def any_goes_on(*values: Any) -> list:
        return [lax.psum(asks(*values)[0].astype(int), axes) > 0]

    def held(*values: Any) -> list:
        own, carry, x = parts(values, k + c, n)
        active = asks(*own[:k], *carry)[0]
        new, y = parts(steps(*own[k:], *carry, *x), n)
        return [*hold(active, new, carry, same), *select(active, y, list(map(jnp.zeros_like, y)))]

    types = [*cond.in_avals[:k], *body.in_avals]
    together, _ = _jax.trace(any_goes_on, cond.in_avals, "any_lane")
    return together, _jax.trace(held, types, "lanes_in_step")[0]
