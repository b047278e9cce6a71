"""Replay steps and reverse them: the work of the backward sweep within a segment."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopkit import _jax
from loopkit._engine import progress
from loopkit._engine.derivative.deferred_products import Products
from loopkit._engine.derivative.pieces import Reversal
from loopkit._engine.facts.bounds import at_step
from loopkit._engine.lanes.safe_inputs import EveryInput, SafeInputs
from loopkit._engine.leaves import spread
from loopkit._engine.loop import Loop, Operands, kept, parts
from loopkit._engine.steps import hold, in_runs, read_rows, repeat, row_of, write_rows
from loopkit._engine.sweeps.window import Window
from loopkit._jaxprs.products import with_merged_axes

SMALL_ROW = 1024
"""The most bytes of a row that is copied out once, rather than sliced in each kernel."""


class Cotangents(NamedTuple):
    """The cotangents between two steps. Each has the linear batch axis first, if there is one."""

    consts: list
    """Cotangents of the constants, summed over the steps so far."""
    carry: list
    """Cotangents of the carry before the step reversed last."""
    xs: list
    """Whole arrays, with the rows of the steps reversed so far."""
    factors: list
    """Factors of deferred products, a row for each step of the segment."""
    bar: progress.StepMeter | None = None
    """The bar, if the loop shows its progress."""

    def after(self, loop: Loop, count: _jax.Whole) -> Cotangents:
        """Return the cotangents with `count` more steps shown on the bar, if there is one."""
        if self.bar is None:
            return self
        return self._replace(bar=progress.after(loop, self.bar, count, backward=True))


def _divided(values: Sequence[Any], flags: Sequence[bool]) -> tuple[list, list]:
    """Return the flagged values, and the others."""
    return kept(values, flags), kept(values, [not f for f in flags])


def zero_cotangents(types: Sequence[Any], batch: int | None) -> list:
    tangents = [t.to_tangent_aval() for t in types]
    return list(map(_jax.zeros, _jax.stack_types(tangents, batch)))


class StepReversal:
    """How steps are replayed and reversed, with the values that all of them read."""

    def __init__(
        self,
        how: Reversal,
        operands: Operands,
        taken: jax.Array,
        batch: int | None,
        ct_ys: Sequence[Any] = (),
        log: Any = None,
        adds: Sequence[bool] = (),
        after: Any = 0,
    ):
        """Prepare for the backward sweep of a plan or, without a `log`, for single steps.

        `taken` is the number of steps that each lane took. `adds` flags active xs whose cotangents
        are added to existing rows (by default, none). The memory for the rows of steps is allocated
        once `after` is computed.
        """
        self.after = after
        self.how, self.operands, self.taken, self.batch = how, operands, taken, batch
        self.ct_ys, self.log = ct_ys, log
        self.adds = list(adds) or [False] * sum(how.active.xs)
        self.window: Window | None = None
        self.products: Products | None = None
        self.safe: Any = EveryInput(operands.consts)
        if how.loop.lanes:
            self.safe = SafeInputs.of(how.loop, operands, taken > 0, how.saved, how.forward)
        self.hoisted = list(_jax.call_jaxpr(how.split.hoist)(*self.safe.consts))
        self.backward, self.late = how.backward, [False] * sum(how.active.consts)
        defers = batch is None and not how.loop.lanes and log is not None
        if how.plan.keeps_all and _jax.for_accelerators():
            defers = False  # to store a factor takes a launch
        if defers and how.products is not None:
            self.products, self.backward = how.products, how.products.step
            self.late = list(how.products.put_off[: len(self.late)])
        if batch is not None:
            linear = sum(how.active.consts) + sum(how.active.outputs)
            types = self.backward.in_avals, self.backward.out_avals
            axes = [None] * (len(types[0]) - linear) + [0] * linear
            self.backward, _ = _jax.batch_jaxpr(
                self.backward, _jax.axis(batch), axes, [0] * len(types[1])
            )
        self.backward = with_merged_axes(self.backward)

    def seeing(self, window: Window) -> StepReversal:
        """Return a copy that sees only a window of the xs, and of the cotangents of the ys."""
        seen = copy.copy(self)
        xs = window.read(self.operands.xs, self.how.loop.x_axes)
        seen.operands, seen.window = self.operands._replace(xs=xs), window
        seen.ct_ys = window.read(self.ct_ys, self.axes(self.how.loop.y_axes, self.how.active.ys))
        return seen

    def axes(self, of_step: Sequence[int], active: Sequence[bool]) -> list[int]:
        """Return the stacked axes of cotangents."""
        return [axis + (self.batch is not None) for axis in kept(of_step, active)]

    @property
    def x_axes(self) -> list[int]:
        """The stacked axes of the cotangents of xs."""
        return self.axes(self.how.loop.x_axes, self.how.active.xs)

    def row(self, step: _jax.Whole) -> Any:
        """Return the row of xs and cotangents that belongs to a step."""
        row = row_of(self.how.loop, step)
        return row if self.window is None else row - self.window.low

    def slices(self, step: _jax.Whole) -> list:
        """Return the slices of xs that belong to a step."""
        xs = self.operands.xs
        return read_rows(xs, self.row(step), self.how.loop.x_axes) if xs else []

    def rewind(self, first: _jax.Whole, count: _jax.Whole, buffers: list) -> list:
        """Return the buffers before step `first`, from those at most `count` steps later."""
        loop, undo = self.how.loop, self.how.undo
        if undo is None:
            return buffers
        init, log = self.operands.init, self.log
        return undo.rewound(loop, init, log, self.counters, first, count, buffers)

    def running(self, step: _jax.Whole) -> Any:
        """Return a mask of the lanes that take a step; None without lanes."""
        return step < self.taken if self.how.loop.lanes else None

    def counters(self, step: _jax.Whole) -> list:
        """Return the counters before a step, and None for the other carry leaves."""
        how = self.how
        return at_step(how.loop, self.operands.init, how.counters, step, self.taken)

    def counts(self, step: _jax.Whole) -> list:
        """Return the counters before a step; stopped lanes get those of a step that they took."""
        counts = self.counters(step)
        values = self.safe.carries(self.running(step), kept(counts, self.how.saved))
        return spread(values, self.how.saved, counts)

    def advance(self, carry: list, first: _jax.Whole, times: _jax.Whole) -> list:
        """Return the saved leaves `times` steps after step `first`."""
        how, loop = self.how, self.how.loop

        def step(k: _jax.Whole, carry: list) -> list:
            x = self.slices(first + k)
            new = _jax.call_jaxpr(how.step)(*self.operands.consts, *carry, *x)
            if not loop.lanes:
                return new
            return hold(first + k < self.taken, new, carry, kept(loop.is_buffer, how.saved))

        return repeat(times, step, carry, loop.unroll)

    def replay(
        self, first: _jax.Whole, count: _jax.Whole, carry: list, rows: list, within: bool = True
    ) -> tuple[list, list]:
        """Run `count` steps from step `first` on, and store a row of each for its reversal.

        Also return the carry after them or, if carries are stored, before the last of them. Unless
        the steps are `within` a segment, there may be more of them than rows; the surplus rows are
        not used.
        """
        how = self.how
        if how.plan.store == "carries":
            rows = write_rows(rows, how.split_saved(carry)[0], 0)

            def step(k: _jax.Whole, s: tuple[list, list]) -> tuple[list, list]:
                carry = self.advance(s[0], first + k, 1)
                return carry, write_rows(s[1], how.split_saved(carry)[0], k + 1)

            return repeat(count - 1, step, (carry, rows), how.loop.unroll)

        def step(k: _jax.Whole, s: tuple[list, list]) -> tuple[list, list]:
            carry, row = self.residuals(first + k, s[0])
            place = k if within else jnp.minimum(k, how.plan.segment - 1)
            return carry, write_rows(s[1], how.drop_counters(row), place)

        return repeat(count, step, (carry, rows), how.loop.unroll)

    def residuals(self, step: _jax.Whole, carry: list, x: list | None = None) -> tuple[list, list]:
        """Return the next carry, and the row of this step."""
        how, safe, active = self.how, self.safe, self.running(step)
        x = self.slices(step) if x is None else x
        consts, x = safe.apart_from_carry(active, x)
        outs = safe.call(how.forward, active, consts, safe.carries(active, carry), x)
        new, stored = parts(outs, sum(how.saved))
        return safe.hold(active, new, carry, safe.buffers), stored

    def computed_once(self, stored: list) -> list:
        """Return the current step's residuals, behind a barrier on a CPU or with host checkpoints.

        If they were fused with the backward half, each of its kernels would compute them again.
        Compilers for GPUs and TPUs do that only where it is faster than reading them. With
        checkpoints on the host, a step of two kernels leaves time to load the next checkpoint.
        """
        if _jax.for_accelerators() and not self.how.plan.host:
            return stored
        made = [s is None for s in self.how.sources]
        held = _jax.barrier(kept(stored, made))
        return spread(held, made, stored)

    def reverse_segment(
        self, first: _jax.Whole, count: _jax.Whole, rows: list, cts: Cotangents, buffers: list
    ) -> tuple[Cotangents, list]:
        """Reverse a segment whose rows are stored; rows past its last step are zero."""
        cts, buffers = self.reverse_rows(first, count, rows, cts, buffers)
        if self.products is None:
            return cts, buffers
        sums = iter(self.products.sums(cts.factors, rows))
        pairs = zip(cts.consts, self.late, strict=True)
        return cts._replace(consts=[c + next(sums) if late else c for c, late in pairs]), buffers

    def reverse_carry(
        self, step: _jax.Whole, carry: list, cts: Cotangents, row: _jax.Whole = 0
    ) -> tuple[Cotangents, list]:
        """Reverse one step from the carry before it; also return the buffers before it."""
        # If slices that are sharded over devices were read twice, they might be gathered twice.
        x = self.slices(step)
        new, stored = self.residuals(step, carry, x)
        stored = self.computed_once(stored)
        buffers = self.how.split_saved(carry)[1]
        if self.how.rereads:
            # The step has written to these buffers, and rewinding them saves a copy.
            buffers = self.rewind(step, 1, self.how.split_saved(new)[1])
        return self.reverse(step, stored, cts, row, x), buffers

    def reverse_rows(
        self,
        first: _jax.Whole,
        count: _jax.Whole,
        rows: list | Callable[[Any], list],
        cts: Cotangents,
        buffers: list,
        part: int = 1,
        ahead: Sequence[bool] = (),
    ) -> tuple[Cotangents, list]:
        """Reverse steps `first + count - 1` to `first`; also return the buffers before them.

        `rows` are arrays, or a function from a row's number to the row. `part` is as in `repeat`.
        `ahead` flags arrays whose next row is read while the current step is reversed.
        """
        flags = list(ahead) or [False] * (0 if callable(rows) else len(rows))
        early, late = ([], []) if callable(rows) else _divided(rows, flags)

        def read(k: _jax.Whole, before: list) -> list:
            """Return the row of a step, part of which was read ahead."""
            if callable(rows):
                return rows(k)
            row = spread(read_rows(late, k), [not f for f in flags], [None] * len(flags))
            return spread(before, flags, row)

        def step(k: _jax.Whole, s: tuple[Cotangents, list, list]) -> tuple[Cotangents, list, list]:
            cts, buffers, before = s
            row, following = read(k, before), read_rows(early, jnp.maximum(k - 1, 0))
            if small:
                row = _jax.barrier(row)
            if not repeats:
                row = how.restore_counters(row, self.counts(first + k))
                return self.reverse(first + k, row, cts, k), [], following
            buffers = self.rewind(first + k, 1, buffers)
            carry = how.merge_saved(self.counters(first + k), row, buffers)
            return *self.reverse_carry(first + k, carry, cts, k), following

        how = self.how
        repeats = how.plan.store == "carries"
        small = _jax.byte_count(*how.row_types) <= SMALL_ROW
        last = read_rows(early, jnp.maximum(count - 1, 0))
        state = (cts, buffers if repeats else [], last)
        back = lambda k, s: step(count - 1 - k, s)
        after = lambda s, count: (s[0].after(how.loop, count), *s[1:])
        cts, before, _ = in_runs(how.loop, count, back, state, after, cts.bar, part)
        return cts, before if repeats else self.rewind(first, count, buffers)

    def reverse(
        self, step: _jax.Whole, row: list, cts: Cotangents, place: _jax.Whole, x: list | None = None
    ) -> Cotangents:
        """Reverse one step, number `place` of its segment, from its residuals."""
        at, x_axes = self.row(step), self.x_axes
        y_axes = self.axes(self.how.loop.y_axes, self.how.active.ys)
        flowing = [*cts.carry, *read_rows(self.ct_ys, at, y_axes)]
        x = self.slices(step) if x is None else x
        d_consts, d_carry, d_x, factors = self.back(step, x, row, cts.consts, flowing)
        sums = _jax.barrier(kept(cts.xs, self.adds))
        xs = spread(sums, self.adds, cts.xs)
        before = read_rows(sums, at, kept(x_axes, self.adds))
        total = [b + d for b, d in zip(before, kept(d_x, self.adds), strict=True)]
        d_x = spread(total, self.adds, d_x)
        return Cotangents(
            spread(d_consts, [not late for late in self.late], cts.consts),
            d_carry,
            write_rows(xs, d_x, at, x_axes),
            write_rows(cts.factors, factors, place),
            cts.bar,
        )

    def back(self, step: _jax.Whole, x: list, row: list, so_far: list, flowing: list) -> list[list]:
        """Return cotangents of constants (added to `so_far`), carry and slices, and factors."""
        active, axis = self.how.active, 0 if self.batch is None else 1
        buffers = kept(self.how.loop.is_buffer, active.carry)
        safe, running = self.safe, self.running(step)
        consts, x = safe.apart_from_carry(running, x)
        hoisted = _jax.call_jaxpr(self.how.split.hoist)(*consts) if safe.shared else self.hoisted
        given = safe.hold(running, flowing, None, buffers, axis)
        outs = _jax.call_jaxpr(self.backward)(*consts, *hoisted, *x, *row, *so_far, *given)
        counts = len(so_far) - sum(self.late), sum(active.carry), sum(active.xs)
        d_consts, d_carry, d_x, factors = parts(outs, *counts)
        before = flowing[: len(d_carry)]
        if self.how.loop.lanes and self.how.loop.reads_lanes:  # other lanes read a stopped one
            before = [b + d for b, d in zip(before, d_carry, strict=True)]
        d_carry = safe.hold(running, d_carry, before, buffers, axis)
        return [d_consts, d_carry, d_x, factors]
