"""Inner loops that are run again going back, where the residuals of every step are kept.

A loop inside a step that ends when it likes has residuals for as many steps as it might take, most
of them never written. Kept with every step of the loop around it, that room would be paid for, and
not the steps taken. From what the loop starts with they follow in one more run.
"""

from __future__ import annotations

from typing import Any

from loopkit import _jax
from loopkit._engine.loop import Loop
from loopkit._engine.primitives import PARTIAL_EVAL_RULES, forward_p
from loopkit._jaxprs import equations
from loopkit._jaxprs.dataflow import interpret

ROOM = 1024
"""Bytes of residuals up to which they are kept, with every step of the loop around."""
FEW_STEPS = 16
"""A bound on the steps up to which they are kept: about as many are taken."""


def apart(loop: Loop, step: _jax.Jaxpr) -> _jax.Jaxpr:
    """A step of the loop in which such loops stand twice: for results, and for residuals.

    The second is given zeros where residuals do not depend on what the first is given.
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
    """Such loops in a step of the loop, as the identities of their equations."""
    if loop.holds_custom_vjp:  # the next derivative is that of the code that goes back
        return set()
    j = _jax.open_jaxpr(step)
    inputs = j.invars[: loop.const_count], j.invars[loop.const_count + loop.carry_count :]
    given = equations.following_from(j, (v for some in inputs for v in some))
    read = {v for eqn in j.eqns for v in equations.variables(eqn)}
    read |= {v for v in j.outvars if not isinstance(v, _jax.Literal)}
    return {id(eqn) for eqn in j.eqns if _is_wide(eqn, given, read)}


def _is_wide(eqn: _jax.Equation, given: set, read: set) -> bool:
    """Whether its residuals take more room than what they depend on and is not given anyway."""
    if eqn.primitive is not forward_p or eqn.effects:
        return False
    loop = eqn.params["loop"]
    residuals = (v for v in eqn.outvars[_result_count(eqn) :] if v in read)
    room = _jax.byte_count(*(v.aval for v in residuals))
    takes_few = loop.cond is None or (loop.length is not None and loop.length <= FEW_STEPS)
    if takes_few or room <= ROOM or loop.has_impure_callback:
        return False
    operands = {
        u for _, u, n in _operands(eqn, eqn.invars) if n and not isinstance(u, _jax.Literal)
    }
    return _jax.byte_count(*(u.aval for u in operands - given)) < room


def _operands(eqn: _jax.Equation, values: Any) -> zip:
    """Each with its variable, and whether residuals depend on it."""
    used = [i >= _result_count(eqn) for i in range(len(eqn.outvars))]
    with_few = PARTIAL_EVAL_RULES[forward_p](used, **eqn.params)
    needed = [True] * len(eqn.invars) if with_few is None else with_few[0]
    return zip(values, eqn.invars, needed, strict=True)


def _result_count(eqn: _jax.Equation) -> int:
    return eqn.params["loop"].primal_counts[1]
