"""The derivative of one step before it is cut: its values, and a linear function that reads them.

`jax.linearize` of the body is traced once. Unless a step is too long for a cut, calls of jitted
functions are inlined, so that the cut sees what is inside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax

from loopkit import _jax
from loopkit._arguments import errors
from loopkit._engine.derivative import rerun
from loopkit._engine.facts.bounds import find_counters
from loopkit._engine.leaves import spread
from loopkit._engine.loop import Active, Loop, kept, parts
from loopkit._engine.passes.unused import to_transpose
from loopkit._jaxprs import equations
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
    """Whether the step has wide inner loops (`rerun.py`) and keeps their residuals."""

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
    wide = rerun.found(loop, whole)
    if wide and again:
        whole = rerun.apart(loop, whole)
    tangents, used = _tangents(loop, tree, whole.out_avals[n:], active)
    outs = _jax.open_jaxpr(whole).outvars
    keep = [True] * len(whole.in_avals)
    whole = _jax.with_outputs(whole, [*outs[:n], *kept(outs[n:], used)], keep)
    policy, saves_all = policy_of(loop.checkpoints), isinstance(loop.checkpoints, Policy)
    spelled_out = equations.inlined(whole)
    if len(_jax.open_jaxpr(spelled_out).eqns) <= LARGEST_GRAPH:
        whole = spelled_out
    free = [by is not None for by in find_counters(loop)]
    remade = rerun.found(loop, whole) if again else set()
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
