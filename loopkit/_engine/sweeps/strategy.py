"""The base class of the strategies: what the forward sweep passes to the backward sweep, and how.

The steps are cut into segments. The backward sweep starts with the last segment. It reaches each
segment from what was saved, stores a row for each of its steps, and reverses the rows. No step is
in a branch, and saved values are accessed once per segment, not once per step.
"""

from __future__ import annotations

import abc
import functools as ft
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopkit import _jax
from loopkit._engine import progress
from loopkit._engine import steps as stepping
from loopkit._engine.derivative.pieces import Reversal
from loopkit._engine.derivative.split import cut_ahead
from loopkit._engine.lanes.batched_loop import stacked
from loopkit._engine.loop import Loop, Operands, kept, parts
from loopkit._engine.sweeps.step import Cotangents, StepReversal
from loopkit._engine.sweeps.window import is_seen_in_parts, rows_of_steps
from loopkit._plans.plan import Plan

PART = 32
"""The steps that are reversed between two waits of the host, if their number is traced."""


Saving = tuple[stepping.Steps, list]
"""The state of the forward sweep: that of the loop, and the saved arrays."""


class Backward(NamedTuple):
    """The state of the backward sweep between two segments."""

    segment: Any
    """The segment to reverse next."""
    stacks: list
    segments: Any
    """The segment that each slot holds; empty if slot and segment have the same number."""
    rows: list
    """A row for each step of a segment: carries or residuals."""
    cts: Cotangents
    buffers: list
    """The buffers that are undone, as they were after the segment to reverse next."""
    ahead: Sequence[Any] = ()
    """The next segment's checkpoint, if it is loaded from the host ahead of time."""


