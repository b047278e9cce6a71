"""pullback: the cotangents of a loop, L^T w, linear in w.

    operands  those of the loop, residuals of `forward`, cotangents of the active outputs
    results   cotangents of the active inputs
    JVP       in w, itself; in the primals, `hessian`
    transpose `pushforward`

`batch` is None or the size of a leading axis of the cotangents, which the primals do not have: the
trajectory is replayed once for all of them. `unused_init` says of which carry leaves nobody asks
for the cotangent of the initial value, as of a buffer that starts with zeros; it is zeros then. If
it is `transpose_only`, operands that it does not read are zeros: it has no derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from loopkit import _jax
from loopkit._engine.derivative.reversal import reversal
from loopkit._engine.loop import Active, Loop, kept
from loopkit._engine.lowering.flat_values import of_vectors
from loopkit._engine.lowering.scratch import with_scratch
from loopkit._engine.primitives import define, pullback_p
from loopkit._engine.rules.hessian import second_order
from loopkit._engine.rules.linear import BACKWARD, FORWARD, asked
from loopkit._engine.rules.pushforward import arguments
from loopkit._engine.rules.two_loops import stored_pullback
from loopkit._engine.sweeps import sweeps


def evaluate(
    *operands: jax.Array,
    loop: Loop,
    layout: Active,
    active: Active,
    batch: int | None,
    unused_init: tuple[bool, ...],
    transpose_only: bool,
) -> list:
    primals, residuals, cts = arguments(loop, layout, operands)
    how = reversal(loop, layout, active).without(unused_init)
    with jax.named_scope(f"loopkit.{loop.name}.backward"):
        out = sweeps(how).backward(loop.split(primals)[0], residuals, cts, batch)
    unasked = _unused_results(active, unused_init)
    return [_jax.zeros(jax.typeof(v)) if u else v for v, u in zip(out, unasked, strict=True)]


def _unused_results(active: Active, unused_init: Sequence[bool]) -> list[bool]:
    """Which results are cotangents that nobody asks for."""
    flags = [*[False] * len(active.consts), *unused_init, *[False] * len(active.xs)]
    return kept(flags, active.inputs)


def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list, list]:
    loop, active, batch = params["loop"], params["active"], params["batch"]
    assert not params["transpose_only"], "what it reads is not there"
    values, residuals, cts = arguments(loop, params["layout"], primals)
    t_values, _, t_cts = arguments(loop, params["layout"], tangents)
    out = pullback_p.bind(*primals, **params)
    if loop.holds_custom_vjp:
        # The last residual: the steps taken.
        operands, moves = [*values, residuals[-1], *cts], [*t_values, None, *t_cts]
        stored = lambda *at: stored_pullback(loop, active, batch, at)
        return out, _jax.jvp_in_moving(stored, operands, moves)[1]
    flowing = BACKWARD.of([*values, *residuals], t_cts, params)
    moves = t_values[loop.cond_const_count :]
    if batch is not None:
        repeated = lambda t: jnp.broadcast_to(t, (batch, *jnp.shape(t)))
        moves = [t if type(t) is _jax.Zero else repeated(t) for t in moves]
    second = second_order(loop, values, cts, active, moves, active, batch)
    return out, list(map(_jax.add_tangents, flowing, second))


def transpose(cts: Sequence[Any], *operands: Any, **params: Any) -> list:
    loop = params["loop"]
    values, residuals, _ = arguments(loop, params["layout"], operands)
    unused_init = _unused_results(params["active"], params.pop("unused_init"))
    types = BACKWARD.types(**params)[0]
    tangents = [
        _jax.float0_zero(t) if u else c for t, u, c in zip(types, unused_init, cts, strict=True)
    ]
    return asked(FORWARD.of([*values, *residuals], tangents, params), operands)


define(
    pullback_p,
    evaluate,
    BACKWARD.types,
    jvp=jvp,
    transpose=transpose,
    dce=BACKWARD.dce,
    on_cpu=with_scratch,
    on_tpu=of_vectors,
)
