"""Run inner loops again in the backward pass, if the outer loop keeps every step's residuals.

An inner loop that may stop early has residuals for as many steps as its bound, and most of them are
never written. If each outer step kept them, the outer loop would need memory for the bound instead
of the steps taken. One more run of the inner loop from its operands makes the same residuals.
"""

from __future__ import annotations

from typing import Any

from loopkit import _jax
from loopkit._engine.loop import Loop
from loopkit._engine.primitives import PARTIAL_EVAL_RULES, forward_p
from loopkit._jaxprs import equations
from loopkit._jaxprs.dataflow import interpret
from loopkit._jaxprs.repeatable import is_repeatable

ROOM = 1024
"""The bytes of an inner loop's residuals up to which each step of the outer loop keeps them."""
FEW_STEPS = 16
"""The bound of an inner loop up to which outer steps keep its residuals: few go unused."""


def apart(loop: Loop, step: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a step that runs each wide inner loop twice: for its results, and for its residuals.

    The second run gets zeros for operands on which no residual depends.
    """
    j, wide = _jax.open_jaxpr(step), found(loop, step)

    def rule(eqn: _jax.Equation, ins: list) -> list:
        outs = list(_jax.bind_equation(eqn, ins))
        if id(eqn) not in wide:
            return outs
        fewer = [v if n else _jax.zeros(u.aval) for v, u, n in _operands(eqn, ins)]
        results = _result_count(eqn)
        return [*outs[:results], *list(_jax.bind_equation(eqn, fewer))[results:]]

    run = lambda *values: interpret(j, values, rule)
    return _jax.trace_closed(run, step.in_avals, "loop_step")


def found(loop: Loop, step: _jax.Jaxpr) -> set[int]:
    """Return the ids of the equations of wide inner loops in a step of the loop."""
    if loop.holds_custom_vjp:  # the next derivative is that of the backward code
        return set()
    j = _jax.open_jaxpr(step)
    inputs = j.invars[: loop.const_count], j.invars[loop.const_count + loop.carry_count :]
    given = equations.following_from(j, (v for some in inputs for v in some))
    read = {v for eqn in j.eqns for v in equations.variables(eqn)}
    read.update(_jax.variables(j.outvars))
    return {id(eqn) for eqn in j.eqns if _is_wide(eqn, given, read)}


def _is_wide(eqn: _jax.Equation, given: set, read: set) -> bool:
    """Return whether a loop's residuals need more memory than the operands they follow from."""
    if eqn.primitive is not forward_p or not is_repeatable(eqn):
        return False
    loop = eqn.params["loop"]
    residuals = (v for v in eqn.outvars[_result_count(eqn) :] if v in read)
    room = _jax.byte_count(*(v.aval for v in residuals))
    takes_few = loop.cond is None or (loop.length is not None and loop.length <= FEW_STEPS)
    if takes_few or room <= ROOM:
        return False
    operands = {
        u for _, u, n in _operands(eqn, eqn.invars) if n and not isinstance(u, _jax.Literal)
    }
    return _jax.byte_count(*(u.aval for u in operands - given)) < room


def _operands(eqn: _jax.Equation, values: Any) -> zip:
    """Return each operand with its variable, and whether residuals depend on it."""
    used = [i >= _result_count(eqn) for i in range(len(eqn.outvars))]
    with_few = PARTIAL_EVAL_RULES[forward_p](used, **eqn.params)
    needed = [True] * len(eqn.invars) if with_few is None else with_few[0]
    return zip(values, eqn.invars, needed, strict=True)


def _result_count(eqn: _jax.Equation) -> int:
    return eqn.params["loop"].primal_counts[1]
