"""Parts of a loop whose steps see only their own rows of stacked arrays.

XLA for CPUs runs operations on small arrays in order, on one thread. If a loop has a large array,
XLA hands each operation to a pool of threads, and waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from loopkit import _jax
from loopkit._engine import steps as stepping
from loopkit._engine.derivative.pieces import Reversal
from loopkit._engine.loop import Loop, Operands
from loopkit._jaxprs.kernels import ONE_THREAD


class Window(NamedTuple):
    """A range of consecutive rows."""

    low: Any
    """The first row."""
    rows: int

    def read(self, arrays: Sequence[Any], axes: Sequence[int]) -> list:
        pairs = zip(arrays, axes, strict=True)
        return [lax.dynamic_slice_in_dim(a, self.low, self.rows, axis) for a, axis in pairs]

    def write(self, arrays: Sequence[Any], parts: Sequence[Any], axes: Sequence[int]) -> list:
        triples = zip(arrays, parts, axes, strict=True)
        return [lax.dynamic_update_slice_in_dim(a, p, self.low, axis) for a, p, axis in triples]


def rows_from(first: _jax.Whole, length: int, of: int) -> Window:
    """Return `length` rows of `of` from row `first` on, or the last ones if fewer are left."""
    return Window(first if not of % length else jnp.minimum(first, of - length), length)


def rows_of_steps(loop: Loop, first: _jax.Whole, length: int) -> Window:
    """Return the window of xs and ys that steps `first` to `first + length` see."""
    assert loop.length is not None, "a loop that runs in parts has a length"
    window = rows_from(first, length, loop.length)
    return window._replace(low=loop.length - length - window.low) if loop.reverse else window


def is_seen_in_parts(how: Reversal, length: int) -> bool:
    """Return whether steps run `length` at a time, and see only their own rows of xs and ys."""
    loop = how.loop
    if loop.cond is not None or loop.progress is not None or not how.plan.step.pooled:
        return False
    if _jax.for_accelerators() or not 1 < length < (loop.length or 0):
        return False
    stacked = (*loop.xs_types, *loop.ys_types)
    if any(map(_jax.is_spread, stacked)):  # a part of the rows may be on one device
        return False
    largest = max(map(_jax.byte_count, stacked), default=0)
    return largest > ONE_THREAD >= largest * length // (loop.length or 1)


def run_part(
    loop: Loop,
    operands: Operands,
    first: _jax.Whole,
    length: int,
    steps: stepping.Steps,
    run: Callable[[Loop, Operands, stepping.Steps], tuple[stepping.Steps, Any]],
) -> tuple[stepping.Steps, Any]:
    """Return the state after `run` has taken steps from `first` on, and what else it returns.

    `run` gets a loop over the `length` steps of a window, whose counter starts at 0, or later if
    the window begins before `first`.
    """
    window = rows_of_steps(loop, first, length)
    begin = rows_from(first, length, loop.length or 0).low
    seen = operands._replace(xs=window.read(operands.xs, loop.x_axes))
    ys = window.read(steps.ys, loop.y_axes)
    state = steps._replace(count=steps.count - begin, ys=ys)
    state, rest = run(loop.replace(length=length), seen, state)
    ys = window.write(steps.ys, state.ys, loop.y_axes)
    return state._replace(count=state.count + begin, ys=ys), rest


def take_segment(
    how: Reversal,
    loop: Loop,
    operands: Operands,
    first: _jax.Whole,
    count: _jax.Whole,
    steps: stepping.Steps,
) -> stepping.Steps:
    """Take `count` steps of the segment that begins with step `first`."""
    length = how.plan.segment
    if not is_seen_in_parts(how, length):
        return stepping.take(loop, operands, count, steps)
    take = lambda loop, operands, steps: (stepping.take(loop, operands, count, steps), None)
    return run_part(loop, operands, first, length, steps, take)[0]
