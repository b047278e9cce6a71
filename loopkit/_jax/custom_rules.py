"""Calls with rules for derivatives, and checks, that other code has put into equations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import checkify, linear_util

from loopkit._jax.avals import Equation
from loopkit._jax.jaxprs import bind_equation, context_of, open_jaxpr, trace
from loopkit._jax.next_jax import hi_primitive_p, name_of_primitive, with_rules

checkify_p = checkify.check_p


def with_custom_rules(eqn: Equation, within: Callable[[Callable], Callable]) -> Any:
    """Return a call with its rules for derivatives run as `within(rule)`; others are unchanged."""
    if eqn.primitive is hi_primitive_p:
        return eqn.replace(params={"_prim": with_rules(eqn.params["_prim"], within)})
    rules = [k for k in ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd") if k in eqn.params]
    if not rules or not eqn.primitive.name.startswith("custom_"):
        return eqn
    params = dict(eqn.params)
    for name in rules:
        rule = params[name]
        wrapped: Any = within(rule.call_wrapped)
        wrapped.rule_within = rule
        params[name] = linear_util.wrap_init(wrapped, debug_info=rule.debug_info)
    return eqn.replace(params=params)


def has_rules(eqn: Equation) -> bool:
    """Return whether an equation calls a function with rules of the user for its derivatives."""
    rules = "custom_jvp_call", "custom_vjp_call", "CustomJVP", "CustomVJP"
    return name_of_primitive(eqn).startswith(rules)


def has_custom_jvp(eqn: Equation) -> bool:
    """Return whether an equation calls a function with a custom JVP."""
    return name_of_primitive(eqn).startswith(("custom_jvp_call", "CustomJVP"))


def jvp_rule(eqn: Equation) -> Any:
    """Return the user's rule of a function with a custom JVP; None if it cannot be told apart.

    Each trace of a call wraps the rule anew. Calls with static arguments have no rule of their own.
    """
    rule = eqn.params.get("jvp_jaxpr_fun")
    while rule is not None:
        if [step.__name__ for step, *_ in getattr(rule, "transforms", ())] == ["_flatten_jvp"]:
            return rule.f
        fun = getattr(rule, "f", None)
        fun = _closed_over(fun, "fn") or fun
        rule = _closed_over(fun, "jvp_jaxpr_fun") or _closed_over(fun, "jvp")
        rule = rule or getattr(fun, "rule_within", None)
    return None


def _closed_over(fun: Any, name: str) -> Any:
    names = getattr(getattr(fun, "__code__", None), "co_freevars", ())
    return fun.__closure__[names.index(name)].cell_contents if name in names else None


def bind_check(eqn: Equation, values: Sequence[Any], condition: Any) -> list:
    """Bind a check of checkify so that it fails only under a condition."""
    error = jax.tree.unflatten(eqn.params["err_tree"], values)
    some = {kind: failed & condition for kind, failed in error._pred.items()}
    return bind_equation(eqn, jax.tree.leaves(error._replace(_pred=some)))


def bind_custom(eqn: Equation, values: Sequence[Any], extra: Any, run: Callable) -> list:
    """Bind a call with a custom derivative; `run(jaxpr, values, extra)` evaluates it and its rule.

    The value `extra` becomes the first constant of the call. JAX passes constants to no rule, so
    the new rule takes `extra` off, and runs the jaxpr of the old rule with it.
    """
    old = eqn.params["call_jaxpr"]
    types = [jax.typeof(extra), *old.in_avals]
    new, _ = trace(lambda extra, *v: run(open_jaxpr(old), v, extra), types, "custom")
    more = {"call_jaxpr": new, "num_consts": eqn.params["num_consts"] + 1}
    (call, rule, *bwd), params = _bound(eqn.replace(params=eqn.params | more))

    def rule_for(extra: Any) -> Callable:
        within = lambda rule: lambda *zeros: _running(run, extra, *rule(*zeros))
        return _bound(with_custom_rules(eqn, within))[0][1].call_wrapped

    def jvp(*values: Any) -> Any:
        half = len(values) // 2
        return rule_for(values[0])(*values[1:half], *values[half + 1 :])

    def fwd(extra: Any, _: bool, *values: Any) -> Any:
        return rule_for(extra)(*values)

    def out_trees() -> tuple:
        out, residuals, places = eqn.params["out_trees"]()
        return out, residuals, [None if i is None else i + 1 for i in places]

    rule = linear_util.wrap_init(fwd if bwd else jvp, debug_info=rule.debug_info)
    params |= {"out_trees": out_trees} if bwd else {}
    with context_of(eqn):
        return eqn.primitive.bind(extra, *values, subfuns=(call, rule, *bwd), **params)


def _bound(eqn: Equation) -> tuple[Sequence[Any], dict]:
    """Return the functions of a call with a custom derivative, and its other parameters."""
    params: Any = dict(eqn.primitive.get_bind_params(eqn.params))
    return params.pop("subfuns"), params


def _running(run: Callable, extra: Any, jaxpr: Any, consts: Sequence[Any], *rest: Any) -> tuple:
    """Return the results of a rule, with its jaxpr evaluated by `run` and closing over `extra`."""
    j = open_jaxpr(jaxpr)
    again = lambda *values: run(j, [*consts, *values], extra)
    made, held = trace(again, [v.aval for v in j.invars], "rule")
    made, k = open_jaxpr(made), len(held)
    return made.replace(constvars=made.invars[:k], invars=made.invars[k:]), held, *rest
