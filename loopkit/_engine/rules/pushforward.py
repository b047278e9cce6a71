"""pushforward: the tangents of a loop, L t, linear in t.

    operands  those of the loop, residuals of `forward`, tangents of the active inputs
    results   tangents of the active outputs
    JVP       in t, itself; in the primals, that of D
    transpose `pullback`

The residuals are there for the transpose; run as it is, it is D, which needs none. `batch` is None
or the size of a leading axis of the tangents, which the primals do not have. If it is
`transpose_only`, operands that its transpose does not read are zeros, and it is not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from loopkit import _jax
from loopkit._engine.derivative.reversal import reversal
from loopkit._engine.facts.activity import cotangent_activity
from loopkit._engine.loop import Active, Loop, kept, parts, spread
from loopkit._engine.passes.dual_loop import dual_loop, run_dual
from loopkit._engine.primitives import READS, define, pullback_p, pushforward_p
from loopkit._engine.rules import while_
from loopkit._engine.rules.linear import FORWARD, asked
from loopkit._engine.sweeps import sweeps


def evaluate(
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
    """Primals, residuals and linear operands."""
    return parts(operands, loop.operand_count, len(sweeps(reversal(loop, layout)).residual_types))


def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list, list]:
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


def transpose(cts: Sequence[Any], *operands: Any, **params: Any) -> list:
    loop, layout, active = params["loop"], params["layout"], params["active"]
    values, residuals, linear = arguments(loop, layout, operands)
    zeros = [_jax.float0_zero(l.aval) for l in linear]
    live = cotangent_activity(loop, active, _jax.nonzero(cts))
    reaching = kept(live.outputs, active.outputs)
    cts = [_jax.instantiate(c) for c in kept(cts, reaching)]
    if not any(live.inputs):
        return asked(zeros, operands)
    # Of a tangent that is known, which is zero, nobody asks for the cotangent.
    flags = [_jax.is_undefined(v) for v in linear]
    flags = spread(flags, active.inputs, [False] * len(active.inputs))
    _, wanted, _ = parts(flags, loop.const_count, loop.carry_count)
    unused_init = tuple(l and not a for l, a in zip(live.carry, wanted, strict=True))
    params = dict(params, layout=layout, active=live, unused_init=unused_init)
    out = pullback_p.bind(*values, *residuals, *cts, **params)
    return asked(spread(out, kept(live.inputs, active.inputs), zeros), operands)


def reads(*, loop: Loop, layout: Active, active: Active, **_: object) -> list[bool]:
    """Which operands of the loop its pullback reads."""
    return reversal(loop, layout, active).reads


define(pushforward_p, evaluate, FORWARD.types, jvp=jvp, transpose=transpose, dce=FORWARD.dce)
READS[pushforward_p] = reads
