"""Loops as Python runs them, under `jax.disable_jit`: for a debugger, and for print."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from loopkit._engine.loop import parts
from loopkit._progress.open_bars import bar
from loopkit._tracing.axes import y_axes
from loopkit._tracing.finite_steps import Given
from loopkit._tracing.spec import LoopInfo, LoopSpec
from loopkit._tracing.trace import FlatSteps, names_of


def python_steps(
    spec: LoopSpec,
    carry: PyTree[Any],
    order: Iterable[int],
    ys: list,
    taken: Callable[[int], Any],
) -> tuple[Any, bool]:
    """Take steps of these numbers: the carry after them, and whether the predicate ended them.

    The y of each is put to `ys`.
    """
    steps = jnp.int32(len(ys) + spec.before) if spec.counts else None
    state = carry, spec.hidden(steps=steps)
    flat, leaves = FlatSteps(spec, state, traced=False), jax.tree.leaves(state)
    asks_first = spec.predicate is not None and spec.names.takes != "carry, x"
    asks_last = spec.predicate is not None and not asks_first
    for t in order:
        if asks_first and not spec.goes_on(carry):
            return carry, True
        new, y = parts(_step(flat, leaves, spec.inputs.slices(t)), len(leaves))
        leaves, y = new, flat.y_tree.unflatten(y)
        carry = flat.tree.unflatten(leaves)[0]
        ys.append(y)
        taken(1)
        if asks_last and not spec.goes_on(carry, y):
            return carry, True
    return carry, False


def _step(flat: FlatSteps, leaves: list, x: list) -> list:
    """Take a step, whose values are watched if they have to stay finite."""
    if flat.spec.finite is None:
        return flat.body(*leaves, *x)
    finite = flat.finite()
    loop, buffers = replace(finite.loop, missing=()), (False,) * len(leaves)
    finite = replace(finite, loop=loop, buffers=buffers)  # what runs here is kept as a whole
    return finite.around(Given([], leaves, x), lambda seen, _: _named(flat, seen))


def _named(flat: FlatSteps, seen: Given) -> tuple[list, Any]:
    outs = flat.body(*seen.carry, *seen.x)
    y = outs[len(seen.carry) :]
    return outs, names_of("ys", flat.y_tree.unflatten(y))


def python_scan(spec: LoopSpec) -> tuple[Any, Any, LoopInfo]:
    """Run a scan: the final carry, ys, and how far it went."""
    carry, rows, stopped = spec.init, [], bool(spec.stopped)
    inputs, reverse = spec.inputs, spec.reverse
    order = range(inputs.length)
    with bar(spec.progress, inputs.length) as taken_steps:
        if not stopped:
            order = reversed(order) if reverse else order
            carry, stopped = python_steps(spec, carry, order, rows, taken_steps)
    taken = len(rows)
    if rows:
        blank = rows[0]
    else:
        flat = FlatSteps(spec, (carry, spec.hidden()), traced=False)
        y = jax.eval_shape(flat.body, *flat.types, *inputs.slice_types)[len(flat.types) :]
        blank = flat.y_tree.unflatten(y)
    rows += [jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), blank)] * (inputs.length - taken)
    last = jax.tree.leaves(rows[max(taken, 1) - 1])
    columns = zip(*map(jax.tree.leaves, rows[::-1] if reverse else rows), strict=True)
    ys = [
        final if axis is None else jnp.stack(column, axis)
        for final, column, axis in zip(last, columns, y_axes(spec.out_axes, rows[0]), strict=True)
    ]
    ys = jax.tree.structure(rows[0]).unflatten(ys)
    return carry, ys, LoopInfo(jnp.int32(taken), jnp.array(stopped))
