"""Loops without their unused parts.

Pruning a loop removes unused results, and what only they need. If a step only runs, and is not
differentiated, the loops in it are pruned too. For example, a buffer that an inner loop only writes
to is needed neither to run the outer step again nor to reverse it. So the outer step does not save
or store that buffer. The next derivative may read it, and uses the step as written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import or_
from typing import Any

from loopkit import _jax
from loopkit._engine.leaves import spread
from loopkit._engine.loop import Loop, Operands, Rewritten, kept, parts
from loopkit._engine.primitives import PARTIAL_EVAL_RULES, READS, evaluated_p
from loopkit._jaxprs import equations
from loopkit._jaxprs.cost import loop_nanoseconds
from loopkit._jaxprs.dataflow import fixed_point, interpret


@dataclass(frozen=True)
class Pruned(Rewritten):
    """The pruned loop, and which operands and results of the original loop it keeps."""

    operands: list[bool]
    results: list[bool]


def prune(loop: Loop, used: Sequence[bool], inputs: Sequence[bool] = ()) -> Pruned:
    """Return the loop with only the used results, and what they need.

    `inputs` flags further inputs of a step to keep.
    """
    key = ("pruned", tuple(used), tuple(inputs))
    return loop.derived(key, lambda: _prune(loop, used, inputs))


def _prune(loop: Loop, used: Sequence[bool], inputs: Sequence[bool]) -> Pruned:
    if (lane := loop.lane) is not None:
        one = prune(lane.loop, used, inputs)
        flags = one.loop.split(one.map_operands(lane.flags.flat))[0]
        return replace(one, loop=lane.replaced(one.loop, flags))
    inputs = inputs or [False] * len(loop.body.in_avals)
    consts, also, xs = parts(inputs, loop.const_count, loop.carry_count)
    carry, used_ys = parts(used, loop.carry_count)
    cond, used_cond_consts = loop.cond, []
    if loop.cond is not None:
        asked = _jax.used_inputs(loop.cond, [True])
        used_cond_consts = asked[: loop.cond_const_count]
        carry = [a or b for a, b in zip(carry, asked[loop.cond_const_count :], strict=True)]

    carry = list(map(or_, carry, also))

    def needed(carry: list[bool]) -> tuple:
        keep = [*consts, *carry, *xs]
        body, inputs = _jax.dce(loop.body, [*carry, *used_ys], keep)
        used = parts(inputs, loop.const_count, loop.carry_count)
        return used[1], body, used[0], used[2]

    carry, body, consts, xs = fixed_point(carry, needed)
    if loop.cond is not None:
        cond, _ = _jax.dce(loop.cond, [True], [*used_cond_consts, *carry])
    operands, results = Operands(used_cond_consts, consts, carry, xs).flat, [*carry, *used_ys]
    pruned = loop.replace(
        cond=cond,
        body=body,
        cond_const_count=sum(used_cond_consts),
        consts=tuple(kept(loop.consts, consts)),
        carry=tuple(kept(loop.carry, carry)),
        xs=tuple(kept(loop.xs, xs)),
        ys=tuple(kept(loop.ys, used_ys)),
    )
    map_operands = lambda values: kept(values, operands)
    map_results = lambda values, _=(): spread(values, results, [None] * len(results))
    return Pruned(pruned, map_operands, map_results, operands, results)


def to_run(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a jaxpr to run, whose loops take only the operands that their used results need."""
    if not any(eqn.primitive in PARTIAL_EVAL_RULES for eqn in equations.all_equations(jaxpr)):
        return jaxpr
    j = _jax.open_jaxpr(jaxpr)
    eqns, live = [], set(_jax.variables(j.outvars))
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
    # These loops are not the user's, so they are not replaced.
    with _jax.replacing(None), _jax.as_there():
        jaxpr = _jax.trace_closed(run, [v.aval for v in invars], "loop")
    loop = eqn.params["loop"]
    params = {"jaxpr": jaxpr, "nanoseconds": loop_nanoseconds(loop, loop.device)}
    return _jax.new_equation(eqn, evaluated_p, invars, outvars, params)


def to_transpose(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a linear jaxpr to transpose and run, whose loops get zeros for operands never read.

    Branches stay as they are, because compilers may fail on branches that have lost operands.
    """
    if not any(eqn.primitive in READS for eqn in equations.all_equations(jaxpr)):
        return jaxpr

    def rule(eqn: _jax.Equation, ins: list) -> Any:
        if eqn.primitive not in READS or eqn.params["loop"].holds_custom_vjp:
            return None  # custom rules are differentiated from the operands alone
        read = READS[eqn.primitive](**eqn.params)
        pairs = zip(ins, read, strict=False)
        held = [
            v if r else _jax.zeros(u.aval) for (v, r), u in zip(pairs, eqn.invars, strict=False)
        ]
        return eqn.primitive.bind(*held, *ins[len(read) :], **dict(eqn.params, transpose_only=True))

    j = _jax.open_jaxpr(jaxpr)
    run = lambda *values: interpret(j, values, rule)
    return _jax.trace_closed(run, jaxpr.in_avals, "loop_tangents")
