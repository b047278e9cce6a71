"""dual: a loop and its tangents, in forward mode.

    operands  those of the loop, tangents of the active inputs
    results   those of the loop, tangents of the active outputs
    JVP       that of D, which is a loop
    splits    into `forward`, known, and `pushforward`, linear, if only the tangents are unknown

The dual body is traced when the primitive is lowered or differentiated, never before. A body that
calls a function with a custom VJP has no JVP, and still has a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from loopkit import _jax
from loopkit._engine.derivative.reversal import reversal
from loopkit._engine.derivative.split import primal_half
from loopkit._engine.facts.activity import cotangent_activity
from loopkit._engine.loop import Active, Loop, kept, parts
from loopkit._engine.lowering.scratch import with_scratch
from loopkit._engine.passes.dual_loop import dual_loop
from loopkit._engine.primitives import define, dual_p, forward_p, pushforward_p, while_p
from loopkit._engine.rules import while_
from loopkit._engine.rules.linear import linear_params
from loopkit._engine.sweeps import sweeps


def evaluate(*operands: jax.Array, loop: Loop, active: Active) -> list:
    dual = dual_loop(loop, active)
    return dual.map_results(while_.evaluate(*dual.map_operands(operands), loop=dual.loop))


def result_types(*_: object, loop: Loop, active: Active) -> tuple[list, Any]:
    return [*loop.result_types, *loop.output_types(active)], loop.effects


def jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, loop: Loop, active: Active
) -> tuple[list, list]:
    dual = dual_loop(loop, active)
    outs, moved = while_.jvp(
        dual.map_operands(primals), dual.map_operands(tangents), loop=dual.loop
    )
    return dual.map_results(outs), dual.map_results(moved)


def known(values: Sequence[Any], *, loop: Loop, active: Active) -> tuple:
    """Evaluate partially, with the primals known: see `_jax.register_partial_eval`."""
    outs = forward_p.bind(*values, loop=loop, active=active)
    results, residuals = parts(outs, loop.primal_counts[1])
    both = sweeps(reversal(loop, active))
    if any(both.how.on_host):
        residuals = list(map(_jax.placed, residuals, both.residual_types))
        residuals = list(map(_jax.named_on_host, residuals))
    params = linear_params(loop, active, active)
    return results, [*values, *residuals], pushforward_p, params


def known_equation(eqn: _jax.Equation) -> Any:
    """Return the primal results alone, so that jax.checkpoint saves nothing."""
    loop = primal_half(eqn.params["loop"], eqn.params["active"])
    operands, results = loop.primal_counts
    invars, outvars = eqn.invars[:operands], eqn.outvars[:results]
    return _jax.new_equation(eqn, while_p, invars, outvars, {"loop": loop})


def dce(used: list[bool], eqn: _jax.Equation) -> tuple[list[bool], Any]:
    """Remove tangents that nobody uses; without tangents, the loop itself is left."""
    loop, active = eqn.params["loop"], eqn.params["active"]
    operands, results = loop.primal_counts
    if any(used[results:]):
        live = cotangent_activity(loop, active, used[results:])
        ins = [True] * operands + kept(live.inputs, active.inputs)
        outs = [True] * results + kept(live.outputs, active.outputs)
        return ins, _jax.part_of(eqn, ins, outs, {"loop": loop, "active": live})
    plain = known_equation(eqn)
    needed, plain = while_.dce(used[:results], plain)
    return [*needed, *[False] * (len(eqn.invars) - operands)], plain


define(dual_p, evaluate, result_types, jvp=jvp, dce=dce, on_cpu=with_scratch)
_jax.register_partial_eval(dual_p, known, known_equation)
