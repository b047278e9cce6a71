"""Scans as Python runs them, under `jax.disable_jit`: for a debugger, and for print."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from loopkit._arguments.static_leaves import wrapped
from loopkit._loops.info import LoopInfo
from loopkit._loops.request import Scan, Stepped
from loopkit._progress.open_bars import bar
from loopkit._tracing.axes import y_axes
from loopkit._tracing.trace import pair


def python_steps(
    scan: Stepped, carry: PyTree[Any], order: Iterable[int], ys: list, taken: Callable[[int], Any]
) -> tuple[Any, bool]:
    """The carry after steps of these numbers, whose y is put to `ys`, and whether to stop there."""
    before = len(ys) + getattr(scan, "before", 0)
    body = scan.by_hand(lambda x, carry: _stepped(scan, carry, x), before)
    for t in order:
        carry, y = body(scan.inputs.row(t), carry)
        ys.append(jax.tree.map(jnp.asarray, y))
        taken(1)
        if scan.until is not None and scan.until(carry, y):
            return carry, True
    return carry, False


def _stepped(scan: Stepped, carry: PyTree[Any], x: PyTree[Any]) -> tuple[Any, Any]:
    out = pair(scan.names, scan.f(carry, x))
    return wrapped(scan.names.function, scan.names.body, out)


def python_scan(scan: Scan) -> tuple[Any, Any, LoopInfo]:
    carry, rows, stopped = scan.init, [], bool(scan.stopped)
    inputs, reverse = scan.inputs, scan.reverse
    order = range(inputs.length)
    with bar(scan.progress, inputs.length) as taken_steps:
        if not stopped:
            order = reversed(order) if reverse else order
            carry, stopped = python_steps(scan, carry, order, rows, taken_steps)
    taken = len(rows)
    blank = (
        rows[0] if rows else jax.eval_shape(ft.partial(_stepped, scan), scan.init, inputs.row(0))[1]
    )
    rows += [jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), blank)] * (inputs.length - taken)
    last = jax.tree.leaves(rows[max(taken, 1) - 1])
    columns = zip(*map(jax.tree.leaves, rows[::-1] if reverse else rows), strict=True)
    ys = [
        final if axis is None else jnp.stack(column, axis)
        for final, column, axis in zip(last, columns, y_axes(scan.out_axes, rows[0]), strict=True)
    ]
    ys = jax.tree.structure(rows[0]).unflatten(ys)
    return carry, ys, LoopInfo(jnp.int32(taken), jnp.array(stopped))
