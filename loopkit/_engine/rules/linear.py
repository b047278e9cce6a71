"""The linear primitives, transposes of each other: `pushforward` and `pullback`.

pushforward: the tangents L t of a loop.

    operands  those of the loop, residuals of `forward`, tangents of the active inputs
    results   tangents of the active outputs
    JVP       in t, itself; in the primals, that of D

pullback: the cotangents L^T w of a loop, from what `forward` saved.

    operands  those of the loop, residuals of `forward`, cotangents of active outputs, and tangents
              of those that move (`along`)
    results   cotangents of the active inputs, and tangents of those that move
    JVP       itself, with tangents
    splits    into itself in w, and `hessian` in the primals, if the tangents are not all known

A pushforward runs as D, and only its transpose reads the residuals. `batch` is None or the size of
a leading axis of tangents or cotangents that the primals lack: the trajectory is replayed once for
all of them. In a `transpose_only` primitive, operands that the pullback does not read are zeros.
Such a pushforward cannot run, and such a pullback can be differentiated only with the tangents of
what was saved.

A missing cotangent (or tangent) is not a cotangent of zeros. Results that only zeros reach are
symbolic zeros, and what reaches no used result is left out. `unused_init` flags carry leaves whose
initial value needs no cotangent, such as a buffer that starts with zeros; their cotangent is zeros.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from loopkit import _jax
from loopkit._engine.derivative.pieces import Reversal
from loopkit._engine.derivative.reversal import reversal
from loopkit._engine.facts.activity import cotangent_activity, linear_activity
from loopkit._engine.leaves import spread
from loopkit._engine.loop import Active, Loop, kept, parts
from loopkit._engine.lowering.scratch import with_scratch
from loopkit._engine.passes.dual_loop import run_dual
from loopkit._engine.primitives import READS, define, pullback_onto_p, pullback_p, pushforward_p
from loopkit._engine.rules.along import (
    Along,
    dce_tangents,
    moved_by_forward,
    moved_by_pullback,
    moving,
    splits,
    without_tangents,
)
from loopkit._engine.rules.hessian import second_order
from loopkit._engine.rules.two_loops import stored_pullback
from loopkit._engine.sweeps import sweeps


@dataclass(frozen=True)
class Linear:
    """L or its transpose, as a map from one side of the active leaves to the other."""

    primitive: Any
    ins: str
    outs: str
    reached: Callable[[Loop, Active, Sequence[bool]], Active]
    """A function that returns the leaves that some of the given values reach."""
    needed: Callable[[Loop, Active, Sequence[bool]], Active]
    """A function that returns the leaves that some of the results need."""
    out_types: Callable[[Loop, Active], list]

    def types(
        self, *_: object, loop: Loop, active: Active, batch: int | None, **__: object
    ) -> tuple[list, Any]:
        """Return the result types, with a leading batch if there is one, and the effects."""
        types = _jax.stack_types(self.out_types(loop, active), batch)
        return types, loop.without_debug_effects().effects

    def of(self, known: Sequence[Any], values: Sequence[Any], params: dict[str, Any]) -> list:
        """Apply the map to values, of which some may be symbolically zero."""
        active = params["active"]
        live = self.reached(params["loop"], active, _jax.nonzero(values))
        zeros = list(map(_jax.float0_zero, self.types(**params)[0]))
        if not any(live.inputs):
            return zeros
        given = kept(values, kept(getattr(live, self.ins), getattr(active, self.ins)))
        given = map(_jax.instantiate, given)
        out = self.primitive.bind(*known, *given, **dict(params, active=live))
        return spread(out, kept(getattr(live, self.outs), getattr(active, self.outs)), zeros)

    def dce(self, used: list[bool], eqn: _jax.Equation) -> tuple[list[bool], Any]:
        """Remove the values that reach none of the used results."""
        if not any(used):
            return [False] * len(eqn.invars), None
        active = eqn.params["active"]
        live = self.needed(eqn.params["loop"], active, used)
        reaching, found = (
            kept(getattr(live, side), getattr(active, side)) for side in (self.ins, self.outs)
        )
        if any(u and not f for u, f in zip(used, found, strict=True)):
            return [True] * len(eqn.invars), eqn
        ins = [True] * (len(eqn.invars) - len(reaching)) + reaching
        return ins, _jax.part_of(eqn, ins, found, dict(eqn.params, active=live))


def linear_params(loop: Loop, layout: Active, active: Active) -> dict[str, Any]:
    """Return the parameters of a `pushforward`, whose residuals were saved for `layout`."""
    params = {"loop": loop, "layout": layout, "active": active}
    return {**params, "batch": None, "transpose_only": False}


by_tangents, by_cotangents = linear_activity, cotangent_activity
FORWARD = Linear(pushforward_p, "inputs", "outputs", by_tangents, by_cotangents, Loop.output_types)
BACKWARD = Linear(pullback_p, "outputs", "inputs", by_cotangents, by_tangents, Loop.input_types)


def evaluate_pushforward(*operands: jax.Array, **params: Any) -> list:
    loop = params["loop"]
    assert not params["transpose_only"], "what it reads is not there"
    primals, _, tangents = arguments(loop, params["layout"], operands)
    quiet = loop.without_debug_effects()
    loop.check_repeats()
    return run_dual(quiet, primals, tangents, params["active"], params["batch"])


def arguments(loop: Loop, layout: Active, operands: Sequence[Any]) -> list[list]:
    """Split operands into primals, residuals and linear operands."""
    return parts(operands, loop.operand_count, len(sweeps(reversal(loop, layout)).residual_types))


def jvp_of_pushforward(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[list, list]:
    loop, active = params["loop"], params["active"]
    assert not params["transpose_only"], "what it reads is not there"
    values, residuals, linear = arguments(loop, params["layout"], primals)
    t_values, _, t_linear = arguments(loop, params["layout"], tangents)
    out = pushforward_p.bind(*primals, **params)
    flowing = FORWARD.of([*values, *residuals], t_linear, params)
    if not any(_jax.nonzero(t_values[loop.cond_const_count :])):
        return out, flowing
    quiet = loop.without_debug_effects()
    tangents_at = lambda *at: run_dual(quiet, at, linear, active, params["batch"])
    second = _jax.jvp_in_moving(tangents_at, values, t_values)[1]
    return out, list(map(_jax.add_tangents, flowing, second))


def transpose_pushforward(
    cts: Sequence[Any], *operands: Any, sums: Sequence[Any] | None = None, **params: Any
) -> list:
    loop, layout, active = params["loop"], params["layout"], params["active"]
    values, residuals, linear = arguments(loop, layout, operands)
    zeros = [_jax.float0_zero(l.aval) for l in linear]
    live = cotangent_activity(loop, active, _jax.nonzero(cts))
    reaching = kept(live.outputs, active.outputs)
    cts = [_jax.instantiate(c) for c in kept(cts, reaching)]
    if not any(live.inputs):
        return _jax.asked_for(zeros, operands)
    # A known tangent is zero, and its cotangent is not needed.
    flags = [_jax.is_undefined(v) for v in linear]
    flags = spread(flags, active.inputs, [False] * len(active.inputs))
    _, wanted, _ = parts(flags, loop.const_count, loop.carry_count)
    unused_init = tuple(l and not a for l, a in zip(live.carry, wanted, strict=True))
    params = dict(params, layout=layout, active=live, unused_init=unused_init)
    reached = kept(live.inputs, active.inputs)
    before = kept(arguments(loop, layout, sums or [None] * len(operands))[2], reached)
    primitive, onto = pullback_p, tuple(s is not None for s in before)
    if any(onto):
        primitive, params = pullback_onto_p, dict(params, onto=onto)
    out = primitive.bind(*kept(before, onto), *values, *residuals, *cts, **params)
    return _jax.asked_for(spread(out, reached, zeros), operands)


def pullback_reads(*, loop: Loop, layout: Active, active: Active, **_: object) -> list[bool]:
    """Return which operands of the loop its pullback reads."""
    return reversal(loop, layout, active).reads


define(
    pushforward_p,
    evaluate_pushforward,
    FORWARD.types,
    jvp=jvp_of_pushforward,
    transpose=transpose_pushforward,
    dce=FORWARD.dce,
)
_jax.transpose_onto_references(pushforward_p)
READS[pushforward_p] = pullback_reads


def _how(
    loop: Loop, layout: Active, active: Active, unused_init: tuple[bool, ...], **_: object
) -> Reversal:
    return reversal(loop, layout, active).without(unused_init)


def evaluate_pullback(
    *operands: jax.Array,
    batch: int | None,
    transpose_only: bool,
    along: Along | None = None,
    sums: Sequence[Any] | None = None,
    **params: Any,
) -> list:
    loop, how = params["loop"], _how(**params)
    if sums is not None and not _jax.keeps_barriers():
        # The compiler would copy the sums between the steps of an iteration.
        how = replace(how, loop=how.loop.unrolled(1))
    unasked = _unused_results(params["active"], params["unused_init"])

    def swept(*operands: jax.Array) -> list:
        primals, residuals, cts = arguments(loop, params["layout"], operands)
        with jax.named_scope(f"loopkit.{loop.name}.backward"):
            out = sweeps(how).backward(loop.split(primals)[0], residuals, cts, batch, sums)
        return [_jax.zeros(jax.typeof(v)) if u else v for v, u in zip(out, unasked, strict=True)]

    if along is None:
        return swept(*operands)
    return along.evaluate(swept, operands)


def _unused_results(active: Active, unused_init: Sequence[bool]) -> list[bool]:
    """Return which results are unused cotangents of the initial carry."""
    flags = [*[False] * len(active.consts), *unused_init, *[False] * len(active.xs)]
    return kept(flags, active.inputs)


def types_of_pullback(*_: object, along: Along | None = None, **params: Any) -> tuple[list, Any]:
    types, effects = BACKWARD.types(**params)
    return types if along is None else along.types(types), effects


def jvp_of_pullback(
    primals: Sequence[Any], tangents: Sequence[Any], along: Along | None = None, **params: Any
) -> tuple[list, list]:
    if along is not None:
        by_others = ft.partial(pullback_apart, along=along, **params)
        return _jax.jvp_in_moving(by_others, primals, tangents)
    loop, flags = params["loop"], moving(primals, tangents)
    here = not params["transpose_only"]
    if here and (loop.holds_custom_vjp or _lacks_tangents(flags, **params)):
        return _with_hessian(primals, tangents, **params)
    along = Along(flags, _moved(flags, **params))
    return along.apart(pullback_p.bind(*primals, *kept(tangents, flags), **params, along=along))


def _lacks_tangents(flags: tuple[bool, ...], loop: Loop, layout: Active, **_: object) -> bool:
    """Return whether tangents of saved values may be missing, though they are not zero.

    They may be zero: what an inlined loop saves has fewer tangents than `moved_by_forward` says.
    """
    operands, results = loop.primal_counts
    saved = moved_by_forward(loop, layout, flags[:operands])[results:]
    return any(m and not has for m, has in zip(saved, flags[operands:], strict=False))


def _moved(flags: tuple[bool, ...], **params: Any) -> tuple[bool, ...]:
    loop, how = params["loop"], _how(**params)
    unasked = _unused_results(params["active"], params["unused_init"])
    key = "moved by pullback", flags, *(params[k] for k in ("layout", "active", "unused_init"))
    found = loop.derived(key, lambda: moved_by_pullback(loop, how, flags))
    return tuple(f and not u for f, u in zip(found, unasked, strict=True))


def pullback_apart(*operands: Any, along: Along, **params: Any) -> list:
    """Return what `pullback` returns, with tangents from `pullback` and `hessian`."""
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


def transpose_pullback(cts: Sequence[Any], *operands: Any, **params: Any) -> list:
    loop = params["loop"]
    values, residuals, _ = arguments(loop, params["layout"], operands)
    unused_init = _unused_results(params["active"], params.pop("unused_init"))
    types = BACKWARD.types(**params)[0]
    tangents = [
        _jax.float0_zero(t) if u else c for t, u, c in zip(types, unused_init, cts, strict=True)
    ]
    return _jax.asked_for(FORWARD.of([*values, *residuals], tangents, params), operands)


def dce_pullback(used: list[bool], eqn: _jax.Equation) -> tuple[list[bool], Any]:
    """Remove the cotangents that reach no used result, and tangents if all are unused."""
    if "along" in eqn.params:
        return dce_tangents(used, eqn, BACKWARD.dce)
    return BACKWARD.dce(used, eqn)


define(
    pullback_p,
    evaluate_pullback,
    types_of_pullback,
    jvp=jvp_of_pullback,
    transpose=transpose_pullback,
    dce=dce_pullback,
    on_cpu=with_scratch,
)
_jax.register_split(pullback_p, splits, pullback_apart, without_tangents)
