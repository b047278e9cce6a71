"""hessian: d/dtheta <w, L(theta) u>, linear in u.

operands  those of the loop, cotangents w of the outputs that `moving` has, tangents u of its inputs
results   cotangents of the active inputs
JVP       of its definition, a pullback of the dual loop
transpose itself in u, with the two kinds of inputs exchanged: second derivatives commute

They do not commute where a custom rule is not the derivative of its function, as in a surrogate
gradient. So for loops with custom JVPs the transpose is `of_pullback`: the derivative of
L(theta)^T w along u. Its own transpose is d/dtheta <w, L(theta) u> again. To compute it, the loop
stores every carry. So without a bound on the steps, custom rules are assumed to be derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from loopkit import _jax
from loopkit._engine.derivative.reversal import reversal
from loopkit._engine.facts.activity import backward_activity, forward_activity
from loopkit._engine.leaves import spread
from loopkit._engine.loop import Active, Loop, Operands, kept, parts
from loopkit._engine.passes.dual_loop import active_inputs, dual_loop, replace_active, run_dual
from loopkit._engine.primitives import define, forward_p, hessian_p
from loopkit._engine.rules import while_
from loopkit._engine.rules.two_loops import stored_pullback
from loopkit._jaxprs import equations


def evaluate(
    *operands: jax.Array,
    loop: Loop,
    active: Active,
    moving: Active,
    of_pullback: bool,
    batch: int | None,
) -> list:
    values, cts, u = parts(operands, loop.operand_count, sum(moving.outputs))
    quiet = loop.without_debug_effects()
    loop.check_repeats()

    def one(cts: list, u: list) -> list:
        if of_pullback:
            return pullback_along(quiet, values, active, moving, cts, u)

        def tangents_at(*moved: jax.Array) -> list:
            at = replace_active(quiet, values, active, moved)
            return run_dual(quiet, at, u, moving, None)

        _, pull = jax.vjp(tangents_at, *active_inputs(quiet, values, active))
        return list(pull(cts))

    return one(cts, u) if batch is None else jax.vmap(one)(cts, u)


def pullback_along(
    loop: Loop, values: Sequence[Any], active: Active, moving: Active, cts: list, u: list
) -> list:
    """Return the derivative of L(theta)^T w along tangents of the moving inputs."""
    zeros = [_jax.zeros(t.to_tangent_aval()) for t in loop.result_types]
    w = kept(spread(cts, moving.outputs, zeros), active.outputs)

    def pulled(*moved: jax.Array) -> list:
        at = replace_active(loop, values, moving, moved)
        taken = forward_p.bind(*at, loop=loop, active=active)[-1]
        return stored_pullback(loop, active, None, [*at, taken, *w])

    return list(jax.jvp(pulled, active_inputs(loop, values, moving), u)[1])


def result_types(
    *_: object, loop: Loop, active: Active, batch: int | None, **__: object
) -> tuple[list, Any]:
    """Return the types of the cotangents, with a leading batch if there is one, and the effects."""
    types = _jax.stack_types(loop.input_types(active), batch)
    return types, loop.without_debug_effects().effects


def second_order(
    loop: Loop,
    values: Sequence[Any],
    cts: Sequence[Any],
    given: Active,
    tangents: Sequence[Any],
    wanted: Active,
    batch: int | None,
    of_pullback: bool = True,
) -> list:
    """Return d/dtheta <w, L u> in the wanted inputs, symbolically zero where u moves nothing.

    With `of_pullback`, return the derivative of L^T w along u, which is equal without custom rules.
    `cts` are w, for the active outputs of `given`. `tangents` are u, one for each input.
    """
    of_pullback = of_pullback and _may_not_commute(loop, wanted)
    zeros = list(map(_jax.float0_zero, _jax.stack_types(loop.input_types(wanted), batch)))
    flags = [False] * loop.cond_const_count + _jax.nonzero(tangents)
    moving = forward_activity(loop, loop.split(flags)[0])
    moving = backward_activity(loop, moving, given.carry, given.ys)
    reached = wanted if of_pullback else _reached(loop, moving, wanted)
    if not any(reached.inputs) or not any(moving.outputs):
        return zeros
    w = spread(cts, given.outputs, list(map(_jax.float0_zero, loop.result_types)))
    linear = [*kept(w, moving.outputs), *kept(tangents, moving.inputs)]
    of = _jax.stack_types([*loop.output_types(moving), *loop.input_types(moving)], batch)
    linear = [_jax.zeros(t) if type(v) is _jax.Zero else v for v, t in zip(linear, of, strict=True)]
    params = {"loop": loop, "active": reached, "moving": moving, "batch": batch}
    out = hessian_p.bind(*values, *linear, of_pullback=of_pullback, **params)
    return spread(out, kept(reached.inputs, wanted.inputs), zeros)


def _may_not_commute(loop: Loop, active: Active) -> bool:
    """Return whether a custom rule may not be a derivative, in a loop that can store carries."""
    holds = equations.holds_custom_jvp(loop.body)
    return holds and loop.length is not None and not any(reversal(loop, active).on_host)


def _reached(loop: Loop, moving: Active, wanted: Active) -> Active:
    """Return the wanted inputs on which the output tangents of `moving` depend."""
    dual = dual_loop(loop.without_debug_effects(), moving).loop

    def beside(flags: Sequence[bool], tangents: Sequence[bool], of: bool) -> list[bool]:
        return [*flags, *[of] * sum(tangents)]

    flags = [beside(w, m, False) for w, m in zip(wanted[:3], moving[:3], strict=True)]
    active = forward_activity(dual, Operands([], *flags))
    carry = beside([False] * loop.carry_count, moving.carry, True)
    ys = beside([False] * loop.ys_count, moving.ys, True)
    live = backward_activity(dual, active, carry, ys)
    consts, carry, xs = (
        tuple(w and a for w, a in zip(group, found, strict=False))
        for group, found in zip(wanted[:3], live[:3], strict=True)
    )
    return Active(consts, carry, xs, wanted.ys)


def transpose(
    cts: Sequence[Any],
    *operands: Any,
    loop: Loop,
    active: Active,
    moving: Active,
    of_pullback: bool,
    batch: int | None,
) -> list:
    values, w, _ = parts(operands, loop.operand_count, sum(moving.outputs))
    zeros = map(_jax.float0_zero, loop.operand_types[loop.cond_const_count :])
    tangents = spread(cts, active.inputs, list(zeros))
    out = second_order(loop, values, w, moving, tangents, moving, batch, not of_pullback)
    return _jax.asked_for(out, operands)


define(hessian_p, evaluate, result_types, jvp=while_.jvp_of(evaluate), transpose=transpose)
