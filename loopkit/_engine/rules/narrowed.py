"""vmap of the derivatives of a loop whose lanes narrow as they stop.

`forward` has no room for what the phases save, because its layout is that of a single lane. So it
saves only the number of steps taken. The linear primitives become one primitive, which is the
derivative of all phases and runs them again from the operands.

    operands  those of the loop of all lanes, then those of the primitive `of` that are linear
    results   those of that primitive
    JVP       that of its evaluation; so is the transpose, in the linear operands
    vmap      lanes of another axis join the existing ones
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import or_
from typing import Any

import jax

from loopkit import _jax
from loopkit._arguments import errors
from loopkit._engine.derivative.reversal import reversal
from loopkit._engine.derivative.split import primal_half
from loopkit._engine.facts.activity import either
from loopkit._engine.lanes.batched_loop import Batched, waiting
from loopkit._engine.lanes.many_lanes import (
    AxisPair,
    ManyLanes,
    OneLane,
    join,
    waiting_lanes,
    with_lanes,
)
from loopkit._engine.lanes.phases import phases_of
from loopkit._engine.lanes.predicates import counted
from loopkit._engine.leaves import spread
from loopkit._engine.loop import Active, Loop, Operands, kept, parts
from loopkit._engine.passes.dual_loop import active_inputs, replace_active
from loopkit._engine.primitives import (
    define,
    hessian_p,
    narrowed_p,
    pullback_p,
    pushforward_p,
    while_p,
)
from loopkit._engine.rules import while_
from loopkit._engine.rules.hessian import pullback_along
from loopkit._engine.sweeps import sweeps


def lanes_of(loop: Loop, axis: _jax.AxisData, dims: Sequence[Any]) -> ManyLanes | None:
    """Return the lanes of a loop to differentiate, if they narrow."""
    if loop.has_impure_callback or loop.holds_custom_vjp:
        return None  # it must not run again, or its rule reads saved values
    if loop.lane_policy is None:
        return None  # loops run again only if the user asks for it
    if loop.lane is not None:
        loop = loop.derived("its lanes are not joined", loop.replace)
    found = with_lanes(loop, axis, dims)
    return found if found is not None and phases_of(found.loop) is not None else None


def forward(
    loop: Loop, lanes: ManyLanes, args: Sequence[Any], dims: Sequence[Any], active: Active
) -> tuple:
    """Return the results, zeros for the saved values, and the steps taken."""
    lane = lanes.lane
    flags = lane.flags._replace(init=[*lane.flags.init, False])
    half = primal_half(lane.loop, active)  # a custom rule is differentiated once
    counting = lane.replaced(counted(half), flags)
    given = lanes.loop.split(lanes.map_operands(list(zip(args, dims, strict=True))))[0]
    given.init.append(_jax.zeros(counting.carry_types[-1]))
    carry, ys = parts(while_p.bind(*given.flat, loop=counting), counting.carry_count)
    saved = list(map(_jax.zeros, sweeps(reversal(loop, active)).residual_types[:-1]))
    places = [*lanes.results, *[None] * len(saved), 0]
    return [*lanes.map_results([*carry[:-1], *ys]), *saved, carry[-1]], places


def linear_lanes(
    axis: _jax.AxisData,
    dims: Sequence[Any],
    *,
    loop: Loop,
    active: Active,
    transpose_only: bool = False,
    **params: Any,
) -> OneLane | None:
    """Return the lanes of a linear primitive, if they narrow. All active leaves have lanes."""
    with waiting(transpose_only):  # operands may be missing then
        lanes = lanes_of(loop, axis, dims)
    if lanes is None:
        return None
    lane, leaves = lanes.lane, either(active, params.get("moving", active))
    quiet = lane.loop.without_debug_effects()
    return replace(lane, loop=quiet, flags=with_leaves(lane.flags, leaves))


def with_leaves(flags: Operands, leaves: Active) -> Operands:
    """Return flags of operands, in which those of some leaves are set, too."""
    groups = zip(flags[1:], leaves[:3], strict=True)
    return Operands(flags.cond_consts, *(list(map(or_, *pair)) for pair in groups))


def check_saved(loop: Loop, saved: Sequence[Any], places: Sequence[Any]) -> None:
    """Raise if zeros were saved in place of values that are read.

    `saved` has the lane axis of each saved value, and `places` the axis that it should have.
    """
    zeros = any(s is None and p is not None for s, p in zip(saved, places, strict=True))
    if zeros and saved[-1] is not None:
        expected = 'must be "wait" if the loop is linearised outside another loop, and its '
        expected += "linear part runs in that loop, which stores all residuals of its steps"
        advice = 'Pass `lanes="wait"`, or linearise in the step.'
        raise NotImplementedError(
            errors.wrong(loop.name, "lanes", expected, repr(loop.lane_policy), advice)
        )


def derivative(
    primitive: _jax.Primitive, lane: OneLane, operands: Sequence[Any], params: dict[str, Any]
) -> list:
    """Return the results of a linear primitive of all lanes, without saved values."""
    active, batch = params["active"], params["batch"]
    what = {"of": primitive, "active": active, "moving": params.get("moving", active)}
    what["of_pullback"] = params.get("of_pullback", False)
    return narrowed_p.bind(*operands, loop=lane.many, batch=batch, **what)


def evaluate(
    *operands: jax.Array,
    loop: Loop,
    of: _jax.Primitive,
    active: Active,
    moving: Active,
    of_pullback: bool,
    batch: int | None,
) -> list:
    values, linear = parts(operands, loop.operand_count)
    inputs = active_inputs(loop, values, active)

    def run(at: Sequence[Any], leaves: Active) -> Any:
        bind = lambda *given: while_p.bind(*given, loop=loop)
        return lambda *moved: kept(bind(*replace_active(loop, at, leaves, moved)), leaves.outputs)

    def tangents_at(u: list) -> Any:
        def tangents(*moved: jax.Array) -> list:
            at = replace_active(loop, values, active, moved)
            return jax.jvp(run(at, moving), active_inputs(loop, at, moving), u)[1]

        return tangents

    def one(*given: jax.Array) -> list:
        if of is pushforward_p:
            return list(jax.linearize(run(values, active), *inputs)[1](*given))
        w, u = parts(given, sum(moving.outputs))
        if of_pullback:
            return pullback_along(loop, values, active, moving, w, u)
        tangents = tangents_at(u) if of is hessian_p else run(values, active)
        return list(jax.vjp(tangents, *inputs)[1](w))

    return one(*linear) if batch is None else jax.vmap(one)(*linear)


def result_types(
    *_: object, loop: Loop, of: _jax.Primitive, active: Active, batch: int | None, **__: object
) -> tuple[list, Any]:
    types = loop.output_types(active) if of is pushforward_p else loop.input_types(active)
    return _jax.stack_types(types, batch), loop.effects


def transpose(cts: Sequence[Any], *operands: Any, **params: Any) -> list:
    """Transpose in the linear operands that are unknown."""
    unknown = [_jax.is_undefined(v) for v in operands]
    types = [v.aval for v in kept(operands, unknown)]
    linear = lambda *moved: evaluate(*spread(moved, unknown, operands), **params)
    found = jax.linear_transpose(linear, *types)(list(map(_jax.instantiate, cts)))
    return spread(found, unknown, [None] * len(operands))


def _batch(axis: _jax.AxisData, args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple:
    """Join the lanes of another axis with the existing ones, if they narrow together."""
    lane, count = params["loop"].lane, params["loop"].operand_count
    new = join(lane, axis, dims[:count])
    if new is None:
        return while_.batching_of(evaluate)(axis, args, dims, **params)
    old, one, two = waiting_lanes(lane), waiting_lanes(new), AxisPair(axis.size, lane.count)
    linear, places = linear_places(params["of"], one, **params)
    before = [*old.axes.flat, *linear_places(params["of"], old, **params)[0]]
    moved = map(two.joined, args, [*one.axes.flat, *linear], dims, before)
    results = narrowed_p.bind(*moved, **dict(params, loop=new.many))
    return list(map(two.apart, results, places)), places


SIDES: dict[Any, tuple[tuple[str, ...], tuple[str, ...]]] = {
    pushforward_p: (("inputs",), ("outputs",)),
    pullback_p: (("outputs",), ("inputs",)),
    hessian_p: (("outputs", "inputs"), ("inputs",)),
}
"""For each linear primitive, the sides of the loop to which its linear operands and its results
belong."""


def linear_places(
    primitive: _jax.Primitive,
    many: Batched,
    *,
    active: Active,
    batch: int | None,
    moving: Active | None = None,
    **_: object,
) -> tuple[list, list]:
    """Return the lane axes of the linear operands, and of the results.

    Linear operands belong to the leaves of `moving`, if the primitive has that parameter.
    """
    leading, (ins, outs) = batch is not None, SIDES[primitive]
    of = {"inputs": many.axes.flat[many.loop.cond_const_count :], "outputs": many.results}

    def places(sides: Sequence[str], leaves: Active) -> list[int]:
        return [a + leading for side in sides for a in kept(of[side], getattr(leaves, side))]

    return places(ins, moving or active), places(outs, active)


define(narrowed_p, evaluate, result_types, jvp=while_.jvp_of(evaluate), transpose=transpose)
_jax.register_batching(narrowed_p, _batch)
