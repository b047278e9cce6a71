"""pullback: the cotangents L^T w of a loop, from what `forward` has saved.

operands  those of the loop, residuals of `forward`, cotangents of active outputs, and tangents of
          those that move (`along`)
results   cotangents of the active inputs, and tangents of those that move
JVP       itself, with tangents
splits    into itself in w, and `hessian` in the primals, if the tangents are not all known
transpose `pushforward`

`unused_init` flags carry leaves whose initial value needs no cotangent, such as a buffer that
starts with zeros; the cotangent is then zeros.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from loopkit import _jax
from loopkit._engine.derivative.pieces import Reversal
from loopkit._engine.derivative.reversal import reversal
from loopkit._engine.loop import Active, Loop, kept
from loopkit._engine.lowering.scratch import with_scratch
from loopkit._engine.primitives import define, pullback_p
from loopkit._engine.rules.along import Along, moved_by_forward, moved_by_pullback, moving
from loopkit._engine.rules.hessian import second_order
from loopkit._engine.rules.linear import BACKWARD, FORWARD, arguments
from loopkit._engine.rules.two_loops import stored_pullback
from loopkit._engine.sweeps import sweeps


def _how(
    loop: Loop, layout: Active, active: Active, unused_init: tuple[bool, ...], **_: object
) -> Reversal:
    return reversal(loop, layout, active).without(unused_init)


def evaluate(
    *operands: jax.Array,
    batch: int | None,
    transpose_only: bool,
    along: Along | None = None,
    **params: Any,
) -> list:
    loop, how = params["loop"], _how(**params)
    unasked = _unused_results(params["active"], params["unused_init"])

    def swept(*operands: jax.Array) -> list:
        primals, residuals, cts = arguments(loop, params["layout"], operands)
        with jax.named_scope(f"loopkit.{loop.name}.backward"):
            out = sweeps(how).backward(loop.split(primals)[0], residuals, cts, batch)
        return [_jax.zeros(jax.typeof(v)) if u else v for v, u in zip(out, unasked, strict=True)]

    if along is None:
        return swept(*operands)
    return along.evaluate(swept, operands)


def _unused_results(active: Active, unused_init: Sequence[bool]) -> list[bool]:
    """Return which results are cotangents that nobody wants."""
    flags = [*[False] * len(active.consts), *unused_init, *[False] * len(active.xs)]
    return kept(flags, active.inputs)


def result_types(*_: object, along: Along | None = None, **params: Any) -> tuple[list, Any]:
    types, effects = BACKWARD.types(**params)
    return types if along is None else along.types(types), effects


def jvp(
    primals: Sequence[Any], tangents: Sequence[Any], along: Along | None = None, **params: Any
) -> tuple[list, list]:
    if along is not None:
        by_others = ft.partial(apart, along=along, **params)
        return _jax.jvp_in_moving(by_others, primals, tangents)
    loop, flags = params["loop"], moving(primals, tangents)
    if loop.holds_custom_vjp or _lacks_tangents(flags, **params):
        return _with_hessian(primals, tangents, **params)
    along = Along(flags, _moved(flags, **params))
    return along.apart(pullback_p.bind(*primals, *kept(tangents, flags), **params, along=along))


def _lacks_tangents(flags: tuple[bool, ...], loop: Loop, layout: Active, **_: object) -> bool:
    """Return whether `forward` has left out tangents of what it saved, as if they were zero."""
    operands, results = loop.primal_counts
    saved = moved_by_forward(loop, layout, flags[:operands])[results:]
    return any(m and not has for m, has in zip(saved, flags[operands:], strict=False))


def _moved(flags: tuple[bool, ...], **params: Any) -> tuple[bool, ...]:
    loop, how = params["loop"], _how(**params)
    unasked = _unused_results(params["active"], params["unused_init"])
    key = "moved by pullback", flags, *(params[k] for k in ("layout", "active", "unused_init"))
    found = loop.derived(key, lambda: moved_by_pullback(loop, how, flags))
    return tuple(f and not u for f, u in zip(found, unasked, strict=True))


def apart(*operands: Any, along: Along, **params: Any) -> list:
    """Return what `pullback` returns, with tangents by `pullback` and `hessian`."""
    return along.by_others(ft.partial(_with_hessian, **params), operands)


def _with_hessian(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[list, list]:
    loop, active, batch = params["loop"], params["active"], params["batch"]
    assert not params["transpose_only"], "what it reads is not there"
    values, residuals, cts = arguments(loop, params["layout"], primals)
    t_values, _, t_cts = arguments(loop, params["layout"], tangents)
    out = pullback_p.bind(*primals, **params)
    if loop.holds_custom_vjp:
        # The last residual is the number of steps taken.
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
    return _jax.asked_for(FORWARD.of([*values, *residuals], tangents, params), operands)


def dce(used: list[bool], eqn: _jax.Equation) -> tuple[list[bool], Any]:
    """Leave out cotangents that reach none of the used results, and tangents that nobody uses."""
    along = eqn.params.get("along")
    if along is None:
        return BACKWARD.dce(used, eqn)
    operands, results = len(along.operands), len(along.results)
    if any(used[results:]):
        return [True] * len(eqn.invars), eqn
    params = {k: v for k, v in eqn.params.items() if k != "along"}
    ends = eqn.invars[:operands], eqn.outvars[:results]
    needed, plain = BACKWARD.dce(used[:results], _jax.new_equation(eqn, pullback_p, *ends, params))
    return [*needed, *[False] * (len(eqn.invars) - operands)], plain


define(
    pullback_p,
    evaluate,
    result_types,
    jvp=jvp,
    transpose=transpose,
    dce=dce,
    on_cpu=with_scratch,
)
_jax.register_split(pullback_p, lambda along=None, **_: along is not None, apart)
