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
from loopkit.engine.activity import backward_activity, forward_activity
from loopkit.engine.backward_sweep import backward_sweep
from loopkit.engine.loop import Active, Loop, kept, spread
from loopkit.engine.primitives import hessian_p, pullback_p, pushforward_p
from loopkit.engine.pushforward import arguments
from loopkit.engine.reversal import reversal
from loopkit.engine.stored_pullback import stored_pullback
from loopkit.engine.unrolling import settled


def evaluate(
    *operands: Any,
    loop: Loop,
    layout: Active,
    active: Active,
    batch: Any,
    unread: tuple[bool, ...],
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
        return out, _stored_tangents(operands, moves, loop, active, params["batch"])
    flowing = [_jax.float0_zero(jax.typeof(o)) for o in out]
    if any(type(t) is not _jax.Zero for t in t_cts):
        linear = [_jax.instantiate(t) for t in t_cts]
        flowing = pullback_p.bind(*values, *residuals, *linear, **params)
    second = _second_order(values, t_values, cts, loop, active, params["batch"])
    return out, list(map(_jax.add_tangents, flowing, second))


def _stored_tangents(
    operands: Sequence[Any], tangents: Sequence[Any], loop: Loop, active: Active, batch: Any
) -> list:
    """How the cotangents change, where custom rules make them."""
    moving = [
        i
        for i, t in enumerate(tangents)
        if t is not None and type(t) is not _jax.Zero and i >= loop.cond_const_count
    ]

    def at(*moved: Any) -> list:
        values = list(operands)
        for i, v in zip(moving, moved, strict=True):
            values[i] = v
        return stored_pullback(loop, active, batch, values)

    return jax.jvp(at, [operands[i] for i in moving], [tangents[i] for i in moving])[1]


def _second_order(
    values: Sequence[Any],
    tangents: Sequence[Any],
    cts: Sequence[Any],
    loop: Loop,
    active: Active,
    batch: Any,
) -> list:
    """How the cotangents of the active inputs change as the operands do.

    Operands may move that are not active here; the hessian is taken in both together.
    """
    types = loop.input_types(active)
    if batch is not None:
        types = [_jax.stack_type(t, batch) for t in types]
    zeros = [_jax.Zero(t) for t in types]
    count = loop.cond_const_count
    moves = [type(t) is not _jax.Zero for t in tangents[count:]]
    if not any(moves):
        return zeros
    nonzero = [a or b for a, b in zip(active.inputs, moves, strict=True)]
    flags = loop.split([False] * count + nonzero)[0]
    joint = forward_activity(loop, flags)
    joint = backward_activity(loop, joint, active.carry, active.ys)
    w_types = loop.output_types(joint)
    if batch is not None:
        w_types = [_jax.stack_type(t, batch) for t in w_types]
    # A cotangent for every joint output: zero for those that are not active here.
    w = spread(cts, kept(active.outputs, joint.outputs), list(map(_jax.zeros, w_types)))
    u = [_jax.instantiate(t) for t in kept(tangents[count:], joint.inputs)]
    if batch is not None:
        u = [jax.numpy.broadcast_to(t, (batch, *t.shape)) for t in u]
    out = hessian_p.bind(*values, *w, *u, loop=loop, active=joint, batch=batch)
    of_input = dict(zip([i for i, j in enumerate(joint.inputs) if j], out, strict=True))
    places = [i for i, a in enumerate(active.inputs) if a]
    return [of_input.get(i, zero) for i, zero in zip(places, zeros, strict=True)]


def transpose(cts: Sequence[Any], *operands: Any, **params: Any) -> list:
    loop = params["loop"]
    values, residuals, linear = arguments(loop, params["layout"], operands)
    none = [None] * (len(values) + len(residuals))
    if all(type(c) is _jax.Zero for c in cts):
        return [*none, *[_jax.float0_zero(l.aval) for l in linear]]
    tangents = [_jax.instantiate(c) for c in cts]
    unread = _unread_results(params["active"], params.pop("unread"))
    tangents = [jnp.zeros_like(t) if u else t for t, u in zip(tangents, unread, strict=True)]
    return [*none, *pushforward_p.bind(*values, *residuals, *tangents, **params)]


_jax.define(pullback_p, evaluate, result_types)
_jax.register_jvp(pullback_p, jvp)
_jax.register_transpose(pullback_p, transpose)
