"""Run-time checks of what a loop reads and writes, for finding mistakes. They are slow.

Beside each buffer the loop carries an array of bools that says what has been written. What the
initial buffer has in a row that is not all zeros counts as written.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from loopkit import _errors, _jax, _slices

VARIABLE = "LOOPKIT_CHECKS"


def wanted(function: str, checks: Any) -> bool:
    """Whether to check: as the argument says, or the environment where it is None."""
    if checks is None:
        return os.environ.get(VARIABLE, "0") not in ("", "0")
    if not isinstance(checks, (bool, np.bool_)):
        advice = f"None is what the environment variable {VARIABLE} says."
        raise TypeError(
            _errors.wrong(function, "checks", "must be a bool or None", repr(checks), advice)
        )
    return bool(checks)


def first_written(value: Any) -> Any:
    """What counts as written in an initial buffer."""
    filled = value != jnp.zeros((), value.dtype)
    rows = filled.any(tuple(range(1, filled.ndim)), keepdims=True) if filled.ndim else filled
    return jnp.broadcast_to(rows, filled.shape)


def check_read(buffer: Any, found: Any, place: Any, bounds: bool) -> Any:
    """What was read, with an error at run time if it was not to be."""
    if buffer._written is None:
        return found
    if bounds:
        found = check_bounds(buffer, found, place, None, "read")
    written, _ = _slices.read(buffer._written, place.starts, place.window)
    inside = place.window.inside(buffer.shape, place.starts)
    bad = ~written.all(tuple(range(len(place.batch), written.ndim))) & inside
    text = (
        "is read at index {index} in step {step}, where nothing has been written. Write first, or "
        "start from a buffer that has what is to be read: rows of zeros count as empty."
    )
    return _raise_if(buffer, found, bad, place, text)


def check_bounds(buffer: Any, value: Any, place: Any, pred: Any, verb: str) -> Any:
    """`value`, with an error at run time if slices that are read or written are not inside."""
    if buffer._written is None:
        return value
    bad = ~place.window.inside(buffer.shape, place.starts)
    if pred is not None:
        mask = place.inward_mask(pred)
        bad = bad & mask.any(tuple(range(len(place.batch), mask.ndim)))
    text = (
        f"is {verb} at index {{index}} in step {{step}}, outside of its shape {buffer.shape}. Pass "
        "`mode` to `.at[...].get` or `.at[...].set` if that is meant."
    )
    return _raise_if(buffer, value, bad, place, text)


def _raise_if(buffer: Any, value: Any, bad: Any, place: Any, text: str) -> Any:
    owner = buffer._owner
    if owner.mask is not None:
        bad = bad & owner.mask

    def say(index: tuple, step: int) -> str:
        shown = index[0] if len(index) == 1 else index
        return f"loopkit: buffer `{owner.name}` " + text.format(index=shown, step=step)

    window = place.window
    partly = [a for a, n in enumerate(buffer.shape) if window.sizes[a] != n] or [0]
    offsets = np.array(window.offsets, np.int32)
    point = jnp.broadcast_to(jnp.asarray(offsets), (*place.batch, len(offsets)))
    if window.axes:
        point = point.at[..., np.array(window.axes)].set(place.starts.astype(jnp.int32))
    return _raising(value, bad, point[..., np.array(partly)], owner.step, say)


def _raising(value: Any, bad: Any, point: Any, step: Any, say: Callable[[tuple, int], str]) -> Any:
    """`value`, and an error at run time if any of `bad` holds.

    `point` has an index for each of `bad`, along its last axis; the first bad one is reported.
    """

    def report(bad: Any, point: Any, step: Any) -> Any:
        bad, point, step = map(np.asarray, (bad, point, step))
        if bad.any():
            lanes = step.ndim
            steps = np.broadcast_to(
                step.reshape((*step.shape, *[1] * (bad.ndim - lanes))), bad.shape
            )
            points = np.broadcast_to(point, (*bad.shape, point.shape[-1]))
            first = np.flatnonzero(bad)[0]
            index = points.reshape(-1, points.shape[-1])[first]
            raise IndexError(say(tuple(map(int, index)), int(steps.reshape(-1)[first])))
        return np.ones(step.shape, bool)

    def call(bad: Any, point: Any, step: Any) -> Any:
        out = jax.ShapeDtypeStruct((), jnp.bool_)
        return jax.pure_callback(report, out, bad, point, step, vmap_method="broadcast_all")

    # Called where there is something to report.
    done = lax.cond(bad.any(), call, lambda *_: jnp.array(True), bad, point, step)
    # The value depends on the call, which would be left out otherwise.
    return jnp.where(done, value, _jax.zeros(jax.typeof(value)))
