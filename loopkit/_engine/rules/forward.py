"""The primitives of a loop that is differentiated as it runs: `dual` and `forward`.

dual: a loop and its tangents, in forward mode.

    operands  those of the loop, tangents of the active inputs
    results   those of the loop, tangents of the active outputs
    JVP       that of D, which is a loop
    splits    into `forward`, known, and `pushforward`, linear, if only the tangents are unknown

forward: a loop and its checkpoints, the known half of a linearised loop.

    operands  those of the loop, and tangents of those that move (`along`)
    results   those of the loop, then the residuals: checkpoints, the segments they start, steps
              taken; and tangents of those that move
    JVP       itself, with tangents
    splits    into itself without tangents, and `pushforward`, if the tangents are not all known

The dual body is traced only when the primitive is lowered or differentiated. So a body that calls a
function with a custom VJP, which has no JVP, still has a gradient.
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
from loopkit._engine.facts.activity import cotangent_activity, moving_activity
from loopkit._engine.leaves import spread
from loopkit._engine.loop import Active, Loop, kept, parts
from loopkit._engine.lowering.memory import check_host_memory
from loopkit._engine.lowering.scratch import with_scratch
from loopkit._engine.passes.dual_loop import bind_dual, dual_loop, taylor
from loopkit._engine.passes.unused import Pruned
from loopkit._engine.primitives import (
    PARTIAL_EVAL_RULES,
    define,
    dual_p,
    forward_p,
    pushforward_p,
    while_p,
)
from loopkit._engine.rules import while_
from loopkit._engine.rules.along import (
    Along,
    dce_tangents,
    moved_by_forward,
    moving,
    splits,
    without_tangents,
)
from loopkit._engine.rules.linear import linear_params
from loopkit._engine.sweeps import sweeps


def types_of_dual(*_: object, loop: Loop, active: Active) -> tuple[list, Any]:
    return [*loop.result_types, *loop.output_types(active)], loop.effects


def by_loop(*operands: Any, loop: Loop, active: Active) -> list:
    return bind_dual(dual_loop(loop, active), operands)


def taylor_of_dual(
    primals: Sequence[Any], series: Sequence[Any], order: int, *, loop: Loop, active: Active
) -> tuple[list, list]:
    dual = dual_loop(loop, active)
    given = dual.map_operands(primals), dual.map_operands(series)
    outs, moved = taylor(*given, order, loop=dual.loop)
    return dual.map_results(outs), dual.map_results(moved)


def splits_dual(unknown: Sequence[bool], *, loop: Loop, **_: object) -> int | None:
    """Return how many results of `dual` are known if only tangents are unknown."""
    operands, results = loop.primal_counts
    return None if any(unknown[:operands]) else results


def dual_apart(*operands: Any, loop: Loop, active: Active) -> list:
    """Return what `dual` returns, with tangents from `pushforward`."""
    values, tangents = parts(operands, loop.primal_counts[0])
    outs = forward_p.bind(*values, loop=loop, active=active)
    results, residuals = parts(outs, loop.primal_counts[1])
    both = sweeps(reversal(loop, active))
    if any(both.how.on_host):
        residuals = list(map(_jax.placed, residuals, both.residual_types))
        residuals = list(map(_jax.named_on_host, residuals))
    params = linear_params(loop, active, active)
    return [*results, *pushforward_p.bind(*values, *residuals, *tangents, **params)]


def known_equation(eqn: _jax.Equation) -> Any:
    """Return the equation of the primal results alone, so that jax.checkpoint saves nothing."""
    loop = primal_half(eqn.params["loop"], eqn.params["active"])
    operands, results = loop.primal_counts
    invars, outvars = eqn.invars[:operands], eqn.outvars[:results]
    return _jax.new_equation(eqn, while_p, invars, outvars, {"loop": loop})


def dce_dual(used: list[bool], eqn: _jax.Equation) -> tuple[list[bool], Any]:
    """Remove unused tangents; without any, the loop itself is left."""
    loop, active = eqn.params["loop"], eqn.params["active"]
    operands, results = loop.primal_counts
    if any(used[results:]):
        live = cotangent_activity(loop, active, used[results:])
        ins = [True] * operands + kept(live.inputs, active.inputs)
        outs = [True] * results + kept(live.outputs, active.outputs)
        return ins, _jax.part_of(eqn, ins, outs, {"loop": loop, "active": live})
    needed, plain = while_.dce(used[:results], known_equation(eqn))
    return [*needed, *[False] * (len(eqn.invars) - operands)], plain


define(
    dual_p,
    by_loop,
    types_of_dual,
    jvp=while_.jvp_of(by_loop),
    taylor=taylor_of_dual,
    dce=dce_dual,
    on_cpu=with_scratch,
)
_jax.register_split(dual_p, splits_dual, dual_apart, known_equation)


def evaluate(
    *operands: jax.Array,
    loop: Loop,
    active: Active,
    along: Along | None = None,
    unread: tuple[bool, ...] = (),
) -> list:
    how = reversal(loop, active)
    if along is None:
        few = how.prune_results([not u for u in unread]) if any(unread) else None
        if few is None:
            return _swept(how, loop, operands)
        results, residuals = _pruned(how, few, few.map_operands(operands))
        pairs = zip(results, loop.result_types, strict=True)
        return [*(_jax.zeros(t) if v is None else v for v, t in pairs), *residuals]
    half = primal_half(loop, active)
    run = half.derived("held predicate", lambda: _with_held_predicate(half))

    def swept(*given: Any) -> list:
        values, stacks = parts(given, loop.operand_count)
        return _swept(how, run, values, stacks)

    # Tangents of saved values are also written before they are read.
    stacks, moved = sweeps(how).blank_stacks(), sweeps(how).blank_stacks()
    moving = along.results[loop.primal_counts[1] :][: len(stacks)]
    within = along._replace(operands=(*along.operands, *moving))
    values, tangents = parts(operands, loop.operand_count)
    return within.evaluate(swept, [*values, *stacks, *tangents], kept(moved, moving))


def _pruned(how: Reversal, few: Pruned, operands: Sequence[Any]) -> tuple[list, list]:
    """Return the results, None for those that are pruned, and what the forward sweep saves."""
    outs = _swept(how.pruned(few), few.loop, operands)
    found, residuals = parts(outs, few.loop.primal_counts[1])
    return few.map_results(found), residuals


def _with_held_predicate(loop: Loop) -> Loop:
    """Return the loop with a predicate that is never differentiated, as in lax."""
    if loop.cond is None:
        return loop
    predicate = _jax.call_jaxpr(loop.cond)
    held = lambda *values: predicate(*map(lax.stop_gradient, values))
    return loop.replace(cond=_jax.trace_closed(held, loop.cond.in_avals, "loop_goes_on"))


def _swept(
    how: Reversal, loop: Loop, operands: Sequence[Any], stacks: Sequence[Any] | None = None
) -> list:
    """Run the forward sweep of a loop, or of the part of it that is needed."""
    with jax.named_scope(f"loopkit.{loop.name}.forward"):
        if any(how.on_host):
            check_host_memory(loop.name)
        both = sweeps(how)
        outs = both.forward(loop, loop.split(operands)[0], stacks)
        last = zip(outs[-2:], both.residual_types[-2:], strict=True)
        return [*outs[:-2], *(_jax.vary_like(v, [t]) for v, t in last)]


def runs_with(
    used: list[bool], *, loop: Loop, active: Active, along: Along | None = None, **_: object
) -> tuple[list[bool], Any] | None:
    """Leave out what neither the used results nor the residuals need: see `PARTIAL_EVAL_RULES`.

    An example is a buffer that steps only write to, if they run again.
    """
    results, how = loop.primal_counts[1], reversal(loop, active)
    few = None if along or how.undo is not None else how.prune_results(used[:results])
    if few is None or all(few.operands):
        return None

    def run(*operands: jax.Array) -> list:
        found, residuals = _pruned(how, few, operands)
        return kept([*found, *residuals], used)

    return few.operands, run


def result_types(
    *_: object, loop: Loop, active: Active, along: Along | None = None, **__: object
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
    **_: object,
) -> tuple[list, list]:
    if along is not None:
        by_others = ft.partial(apart, loop=loop, active=active, along=along)
        return _jax.jvp_in_moving(by_others, primals, tangents)
    if loop.holds_custom_vjp or loop.effects:  # some effects cannot be under a vmap of tangents
        return _with_pushforward(primals, tangents, loop, active)
    flags = moving(primals, tangents)
    along = Along(flags, moved_by_forward(loop, active, flags))
    outs = forward_p.bind(*primals, *kept(tangents, flags), loop=loop, active=active, along=along)
    return along.apart(outs)


def apart(*operands: Any, loop: Loop, active: Active, along: Along) -> list:
    """Return what `forward` returns, with tangents from `pushforward`; saved values have none."""
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
    """Remove tangents if none is used; if no residual is, either, the loop itself is left.

    Unread results, such as stacked ys, are marked and not removed: other rules count all results.
    """
    if "along" in eqn.params:
        return dce_tangents(used, eqn, dce)
    loop, results = eqn.params["loop"], eqn.params["loop"].primal_counts[1]
    if not any(used[results:]):
        return while_.dce(used[:results], known_equation(eqn))
    whole = loop.effects or loop.shows or reversal(loop, eqn.params["active"]).undo
    if not whole and not all(used[:results]):
        unread = tuple(not u for u in used[:results])
        eqn = eqn.replace(params=eqn.params | {"unread": unread})
    return [True] * len(eqn.invars), eqn


define(forward_p, evaluate, result_types, jvp=jvp, dce=dce, on_cpu=with_scratch)
_jax.register_split(forward_p, splits, apart, without_tangents)
PARTIAL_EVAL_RULES[forward_p] = runs_with