@dataclass(frozen=True)
class Sweep(abc.ABC):
    """A strategy: how the two sweeps save and read what a plan keeps."""

    how: Reversal
    half: _jax.Jaxpr | None = None
    """The forward half of a step, if it also takes slices of constants."""

    @property
    def layout_plan(self) -> Plan:
        """The plan that lays out the saved values."""
        return self.how.layout_plan or self.how.plan

    @property
    def stack_types(self) -> list[_jax.ShapedArray]:
        """The types of the arrays in which checkpoints are saved."""
        return self.stacked(self.how.slot_types, self.layout_plan.rows)

    def stacked(self, types: Sequence[Any], rows: int) -> list[_jax.ShapedArray]:
        """Return types of stacks, which have at least 2 rows on the host, for GPU compilers."""
        counts = [2 if there and rows == 1 else rows for there in self.how.on_host]
        return [_jax.stack_type(t, n) for t, n in zip(types, counts, strict=True)]

    @property
    def segment_count(self) -> int:
        """The number of slots whose segment is recorded."""
        return 0

    def stack_axes(self, batched: Reversal, carry: Sequence[int | None]) -> list[int | None]:
        """Return the axis of the batch in each saved array, from its axis in the carry."""
        saved = kept(carry, self.how.slotted)
        return stacked(saved, [0] * len(saved))

    @abc.abstractmethod
    def run(self, loop: Loop, operands: Operands, state: Saving) -> tuple[Any, ...]:
        """Run the loop to its end; return its state, the saved arrays, and any segments of slots.

        `state` is that before the first step, with nothing saved.
        """

    def reverse(self, step: StepReversal, steps: _jax.Whole, s: Backward) -> Cotangents:
        """Reverse `steps` steps, an int if known. By default, each of them has a saved row.

        `s` holds what the forward sweep passed on, before the last segment is chosen.
        """
        part = PART if _jax.host_waits.value else 1
        ahead, stacks = self.how.on_host, s.stacks
        if any(ahead):  # else, in an outer loop, the first row is read as a row of that loop's row
            stacks = _jax.barrier(stacks)  # not every compiler for TPUs can do that
        return step.reverse_rows(0, steps, stacks, s.cts, s.buffers, part, ahead)[0]

    def leaving(self, values: list[Any], number: _jax.Whole) -> list[Any]:
        """Return values to save under `number`, which is never negative; copies for the host.

        Without a copy, the next steps would reuse the same memory, and wait for its transfer.
        """
        return [
            jnp.where(number < 0, _jax.zeros(jax.typeof(v)), v)
            if goes and not _jax.is_on_host(jax.typeof(v))
            else v
            for v, goes in zip(values, self.how.on_host, strict=True)
        ]

    @property
    def residual_types(self) -> list[_jax.ShapedArray]:
        """The types of the residuals, which the forward sweep passes on.

        They are the checkpoints, the log of what was overwritten in buffers, the final buffers, the
        segment that each checkpoint starts, and the number of steps taken, for each lane.
        """
        how, loop, int32 = self.how, self.how.loop, jnp.dtype("int32")
        pairs = zip(self.stack_types, how.on_host, strict=True)
        stacks = [_jax.on_host(t) if there else t for t, there in pairs]
        segments, taken = (_jax.ShapedArray(s, int32) for s in ((self.segment_count,), ()))
        if loop.lanes and loop.cond is not None:  # laid out over devices as the predicate is
            taken = loop.cond.out_avals[0].update(dtype=int32, weak_type=False)
        body = (how.whole or how).loop.body
        decide = _in_common(body) if loop.cond is None else loop.cond.out_avals
        undoing = [*map(loop.stack_type, how.log_types), *kept(loop.carry_types, how.undone)]
        return [*stacks, *undoing, *(_jax.type_like(t, decide) for t in (segments, taken))]

    def residual_axes(self, batched: Reversal, carry: Sequence[int | None]) -> list[int | None]:
        """Return the axis of the batch in each residual, from its axis in the carry."""
        how, axes = self.how, self.stack_axes(batched, carry)
        if batched.undo is not None:
            axes += [1 if f else None for f in batched.undo.batched]
        axes += kept(carry, how.undone)
        # Each lane has its own number of steps, if the axis makes lanes.
        return [*axes, None, 0 if len(batched.loop.lanes) > len(how.loop.lanes) else None]

    def blank_stacks(self, after: Any = 0) -> list:
        """Return the arrays that the forward sweep saves in, made once `after` is computed.

        They are written before they are read, so that their cost depends on the steps taken.
        """
        types = self.residual_types[: len(self.stack_types)]
        return [
            _jax.blank_on_host(t) if _jax.is_on_host(t) else _jax.blank(t, after) for t in types
        ]

    def forward(self, loop: Loop, operands: Operands, stacks: Sequence[Any] | None = None) -> list:
        """Return the final carry, ys, and the residuals.

        `stacks` are the arrays to save in; by default, blank ones.
        """
        how = self.how
        if loop.length == 0:
            return [*stepping.evaluate(loop, operands), *map(_jax.zeros, self.residual_types)]
        loop = loop if how.undo is None else how.undo.logged(loop)
        empty = self.blank_stacks(_jax.moment(operands.flat)) if stacks is None else list(stacks)
        half, loop, operands = cut_ahead(how.split.forward, loop, operands)
        first = stepping.start(loop, operands), empty
        steps, saved, *segments = replace(self, half=half).run(loop, operands, first)
        steps = stepping.finished(loop, steps)
        ys, log = parts(steps.ys, how.loop.ys_count)
        buffers = kept(steps.carry, how.undone)
        taken = jnp.int32(loop.length) if loop.cond is None else steps.taken
        if not segments:
            segments = [jnp.zeros(0, jnp.int32) + (0 if loop.cond is None else steps.count)]
        return [*steps.carry, *ys, *saved, *log, *buffers, *segments, taken]

    def backward(
        self,
        operands: Operands,
        residuals: Sequence[Any],
        cts: Sequence[Any],
        batch: int | None,
        sums: Sequence[Any] | None = None,
    ) -> list:
        """Return the cotangents of the active constants, initial carry and xs.

        `batch` is the size of a leading batch axis of the cotangents, or None. `sums` holds, for
        each result, an array that it is added to, or None.
        """
        how, loop, active = self.how, self.how.loop, self.how.active
        counts = len(self.stack_types), len(how.log_types), sum(how.undone)
        stacks, log, buffers, (segments, taken) = parts(residuals, *counts)
        steps = taken if loop.length is None or loop.cond is not None else loop.length
        steps = taken.max(initial=0) if loop.lanes else steps
        ct_carry, ct_ys = parts(cts, sum(active.carry))
        before = sums or [None] * sum(active.inputs)
        consts, carry, xs = parts(before, sum(active.consts), sum(active.carry))
        after = _jax.moment([*residuals, *cts])
        flowing = _no_cotangents(how, ct_carry, batch, consts, xs, after)
        bar, puts_off = None, False
        if loop.progress is not None:
            bar = progress.opened(loop, steps, taken, [*residuals, *cts], backward=True)
        if loop.length != 0:
            flowing = flowing._replace(bar=bar)
            adds = [s is not None for s in xs]
            step = StepReversal(how, operands, taken, batch, ct_ys, log, adds, after)
            if step.products is not None:
                types = _jax.stack_types(step.products.factor_types, how.plan.summed)
                flowing = flowing._replace(factors=[_jax.zeros_after(t, after) for t in types])
            flowing = self.reverse(step, steps, Backward(0, stacks, segments, [], flowing, buffers))
            bar, puts_off = flowing.bar, step.products is not None
        init = [d if s is None else s + d for d, s in zip(flowing.carry, carry, strict=True)]
        results = [*flowing.consts, *init, *flowing.xs]
        if puts_off:  # else a compiler may keep the factors and multiply them later
            results = _jax.barrier(results)
        return results if bar is None else progress.closed(loop, bar, results, backward=True)


