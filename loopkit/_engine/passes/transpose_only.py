"""Loops in a step that is only run, and not differentiated, without what nobody uses of them.

A buffer that an inner loop only writes to is needed neither to run the step again nor to go back.
So it is neither saved nor stored with the step around it. The next derivative may read it, and
takes the step as it is written.
"""

from __future__ import annotations

from typing import Any

from loopkit import _jax
from loopkit._engine.loop import kept
from loopkit._engine.primitives import PARTIAL_EVAL_RULES, READS, evaluated_p
from loopkit._jaxprs import equations
from loopkit._jaxprs.cost import loop_nanoseconds
from loopkit._jaxprs.dataflow import interpret


def to_run(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """A jaxpr to be run: its loops compute what is used, of operands that they need for that."""
    if not any(eqn.primitive in PARTIAL_EVAL_RULES for eqn in equations.all_equations(jaxpr)):
        return jaxpr
    j = _jax.open_jaxpr(jaxpr)
    eqns, live = [], {v for v in j.outvars if not isinstance(v, _jax.Literal)}
    for eqn in reversed(j.eqns):
        if eqn.primitive in PARTIAL_EVAL_RULES:
            eqn = _evaluated([v in live for v in eqn.outvars], eqn)
        elif equations.is_call(eqn) or eqn.primitive.name == "cond":
            eqn = eqn.replace(params=equations.with_jaxprs(eqn.params, to_run))
        eqns.append(eqn)
        live.update(equations.variables(eqn))
    new = j.replace(eqns=eqns[::-1])
    return new if j is jaxpr else jaxpr.replace(jaxpr=new)


def _evaluated(used: list[bool], eqn: _jax.Equation) -> Any:
    found = PARTIAL_EVAL_RULES[eqn.primitive](used, **eqn.params)
    if found is None:
        return eqn
    needed, run = found
    invars, outvars = kept(eqn.invars, needed), kept(eqn.outvars, used)
    # The loops that compute it are none of the user's.
    with _jax.replacing(None), _jax.as_there():
        jaxpr = _jax.trace_closed(run, [v.aval for v in invars], "loop")
    params = {"jaxpr": jaxpr, "nanoseconds": loop_nanoseconds(eqn.params["loop"])}
    return _jax.new_equation(eqn, evaluated_p, invars, outvars, params)


def to_transpose(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """A linear jaxpr, to be transposed and run: what that does not read of loops is zeros.

    Not in branches: a compiler was seen to fail where these have lost operands.
    """
    if not any(eqn.primitive in READS for eqn in equations.all_equations(jaxpr)):
        return jaxpr

    def rule(eqn: _jax.Equation, ins: list) -> Any:
        if eqn.primitive not in READS:
            return None
        read = READS[eqn.primitive](**eqn.params)
        pairs = zip(ins, read, strict=False)
        held = [
            v if r else _jax.zeros(u.aval) for (v, r), u in zip(pairs, eqn.invars, strict=False)
        ]
        return eqn.primitive.bind(*held, *ins[len(read) :], **dict(eqn.params, transpose_only=True))

    j = _jax.open_jaxpr(jaxpr)
    run = lambda *values: interpret(j, values, rule)
    return _jax.trace_closed(run, jaxpr.in_avals, "loop_tangents")
