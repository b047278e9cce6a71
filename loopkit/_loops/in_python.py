"""Scans as Python runs them, under `jax.disable_jit`: for a debugger, and for print."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from loopkit._loops.info import LoopInfo
from loopkit._loops.request import Scan
from loopkit._tracing.axes import y_axes
from loopkit._tracing.trace import pair


def python_scan(scan: Scan) -> tuple[Any, Any, LoopInfo]:
    carry, rows, stopped = scan.init, [], bool(scan.stopped)
    f, inputs, reverse = scan.f, scan.inputs, scan.reverse
    order = range(inputs.length)
    body = scan.carried.by_hand(lambda x, carry: pair(scan.names, f(carry, x)))
    for t in [] if stopped else reversed(order) if reverse else order:
        carry, y = body(inputs.row(t), carry)
        rows.append(jax.tree.map(jnp.asarray, y))
        if scan.until is not None and scan.until(carry, y):
            stopped = True
            break
    taken = len(rows)
    blank = rows[0] if rows else jax.eval_shape(f, scan.init, inputs.row(0))[1]
    rows += [jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), blank)] * (inputs.length - taken)
    last = jax.tree.leaves(rows[max(taken, 1) - 1])
    columns = zip(*map(jax.tree.leaves, rows[::-1] if reverse else rows), strict=True)
    ys = [
        final if axis is None else jnp.stack(column, axis)
        for final, column, axis in zip(last, columns, y_axes(scan.out_axes, rows[0]), strict=True)
    ]
    ys = jax.tree.structure(rows[0]).unflatten(ys)
    return carry, ys, LoopInfo(jnp.int32(taken), jnp.array(stopped))
