"""The forward sweep: the loop itself, saving checkpoints at the starts of segments on its way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopkit import _jax
from loopkit._engine.derivative.reversal import Reversal
from loopkit._engine.loop import Loop, Operands, kept, parts
from loopkit._engine.steps import (
    Steps,
    advance,
    evaluate,
    goes_on,
    guarded_step,
    is_active,
    one_step,
    read_rows,
    repeat,
    row_of,
    select,
    start,
    write_rows,
)
from loopkit._engine.sweeps import tables
from loopkit._engine.sweeps.lanes import SafeInputs


class Forward(NamedTuple):
    """The sweep at the start of a segment."""

    steps: Steps
    slots: list
    """For each saved carry leaf, its checkpoints, as many as have memory."""
    placed: tables.Slots | None
    """None where every segment has a slot of its own."""


LAST_STEP = jnp.iinfo(jnp.int32).max
"""What a counter of steps can hold."""


def forward_sweep(how: Reversal, loop: Loop, operands: Operands) -> list:
    """Final carry, ys, and the residuals of the backward sweep."""
    if loop.length == 0:
        residuals = [_jax.zeros(t) for t in how.residual_types]
        return [*evaluate(loop, operands), *residuals]
    if how.plan.keeps_all:
        return _store_residuals(how, loop, operands)
    if how.undo is not None:
        loop = how.undo.logged(loop)
    if how.plan.every_carry:
        return _save_every_carry(how, loop, operands)
    if loop.cond is None and how.plan.direct:
        return _save_every_segment(how, loop, operands)
    plan, first = how.plan, start(loop, operands)
    schedule = None if plan.direct else tables.Schedule.of(plan)

    def cond(s: Forward) -> Any:
        return _goes_on(loop, operands, s.steps)

    def body(s: Forward) -> Forward:
        count, placed = s.steps.count, None
        if schedule is None or s.placed is None:
            slot, run = lax.div(count, jnp.int32(plan.segment)), 1
        else:
            slot, run, placed = schedule.save(s.placed)
            run = lax.min(run, lax.div(LAST_STEP - count, jnp.int32(plan.segment)))
        slots = how.save(s.slots, kept(s.steps.carry, how.slotted), slot)
        stop = count + run * plan.segment
        if loop.length is not None:
            stop = lax.min(stop, jnp.int32(loop.length))
        return Forward(advance(loop, operands, s.steps, stop), slots, placed)

    placed = None if schedule is None else schedule.start(first.count)
    done = lax.while_loop(cond, body, Forward(first, how.blank_stacks, placed))
    # Without a schedule, slot and segment have the same number.
    units = jnp.zeros(0, jnp.int32) + first.count
    if done.placed is not None:
        units = done.placed.units
    return _results(how, done.steps, done.slots, units, done.steps.taken)


def _results(how: Reversal, steps: Steps, slots: list, units: Any, taken: Any) -> list:
    """Final carry, ys, and the residuals."""
    ys, log = parts(steps.ys, how.loop.ys_count)
    buffers = [] if how.undo is None else kept(steps.carry, how.undo.leaves)
    return [*steps.carry, *ys, *slots, *log, *buffers, units, taken]


def _goes_on(loop: Loop, operands: Operands, steps: Steps) -> Any:
    if loop.cond is None:
        return steps.count < loop.length
    go = goes_on(loop, operands, steps.carry)
    return go if loop.length is None else go & (steps.count < loop.length)


def _save_every_segment(how: Reversal, loop: Loop, operands: Operands) -> list:
    """The sweep where the length is known and every segment has a slot."""
    plan, length = how.plan, loop.length
    assert length is not None, "a loop without a predicate has a length"

    def segment(unit: Any, state: tuple[Steps, list]) -> tuple[Steps, list]:
        steps, slots = state
        slots = how.save(slots, kept(steps.carry, how.slotted), unit)
        if length % plan.segment == 0:
            steps = repeat(
                plan.segment, lambda _, s: one_step(loop, operands, s), steps, loop.unroll
            )
            return steps, slots
        stop = jnp.minimum((unit + 1) * plan.segment, length)
        return advance(loop, operands, steps, stop), slots

    steps, slots = repeat(plan.segments, segment, (start(loop, operands), how.blank_stacks))
    return _results(how, steps, slots, jnp.zeros(0, jnp.int32), jnp.int32(length))


def _save_every_carry(how: Reversal, loop: Loop, operands: Operands) -> list:
    """The sweep where every step has a slot."""

    def step(s: tuple[Steps, list], go: Any = None) -> tuple[Steps, list]:
        steps, slots = s
        slots = _write(slots, kept(steps.carry, how.slotted), steps.count, go)
        if go is None:
            return one_step(loop, operands, steps), slots
        return guarded_step(loop, operands, loop.length, steps), slots

    steps, slots = _run(loop, operands, step, (start(loop, operands), how.blank_stacks))
    return _results(how, steps, slots, jnp.zeros(0, jnp.int32) + steps.count, steps.taken)


def _run(loop: Loop, operands: Operands, step: Callable, state: tuple[Steps, list]) -> Any:
    """`step(state, go)` to the end of the loop; `go` says whether it counts, None that it does."""
    if loop.cond is None:
        return repeat(loop.length, lambda _, s: step(s), state, loop.unroll)

    def goes_on(s: tuple[Steps, list]) -> Any:
        return _goes_on(loop, operands, s[0])

    def iteration(s: tuple[Steps, list]) -> tuple[Steps, list]:
        s = step(s)
        for _ in range(loop.unroll - 1):
            s = step(s, goes_on(s))
        return s

    return lax.while_loop(goes_on, iteration, state)


def _write(arrays: list, values: list, row: Any, go: Any, axes: Any = 0) -> list:
    """Write rows, unless `go` is false.

    The compiler turns this choice between arrays into one between rows. Written as that, with the
    old row read beside the write, it would copy the arrays.
    """
    written = write_rows(arrays, values, row, axes)
    return written if go is None else select(go, written, arrays)


def _store_residuals(how: Reversal, loop: Loop, operands: Operands) -> list:
    """The sweep that stores what the derivative of every step reads."""
    safe = None
    if loop.lanes:
        active = is_active(loop, operands, operands.init)
        safe = SafeInputs.of(loop, operands, active, [True] * loop.carry_count)

    def step(s: tuple[Steps, list], go: Any = None) -> tuple[Steps, list]:
        if go is not None and loop.effects:
            return lax.cond(go, step, lambda s: s, s)
        steps, rows = s
        row = row_of(loop, steps.count) if loop.xs_count or steps.ys else steps.count
        consts, carry, x = operands.consts, steps.carry, read_rows(operands.xs, row, loop.x_axes)
        active = None if safe is None else is_active(loop, operands, carry)
        if safe is not None:
            consts, x = safe.constants(active), safe.slices(active, x)
            carry = safe.carries(active, carry)
        outs = _jax.call_jaxpr(how.split.forward)(*consts, *carry, *x)
        new, y, stored = parts(outs, loop.carry_count, loop.ys_count)
        lane_counts = None
        if safe is not None:
            new = select(active, new, steps.carry)
            y = select(active, y, [_jax.zeros(jax.typeof(v)) for v in y])
            lane_counts = steps.lane_counts + (active if go is None else active & go)
        ys = _write(steps.ys, y, row, go, loop.y_axes) if steps.ys else []
        count = steps.count + 1
        if go is not None:
            new, (count,) = select(go, new, steps.carry), select(go, [count], [steps.count])
        done = Steps(count, new, ys, lane_counts)
        return done, _write(rows, how.shortened(stored), steps.count, go)

    steps, rows = _run(loop, operands, step, (start(loop, operands), how.blank_stacks))
    return [*steps.carry, *steps.ys, *rows, jnp.zeros(0, jnp.int32) + steps.count, steps.taken]
