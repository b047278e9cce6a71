"""The derivative of one step before it is cut: its values, and a linear function that reads them.

`jax.linearize` of the body is traced once. Unless a step is too long for a cut, calls of jitted
functions are inlined, so that the cut sees what is inside them.

An inner loop that may stop early has residuals for as many steps as its bound, and most of them are
never written. If each outer step kept them, the outer loop would need memory for the bound instead
of the steps taken. So if the outer loop keeps every step's residuals, such an inner loop runs again
in the backward pass, from its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax

from loopkit import _jax
from loopkit._arguments import errors
from loopkit._engine.facts.bounds import find_counters
from loopkit._engine.leaves import spread
from loopkit._engine.loop import Active, Loop, kept, parts
from loopkit._engine.passes.unused import to_transpose
from loopkit._engine.primitives import PARTIAL_EVAL_RULES, forward_p
from loopkit._jaxprs import equations
from loopkit._jaxprs.cost import is_repeatable
from loopkit._jaxprs.dataflow import interpret
from loopkit._jaxprs.min_cut import LARGEST_GRAPH, Residuals
from loopkit._plans.budget import Policy, policy_of
from loopkit._plans.planner import CHECKPOINT_BYTES


@dataclass(frozen=True, eq=False)
class Linearised:
    """The derivative of a step before it is cut in two."""

    loop: Loop
    active: Active
    residuals: Residuals
    """The values that a step computes, including those that the tangents read."""
    tangents: _jax.Jaxpr
    """(residuals, tangents of active inputs) -> tangents of active outputs"""
    holds_wide: bool
    """Whether the step has wide inner loops and keeps their residuals."""

    @property
    def carry(self) -> list[_jax.Var]:
        """The carry before the step."""
        return self.residuals.step.invars[self.loop.const_count :][: self.loop.carry_count]


Variant = Literal["as it is", "inner loops again", "opened"]
"""How the body is linearised. With "inner loops again", wide inner loops run again, as they do if
every step's residuals are kept. With "opened", a cut sees what is inside `jax.checkpoint`."""


SMALLEST_ROW = 1 << 12
"""The residual bytes of a step up to which a loop keeps all or none, if making them is fast."""
LONG_FOR_A_BYTE = 20.0
"""The nanoseconds per byte above which loopkit chooses among residuals, however few they are."""

ROOM = 1024
"""The bytes of an inner loop's residuals up to which each step of the outer loop keeps them."""
FEW_STEPS = 16
"""The bound of an inner loop up to which outer steps keep its residuals: few go unused."""


def has_frontier(loop: Loop, row_bytes: int, nanoseconds: float) -> bool:
    """Return whether it pays to choose which residuals of a step to store."""
    is_large = (loop.length or 1) * row_bytes > CHECKPOINT_BYTES
    return is_large and (row_bytes > SMALLEST_ROW or nanoseconds > LONG_FOR_A_BYTE * row_bytes)


def linearised(loop: Loop, active: Active, variant: Variant = "as it is") -> Linearised:
    """Return the derivative of the body in its active inputs and outputs."""
    if loop.checkpoints == "all":
        variant = "inner loops again"
    make = lambda: _linearise(loop, active, variant)
    return loop.derived_of_step(("linearised", active, variant), make)


def _linearised(body: _jax.Jaxpr, active: Active) -> tuple[_jax.Jaxpr, Any]:
    """Return (consts, carry, x) -> carry, y, residuals, and the tree of the linear function."""
    tree = None

    def linearised(*values: jax.Array) -> list:
        nonlocal tree

        def differentiated(*moving: jax.Array) -> tuple[list, list]:
            outs = _jax.call_jaxpr(body)(*spread(moving, active.inputs, values))
            return kept(outs, active.outputs), outs

        inputs = kept(values, active.inputs)
        _, pushforward, outs = jax.linearize(differentiated, *inputs, has_aux=True)
        residuals, tree = jax.tree.flatten(pushforward)
        return [*outs, *residuals]

    return _jax.trace_closed(linearised, list(body.in_avals), "loop_step"), tree