def in_parts(step: StepReversal, length: int, reverse: Callable, first: int = 0) -> Callable:
    """Return `reverse` bound to `step`, which sees only its own rows if that is faster.

    Rows are numbered from step `first` on.
    """
    if not is_seen_in_parts(step.how, length):
        return ft.partial(reverse, step)

    def reverse_part(row: _jax.Whole, count: _jax.Whole, s: Backward) -> Backward:
        window, axes = rows_of_steps(step.how.loop, first + row, length), step.x_axes
        xs, cts = s.cts.xs, s.cts._replace(xs=window.read(s.cts.xs, axes))
        s = reverse(step.seeing(window), row, count, s._replace(cts=cts))
        return s._replace(cts=s.cts._replace(xs=window.write(xs, s.cts.xs, axes)))

    return reverse_part


def reverse_segments(
    reverse: Callable[[Any, Any, Backward], Backward],
    length: int,
    steps: _jax.Whole,
    state: Backward,
) -> Backward:
    """Reverse all segments of `length` steps, with `reverse(first step, step count, state)`."""
    known = isinstance(steps, int)
    even = known and not steps % length
    if _jax.host_waits.value and length > 1 and not even:
        return _reverse_apart(reverse, length, steps, state)

    def reverse_one(s: Backward) -> Backward:
        first = s.segment * length
        count = length if even else jnp.minimum(steps - first, length)
        return reverse(first, count, s)._replace(segment=s.segment - 1)

    last = stepping.quotient(steps + (length - 1), length) - 1
    state = state._replace(segment=jnp.asarray(last, jnp.int32))
    if known:
        return stepping.repeat(last + 1, lambda _, s: reverse_one(s), state)
    return lax.while_loop(lambda s: s.segment >= 0, reverse_one, state)


def _reverse_apart(reverse: Callable, length: int, steps: _jax.Whole, state: Backward) -> Backward:
    """Reverse the last segment by itself, so that the others have a known length."""

    def reverse_one(segment: _jax.Whole, count: _jax.Whole, s: Backward) -> Backward:
        return reverse(segment * length, count, s._replace(segment=segment))._replace(
            segment=s.segment
        )

    whole = stepping.quotient(steps, length)
    rest = steps - whole * length
    some = min(rest, 1) if isinstance(rest, int) else jnp.minimum(rest, 1)
    state = state._replace(segment=jnp.int32(0))
    state = stepping.repeat(some, lambda _, s: reverse_one(whole, rest, s), state)
    return stepping.repeat_backwards(
        whole, lambda segment, s: reverse_one(segment, length, s), state
    )


def write_if(
    go: jax.Array | None, arrays: list, values: list, row: _jax.Whole, axes: Sequence[int] = ()
) -> list:
    """Write rows, unless `go` is false.

    The compiler turns this choice between arrays into one between rows. If the code read the old
    row beside the write, the compiler would copy the arrays. That does not work for arrays on the
    host: their old row is moved to the device, and written back.
    """
    if go is not None and any(map(_jax.is_on_host, map(jax.typeof, arrays))):
        here = list(map(_jax.placed, values))  # values of an inner loop are on the host
        return stepping.write_rows(
            arrays, stepping.select(go, here, stepping.read_rows(arrays, row, axes)), row, axes
        )
    written = stepping.write_rows(arrays, values, row, axes)
    return written if go is None else stepping.select(go, written, arrays)


def _no_cotangents(
    how: Reversal, ct_carry: list, batch: int | None, on_consts: list, on_xs: list, after: Any
) -> Cotangents:
    """Return the cotangents before any step is reversed, made once `after` is computed.

    `on_consts` and `on_xs` hold the arrays that cotangents are added to, or None.
    """
    loop, active = how.loop, how.active

    def begun(types: Sequence[Any], sums: list, make: Callable) -> list:
        types = _jax.stack_types([t.to_tangent_aval() for t in types], batch)
        pairs = enumerate(zip(types, sums, strict=True))
        return [make(k, t) if s is None else s for k, (t, s) in pairs]

    clear = lambda _, t: _jax.zeros_after(t, after)
    whole = lambda k, t: _jax.written(t, after, k)
    consts = begun(kept(loop.const_types, active.consts), on_consts, clear)
    xs = begun(kept(loop.xs_types, active.xs), on_xs, whole if loop.cond is None else clear)
    return Cotangents(consts, ct_carry, xs, [])


def _in_common(jaxpr: _jax.Jaxpr) -> list:
    """Return a type that varies only over axes over which all inputs vary, if there is one."""
    fewest = sorted(jaxpr.in_avals, key=lambda t: len(_jax.varying(t)))[:1]
    axes = [_jax.varying(t) for t in fewest]
    return [t for t in fewest if all(axes[0] <= _jax.varying(v) for v in jaxpr.in_avals)]
