"""vmap of a loop: one function for all six primitives.

A batch axis that only tangents or cotangents have becomes the primitive's `batch` parameter, so
that the trajectory is computed once for all of them. Any other batch axis goes into the loop
itself: its two jaxprs are batched to a fixed point of which carry leaves have the axis, and the
same primitive is bound on the batched loop.

The new axis is the first of a carry leaf, unless the loop has lanes that it does not add to: then
it comes after the lane axes, so that a mask over the lanes always broadcasts from the left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from loopkit import _jax
from loopkit.engine.dual_loop import dual_loop, dual_operands, dual_results
from loopkit.engine.loop import Active, Loop, Operands, kept, parts
from loopkit.engine.primitives import (
    dual_p,
    forward_p,
    hessian_p,
    pullback_p,
    pushforward_p,
    while_p,
)
from loopkit.engine.reversal import build, can_replay, reversal
from loopkit.engine.split import batch_split, split_step
from loopkit.engine.undo import batch_undo


class Batched(NamedTuple):
    """A batched loop, and where the new axis is in each operand and result (None: nowhere)."""

    loop: Loop
    operands: Operands
    ys: list


def batch_loop(
    loop: Loop,
    axis: Any,
    batched: Operands,
    ys: Sequence[bool] | None = None,
    whole: bool = False,
) -> Batched:
    """`loop` over operands of which some are batched; `ys` forces results to be.

    `whole`: if the axis becomes a lane, so are constants that differ between lanes already. Then a
    lane can be given those of another (lanes.py).
    """
    ys = [False] * loop.ys_count if ys is None else list(ys)
    key = ("batched", axis, *map(tuple, batched), tuple(ys), whole)
    return loop.derived(key, lambda: _batch_loop(loop, axis, batched, ys, whole))


def _batch_loop(loop: Loop, axis: Any, batched: Operands, ys: list[bool], whole: bool) -> Batched:
    k = len(loop.lanes)
    joins, carry = False, list(batched.init)
    while True:
        place = 0 if joins else k
        const_axes = _places(loop.const_lanes, batched.consts, joins)
        x_axes = _places(loop.xs_lanes, batched.xs, joins)
        carry_axes = _at(carry, place)
        body_axes = [*const_axes, *carry_axes, *x_axes]
        _, flags = _jax.batch_jaxpr(loop.body, axis, body_axes, ["free"] * len(loop.body.out_avals))
        new, out_ys = parts(flags, loop.carry_count)
        new = [a or b for a, b in zip(carry, new, strict=True)]
        if not joins and loop.cond is not None:
            cond_axes = [*_at(batched.cond_consts, 0), *_at(new, place)]
            _, (joins,) = _jax.batch_jaxpr(loop.cond, axis, cond_axes, ["free"])
            if joins and whole and loop.lanes:
                consts = [f or n > 0 for f, n in zip(batched.consts, loop.const_lanes, strict=True)]
                batched = batched._replace(consts=consts)
        if joins and not all(new):
            new = [True] * len(new)
        elif new == carry and (not joins or place == 0):
            break
        carry = new
    ys = [joins or a or b for a, b in zip(ys, out_ys, strict=True)]
    carry_axes, y_axes = _at(carry, place), _at(ys, place)
    body, _ = _jax.batch_jaxpr(loop.body, axis, body_axes, [*carry_axes, *y_axes])
    cond = loop.cond
    if cond is not None:
        cond_axes = [*_at(batched.cond_consts, 0), *carry_axes]
        cond, _ = _jax.batch_jaxpr(cond, axis, cond_axes, [0 if joins else None])
    new_loop = loop.replace(
        cond=cond,
        body=body,
        const_lanes=_lanes(loop.const_lanes, batched.consts, joins),
        xs_lanes=_lanes(loop.xs_lanes, batched.xs, joins),
        xs_axes=_shifted(loop.x_axes, x_axes),
        ys_axes=_shifted(loop.y_axes, y_axes),
    )
    x_places, y_places = _stacked(x_axes, loop.x_axes), _stacked(y_axes, loop.y_axes)
    axes = Operands(_at(batched.cond_consts, 0), const_axes, carry_axes, x_places)
    return Batched(new_loop, axes, y_places)


def _at(flags: Sequence[bool], place: int) -> list[int | None]:
    return [place if f else None for f in flags]


def _stacked(axes: Sequence[int | None], rows: Sequence[int]) -> list[int | None]:
    """The axes in arrays of rows, from those in one row. Rows are along the axes `rows`."""
    return [None if a is None else a + (a >= row) for a, row in zip(axes, rows, strict=True)]


def _shifted(rows: Sequence[int], axes: Sequence[int | None]) -> tuple[int, ...]:
    """The axes of the rows, once each row has one more axis at `axes`."""
    return tuple(row + (a is not None and a < row) for a, row in zip(axes, rows, strict=True))


def _places(lanes: Sequence[int], batched: Sequence[bool], joins: bool) -> list[int | None]:
    """Where the axis goes in constants or slices: behind the lane axes, or before them."""
    lanes = lanes or [0] * len(batched)
    return [(0 if joins else n) if f else None for f, n in zip(batched, lanes, strict=True)]


def _lanes(lanes: tuple[int, ...], batched: Sequence[bool], joins: bool) -> tuple[int, ...]:
    """How many lane axes lead in each of them, once the new axis is in."""
    if not joins:
        return lanes
    lanes = lanes or (0,) * len(batched)
    return tuple(n + 1 if f else 0 for f, n in zip(batched, lanes, strict=True))


def move(value: Any, source: int | None, target: int | None, size: int) -> Any:
    """`value` with its batch axis moved, or put in."""
    if target is None:
        assert source is None, "a batched operand of a leaf that is not batched"
        return value
    if source is None:
        shape = list(jnp.shape(value))
        shape.insert(target, size)
        return jnp.broadcast_to(jnp.expand_dims(value, target), shape)
    return jnp.moveaxis(value, source, target)


def batch_tangents(
    loop: Loop, dual: Loop, operands: Sequence[Any], active: Active, size: int
) -> list:
    """The tangents that come out of the dual loop, where those that go in have a leading batch."""
    p, _ = dual.split(operands)

    def added(count: int, total: int) -> list[bool]:
        return [False] * count + [True] * (total - count)

    flags = Operands(
        [False] * len(p.cond_consts),
        added(loop.const_count, dual.const_count),
        added(loop.carry_count, dual.carry_count),
        added(loop.xs_count, dual.xs_count),
    )
    ys = added(loop.ys_count, dual.ys_count)
    new, axes, y_axes = batch_loop(dual, _jax.axis(size), flags, ys)
    moved = [
        move(v, 0 if f else None, a, size)
        for v, f, a in zip(p.flat, flags.flat, axes.flat, strict=True)
    ]
    outs = while_p.bind(*moved, loop=new)
    _, tangents = dual_results(loop, outs, active)
    _, places = dual_results(loop, [*axes.init, *y_axes], active)
    return [jnp.moveaxis(t, a, 0) for t, a in zip(tangents, places, strict=True)]


# ---------------------------------------------------------------- the rule


def batch_loop_primitive(primitive: Any) -> Any:
    """The rule for primitives whose operands and results are all primal."""

    def rule(axis: Any, args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple:
        loop = params["loop"]
        if primitive is dual_p:
            return _batch_dual(axis, args, dims, **params)
        flags = loop.split([d is not None for d in dims])[0]
        new, operands, ys = batch_loop(loop, axis, flags)
        values = [move(*vda, axis.size) for vda in zip(args, dims, operands.flat, strict=True)]
        return while_p.bind(*values, loop=new), [*operands.init, *ys]

    return rule


def _batch_dual(
    axis: Any, args: Sequence[Any], dims: Sequence[Any], *, loop: Loop, active: Active
) -> tuple:
    dual = dual_loop(loop, active)

    def arrange(values: Sequence[Any]) -> list:
        primal, tangent = parts(values, loop.operand_count)
        return dual_operands(loop, primal, tangent, active)

    rule = batch_loop_primitive(while_p)
    outs, places = rule(axis, arrange(args), arrange(dims), loop=dual)
    results, tangents = dual_results(loop, outs, active)
    places, tangent_places = dual_results(loop, places, active)
    return [*results, *tangents], [*places, *tangent_places]


def _laid_out(loop: Loop, axis: Any, batched: Batched, layout: Active) -> None:
    """Make the batched loop save what the loop itself saves, in the same slots."""
    (new, places, ys), key = batched, ("reversal", layout)
    if key in new.memory:
        return
    how = reversal(loop, layout)
    split = None if how.plan.keeps_all else split_step(new, layout)
    if split is None or not can_replay(new, split, how.saved):
        split = batch_split(how.split, loop, axis, places, layout)
    new.memory[("split", layout)] = split
    undo = None if how.undo is None else batch_undo(how.undo, loop, axis, places, ys)
    new.memory[key] = build(new, layout, how.plan, how.saved, split, undo, how.counters)


def _residual_axes(loop: Loop, new: Loop, axis: Any, places: Operands, layout: Active) -> list:
    """Where the new axis is in the residuals: in each lane's steps, if it makes lanes."""
    how = reversal(loop, layout)
    if how.plan.keeps_all:
        batched = reversal(new, layout).split.stored_batched
        rows: list[int | None] = [1 if f else None for f in how.shortened(batched)]
    else:
        saved = kept(places.init, how.slotted)
        rows = _stacked(saved, [0] * len(saved))
    if how.undo is not None:
        log = reversal(new, layout).undo
        assert log is not None, "what is batched saves what it saved before"
        rows += [1 if f else None for f in log.batched]
        rows += kept(places.init, how.undo.leaves)
    return [*rows, None, 0 if len(new.lanes) > len(loop.lanes) else None]


