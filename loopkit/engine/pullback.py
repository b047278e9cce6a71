"""pullback: the cotangents of a loop, L^T w, linear in w.

    operands  those of the loop, residuals of `forward`, cotangents of the active outputs
    results   cotangents of the active inputs
    JVP       in w, itself; in the primals, `hessian`
    transpose `pushforward`

`batch` is None or the size of a leading axis of the cotangents, which the primals do not have: the
trajectory is replayed once for all of them. `unread` says of which carry leaves nobody asks for the
cotangent of the initial value, as of a buffer that starts with zeros; it is zeros then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from loopkit import _jax
from loopkit.engine.activity import cotangent_activity, linear_activity
from loopkit.engine.backward_sweep import backward_sweep
from loopkit.engine.hessian import second_order
from loopkit.engine.loop import Active, Loop, kept, spread
from loopkit.engine.primitives import define, pullback_p
from loopkit.engine.pushforward import arguments, of_tangents
from loopkit.engine.reversal import reversal
from loopkit.engine.stored_pullback import stored_pullback
from loopkit.engine.unrolling import settled


def evaluate(
    *operands: Any, loop: Loop, layout: Active, active: Active, batch: Any, unread: tuple[bool, ...]
) -> list:
    primals, residuals, cts = arguments(loop, layout, operands)
    how = reversal(loop, layout, active).unrolled(settled(loop, layout)).without(unread)
    with jax.named_scope(f"loopkit.{loop.name}.backward"):
        out = backward_sweep(how, loop.split(primals)[0], residuals, cts, batch)
    unasked = _unread_results(active, unread)
    return [_jax.zeros(jax.typeof(v)) if u else v for v, u in zip(out, unasked, strict=True)]


def _unread_results(active: Active, unread: Sequence[bool]) -> list[bool]:
    """Which results are cotangents that nobody asks for."""
    flags = [*[False] * len(active.consts), *unread, *[False] * len(active.xs)]
    return kept(flags, active.inputs)


def result_types(*_: Any, loop: Loop, active: Active, batch: Any, **__: Any) -> tuple:
    types = loop.input_types(active)
    effects = loop.without_debug_effects().effects
    return [t if batch is None else _jax.stack_type(t, batch) for t in types], effects


def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list, list]:
    loop, active = params["loop"], params["active"]
    values, residuals, cts = arguments(loop, params["layout"], primals)
    t_values, _, t_cts = arguments(loop, params["layout"], tangents)
    out = pullback_p.bind(*primals, **params)
    if loop.holds_custom_vjp:
        # The last residual: the steps taken.
        operands, moves = [*values, residuals[-1], *cts], [*t_values, None, *t_cts]
        stored = lambda *at: stored_pullback(loop, active, params["batch"], at)
        return out, _jax.jvp_in_moving(stored, operands, moves)[1]
    flowing = _of_cotangents([*values, *residuals], t_cts, params)
    second = _second_order(values, t_values, cts, loop, active, params["batch"])
    return out, list(map(_jax.add_tangents, flowing, second))


def _of_cotangents(known: Sequence[Any], cts: Sequence[Any], params: dict[str, Any]) -> list:
    """L^T w for cotangents of which some are symbolically zero, and so are results of no others."""
    loop, active = params["loop"], params["active"]
    live = cotangent_activity(loop, active, [type(c) is not _jax.Zero for c in cts])
    zeros = [_jax.float0_zero(t) for t in result_types(**params)[0]]
    if not any(live.inputs):
        return zeros
    linear = [_jax.instantiate(c) for c in kept(cts, kept(live.outputs, active.outputs))]
    out = pullback_p.bind(*known, *linear, **dict(params, active=live))
    return spread(out, kept(live.inputs, active.inputs), zeros)


def _second_order(
    values: Sequence[Any],
    tangents: Sequence[Any],
    cts: Sequence[Any],
    loop: Loop,
    active: Active,
    batch: Any,
) -> list:
    """How the cotangents of the active inputs change as the operands do."""
    tangents = tangents[loop.cond_const_count :]
    if batch is not None:
        tangents = [
            t if type(t) is _jax.Zero else jnp.broadcast_to(t, (batch, *t.shape)) for t in tangents
        ]
    return second_order(loop, values, cts, active, tangents, active, batch)


def transpose(cts: Sequence[Any], *operands: Any, **params: Any) -> list:
    loop = params["loop"]
    values, residuals, linear = arguments(loop, params["layout"], operands)
    none = [None] * (len(values) + len(residuals))
    unread = _unread_results(params["active"], params.pop("unread"))
    tangents = [
        _jax.float0_zero(t) if u else c
        for t, u, c in zip(loop.input_types(params["active"]), unread, cts, strict=True)
    ]
    out = of_tangents([*values, *residuals], tangents, params)
    asked = map(_jax.is_undefined, linear)
    return [*none, *(t if a else None for t, a in zip(out, asked, strict=True))]


def dce(used: list[bool], eqn: Any) -> tuple[list[bool], Any]:
    """Without the cotangents from which none of the used results follows."""
    if not any(used):
        return [False] * len(eqn.invars), None
    active = eqn.params["active"]
    needed = linear_activity(eqn.params["loop"], active, used)
    found = kept(needed.inputs, active.inputs)
    if any(u and not f for u, f in zip(used, found, strict=True)):
        return [True] * len(eqn.invars), eqn
    reaching = kept(needed.outputs, active.outputs)
    ins = [True] * (len(eqn.invars) - len(reaching)) + reaching
    params = dict(eqn.params, active=needed)
    invars, outvars = kept(eqn.invars, ins), kept(eqn.outvars, found)
    return ins, _jax.new_equation(eqn, pullback_p, invars, outvars, params)


define(pullback_p, evaluate, result_types)
_jax.register_jvp(pullback_p, jvp)
_jax.register_transpose(pullback_p, transpose)
_jax.register_dce(pullback_p, dce)
