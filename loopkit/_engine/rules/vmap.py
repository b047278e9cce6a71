"""The vmap rules of the six primitives.

A batch axis that only tangents or cotangents have becomes the primitive's `batch` parameter, so
that the trajectory is computed once for all of them. Any other batch axis goes into the loop itself
(lanes/batched_loop.py), and the same primitive is bound on the batched loop.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from loopkit import _jax
from loopkit._engine.derivative.pieces import build
from loopkit._engine.derivative.reversal import can_replay, decide, reversal
from loopkit._engine.derivative.split import batch_split, split_step
from loopkit._engine.derivative.write_log import batch_undo
from loopkit._engine.facts.activity import either
from loopkit._engine.lanes.batched_loop import Batched, batch_loop, leaves_in_rows, waiting
from loopkit._engine.lanes.many_lanes import waiting_lanes, with_lanes
from loopkit._engine.lanes.phases import phases_of
from loopkit._engine.leaves import spread
from loopkit._engine.loop import Active, Loop, kept, parts
from loopkit._engine.passes.dual_loop import dual_loop
from loopkit._engine.primitives import (
    dual_p,
    forward_p,
    hessian_p,
    pullback_p,
    pushforward_p,
    while_p,
)
from loopkit._engine.rules import forward, narrowed
from loopkit._engine.rules.along import Along
from loopkit._engine.rules.linear import pullback_apart
from loopkit._engine.sweeps import sweeps


def _batch_while(
    axis: _jax.AxisData, args: Sequence[Any], dims: Sequence[Any], *, loop: Loop
) -> tuple:
    pairs = list(zip(args, dims, strict=True))
    if (new := with_lanes(loop, axis, dims)) is not None:
        return new.map_results(while_p.bind(*new.map_operands(pairs), loop=new.loop)), new.results
    if (phases := phases_of(loop)) is not None:
        # The lanes of this loop narrow, and those of the new axis wait for each other in each
        # phase.
        return _jax.batched_call(phases.run, axis, args, dims)
    batched = batch_loop(loop, axis, loop.split([d is not None for d in dims])[0])
    return while_p.bind(*batched.map_operands(pairs), loop=batched.loop), batched.results


def _batch_dual(
    axis: _jax.AxisData, args: Sequence[Any], dims: Sequence[Any], *, loop: Loop, active: Active
) -> tuple:
    dual = dual_loop(loop, active)
    outs, places = _batch_while(
        axis, dual.map_operands(args), dual.map_operands(dims), loop=dual.loop
    )
    return dual.map_results(outs), dual.map_results(places)


def _laid_out(loop: Loop, axis: _jax.AxisData, batched: Batched, layout: Active) -> None:
    """Make the batched loop save what the loop itself saves, in the same slots."""
    new, places, ys = batched.loop, batched.axes, batched.ys
    with waiting(True):  # the layout has room for what inner loops save
        how = reversal(loop, layout)
        split = None if how.plan.stores_rows else split_step(new, layout)
        if split is None or not can_replay(new, split, how.saved):
            split = batch_split(how.split, loop, axis, places, ys, layout)
        split = replace(split, uncut_bytes=how.split.uncut_bytes)  # of one lane, as in plans
        undo = None if how.undo is None else batch_undo(how.undo, loop, axis, places, ys)
        made = build(new, layout, how.plan, how.saved, split, undo, how.counters)
        decide(new, layout, made)


def _residual_axes(loop: Loop, batched: Batched, layout: Active) -> list:
    """Return the position of the new axis in each residual."""
    both = sweeps(reversal(loop, layout))
    return both.residual_axes(reversal(batched.loop, layout), batched.axes.init)


def _batch_forward(
    axis: _jax.AxisData,
    args: Sequence[Any],
    dims: Sequence[Any],
    *,
    loop: Loop,
    active: Active,
    along: Along | None = None,
    **_: object,
) -> tuple:
    leaves = active if reversal(loop, active).plan.stores_rows else None
    lanes_of = lambda dims: narrowed.lanes_of(loop, axis, dims)

    def places(batched: Batched) -> tuple[list, list]:
        return batched.axes.flat, [*batched.results, *_residual_axes(loop, batched, active)]

    if along is not None:
        params = {"loop": loop, "active": active, "along": along}
        how = forward.apart, lanes_of, places, leaves
        return _batch_along(forward_p, *how, axis, args, dims, params)
    if (lanes := lanes_of(dims)) is not None:
        return narrowed.forward(loop, lanes, args, dims, active)
    batched = _batched_for(loop, axis, dims, leaves, active)
    values = batched.map_operands(zip(args, dims, strict=True))
    return forward_p.bind(*values, loop=batched.loop, active=active), places(batched)[1]


def _batch_pullback(
    axis: _jax.AxisData, args: Sequence[Any], dims: Sequence[Any], **params: Any
) -> tuple:
    if params.get("along") is None:
        return _batch_linear(pullback_p, axis, args, dims, **params)
    loop, layout = params["loop"], params["layout"]
    lanes_of = lambda dims: narrowed.linear_lanes(axis, dims, **params)

    def places(batched: Batched) -> tuple[list, list]:
        cts, results = narrowed.linear_places(pullback_p, batched, **params)
        return [*batched.axes.flat, *_residual_axes(loop, batched, layout), *cts], results

    how = pullback_apart, lanes_of, places, layout
    return _batch_along(pullback_p, *how, axis, args, dims, params)


def _batch_along(
    primitive: _jax.Primitive,
    apart: Callable[..., list],
    lanes_of: Callable[[Sequence[Any]], Any],
    places: Callable[[Batched], tuple[list, list]],
    leaves: Active | None,
    axis: _jax.AxisData,
    args: Sequence[Any],
    dims: Sequence[Any],
    params: dict[str, Any],
) -> tuple[list, list]:
    """Batch a primitive that has tangents; each of them gets the axis of its value.

    `apart` computes the same with other primitives, for lanes that narrow (`lanes_of`), and for
    saved values whose layout has no place for the axis. `places` returns the axes of operands and
    results. `leaves` always have the axis.
    """
    loop, along = params["loop"], params["along"]
    layout, by_others = params.get("layout", params["active"]), ft.partial(apart, **params)
    values, count = dims[: loop.operand_count], len(along.operands)
    # JAX has no lanes of a row on the host.
    if not any(reversal(loop, layout).on_host) and _same(loop, axis, dims[:count]):
        return _more_directions(primitive, axis, args, dims, params)
    if _same(loop, axis, values) or lanes_of(values) is not None:
        return _jax.batched_call(by_others, axis, args, dims)
    batched = _batched_for(loop, axis, values, _leaves(loop, along, leaves), layout)
    leading, (into, outs) = along.directions is not None, places(batched)
    beside = lambda axes, flags: [None if a is None else a + leading for a in kept(axes, flags)]
    into = [*into, *beside(into, along.operands)]
    if any(d is not None and a is None for d, a in zip(dims, into, strict=True)):
        return _jax.batched_call(by_others, axis, args, dims)
    size, over = axis.size, axis.explicit_mesh_axis
    moved = [_jax.move(v, d, a, size, over) for v, d, a in zip(args, dims, into, strict=True)]
    found = primitive.bind(*moved, **dict(params, loop=batched.loop))
    return found, [*outs, *beside(outs, along.results)]


def _same(loop: Loop, axis: _jax.AxisData, dims: Sequence[Any]) -> bool:
    """Return whether no operand varies along an axis, and no step uses its name."""
    return all(d is None for d in dims) and axis.name not in loop.axis_names


def _leaves(loop: Loop, along: Along, leaves: Active | None) -> Active:
    """Return the leaves that get the new axis: `leaves`, and those with a tangent."""
    _, consts, carry, xs = loop.split(along.operands[: loop.operand_count])[0]
    moving = Active(tuple(consts), tuple(carry), tuple(xs), (False,) * loop.ys_count)
    return moving if leaves is None else either(moving, leaves)


def _more_directions(
    primitive: _jax.Primitive,
    axis: _jax.AxisData,
    args: Sequence[Any],
    dims: Sequence[Any],
    params: dict[str, Any],
) -> tuple[list, list]:
    """Return results without the axis, and tangents with it."""
    along: Along = params["along"]
    known, tangents = parts(args, len(along.operands))
    count = len(along.results)

    def bind(tangents: list, directions: int) -> list:
        every = along._replace(directions=directions)
        return primitive.bind(*known, *tangents, **dict(params, along=every))

    pairs = zip(tangents, dims[len(known) :], strict=True)
    outs = _in_one_batch(bind, pairs, axis, along.directions, count)
    return outs, [*[None] * count, *[0] * (len(outs) - count)]


def _in_one_batch(
    bind: Callable[[list, int], list],
    pairs: Iterable[tuple],
    axis: _jax.AxisData,
    batch: int | None,
    without: int = 0,
) -> list:
    """Return the results of `bind(values, size)` for a batch that an axis forms, or joins.

    `pairs` are values and the positions of the axis. The first `without` results have no batch.
    """
    size, over = axis.size, axis.explicit_mesh_axis
    values = [_jax.move(v, d, 0, size, over) for v, d in pairs]
    if batch is None:
        return bind(values, size)
    flat = [v.reshape(size * batch, *v.shape[2:]) for v in values]
    plain, results = parts(bind(flat, size * batch), without)
    return [*plain, *(r.reshape(size, batch, *r.shape[1:]) for r in results)]


def _batched_for(
    loop: Loop, axis: _jax.AxisData, dims: Sequence[Any], leaves: Active | None, layout: Active
) -> Batched:
    """Return a separate batched loop for the derivative primitives, with the layout of `loop`.

    `dims` has the position of the axis in each operand. All of `leaves`, if given, get the axis.
    """
    flags, ys = loop.split([d is not None for d in dims])[0], None
    if leaves is not None:
        flags, ys = narrowed.with_leaves(flags, leaves), leaves.ys
    in_rows = leaves_in_rows(loop, axis, loop.split(dims)[0].init)
    key = ("batched for", axis, *map(tuple, flags), ys, layout, in_rows, waiting.value)

    def make() -> Batched:
        found = batch_loop(loop, axis, flags, ys, whole=True, in_rows=in_rows)
        own = replace(found, loop=found.loop.replace())
        _laid_out(loop, axis, own, layout)
        return own

    return loop.derived(key, make)


def _varying(
    loop: Loop, read: list[bool], values: list, dims: list, size: int
) -> tuple[list, list]:
    """Return operands and axes, with batched zeros for operands neither read nor batched."""
    lost = [d is None and not r for d, r in zip(dims, read, strict=True)]
    assert any(lost), "what is saved depends on the operands"
    zeros = map(_jax.zeros, _jax.stack_types(kept(loop.operand_types, lost), size))
    return spread(list(zeros), lost, values), spread([0] * sum(lost), lost, dims)


def _batch_linear(
    primitive: _jax.Primitive,
    axis: _jax.AxisData,
    args: Sequence[Any],
    dims: Sequence[Any],
    **params: Any,
) -> tuple:
    """Batch a primitive with linear operands."""
    loop, active, batch = params["loop"], params["active"], params["batch"]
    has_residuals = "layout" in params
    layout = params["layout"] if has_residuals else either(active, params["moving"])
    residual_count = len(sweeps(reversal(loop, layout)).residual_types) if has_residuals else 0
    counts = loop.operand_count, residual_count
    values, residuals, linear = parts(args, *counts)
    value_dims, residual_dims, linear_dims = parts(dims, *counts)
    size, over = axis.size, axis.explicit_mesh_axis
    if _same(loop, axis, [*value_dims, *residual_dims]):
        of = lambda v, n: primitive.bind(*values, *residuals, *v, **dict(params, batch=n))
        results = _in_one_batch(of, zip(linear, linear_dims, strict=True), axis, batch)
        return results, [0] * len(results)

    # Tangents and cotangents that differ between lanes need inputs that differ, too.
    lane = narrowed.linear_lanes(axis, value_dims, **params)
    if lane is None:
        batched = _batched_for(loop, axis, value_dims, layout, layout)
    else:
        batched = waiting_lanes(lane)
    moved = batched.map_operands(zip(values, value_dims, strict=True))
    if has_residuals and lane is None:
        places = _residual_axes(loop, batched, layout)
        if params["transpose_only"]:
            narrowed.check_saved(loop, residual_dims, places)
        pairs = zip(residual_dims, places, strict=True)
        apart = any(d is not None and p is None for d, p in pairs)
        if apart and params["transpose_only"]:
            # What was saved depends on operands that are missing: give these the axis, too.
            read = reversal(loop, layout, active).reads
            values, value_dims = _varying(loop, read, values, value_dims, size)
            places = [*value_dims, *residual_dims, *linear_dims]
            return _batch_linear(primitive, axis, [*values, *residuals, *linear], places, **params)
        if apart:
            # Lanes that ran one at a time saved in another layout: run them again, together.
            fresh = _batch_forward(axis, values, value_dims, loop=loop, active=layout)
            residuals, residual_dims = (found[loop.primal_counts[1] :] for found in fresh)
        triples = zip(residuals, residual_dims, places, strict=True)
        moved += [_jax.move(*v, size, over) for v in triples]
    into, places = narrowed.linear_places(primitive, batched, **params)
    moved += [_jax.move(*v, size, over) for v in zip(linear, linear_dims, into, strict=True)]
    if lane is None:
        return primitive.bind(*moved, **dict(params, loop=batched.loop)), places
    return narrowed.derivative(primitive, lane, moved, params), places


_jax.register_batching(while_p, _batch_while)
_jax.register_batching(dual_p, _batch_dual)
_jax.register_batching(forward_p, _batch_forward)
_jax.register_batching(pushforward_p, ft.partial(_batch_linear, pushforward_p))
_jax.register_batching(pullback_p, _batch_pullback)
_jax.register_batching(hessian_p, ft.partial(_batch_linear, hessian_p))
