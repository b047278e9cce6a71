"""The backward sweep: segments, newest first.

Each segment is reached from the last checkpoint before it, saving more on the way where slots are
free; it is replayed once, a row stored for each step; and the rows are reversed. No step is in a
branch, and a slot is touched once a segment, not once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from loopkit import _jax
from loopkit.engine import placement
from loopkit.engine.lanes import SafeInputs
from loopkit.engine.loop import Active, Loop, Operands, kept, parts, spread
from loopkit.engine.products import Products
from loopkit.engine.reversal import Reversal
from loopkit.engine.steps import hold, read_rows, repeat, repeat_backwards, row_of, write_rows
from loopkit.engine.undo import Rewind

SMALL_ROW = 1024
"""Bytes of a row that is copied out once, rather than sliced in each kernel that reads it."""


class Cotangents(NamedTuple):
    """What flows back. Each has the linear batch axis first, if there is one."""

    consts: list
    """Summed over the steps so far."""
    carry: list
    """With respect to the carry before the step reversed last."""
    xs: list
    """Whole arrays, the rows of the steps reversed so far."""
    factors: list
    """Of products that are put off to the end of the segment, a row for each of its steps."""


class Backward(NamedTuple):
    """The sweep between two segments."""

    unit: Any
    """The segment to reverse next."""
    slots: list
    units: Any
    """The unit that each slot holds."""
    rows: list
    """One for each step of a segment: carries or residuals."""
    cts: Cotangents
    buffers: list
    """Those that are brought back, as they were after the segment to reverse next."""


class Climb(NamedTuple):
    """On the way from a checkpoint to the segment to reverse."""

    carry: list
    unit: Any
    slots: list
    units: Any


def backward_sweep(
    how: Reversal, operands: Operands, residuals: Sequence[Any], cts: Sequence[Any], batch: Any
) -> list:
    """Cotangents of the active constants, initial carry and xs.

    `batch` is None or the size of a leading batch of cotangents.
    """
    loop, plan, active = how.loop, how.plan, how.active
    *stored, units, taken = residuals
    undo = how.undo
    log_size, buffers_size = (0 if undo is None else len(undo.log_types)), sum(how.undone)
    stacks, log, buffers = parts(stored, len(stored) - log_size - buffers_size, log_size)
    steps = taken if loop.length is None or loop.cond is not None else loop.length
    if loop.lanes:
        steps = taken.max(initial=0)
    ct_carry, ct_ys = parts(cts, sum(active.carry))
    if loop.length == 0:
        return [v for group in _no_cotangents(loop, active, ct_carry, batch) for v in group]
    rewind = Rewind(undo, loop, [] if undo is None else kept(operands.init, undo.leaves), log)
    step = _StepReversal.of(how, operands, taken, ct_ys, batch, rewind)
    flowing = _no_cotangents(loop, active, ct_carry, batch)
    if step.products is not None:
        types = step.products.factor_types
        flowing = flowing._replace(
            factors=[_jax.zeros(_jax.stack_type(t, plan.leaf)) for t in types]
        )
    if plan.keeps_all or (plan.every_carry and step.products is None):
        flowing, _ = step.reverse_rows(0, steps, stacks, flowing, buffers)
        return [*flowing.consts, *flowing.carry, *flowing.xs]

    def reach(s: Backward, end: Any) -> tuple[list, list, Any]:
        if plan.direct:
            first = s.unit * plan.leaf
            before = rewind.steps(first, end - first, s.buffers)
            slot = read_rows(s.slots, s.unit)
            counts = how.counts(operands, first, taken)
            return how.together(counts, slot, before), s.slots, s.units
        return _climb(how, operands, taken, rewind, s, end)

    def segment(s: Backward) -> Backward:
        first = s.unit * plan.leaf
        count = plan.leaf
        if not isinstance(steps, int) or steps % plan.leaf:
            count = jnp.minimum(steps - first, plan.leaf)
        if plan.every_carry:
            rows = [lax.dynamic_slice_in_dim(v, first, plan.leaf) for v in s.slots]
            rows = list(map(_jax.placed, rows))
            cts, buffers = step.reverse_segment(first, count, rows, s.cts, s.buffers)
            return s._replace(unit=s.unit - 1, cts=cts, buffers=buffers)
        carry, slots, units = reach(s, first + count)
        if plan.leaf == 1:
            rows, (cts, buffers) = s.rows, step.reverse_carry(first, carry, s.cts)
        else:
            carry, rows = step.replay(first, count, carry, s.rows)
            buffers = how.apart(carry)[1]
            cts, buffers = step.reverse_segment(first, count, rows, s.cts, buffers)
        if not plan.direct:
            units = placement.release(units, s.unit)
        return Backward(s.unit - 1, slots, units, rows, cts, buffers)

    rows: list = []
    if plan.leaf > 1 and not plan.every_carry:
        rows = [_jax.zeros(_jax.stack_type(t, plan.leaf)) for t in how.row_types]
    last = _ceil_div(steps, plan.leaf) - 1
    state = Backward(jnp.asarray(last, jnp.int32), stacks, units, rows, flowing, buffers)
    if isinstance(steps, int):
        done = repeat(last + 1, lambda _, s: segment(s), state)
    else:
        done = lax.while_loop(lambda s: s.unit >= 0, segment, state)
    return [*done.cts.consts, *done.cts.carry, *done.cts.xs]


def _ceil_div(steps: Any, leaf: int) -> Any:
    """Segments that hold so many steps. Traced steps are not negative: no sign to mind."""
    if isinstance(steps, int):
        return -(-steps // leaf)
    return lax.div(steps + (leaf - 1), jnp.int32(leaf))


def _no_cotangents(loop: Loop, active: Active, ct_carry: list, batch: int | None) -> Cotangents:
    """The cotangents before any step is reversed."""

    def zeros(types: Sequence[Any]) -> list:
        types = [t.to_tangent_aval() for t in types]
        return [_jax.zeros(t if batch is None else _jax.stack_type(t, batch)) for t in types]

    xs_types = kept(loop.xs_types, active.xs) if loop.xs_count else []
    consts = zeros(kept(loop.const_types, active.consts))
    return Cotangents(consts, ct_carry, zeros(xs_types), [])


def _climb(
    how: Reversal, operands: Operands, taken: Any, rewind: Rewind, s: Backward, end: Any
) -> tuple[list, list, Any]:
    """The carry at the start of the segment that ends at step `end`.

    And the slots, with what was saved on the way.
    """
    leaf, schedule, target = how.plan.leaf, placement.Schedule.of(how.plan), s.unit

    def advance(s: Climb) -> Climb:
        free, slot = placement.free_slots(s.units)
        run = schedule.split(target + 1 - s.unit, free)
        carry = how.advance(operands, taken, s.carry, s.unit * leaf, run * leaf)
        unit = s.unit + run
        # Without a free slot, the row is written over itself.
        save = free > 0
        old = read_rows(s.slots, slot)
        rows = [jnp.where(save, n, o) for n, o in zip(how.apart(carry)[0], old, strict=True)]
        units = s.units.at[slot].set(jnp.where(save, unit, s.units[slot]))
        return Climb(carry, unit, write_rows(s.slots, rows, slot), units)

    slot = placement.latest(s.units, target)
    unit = s.units[slot]
    buffers = rewind.steps(unit * leaf, end - unit * leaf, s.buffers)
    counts = how.counts(operands, unit * leaf, taken)
    carry = how.together(counts, read_rows(s.slots, slot), buffers)
    start = Climb(carry, unit, s.slots, s.units)
    done = lax.while_loop(lambda s: s.unit < target, advance, start)
    return done.carry, done.slots, done.units


@dataclass(frozen=True)
class _StepReversal:
    """Replaying and reversing steps, with what all of them read."""

    how: Reversal
    operands: Operands
    taken: Any
    """Steps that each lane took."""
    hoisted: list
    backward: Any
    safe: SafeInputs | None
    ct_ys: list
    batch: Any
    products: Products | None
    """Of the backward half, those that are put off to the end of a segment."""
    rewind: Rewind

    @staticmethod
    def of(
        how: Reversal, operands: Operands, taken: Any, ct_ys: list, batch: Any, rewind: Rewind
    ) -> _StepReversal:
        split, safe = how.split, None
        consts = operands.consts
        if how.loop.lanes:
            safe = SafeInputs.of(how.loop, operands, taken > 0, how.saved)
            consts = safe.consts
        hoisted = list(_jax.call_jaxpr(split.hoist)(*consts))
        backward, products = how.backward, None
        if batch is None and safe is None and how.plan.leaf > 1 and not how.plan.keeps_all:
            products = how.products
            backward = backward if products is None else products.step
        if batch is not None:
            linear = sum(how.active.consts) + sum(how.active.outputs)
            axes = [None] * (len(backward.in_avals) - linear) + [0] * linear
            backward, _ = _jax.batch_jaxpr(
                backward, _jax.axis(batch), axes, [0] * len(backward.out_avals)
            )
        pieces = (hoisted, backward, safe, ct_ys, batch, products, rewind)
        return _StepReversal(how, operands, taken, *pieces)

    def slices(self, step: Any) -> list:
        if not self.operands.xs:
            return []
        loop = self.how.loop
        return read_rows(self.operands.xs, row_of(loop, step), loop.x_axes)

    def counts(self, step: Any) -> list:
        """The counters before a step; of lanes that have stopped, those of a step they take."""
        counts = self.how.counts(self.operands, step, self.taken)
        if self.safe is None:
            return counts
        values = self.safe.carries(step < self.taken, kept(counts, self.how.saved))
        return spread(values, self.how.saved, counts)

    def replay(self, first: Any, count: Any, carry: list, rows: list) -> tuple[list, list]:
        """Steps `first` to `first + count`, storing what each leaves for its reversal.

        Returned with the carry after them, or, where carries are stored, before the last of them.
        """
        how = self.how
        if how.plan.store == "carries":
            rows = write_rows(rows, how.apart(carry)[0], 0)

            def step(k: Any, s: tuple[list, list]) -> tuple[list, list]:
                carry = how.advance(self.operands, self.taken, s[0], first + k, 1)
                return carry, write_rows(s[1], how.apart(carry)[0], k + 1)

            return repeat(count - 1, step, (carry, rows), how.loop.unroll)

        def step(k: Any, s: tuple[list, list]) -> tuple[list, list]:
            carry, row = self.residuals(first + k, s[0])
            return carry, write_rows(s[1], how.shortened(row), k)

        return repeat(count, step, (carry, rows), how.loop.unroll)

    def residuals(self, step: Any, carry: list) -> tuple[list, list]:
        """The next carry, and the row of this step."""
        how, consts, x = self.how, self.operands.consts, self.slices(step)
        inputs, active = carry, step < self.taken
        if self.safe is not None:
            consts, x = self.safe.constants(active), self.safe.slices(active, x)
            inputs = self.safe.carries(active, carry)
        new, stored = parts(_jax.call_jaxpr(how.forward)(*consts, *inputs, *x), sum(how.saved))
        if self.safe is not None:
            new = hold(active, new, carry)
        return new, stored

    def computed_once(self, stored: list) -> list:
        """Residuals of the step at hand.

        Fused with the backward half they would be computed again in each of its kernels.
        """
        made = [s is None for s in self.how.sources]
        held = lax.optimization_barrier(kept(stored, made))
        return spread(held, made, stored)

    def reverse_segment(
        self, first: Any, count: Any, rows: list, cts: Cotangents, buffers: list
    ) -> tuple[Cotangents, list]:
        """Back over a segment whose rows are stored; beyond its last step they are zero."""
        cts, buffers = self.reverse_rows(first, count, rows, cts, buffers)
        if self.products is None:
            return cts, buffers
        sums = iter(self.products.sums(cts.factors, rows))
        consts = [
            c + next(sums) if late else c
            for c, late in zip(cts.consts, self.products.put_off, strict=False)
        ]
        return cts._replace(consts=consts), buffers

    def reverse_carry(
        self, step: Any, carry: list, cts: Cotangents, row: Any = 0
    ) -> tuple[Cotangents, list]:
        """Back over one step, given the carry before it; and the buffers before it."""
        new, stored = self.residuals(step, carry)
        stored = self.computed_once(stored)
        buffers = self.how.apart(carry)[1]
        if self.how.rereads:
            # They have been written to, and going on from them saves a copy.
            buffers = self.rewind.steps(step, 1, self.how.apart(new)[1])
        return self.reverse(step, stored, cts, row), buffers

    def reverse_rows(
        self, first: Any, count: Any, rows: list, cts: Cotangents, buffers: list
    ) -> tuple[Cotangents, list]:
        """Back over steps `first + count - 1` to `first`; and the buffers before them."""

        def step(k: Any, s: tuple[Cotangents, list]) -> tuple[Cotangents, list]:
            (cts, buffers), row = s, read_rows(rows, k)
            if small:
                row = list(lax.optimization_barrier(row))
            if not repeats:
                row = how.lengthened(row, self.counts(first + k))
                return self.reverse(first + k, row, cts, k), []
            buffers = self.rewind.steps(first + k, 1, buffers)
            carry = how.together(how.counts(self.operands, first + k, self.taken), row, buffers)
            return self.reverse_carry(first + k, carry, cts, k)

        how = self.how
        repeats = how.plan.store == "carries" and not how.plan.keeps_all
        small = sum(map(_jax.byte_count, how.row_types)) <= SMALL_ROW
        state = (cts, buffers if repeats else [])
        cts, before = repeat_backwards(count, step, state, how.loop.unroll)
        return cts, before if repeats else self.rewind.steps(first, count, buffers)

    def reverse(self, step: Any, row: list, cts: Cotangents, place: Any) -> Cotangents:
        """Back over one step, number `place` of its segment, given its residuals."""
        how, loop, axis = self.how, self.how.loop, 0 if self.batch is None else 1
        at = row_of(loop, step) if loop.length is not None else step
        y_axes = [axis + a for a in kept(loop.y_axes, how.active.ys)]
        x_axes = [axis + a for a in kept(loop.x_axes, how.active.xs)]
        flowing = [*cts.carry, *read_rows(self.ct_ys, at, y_axes)]
        buffers = kept(loop.is_buffer, how.active.carry)
        consts, hoisted, x, active = self.operands.consts, self.hoisted, self.slices(step), None
        if self.safe is not None:
            active = step < self.taken
            consts, x = self.safe.constants(active), self.safe.slices(active, x)
            if self.safe.shared:
                hoisted = list(_jax.call_jaxpr(how.split.hoist)(*consts))
            zeros = list(map(jnp.zeros_like, flowing))
            flowing = hold(active, flowing, zeros, buffers, axis)
        outs = _jax.call_jaxpr(self.backward)(*consts, *hoisted, *x, *row, *cts.consts, *flowing)
        late = [False] * sum(how.active.consts)
        if self.products is not None:
            late = list(self.products.put_off[: len(late)])
        counts = len(late) - sum(late), sum(how.active.carry), sum(how.active.xs)
        d_consts, d_carry, d_x, factors = parts(outs, *counts)
        if self.safe is not None:
            d_carry = hold(active, d_carry, cts.carry, buffers, axis)
        new = iter(d_consts)
        return Cotangents(
            [c if put_off else next(new) for c, put_off in zip(cts.consts, late, strict=True)],
            d_carry,
            write_rows(cts.xs, d_x, at, x_axes),
            write_rows(cts.factors, factors, place),
        )
