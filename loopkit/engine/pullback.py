"""pullback: the cotangents of a loop, L^T w, linear in w.

    operands  those of the loop, residuals of `forward`, cotangents of the active outputs
    results   cotangents of the active inputs
    JVP       in w, itself; in the primals, `hessian`
    transpose `pushforward`

`batch` is None or the size of a leading axis of the cotangents, which the primals do not have: the
trajectory is replayed once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from loopkit import _jax
from loopkit.engine.backward_sweep import backward_sweep
from loopkit.engine.dual_loop import active_inputs
from loopkit.engine.loop import Active, Loop
from loopkit.engine.primitives import hessian_p, pullback_p, pushforward_p
from loopkit.engine.pushforward import arguments
from loopkit.engine.reversal import reversal


def evaluate(*operands: Any, loop: Loop, layout: Active, active: Active, batch: Any) -> list:
    primals, residuals, cts = arguments(loop, layout, operands)
    how = reversal(loop, layout, active)
    with jax.named_scope(f"loopkit.{loop.name}.backward"):
        return backward_sweep(how, loop.split(primals)[0], residuals, cts, batch)


def result_types(*_: Any, loop: Loop, layout: Active, active: Active, batch: Any) -> tuple:
    types = loop.input_types(active)
    effects = loop.without_debug_effects().effects
    return [t if batch is None else _jax.stack_type(t, batch) for t in types], effects


def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list, list]:
    loop, active = params["loop"], params["active"]
    values, residuals, cts = arguments(loop, params["layout"], primals)
    t_values, _, t_cts = arguments(loop, params["layout"], tangents)
    out = pullback_p.bind(*primals, **params)
    flowing = [_jax.float0_zero(jax.typeof(o)) for o in out]
    if any(type(t) is not _jax.Zero for t in t_cts):
        linear = [_jax.instantiate(t) for t in t_cts]
        flowing = pullback_p.bind(*values, *residuals, *linear, **params)
    moving = active_inputs(loop, t_values, active)
    if any(type(t) is not _jax.Zero for t in moving):
        u = [_jax.instantiate(t) for t in moving]
        if params["batch"] is not None:
            u = [jax.numpy.broadcast_to(t, (params["batch"], *t.shape)) for t in u]
        second = hessian_p.bind(
            *values, *cts, *u, loop=loop, active=active, batch=params["batch"]
        )
        flowing = list(map(_jax.add_tangents, flowing, second))
    return out, flowing


def transpose(cts: Sequence[Any], *operands: Any, **params: Any) -> list:
    loop = params["loop"]
    values, residuals, linear = arguments(loop, params["layout"], operands)
    none = [None] * (len(values) + len(residuals))
    if all(type(c) is _jax.Zero for c in cts):
        return [*none, *[_jax.float0_zero(l.aval) for l in linear]]
    tangents = [_jax.instantiate(c) for c in cts]
    return [*none, *pushforward_p.bind(*values, *residuals, *tangents, **params)]


_jax.define(pullback_p, evaluate, result_types)
_jax.register_jvp(pullback_p, jvp)
_jax.register_transpose(pullback_p, transpose)
