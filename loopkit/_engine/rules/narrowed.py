"""vmap of the derivatives of a loop whose lanes narrow as they stop.

For what its phases save, there is no place among what one lane at a time does. So `forward` saves
nothing then but the steps taken, and the linear primitives are derivatives of all phases, which are
run again from the operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from loopkit import _jax
from loopkit._arguments import errors
from loopkit._engine.derivative.reversal import reversal
from loopkit._engine.facts.activity import either
from loopkit._engine.facts.widths import waiting
from loopkit._engine.loop import Active, Loop, Operands, kept, parts
from loopkit._engine.passes.dual_loop import active_inputs, replace_active
from loopkit._engine.passes.phases import Phases, in_phases
from loopkit._engine.primitives import hessian_p, pushforward_p
from loopkit._engine.sweeps import sweeps


def phases_of(loop: Loop, axis: Any, dims: Sequence[Any]) -> Phases | None:
    """The phases of a loop that is differentiated, of operands that have the axis there."""
    if loop.asks_the_host or loop.holds_custom_vjp:
        return None  # it must not be run again, or its rule reads what was saved
    if loop.narrows is None:
        return None  # what is run again is asked for
    return in_phases(loop, axis, loop.split([d is not None for d in dims])[0])


def forward(
    loop: Loop,
    axis: Any,
    phases: Phases,
    args: Sequence[Any],
    dims: Sequence[Any],
    active: Active,
) -> tuple:
    """The results, zeros for what would be saved, and the steps taken."""
    counting = in_phases(phases.loop, axis, phases.flags, counted=True)
    assert counting is not None, "it narrows"
    *results, taken = counting.run(*phases.whole.into(zip(args, dims, strict=True)))
    saved = list(map(_jax.zeros, sweeps(reversal(loop, active)).residual_types[:-1]))
    places = [*phases.whole.results, *[None] * len(saved), 0]
    return [*results, *saved, taken], places


def linear_phases(
    axis: Any, dims: Sequence[Any], *, loop: Loop, active: Active, lean: bool = False, **params: Any
) -> Phases | None:
    """The same of a linear primitive: silent, and what is active has lanes, too."""
    with waiting(lean):  # of a lean one, operands are missing
        phases = phases_of(loop, axis, dims)
    if phases is None:
        return None
    leaves = either(active, params.get("moving", active))
    cond_consts, *flags = phases.flags
    groups = zip(flags, leaves[:3], strict=True)
    every = Operands(cond_consts, *([*map(any, zip(*pair, strict=True))] for pair in groups))
    with waiting(False):
        found = in_phases(phases.loop.without_debug_effects(), axis, every)
    assert found is not None, "it narrows where fewer have lanes"
    return found


def check_saved(loop: Loop, saved: Sequence[Any], places: Sequence[Any]) -> None:
    """Raise if zeros were saved, where they are read. Of what is saved, `saved` says where it has
    lanes, and `places` where they should be.
    """
    zeros = any(s is None and p is not None for s, p in zip(saved, places, strict=True))
    if zeros and saved[-1] is not None:
        expected = 'must be "wait" where a loop is linearised outside another loop, and what that '
        expected += "gives is applied in steps of which all residuals are stored"
        advice = "Pass it, or linearise in the step."
        raise NotImplementedError(
            errors.wrong(loop.name, "lanes", expected, repr(loop.narrows), advice)
        )


def derivative(
    primitive: Any, phases: Phases, operands: Sequence[Any], params: dict[str, Any]
) -> list:
    """What a linear primitive gives, of operands of all lanes without what was saved."""
    active, loop = params["active"], phases.loop
    values, linear = parts(operands, loop.operand_count)
    moving = params.get("moving", active)
    inputs = active_inputs(loop, values, active)

    def run(at: Sequence[Any], leaves: Active) -> Any:
        return lambda *moved: kept(
            phases.run(*replace_active(loop, at, leaves, moved)), leaves.outputs
        )

    def tangents_at(u: list) -> Any:
        def tangents(*moved: Any) -> list:
            at = replace_active(loop, values, active, moved)
            return jax.jvp(run(at, moving), active_inputs(loop, at, moving), u)[1]

        return tangents

    def one(*given: Any) -> list:
        if primitive is pushforward_p:
            return list(jax.linearize(run(values, active), *inputs)[1](*given))
        w, u = parts(given, sum(moving.outputs))
        of = tangents_at(u) if primitive is hessian_p else run(values, active)
        return list(jax.vjp(of, *inputs)[1](w))

    return one(*linear) if params["batch"] is None else jax.vmap(one)(*linear)