def _forced(loop: Loop, flags: Operands, layout: Active, force: bool) -> Operands:
    """Flags with every active input batched, where the primitive needs that."""
    if not force:
        return flags
    consts, init, xs = (
        [f or a for f, a in zip(group, active, strict=True)]
        for group, active in zip(flags[1:], layout[:3], strict=True)
    )
    return Operands(flags.cond_consts, consts, init, xs)


def _batch_forward(
    axis: Any, args: Sequence[Any], dims: Sequence[Any], *, loop: Loop, active: Active
) -> tuple:
    keeps_all = reversal(loop, active).plan.keeps_all
    flags = _forced(loop, loop.split([d is not None for d in dims])[0], active, keeps_all)
    new, operands, ys = _batched_for(loop, axis, flags, active if keeps_all else None, active)
    values = [move(*vda, axis.size) for vda in zip(args, dims, operands.flat, strict=True)]
    outs = forward_p.bind(*values, loop=new, active=active)
    return outs, [*operands.init, *ys, *_residual_axes(loop, new, axis, operands, active)]


def _batched_for(
    loop: Loop, axis: Any, flags: Operands, forced: Active | None, layout: Active
) -> Batched:
    """A batched loop of its own for the derivative primitives, which share the layout of `loop`."""
    ys = None if forced is None else forced.ys
    key = ("batched for", axis, *map(tuple, flags), ys, layout)

    def make() -> Batched:
        found = batch_loop(loop, axis, flags, ys, whole=True)
        own = found._replace(loop=found.loop.replace())
        _laid_out(loop, axis, own, layout)
        return own

    return loop.derived(key, make)


