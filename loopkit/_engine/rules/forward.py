"""forward: a loop and its checkpoints, the known half of a linearised loop.

operands  those of the loop
results   those of the loop, then the residuals: checkpoints, the segments they start, steps taken
JVP       `pushforward` from its own residuals; these carry no tangent, being functions of
          operands that the backward pass has anyway
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from loopkit import _jax
from loopkit._engine.derivative.pieces import Reversal
from loopkit._engine.derivative.reversal import covers, reversal
from loopkit._engine.derivative.split import primal_half
from loopkit._engine.facts.activity import moving_activity
from loopkit._engine.leaves import spread
from loopkit._engine.loop import Active, Loop, kept, parts
from loopkit._engine.lowering.flat_values import of_vectors
from loopkit._engine.lowering.memory import check_host_memory
from loopkit._engine.lowering.scratch import with_scratch
from loopkit._engine.primitives import PARTIAL_EVAL_RULES, define, forward_p, pushforward_p, while_p
from loopkit._engine.rules import while_
from loopkit._engine.rules.linear import linear_params
from loopkit._engine.sweeps import sweeps


def evaluate(*operands: jax.Array, loop: Loop, active: Active) -> list:
    return _swept(loop, reversal(loop, active), loop, operands)


def _swept(loop: Loop, how: Reversal, run: Loop, operands: Sequence[Any]) -> list:
    """Return the forward sweep of `run`, which is the loop or the part of it that is needed."""
    with jax.named_scope(f"loopkit.{loop.name}.forward"):
        if any(how.on_host):
            check_host_memory(loop.name)
        both = sweeps(how)
        outs = both.forward(run, run.split(operands)[0])
        last = zip(outs[-2:], both.residual_types[-2:], strict=True)
        return [*outs[:-2], *(_jax.vary_like(v, [t]) for v, t in last)]


def runs_with(used: list[bool], *, loop: Loop, active: Active) -> tuple[list[bool], Any] | None:
    """Leave out what neither the used results nor the residuals need.

    An example is a buffer that steps only write to, if they run again.
    """
    results, how = loop.primal_counts[1], reversal(loop, active)
    few = None if how.undo is not None else how.prune_results(used[:results])
    if few is None or all(few.operands):
        return None

    def run(*operands: jax.Array) -> list:
        outs = _swept(loop, how.pruned(few), few.loop, operands)
        found, residuals = parts(outs, few.loop.primal_counts[1])
        return kept([*few.map_results(found), *residuals], used)

    return few.operands, run


def result_types(*_: object, loop: Loop, active: Active) -> tuple[list, Any]:
    return [*loop.result_types, *sweeps(reversal(loop, active)).residual_types], loop.effects


def jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, loop: Loop, active: Active
) -> tuple[list, list]:
    outs = forward_p.bind(*primals, loop=loop, active=active)
    _, residuals = parts(outs, loop.primal_counts[1])
    plain = primal_half(loop, active)
    moving = moving_activity(plain, loop.split(_jax.nonzero(tangents))[0])
    inputs = list(map(_jax.instantiate, kept(tangents[loop.cond_const_count :], moving.inputs)))
    source, layout = loop, active
    if plain is not loop or not covers(active, moving):
        source, layout = plain.without_debug_effects(), moving
        fresh = forward_p.bind(*primals, loop=source, active=moving)
        residuals = fresh[loop.primal_counts[1] :]
    params = linear_params(source, layout, moving)
    flowing = pushforward_p.bind(*primals, *residuals, *inputs, **params)
    zeros = list(map(_jax.float0_zero, loop.result_types))
    still = [_jax.float0_zero(jax.typeof(r)) for r in outs[loop.primal_counts[1] :]]
    return outs, [*spread(flowing, moving.outputs, zeros), *still]


def dce(used: list[bool], eqn: _jax.Equation) -> tuple[list[bool], Any]:
    """Return the loop itself if no residual is used."""
    loop = eqn.params["loop"]
    results = loop.primal_counts[1]
    if any(used[results:]):
        return [True] * len(eqn.invars), eqn
    loop = primal_half(loop, eqn.params["active"])
    plain = _jax.new_equation(eqn, while_p, eqn.invars, eqn.outvars[:results], {"loop": loop})
    return while_.dce(used[:results], plain)


define(forward_p, evaluate, result_types, jvp=jvp, dce=dce, on_cpu=with_scratch, on_tpu=of_vectors)
PARTIAL_EVAL_RULES[forward_p] = runs_with
