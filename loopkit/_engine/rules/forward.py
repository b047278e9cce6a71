"""forward: a loop and its checkpoints, the known half of a linearised loop.

operands  those of the loop, and tangents of those that move (`along`)
results   those of the loop, then the residuals: checkpoints, the segments they start, steps taken;
          and tangents of those that move
JVP       itself, with tangents
splits    into itself without tangents, and `pushforward`, if the tangents are not all known
"""

from __future__ import annotations

import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from loopkit import _jax
from loopkit._engine.derivative.pieces import Reversal
from loopkit._engine.derivative.reversal import covers, reversal
from loopkit._engine.derivative.split import primal_half
from loopkit._engine.facts.activity import moving_activity
from loopkit._engine.leaves import spread
from loopkit._engine.loop import Active, Loop, kept, parts
from loopkit._engine.lowering.memory import check_host_memory
from loopkit._engine.lowering.scratch import with_scratch
from loopkit._engine.primitives import PARTIAL_EVAL_RULES, define, forward_p, pushforward_p, while_p
from loopkit._engine.rules import while_
from loopkit._engine.rules.along import Along, moved_by_forward, moving
from loopkit._engine.rules.linear import linear_params
from loopkit._engine.sweeps import sweeps


def evaluate(*operands: jax.Array, loop: Loop, active: Active, along: Along | None = None) -> list:
    how = reversal(loop, active)
    if along is None:
        return _swept(loop, how, loop, operands)
    run = loop.derived("held predicate", lambda: _with_held_predicate(loop))

    def swept(*given: Any) -> list:
        values, stacks = parts(given, loop.operand_count)
        return _swept(loop, how, run, values, stacks)

    # Tangents of what is saved are written before they are read, too.
    stacks, moved = sweeps(how).blank_stacks, sweeps(how).blank_stacks
    moving = along.results[loop.primal_counts[1] :][: len(stacks)]
    within = along._replace(operands=(*along.operands, *moving))
    values, tangents = parts(operands, loop.operand_count)
    return within.evaluate(swept, [*values, *stacks, *tangents], kept(moved, moving))


def _with_held_predicate(loop: Loop) -> Loop:
    """Return the loop with a predicate that is never differentiated, as a loop of lax has it."""
    if loop.cond is None:
        return loop
    predicate = _jax.call_jaxpr(loop.cond)
    held = lambda *values: predicate(*map(lax.stop_gradient, values))
    return loop.replace(cond=_jax.trace_closed(held, loop.cond.in_avals, "loop_goes_on"))


def _swept(
    loop: Loop,
    how: Reversal,
    run: Loop,
    operands: Sequence[Any],
    stacks: Sequence[Any] | None = None,
) -> list:
    """Return the forward sweep of `run`, which is the loop or the part of it that is needed."""
    with jax.named_scope(f"loopkit.{loop.name}.forward"):
        if any(how.on_host):
            check_host_memory(loop.name)
        both = sweeps(how)
        outs = both.forward(run, run.split(operands)[0], stacks)
        last = zip(outs[-2:], both.residual_types[-2:], strict=True)
        return [*outs[:-2], *(_jax.vary_like(v, [t]) for v, t in last)]


def runs_with(
    used: list[bool], *, loop: Loop, active: Active, along: Along | None = None
) -> tuple[list[bool], Any] | None:
    """Leave out what neither the used results nor the residuals need.

    An example is a buffer that steps only write to, if they run again.
    """
    results, how = loop.primal_counts[1], reversal(loop, active)
    few = None if along or how.undo is not None else how.prune_results(used[:results])
    if few is None or all(few.operands):
        return None

    def run(*operands: jax.Array) -> list:
        outs = _swept(loop, how.pruned(few), few.loop, operands)
        found, residuals = parts(outs, few.loop.primal_counts[1])
        return kept([*few.map_results(found), *residuals], used)

    return few.operands, run


def result_types(
    *_: object, loop: Loop, active: Active, along: Along | None = None
) -> tuple[list, Any]:
    types = [*loop.result_types, *sweeps(reversal(loop, active)).residual_types]
    return types if along is None else along.types(types), loop.effects


def jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    loop: Loop,
    active: Active,
    along: Along | None = None,
) -> tuple[list, list]:
    if along is not None:
        by_others = ft.partial(apart, loop=loop, active=active, along=along)
        return _jax.jvp_in_moving(by_others, primals, tangents)
    if loop.holds_custom_vjp or loop.effects:  # not all effects can be under a vmap of tangents
        return _with_pushforward(primals, tangents, loop, active)
    flags = moving(primals, tangents)
    along = Along(flags, moved_by_forward(loop, active, flags))
    outs = forward_p.bind(*primals, *kept(tangents, flags), loop=loop, active=active, along=along)
    return along.apart(outs)


def apart(*operands: Any, loop: Loop, active: Active, along: Along) -> list:
    """Return what `forward` returns, with tangents by `pushforward`, and none of what is saved."""
    rule = ft.partial(_with_pushforward, loop=loop, active=active)
    return along.by_others(rule, operands)


def _with_pushforward(
    primals: Sequence[Any], tangents: Sequence[Any], loop: Loop, active: Active
) -> tuple[list, list]:
    outs = forward_p.bind(*primals, loop=loop, active=active)
    _, residuals = parts(outs, loop.primal_counts[1])
    plain = primal_half(loop, active)
    moved = moving_activity(plain, loop.split(_jax.nonzero(tangents))[0])
    inputs = list(map(_jax.instantiate, kept(tangents[loop.cond_const_count :], moved.inputs)))
    source, layout = loop, active
    if plain is not loop or not covers(active, moved):
        source, layout = plain.without_debug_effects(), moved
        fresh = forward_p.bind(*primals, loop=source, active=moved)
        residuals = fresh[loop.primal_counts[1] :]
    params = linear_params(source, layout, moved)
    flowing = pushforward_p.bind(*primals, *residuals, *inputs, **params)
    zeros = [_jax.float0_zero(jax.typeof(v)) for v in outs]
    results = loop.primal_counts[1]
    return outs, [*spread(flowing, moved.outputs, zeros[:results]), *zeros[results:]]


def dce(used: list[bool], eqn: _jax.Equation) -> tuple[list[bool], Any]:
    """Leave out tangents that nobody uses, and what is saved: the loop, or its dual, is left."""
    loop, active, along = eqn.params["loop"], eqn.params["active"], eqn.params.get("along")
    operands, results = loop.primal_counts
    every = [True] * len(eqn.invars)
    if along is None:
        if any(used[results:]):
            return every, eqn
        loop = primal_half(loop, active)
        plain = _jax.new_equation(eqn, while_p, eqn.invars, eqn.outvars[:results], {"loop": loop})
        return while_.dce(used[:results], plain)
    count = len(along.results)
    if not any(used[count:]):
        params = {"loop": loop, "active": active}
        ends = eqn.invars[:operands], eqn.outvars[:count]
        needed, plain = dce(used[:count], _jax.new_equation(eqn, forward_p, *ends, params))
        return [*needed, *[False] * (len(every) - operands)], plain
    return every, eqn


define(forward_p, evaluate, result_types, jvp=jvp, dce=dce, on_cpu=with_scratch)
_jax.register_split(forward_p, lambda along=None, **_: along is not None, apart)
PARTIAL_EVAL_RULES[forward_p] = runs_with
