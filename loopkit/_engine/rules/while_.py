"""while: the results of a loop.

    operands   cond_consts, consts, init, xs
    results    carry, ys
    JVP        one `dual`, in the leaves that turn out to be active
    transpose  of a loop that is linear in some operands: a pullback, at zero

This module also defines `evaluated`: the equations of a loop, or of its derivative, as a jaxpr. Its
JVP is that of the equations. It has no transpose, because it is made where no gradient is taken any
more.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax

from loopkit import _jax
from loopkit._engine import steps
from loopkit._engine.facts.activity import moving_activity
from loopkit._engine.lanes.phases import phases_of
from loopkit._engine.leaves import spread
from loopkit._engine.loop import Loop, kept, parts
from loopkit._engine.lowering.scratch import with_scratch
from loopkit._engine.passes.dual_loop import bind_dual, open_dual, taylor
from loopkit._engine.passes.unused import prune
from loopkit._engine.primitives import define, dual_p, evaluated_p, while_p
from loopkit._engine.rules.one_number import along, number_that_moves
from loopkit._jaxprs.dataflow import fixed_point


def jvp_of(fun: Callable[..., list]) -> Callable:
    """Return the JVP rule of a primitive that computes `fun(*operands, **params)`."""

    def rule(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list, list]:
        return _jax.jvp_in_moving(ft.partial(fun, **params), primals, tangents)

    return rule


def batching_of(fun: Callable[..., list]) -> Callable:
    """Return the vmap rule of a primitive that computes `fun(*operands, **params)`."""

    def rule(axis: _jax.AxisData, args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple:
        return _jax.batched_call(ft.partial(fun, **params), axis, args, dims)

    return rule


def evaluate(*operands: jax.Array, loop: Loop) -> list:
    if (phases := phases_of(loop)) is not None:
        return phases.run(*operands)
    with jax.named_scope(f"loopkit.{loop.name}"):
        return steps.evaluate(loop, loop.split(operands)[0])


def result_types(*_: object, loop: Loop) -> tuple[list, Any]:
    return loop.result_types, loop.effects


def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, loop: Loop) -> tuple[list, list]:
    rule, number = ft.partial(_dual, loop=loop), number_that_moves(loop, tangents)
    if number is None:
        return rule(primals, tangents)
    return along(rule, number, primals, tangents)


def _dual(primals: Sequence[Any], tangents: Sequence[Any], *, loop: Loop) -> tuple[list, list]:
    if (phases := phases_of(loop)) is not None:
        return phases.jvp(primals, tangents)
    active = moving_activity(loop, loop.split(_jax.nonzero(tangents))[0])
    moving = list(map(_jax.instantiate, kept(tangents[loop.cond_const_count :], active.inputs)))
    if any(map(_jax.is_tracer, _jax.jvp_jaxpr(loop.body, active.inputs)[0].consts)):
        # Rules in the body close over values of a trace, which become operands.
        outs = bind_dual(open_dual(loop, active), [*primals, *moving])
    else:
        outs = dual_p.bind(*primals, *moving, loop=loop, active=active)
    results, tangents = parts(outs, loop.primal_counts[1])
    zeros = list(map(_jax.float0_zero, loop.result_types))
    return results, spread(tangents, active.outputs, zeros)


def transpose(cts: Sequence[Any], *operands: Any, loop: Loop) -> list:
    """Transpose a loop over tangents, such as one in a custom derivative rule."""
    quiet = loop.without_debug_effects()
    unknown = [_jax.is_undefined(v) for v in operands]
    reached = _jax.nonzero(cts)
    types = [v.aval for v in kept(operands, unknown)]

    def linear(*values: jax.Array) -> list:
        return kept(while_p.bind(*spread(values, unknown, operands), loop=quiet), reached)

    _, pullback = jax.vjp(linear, *map(_jax.zeros, types))
    return spread(pullback(kept(cts, reached)), unknown, [None] * len(operands))


def known_part(unknown: list[bool], loop: Loop) -> tuple | None:
    """Find the part that needs no unknown operands: a custom rule may loop over both halves."""
    flags = loop.split(unknown)[0]

    def reached(carry: list[bool]) -> list[list[bool]]:
        out = _jax.unknown_outputs(loop.body, [*flags.consts, *carry, *flags.xs])
        return parts(out, loop.carry_count)

    carry, ys = fixed_point(flags.init, reached)
    if all([*carry, *ys]) or loop.has_impure_callback:
        return None
    pruned = prune(loop.without_debug_effects(), [not u for u in (*carry, *ys)])
    if any(pruned.map_operands(unknown)):
        return None  # the predicate is unknown
    return pruned.operands, pruned.results, {"loop": pruned.loop}


def dce(used: list[bool], eqn: _jax.Equation) -> tuple[list[bool], Any]:
    loop = eqn.params["loop"]
    if not any(used) and not eqn.effects:
        return [False] * len(eqn.invars), None
    if all(used):
        return [True] * len(eqn.invars), eqn
    pruned = prune(loop, used)
    new = _jax.part_of(eqn, pruned.operands, pruned.results, {"loop": pruned.loop})
    return pruned.operands, new


define(
    while_p,
    evaluate,
    result_types,
    jvp=jvp,
    taylor=taylor,
    transpose=transpose,
    dce=dce,
    on_cpu=with_scratch,
)
_jax.register_known_part(while_p, known_part)


def _evaluate_jaxpr(*values: jax.Array, jaxpr: _jax.Jaxpr, **_: object) -> list:
    return list(_jax.call_jaxpr(jaxpr)(*values))


def _jaxpr_types(*_: object, jaxpr: _jax.Jaxpr, **__: object) -> tuple[list, Any]:
    return list(jaxpr.out_avals), jaxpr.effects


_jax.define(
    evaluated_p,
    _evaluate_jaxpr,
    _jaxpr_types,
    jvp=jvp_of(_evaluate_jaxpr),
    on_cpu=with_scratch,
)
_jax.register_batching(evaluated_p, batching_of(_evaluate_jaxpr))