def _linearise(loop: Loop, active: Active, variant: Variant) -> Linearised:
    n, c, again = len(loop.body.out_avals), loop.const_count, variant == "inner loops again"
    body = equations.inlined(loop.body, equations.is_remat) if variant == "opened" else loop.body
    whole, tree = _linearised(body, active)
    wide = wide_loops(loop, whole)
    if wide and again:
        whole = _run_twice(wide, whole)
    tangents, used = _tangents(loop, tree, whole.out_avals[n:], active)
    outs = _jax.open_jaxpr(whole).outvars
    keep = [True] * len(whole.in_avals)
    whole = _jax.with_outputs(whole, [*outs[:n], *kept(outs[n:], used)], keep)
    policy, saves_all = policy_of(loop.checkpoints), isinstance(loop.checkpoints, Policy)
    spelled_out = equations.inlined(whole)
    if len(_jax.open_jaxpr(spelled_out).eqns) <= LARGEST_GRAPH:
        whole = spelled_out
    free = [by is not None for by in find_counters(loop)]
    remade = wide_loops(loop, whole) if again else set()
    if policy is not None:
        _check_policy(loop, policy, whole, saves_all)
    slices = c + loop.carry_count
    residuals = Residuals(whole, n, c, slices, free, remade, policy, saves_all, loop.device)
    return Linearised(loop, active, residuals, tangents, bool(wide) and not again)


def _check_policy(
    loop: Loop, policy: Callable[..., Any], step: _jax.Jaxpr, saves_all: bool
) -> None:
    """Raise if a policy names values that the step lacks, or offloads within a `memory` budget."""
    j = _jax.open_jaxpr(step)
    if not saves_all and any(_jax.offloads(policy, eqn) for eqn in j.eqns):
        expected = "cannot be a policy that puts values on the host together with `memory`"
        advice = 'Leave out `memory`, or pass memory={"device": ..., "host": ...} and no policy.'
        got = f"`{_jax.name_of(policy)}`"
        raise errors.wrong_value(loop.name, "checkpoints", expected, got, advice)
    if loop.replaced_by:  # the names may belong to another loop
        return
    named = map(_jax.checkpoint_name, equations.all_equations(step))
    names = sorted({name for name in named if name is not None})
    missing = sorted(_jax.asked_names(policy).difference(names))
    if missing:
        there = ", ".join(map(repr, names)) or "no names"
        got = f"{', '.join(map(repr, missing))} for a step with {there}"
        expected = "must be a policy whose names occur in the step"
        advice = "Mark values in the step with `jax.ad_checkpoint.checkpoint_name(value, name)`."
        raise errors.wrong_value(loop.name, "checkpoints", expected, got, advice)


def _tangents(
    loop: Loop, tree: _jax.TreeDef, residual_types: Sequence[Any], active: Active
) -> tuple[_jax.Jaxpr, list[bool]]:
    """Return (residuals, tangents of active inputs) -> tangents of active outputs.

    Also return which residuals it reads: the others are not among its inputs.
    """

    def pushforward(*values: jax.Array) -> list:
        residuals, flowing = parts(values, len(residual_types))
        return list(jax.tree.unflatten(tree, residuals)(*flowing))

    types = [t.to_tangent_aval() for t in kept(loop.body.in_avals, active.inputs)]
    linear = _jax.trace_closed(pushforward, [*residual_types, *types], "loop_tangents")
    linear = equations.reported_once(linear)
    if not loop.holds_custom_vjp:  # otherwise the next derivative is that of this code
        linear = to_transpose(linear)
    moving = [True] * sum(active.inputs)
    keep = [*[False] * len(residual_types), *moving]
    linear, used = _jax.dce(linear, [True] * len(linear.out_avals), keep)
    return linear, used[: len(residual_types)]


def _run_twice(wide: set[int], step: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a step that runs each wide inner loop twice: for its results, and for its residuals.

    The second run gets zeros for operands on which no residual depends.
    """
    j = _jax.open_jaxpr(step)

    def rule(eqn: _jax.Equation, ins: list) -> list:
        outs = list(_jax.bind_equation(eqn, ins))
        if id(eqn) not in wide:
            return outs
        fewer = [v if n else _jax.zeros(u.aval) for v, u, n in _operands(eqn, ins)]
        results = _result_count(eqn)
        return [*outs[:results], *list(_jax.bind_equation(eqn, fewer))[results:]]

    run = lambda *values: interpret(j, values, rule)
    return _jax.trace_closed(run, step.in_avals, "loop_step")


def wide_loops(loop: Loop, step: _jax.Jaxpr) -> set[int]:
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
