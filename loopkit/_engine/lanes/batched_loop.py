"""Add an axis to a loop: vmap of its jaxprs.

The two jaxprs are batched until the set of carry leaves with the axis no longer grows.

The new axis is the first of a carry leaf, with one exception: if the loop has lanes, and the axis
is not one of them, it comes after the lane axes. So a mask over the lanes broadcasts from the left.

In derivatives, the axis comes second in a buffer that steps only write rows to. The row that a step
writes is then contiguous in memory, as in the ys of a scan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from loopkit import _jax
from loopkit._engine.facts.write_sites import writes_rows
from loopkit._engine.lanes.going_together import reads_other_lanes
from loopkit._engine.lanes.predicates import ended_in_each_lane
from loopkit._engine.loop import Input, Loop, Operands, parts

MANY_LANES = 8
"""The fewest lanes for which rows are contiguous. Processors prefetch from fewer pieces anyway."""

waiting = jax.make_user_context(False)
"""Whether lanes wait whatever the caller asks for, because the layout of saved values is fixed.

It decides how loops inside a step are batched, so it is in the key of every cache of these."""


@dataclass(frozen=True)
class Batched:
    """A batched loop."""

    loop: Loop
    axis: _jax.AxisData
    axes: Operands
    """The position of the new axis in each operand, or None."""
    ys: list

    @property
    def results(self) -> list:
        return [*self.axes.init, *self.ys]

    def map_operands(self, given: Iterable[tuple]) -> list:
        """Return the operands, from pairs: a value, and the position of the new axis in it."""
        size, over = self.axis.size, self.axis.explicit_mesh_axis
        places = zip(given, self.axes.flat, strict=True)
        return [_jax.move(v, d, a, size, over) for (v, d), a in places]


def batch_loop(
    loop: Loop,
    axis: _jax.AxisData,
    batched: Operands,
    ys: Sequence[bool] | None = None,
    whole: bool = False,
    in_rows: Sequence[int] = (),
) -> Batched:
    """Return `loop` with the axis in the flagged operands; `ys` forces results to have it, too.

    If the axis becomes a lane axis, `whole` also batches constants that already differ between
    lanes, so that a lane can take the constants of another (safe_inputs.py).

    `in_rows` lists the buffers whose rows get the axis, unless it is a lane axis.
    """
    ys = [False] * loop.ys_count if ys is None else list(ys)
    key = ("batched", axis, *map(tuple, batched), tuple(ys), whole, tuple(in_rows), waiting.value)
    return loop.derived(key, lambda: _batch_loop(loop, axis, batched, ys, whole, in_rows))


def _batch_loop(
    loop: Loop, axis: Any, batched: Operands, ys: list[bool], whole: bool, in_rows: Sequence[int]
) -> Batched:
    k = len(loop.lanes)
    joins, carry = False, list(batched.init)

    def carry_at(flags: Sequence[bool]) -> list[int | None]:
        places = [place + (not joins and i in in_rows) for i in range(loop.carry_count)]
        return [a if f else None for a, f in zip(places, flags, strict=True)]

    while True:
        place = 0 if joins else k
        const_axes = _places(loop.const_lanes, batched.consts, joins)
        x_axes = _places(loop.xs_lanes, batched.xs, joins)
        carry_axes = carry_at(carry)
        body_axes = [*const_axes, *carry_axes, *x_axes]
        _, flags = _jax.batch_jaxpr(loop.body, axis, body_axes, ["free"] * len(loop.body.out_avals))
        new, out_ys = parts(flags, loop.carry_count)
        new = [a or b for a, b in zip(carry, new, strict=True)]
        if not joins and loop.cond is not None:
            cond_axes = [*places_at(batched.cond_consts, 0), *carry_at(new)]
            _, (joins,) = _jax.batch_jaxpr(loop.cond, axis, cond_axes, ["free"])
            if joins and loop.min_active_lanes:
                return _batch_loop(ended_in_each_lane(loop), axis, batched, ys, whole, in_rows)
            if joins and whole and loop.lanes:
                consts = [f or n > 0 for f, n in zip(batched.consts, loop.const_lanes, strict=True)]
                batched = batched._replace(consts=consts)
        if joins and not all(new):
            new = [True] * len(new)
        elif new == carry and (not joins or place == 0):
            break
        carry = new
    ys = [joins or a or b for a, b in zip(ys, out_ys, strict=True)]
    carry_axes, y_axes = carry_at(carry), places_at(ys, place)
    body, _ = _jax.batch_jaxpr(loop.body, axis, body_axes, [*carry_axes, *y_axes])
    cond = loop.cond
    if cond is not None:
        cond_axes = [*places_at(batched.cond_consts, 0), *carry_axes]
        cond, _ = _jax.batch_jaxpr(cond, axis, cond_axes, [0 if joins else None])
    new_loop = loop.replace(
        cond=cond,
        body=body,
        reads_lanes=loop.reads_lanes or reads_other_lanes(loop),
        consts=tuple(
            c._replace(lanes=_lanes(c.lanes, b, joins))
            for c, b in zip(loop.consts, batched.consts, strict=True)
        ),
        xs=tuple(
            Input(_shifted(x.axis, a), _lanes(x.lanes, b, joins))
            for x, a, b in zip(loop.xs, x_axes, batched.xs, strict=True)
        ),
        ys=tuple(
            y._replace(axis=_shifted(y.axis, a)) for y, a in zip(loop.ys, y_axes, strict=True)
        ),
    )
    x_places, y_places = stacked(x_axes, loop.x_axes), stacked(y_axes, loop.y_axes)
    axes = Operands(places_at(batched.cond_consts, 0), const_axes, carry_axes, x_places)
    return Batched(new_loop, axis, axes, y_places)


def places_at(flags: Sequence[bool], place: int) -> list[int | None]:
    return [place if f else None for f in flags]


def stacked(axes: Sequence[int | None], rows: Sequence[int]) -> list[int | None]:
    """Return the axes in stacked arrays, from those in one row. Rows lie along the axes `rows`."""
    return [None if a is None else a + (a >= row) for a, row in zip(axes, rows, strict=True)]


def in_row(axes: Sequence[int | None], rows: Sequence[int]) -> list[int | None]:
    """Return the axes in one row, from those in stacked arrays."""
    return [None if a is None else a - (a > row) for a, row in zip(axes, rows, strict=True)]


def _shifted(row: int, axis: int | None) -> int:
    """Return the axis along which rows lie, once each row has the new axis."""
    return row + (axis is not None and axis < row)


def _places(lanes: Sequence[int], batched: Sequence[bool], joins: bool) -> list[int | None]:
    """Return where the axis goes in constants or slices: before the lane axes if it joins them."""
    return [(0 if joins else n) if f else None for f, n in zip(batched, lanes, strict=True)]


def _lanes(lanes: int, batched: bool, joins: bool) -> int:
    """Return how many lane axes an array begins with, once it has the new axis."""
    return lanes if not joins else lanes + 1 if batched else 0


def leaves_in_rows(loop: Loop, axis: _jax.AxisData, dims: Sequence[int | None]) -> tuple[int, ...]:
    """Return the buffers whose rows get the axis, where that needs no transpose."""
    # A symbolic size may be any number.
    if loop.lanes or not isinstance(axis.size, int) or axis.size < MANY_LANES:
        return ()
    places = enumerate(zip(loop.is_buffer, dims, strict=True))
    return tuple(i for i, (b, d) in places if b and d in (None, 1) and writes_rows(loop, i))
