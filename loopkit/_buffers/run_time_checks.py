"""Run-time checks of reads and writes in a loop, for finding mistakes. They are slow.

For each buffer, the loop also carries a mask of what has been written. A row of the initial buffer
counts as written if it is not all zeros."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loopkit._arguments import errors
from loopkit._arguments.error_on_use import call_if, error_on_use
from loopkit._buffers import slices


def first_written(value: jax.Array) -> Any:
    """Mark the entries of an initial buffer that count as written."""
    filled = value != jnp.zeros((), value.dtype)
    rows = filled.any(tuple(range(1, filled.ndim)), keepdims=True)
    return jnp.broadcast_to(rows, filled.shape)


def check_read(buffer: Any, found: jax.Array, place: Any, bounds: bool) -> Any:
    """Return what was read; raise an error at run time if the read is not allowed."""
    if buffer._written is None:
        return found
    if bounds:
        found = check_bounds(buffer, found, place, None, "read")
    written, _ = slices.read(buffer._written, place.starts, place.window)
    inside = place.window.inside(buffer.shape, place.starts)
    bad = ~written.all(tuple(range(len(place.batch), written.ndim))) & inside
    problem, got = "must be written before it is read", "a read at index {} in step {}"
    advice = "Write first, or fill the initial buffer, where rows of zeros count as empty."
    return _raise_if(buffer, found, bad, place, problem, got, advice)


def check_bounds(buffer: Any, value: jax.typing.ArrayLike, place: Any, pred: Any, verb: str) -> Any:
    """Return `value`; raise an error at run time if any slice read or written is out of bounds."""
    if buffer._written is None:
        return value
    bad = ~place.window.inside(buffer.shape, place.starts)
    if pred is not None:
        mask = place.inward_mask(pred)
        bad = bad & mask.any(tuple(range(len(place.batch), mask.ndim)))
    problem, got = f"must be {verb} within its shape {buffer.shape}", "index {} in step {}"
    advice = "Pass `mode` to `.at[...].get` or `.at[...].set` to allow other indices."
    return _raise_if(buffer, value, bad, place, problem, got, advice)


def _raise_if(
    buffer: Any, value: jax.typing.ArrayLike, bad: jax.Array, place: Any, *text: str
) -> Any:
    owner = buffer._owner
    window = place.window
    axes = range(len(buffer.shape))
    partly = [a for a in axes if window.sizes[a] != buffer.shape[a]] or axes[:1]
    offsets = np.array(window.offsets, np.int32)
    point = jnp.broadcast_to(jnp.asarray(offsets), (*place.batch, len(offsets)))
    if window.axes:
        point = point.at[..., np.array(window.axes)].set(place.starts.astype(jnp.int32))
    point = point[..., np.array(partly, np.int32)]
    return error_on_use(Outside((owner.name, *text)), [bad, point, owner.step], value)


@dataclass(frozen=True)
class Outside:
    """Raise an error that names the first bad slice of a buffer: out of bounds, or never written.

    The checks are three arrays: which slices are bad, the start of each along the last axis, and
    the number of the step."""

    text: tuple[str, ...]
    """The name of the buffer, what is wrong, where, and what to do."""

    def __call__(self, checks: Sequence[Any], values: list) -> list:
        return call_if(checks[0].any(), self.report, checks, values)

    def report(self, *checks: jax.Array) -> None:
        bad, point, step = map(np.asarray, checks)
        first = tuple(np.argwhere(bad)[0])
        index = tuple(map(int, np.broadcast_to(point, (*bad.shape, point.shape[-1]))[first]))
        steps = step.reshape((*step.shape, *[1] * (bad.ndim - step.ndim)))
        number = int(np.broadcast_to(steps, bad.shape)[first])
        name, problem, got, advice = self.text
        got = got.format(index[0] if len(index) == 1 else index, number)
        raise IndexError(errors.wrong("Buffer", name, problem, got, advice))
