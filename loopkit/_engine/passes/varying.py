"""Loops in which everything varies over the devices of `jax.shard_map`.

If a step makes a value varying, its transpose sums over the devices in each step of the loop. That
deadlocks if devices take different numbers of steps. Devices at different steps also read and write
different rows.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax

from loopkit import _jax
from loopkit._engine.loop import Loop, Rewritten
from loopkit._jaxprs import equations
from loopkit._jaxprs.dataflow import interpret

HOLDING = (
    *("scan", "while", "cond", "checkpoint", "remat2", "RematTraced", "closed_call", "core_call"),
    *("custom_jvp_call", "custom_vjp_call", "custom_linear_solve"),
)
"""Primitives whose jaxprs apply to their operands (that of a scatter combines two scalars)."""


def varying(loop: Loop) -> Loop | Rewritten:
    """Return the loop in which everything varies as its predicate does."""
    cond = loop.cond
    if cond is None or not any(map(_jax.varying, cond.out_avals)):
        return loop
    new = loop.map_jaxprs(lambda j: all_varying(j, cond.out_avals))

    def map_operands(operands: Sequence[Any]) -> list:
        return [_jax.vary_like(v, [t]) for v, t in zip(operands, new.operand_types, strict=True)]

    return Rewritten(new, map_operands, lambda results, _=(): list(results))


def all_varying(jaxpr: _jax.Jaxpr, like: Sequence[_jax.ShapedArray]) -> _jax.Jaxpr:
    """Return a jaxpr whose inputs and outputs vary over the manual axes of any type in `like`."""
    return jaxpr if not any(map(_jax.varying, like)) else _Varying(like).jaxpr(jaxpr)


class _Varying:
    def __init__(self, like: Sequence[_jax.ShapedArray]):
        self.like = like
        self.inside = ft.cache(self._inside)

    def jaxpr(self, value: Any) -> Any:
        j = _jax.open_jaxpr(value)
        types = [_jax.type_like(v.aval, self.like) for v in j.invars]
        run = lambda *values: self.run(j, [*value.consts, *values] if j.constvars else values)
        new = _jax.trace_closed(run, types, "varying")
        return new if type(new) is type(value) else _jax.open_jaxpr(new)

    def _inside(self, value: Any) -> Any:
        """Return a jaxpr or a loop in an equation, with everything varying."""
        loops = hasattr(value, "map_jaxprs")
        return value.map_jaxprs(self.inside) if loops else self.jaxpr(value)

    def rule(self, rule: Callable) -> Callable:
        """Return a custom rule with varying results, if it returns a jaxpr and its constants."""

        def found(*args: jax.Array) -> Any:
            out = rule(*args)
            if not (isinstance(out, tuple) and out and hasattr(out[0], "eqns")):
                return out
            j, consts, *rest = out
            types = [_jax.type_like(v.aval, self.like) for v in j.invars]
            new, closed_over = _jax.trace(lambda *v: self.run(j, [*consts, *v]), types, "rule")
            new, k = _jax.open_jaxpr(new), len(closed_over)
            new = new.replace(constvars=new.invars[:k], invars=new.invars[k:])
            return new, closed_over, *rest

        return found

    def run(self, j: _jax.OpenJaxpr, values: Sequence[Any]) -> list:
        def rule(eqn: _jax.Equation, ins: list) -> Sequence[Any] | None:
            pairs = zip(eqn.invars, ins, strict=True)
            if all(isinstance(v, _jax.Literal) or jax.typeof(x) == v.aval for v, x in pairs):
                return _jax.bind_equation(eqn, ins)
            if eqn.primitive is _jax.pvary_p:
                return [_jax.vary_like(ins[0], [v.aval for v in eqn.outvars])]
            if equations.is_call(eqn):
                return None
            if _jax.name_of_primitive(eqn) in HOLDING or "loop" in eqn.params:
                params = equations.with_jaxprs(eqn.params, self.inside)
                eqn = _jax.with_custom_rules(eqn.replace(params=params), self.rule)
            return _jax.bind_equation(eqn, [_jax.vary_like(x, self.like) for x in ins])

        return [_jax.vary_like(v, self.like) for v in interpret(j, values, rule)]