def batch_linear(primitive: Any, ins: str, outs: str, has_residuals: bool) -> Any:
    """The rule for a primitive with linear operands.

    `ins` and `outs` say, for its linear operands and its results, whether they go with the
    active "inputs" or the active "outputs" of the loop.
    """

    def rule(axis: Any, args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple:
        loop, active, batch = params["loop"], params["active"], params["batch"]
        layout = params.get("layout", active)
        residual_count = len(reversal(loop, layout).residual_types) if has_residuals else 0
        values, residuals, linear = parts(args, loop.operand_count, residual_count)
        value_dims, residual_dims, linear_dims = parts(dims, loop.operand_count, residual_count)
        size = axis.size
        if all(d is None for d in [*value_dims, *residual_dims]):
            count = size if batch is None else size * batch
            stacked = [move(v, d, 0, size) for v, d in zip(linear, linear_dims, strict=True)]
            if batch is not None:
                stacked = [v.reshape(count, *v.shape[2:]) for v in stacked]
            params = dict(params, batch=count)
            results = primitive.bind(*values, *residuals, *stacked, **params)
            if batch is not None:
                results = [r.reshape(size, batch, *r.shape[1:]) for r in results]
            return results, [0] * len(results)

        # Tangents and cotangents that differ between lanes need inputs that do.
        flags = _forced(loop, loop.split([d is not None for d in value_dims])[0], layout, True)
        new, operands, ys = _batched_for(loop, axis, flags, layout, layout)
        moved = [move(*v, size) for v in zip(values, value_dims, operands.flat, strict=True)]
        if has_residuals:
            places = _residual_axes(loop, new, axis, operands, layout)
            if any(d is not None and p is None for d, p in zip(residual_dims, places, strict=True)):
                # Lanes that were run one at a time saved at other units: run them again, together.
                forward = (axis, values, value_dims)
                fresh, found = _batch_forward(*forward, loop=loop, active=layout)
                residuals = fresh[loop.primal_counts[1] :]
                residual_dims = found[loop.primal_counts[1] :]
            moved += [move(*v, size) for v in zip(residuals, residual_dims, places, strict=True)]
        leading = 0 if batch is None else 1
        of = {
            "inputs": [*operands.consts, *operands.init, *operands.xs],
            "outputs": [*operands.init, *ys],
        }

        def linear_places(side: str) -> list[int]:
            return [a + leading for a in kept(of[side], getattr(active, side))]

        into = [p for side in ins.split() for p in linear_places(side)]
        moved += [move(*v, size) for v in zip(linear, linear_dims, into, strict=True)]
        results = primitive.bind(*moved, **dict(params, loop=new))
        return results, linear_places(outs)

    return rule


_jax.register_batching(while_p, batch_loop_primitive(while_p))
_jax.register_batching(dual_p, batch_loop_primitive(dual_p))
_jax.register_batching(forward_p, _batch_forward)
_jax.register_batching(pushforward_p, batch_linear(pushforward_p, "inputs", "outputs", True))
_jax.register_batching(pullback_p, batch_linear(pullback_p, "outputs", "inputs", True))
_jax.register_batching(hessian_p, batch_linear(hessian_p, "outputs inputs", "inputs", False))
