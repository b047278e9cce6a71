"""Rules for derivatives that users give to functions, as equations hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax._src import linear_util

from loopkit._jax.avals import Equation
from loopkit._jax.next_jax import hi_primitive_p, name_of_primitive, with_rules


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
