"""Silence the checks of steps taken in vain: by stopped lanes, or beyond the last step.

Such a step is discarded, and its checks must not fail. A primitive marks the condition of each
check (`_arguments/error_on_use.py`). A loop that holds checks carries a flag that says whether the
step counts, and makes each condition false unless it does. As a constant, the loop takes whether
the step around it counts. So a check in nested loops fails only if the steps of all of them count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from loopkit import _jax
from loopkit._arguments.error_on_use import if_taken, taken_p
from loopkit._engine.leaves import CarryLeaf, Const
from loopkit._engine.loop import Loop, Rewritten, parts
from loopkit._jaxprs import equations

IN_ANY_LANE = "unvmap_any"
"""The primitive of equinox that returns whether something, such as an error, holds in any lane."""
CALLBACKS = frozenset(("pure_callback", "io_callback", "debug_callback"))
"""Primitives that call the host, as run-time errors do."""


def is_checked(eqn: _jax.Equation) -> bool:
    """Return whether an equation is the condition of a check, or holds one outside loopkit's loops.

    loopkit's loops take care of their own, and take whether the step around counts as a constant.
    """
    own = eqn.primitive in (taken_p, _jax.checkify_p) or eqn.primitive.name == IN_ANY_LANE
    return own or ("loop" not in eqn.params and any(map(holds_checks, equations.jaxprs_in(eqn))))


def holds_checks(jaxpr: _jax.Jaxpr) -> bool:
    """Return whether a jaxpr holds checks; `unvmap_any` is one only if something may raise."""
    raises = any(e.primitive.name in CALLBACKS for e in equations.all_equations(jaxpr))
    eqns = _jax.open_jaxpr(jaxpr).eqns
    return any(is_checked(e) for e in eqns if raises or e.primitive.name != IN_ANY_LANE)


def run_if(j: _jax.OpenJaxpr, values: Sequence[Any], counts: Any) -> list:
    """Return the results of an open jaxpr, with checks that fail only if the step `counts`."""
    env = dict(zip((*j.constvars, *j.invars), values, strict=True))
    return equations.run(j.eqns, env, j.outvars, bound_if(counts))


def bound_if(counts: Any) -> Callable[[Any, list], list]:
    """Return a function that binds equations so that checks fail only if the step `counts`."""
    return lambda eqn, ins: _bind(eqn, ins, counts)


def _alike(eqn: _jax.Equation, ins: list) -> list:
    """Return the operands, made to vary over each mesh axis over which one of them now does.

    A loop whose checks read `counts` may return values that vary over devices as `counts` does.
    """
    pairs = zip(map(jax.typeof, ins), eqn.invars, strict=True)
    since = [t for t, of in pairs if _jax.varying(t) - _jax.varying(of.aval)]
    return [_jax.vary_like(v, since) for v in ins] if since else ins


def _bind(eqn: _jax.Equation, ins: list, counts: Any) -> list:
    if eqn.primitive is _jax.pvary_p:  # the operand may vary already, as `counts` does
        return [_jax.vary_like(ins[0], [eqn.outvars[0].aval])]
    if "loop" not in eqn.params:
        ins = _alike(eqn, ins)
    if not is_checked(eqn):
        return _jax.bind_equation(eqn, ins)
    if eqn.primitive is taken_p or eqn.primitive.name == IN_ANY_LANE:
        return _jax.bind_equation(eqn, [ins[0] & counts])
    if eqn.primitive is _jax.checkify_p:
        return _jax.bind_check(eqn, ins, counts)
    if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        return _jax.bind_custom(eqn, ins, counts, run_if)
    holding = next((f for f, is_one in _HOLDING if is_one(eqn)), None)
    if holding is None:
        return _jax.bind_equation(eqn, ins)
    with _jax.context_of(eqn):
        return holding(_jax.params_of(eqn), ins, counts)


def _closing_over(jaxpr: _jax.Jaxpr, counts: Any) -> Callable[..., list]:
    consts = list(getattr(jaxpr, "consts", ()))
    return lambda *values: run_if(_jax.open_jaxpr(jaxpr), [*consts, *values], counts)


def _branches(params: dict, ins: list, counts: Any) -> list:
    which, *values = ins
    branches = [
        _closing_over(branch, counts & (which == i)) for i, branch in enumerate(params["branches"])
    ]
    return lax.switch(which, branches, *values)


def _scan(params: dict, ins: list, counts: Any) -> list:
    k, n = _jax.scan_counts(params)
    consts, init, xs = parts(ins, k, n)
    step = _closing_over(params["jaxpr"], counts)
    how = {name: params[name] for name in ("length", "reverse", "unroll")}

    def body(carry: list, x: list) -> tuple[list, list]:
        new, y = parts(step(*consts, *carry, *x), n)
        return new, y

    carry, ys = lax.scan(body, init, xs, **how)
    return [*carry, *ys]


def _while(params: dict, ins: list, counts: Any) -> list:
    asked, taken, init = parts(ins, params["cond_nconsts"], params["body_nconsts"])
    cond, body = (_closing_over(params[f"{name}_jaxpr"], counts) for name in ("cond", "body"))
    return lax.while_loop(lambda c: cond(*asked, *c)[0], lambda c: body(*taken, *c), init)


def _remat(params: dict, ins: list, counts: Any) -> list:
    how = {name: params[name] for name in ("prevent_cse", "policy")}
    return jax.checkpoint(_closing_over(params["jaxpr"], counts), **how)(*ins)


_HOLDING = (
    (lambda params, ins, counts: _closing_over(params["jaxpr"], counts)(*ins), equations.is_call),
    (_branches, lambda eqn: eqn.primitive.name == "cond"),
    (_scan, lambda eqn: eqn.primitive is _jax.lax_scan_p),
    (_while, lambda eqn: eqn.primitive is _jax.lax_while_p),
    (_remat, equations.is_remat),
)
"""Functions that bind equations which hold jaxprs, and tests for these equations."""


def without_vain_checks(loop: Loop) -> Loop | Rewritten:
    """Return the loop whose checks fail only in steps that count."""
    if not any(map(holds_checks, loop.jaxprs)):
        return loop
    asked = _asked(loop)
    flag = asked if loop.flag is None else loop.flag
    if flag is None and loop.cond is not None:
        return _with_flag(loop)
    return _where_flagged(loop, flag, loop.cond if asked is None else None)


def _asked(loop: Loop) -> int | None:
    """Return the carry leaf that the predicate returns as it is, if it returns one."""
    place = None if loop.cond is None else equations.forwarded(loop.cond)[0]
    if place is None or place < loop.cond_const_count:
        return None
    return place - loop.cond_const_count


def _where_flagged(loop: Loop, flag: int | None, asks: Any) -> Rewritten:
    """Return the loop whose checks fail only if its flag is set and `asks`, if given, holds."""
    c, n = loop.const_count, loop.carry_count

    def step(counts: jax.Array, *values: jax.Array) -> list:
        carry = parts(values, c, n)[1]
        if flag is not None:
            counts = counts & carry[flag]
        if asks is not None:
            counts = counts & _jax.call_jaxpr(asks)(*carry)[0]
        return _weak_as(run_if(_jax.open_jaxpr(loop.body), values, counts), loop.body)

    leaves = [leaf._replace(flag=leaf.flag or i == flag) for i, leaf in enumerate(loop.carry)]
    new = loop.replace(
        body=_jax.trace_closed(step, [_bit(loop), *loop.body.in_avals], "counting_body"),
        consts=(Const(), *loop.consts),
        carry=tuple(leaves),
    )
    k = loop.cond_const_count
    map_operands = lambda operands: [*operands[:k], _counts(loop), *operands[k:]]
    return Rewritten(new, map_operands, lambda results, _=(): list(results))


def _with_flag(loop: Loop) -> Rewritten:
    """Return the loop that carries its predicate; the body takes the predicate's constants, too."""
    assert loop.cond is not None, "it has a predicate"
    asked, body = _jax.open_jaxpr(loop.cond), _jax.open_jaxpr(loop.body)
    k, c, n = loop.cond_const_count, loop.const_count, loop.carry_count

    def step(around: jax.Array, *values: jax.Array) -> list:
        own, consts, (flag, *carry), x = parts(values, k, c, n + 1)
        counts = around & flag
        outs = _weak_as(run_if(body, [*consts, *carry, *x], counts), loop.body)
        held = list(map(lax.stop_gradient, [*own, *outs[:n]]))
        return [*run_if(asked, held, counts), *outs]

    types = [*loop.cond_types, *loop.const_types, loop.cond.out_avals[0], *loop.body.in_avals[c:]]
    new = loop.replace(
        cond=_jax.trace_closed(lambda flag, *_: [flag], types[k + c : k + c + n + 1], "flag"),
        body=_jax.trace_closed(step, [_bit(loop), *types], "counting_body"),
        cond_const_count=0,
        consts=(Const(),) * (1 + k) + loop.consts,
        carry=(CarryLeaf("go", flag=True), *loop.carry),
    )

    def map_operands(operands: Sequence[Any]) -> list:
        given = loop.split(operands)[0]
        held = map(lax.stop_gradient, [*given.cond_consts, *given.init])  # as predicates in lax are
        flag = _jax.call_jaxpr(loop.cond)(*held)
        return [_counts(loop), *operands[: k + c], *flag, *operands[k + c :]]

    return Rewritten(new, map_operands, lambda results, _=(): list(results[1:]))


def _bit(loop: Loop) -> Any:
    decides = [] if loop.cond is None else loop.cond.out_avals
    return _jax.type_like(_jax.ShapedArray((), jnp.dtype(bool)), decides)


def _counts(loop: Loop) -> Any:
    """Return whether the step around the loop counts."""
    return _jax.vary_like(if_taken(jnp.bool_(True)), [_bit(loop)])


def _weak_as(values: Sequence[Any], jaxpr: _jax.Jaxpr) -> list:
    return list(map(_jax.weak_as, values, jaxpr.out_avals))
