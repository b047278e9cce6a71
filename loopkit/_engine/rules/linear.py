"""pushforward: the tangents L t of a loop, and what it shares with its transpose, `pullback`.

    operands  those of the loop, residuals of `forward`, tangents of the active inputs
    results   tangents of the active outputs
    JVP       in t, itself; in the primals, that of D
    transpose `pullback`

Only the transpose reads the residuals. A pushforward that runs is D, which needs none. `batch` is
None or the size of a leading axis of tangents or cotangents that the primals lack: the trajectory
is replayed once for all of them. If a primitive is `transpose_only`, operands that the pullback
does not read are zeros: the pushforward is not run, and the pullback is differentiated with what
was saved or not at all.

No cotangent (or tangent) is not the same as a cotangent of zeros. Results that only zeros reach are
symbolic zeros, and what reaches no used result is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from loopkit import _jax
from loopkit._engine.derivative.reversal import reversal
from loopkit._engine.facts.activity import cotangent_activity, linear_activity
from loopkit._engine.leaves import spread
from loopkit._engine.loop import Active, Loop, kept, parts
from loopkit._engine.passes.dual_loop import dual_loop, run_dual
from loopkit._engine.primitives import READS, define, pullback_p, pushforward_p
from loopkit._engine.rules import while_
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
        """Return the map of values of which some are symbolically zero."""
        active = params["active"]
        live = self.reached(params["loop"], active, _jax.nonzero(values))
        zeros = list(map(_jax.float0_zero, self.types(**params)[0]))
        if not any(live.inputs):
            return zeros
        moving = kept(values, kept(getattr(live, self.ins), getattr(active, self.ins)))
        moving = map(_jax.instantiate, moving)
        out = self.primitive.bind(*known, *moving, **dict(params, active=live))
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
    """Return the parameters of a `pushforward` from what a loop has saved for some leaves."""
    params = {"loop": loop, "layout": layout, "active": active}
    return {**params, "batch": None, "transpose_only": False}


by_tangents, by_cotangents = linear_activity, cotangent_activity
FORWARD = Linear(pushforward_p, "inputs", "outputs", by_tangents, by_cotangents, Loop.output_types)
BACKWARD = Linear(pullback_p, "outputs", "inputs", by_cotangents, by_tangents, Loop.input_types)


def evaluate_pushforward(
    *operands: jax.Array,
    loop: Loop,
    layout: Active,
    active: Active,
    batch: int | None,
    transpose_only: bool,
) -> list:
    assert not transpose_only, "what it reads is not there"
    primals, _, tangents = arguments(loop, layout, operands)
    quiet = loop.without_debug_effects()
    loop.check_repeats()
    return run_dual(quiet, primals, tangents, active, batch)


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
    if params["batch"] is None:
        dual = dual_loop(quiet, active)
        still = [_jax.float0_zero(jax.typeof(t)) for t in linear]
        at, moves = dual.map_operands([*values, *linear]), dual.map_operands([*t_values, *still])
        second = dual.map_results(while_.jvp(at, moves, loop=dual.loop)[1])[loop.primal_counts[1] :]
    else:
        tangents_at = lambda *at: run_dual(quiet, at, linear, active, params["batch"])
        second = _jax.jvp_in_moving(tangents_at, values, t_values)[1]
    return out, list(map(_jax.add_tangents, flowing, second))


def transpose_pushforward(cts: Sequence[Any], *operands: Any, **params: Any) -> list:
    loop, layout, active = params["loop"], params["layout"], params["active"]
    values, residuals, linear = arguments(loop, layout, operands)
    zeros = [_jax.float0_zero(l.aval) for l in linear]
    live = cotangent_activity(loop, active, _jax.nonzero(cts))
    reaching = kept(live.outputs, active.outputs)
    cts = [_jax.instantiate(c) for c in kept(cts, reaching)]
    if not any(live.inputs):
        return _jax.asked_for(zeros, operands)
    # A known tangent is zero, and nobody wants its cotangent.
    flags = [_jax.is_undefined(v) for v in linear]
    flags = spread(flags, active.inputs, [False] * len(active.inputs))
    _, wanted, _ = parts(flags, loop.const_count, loop.carry_count)
    unused_init = tuple(l and not a for l, a in zip(live.carry, wanted, strict=True))
    params = dict(params, layout=layout, active=live, unused_init=unused_init)
    out = pullback_p.bind(*values, *residuals, *cts, **params)
    return _jax.asked_for(spread(out, kept(live.inputs, active.inputs), zeros), operands)


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
READS[pushforward_p] = pullback_reads
