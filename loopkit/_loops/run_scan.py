"""A scan as it runs: step by step in Python, as that of lax, or as a loop of the engine."""

from __future__ import annotations

import functools as ft
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from loopkit import _jax
from loopkit._arguments import errors, validate
from loopkit._arguments.static_leaves import wrapped
from loopkit._engine import steps as engine_steps
from loopkit._engine.loop import Input, Loop, Output, parts
from loopkit._jaxprs import equations
from loopkit._loops.in_python import python_scan
from loopkit._loops.info import LoopInfo
from loopkit._loops.request import Hidden, Scan
from loopkit._programs.cache import remember, shared
from loopkit._tracing.axes import arranged, has_none, stacks, without_last
from loopkit._tracing.trace import Traced, type_key
from loopkit._types import Axes


def run(scan: Scan) -> tuple[Any, Any, Any]:
    """Final carry, ys, and, if it is wanted, a LoopInfo."""
    names, carried, inputs, out_axes = scan.names, scan.carried, scan.inputs, scan.out_axes
    in_python = inputs.length != 0 and scan.some is None
    if in_python and (ran := validate.in_python(lambda: python_scan(scan))) is not None:
        carry, ys, info = ran
        return carried.returned(carry), ys, info
    traced, leaves, tree = trace(scan)
    traced, stopping = _stacking(traced, out_axes), scan.until is not None
    leading = not any((*traced.loop.x_axes, *traced.loop.y_axes))
    as_lax = scan.budget == "all" and not stopping and leading and not carried.any
    as_lax = as_lax and scan.progress is None  # which has none on the way back
    if scan.split_transpose and (scan.truncate is not None or not as_lax):
        expected = "can be True only where every step is stored, along leading axes, as in lax.scan"
        got = f"checkpoints={scan.budget!r} and other settings that lax.scan lacks"
        raise errors.wrong_value(names.function, "_split_transpose", expected, got, "Leave it out.")
    if not _jax.is_symbolic(inputs.length):
        body = traced.loop.body
        as_lax = as_lax and not (equations.lax_loses_rules(body) or equations.lax_loses_calls(body))
    stored = ft.partial(_stored_scan, split_transpose=scan.split_transpose) if as_lax else None
    carry, ys = traced.run(leaves, inputs.arrays, stored)
    final, hidden = tree.unflatten(carry)
    ys = arranged(traced.y_tree, ys, traced.loop.ys_types, out_axes, hidden.last)
    info = None
    if scan.return_info:
        steps = hidden.steps if stopping else jnp.asarray(inputs.length, jnp.int32)
        if stopping and scan.body is not None:
            steps = steps - scan.before
        info = LoopInfo(steps, jnp.logical_not(hidden.go) if stopping else jnp.array(False))
    return carried.returned(final), ys, info


def trace(scan: Scan) -> tuple[Traced, list, Any]:
    """The loop, with ys stacked along the leading axis, its initial carry, and the tree of that."""
    inputs, out_axes, stopping = scan.inputs, scan.out_axes, scan.until is not None
    rest = inputs.tree, *inputs.axes, jax.tree.structure(out_axes), *jax.tree.leaves(out_axes)
    last = _last_ys(scan, rest) if has_none(out_axes) else []
    counting = scan.counts or (scan.return_info and stopping)
    go = jnp.logical_not(jnp.zeros((), bool) | scan.stopped) if stopping else None

    def step(value: PyTree[Any], hidden: Hidden, x: list) -> tuple[Any, Any]:
        new, y, go = scan.step(value, inputs.join(x, hidden.whole))
        y, last = _stacked(scan, y) if hidden.last else (y, [])
        steps = hidden.steps + 1 if counting else None
        return (new, hidden._replace(go=go, steps=steps, last=last)), y

    settings = {"reverse": scan.reverse, "xs": tuple(map(Input, inputs.places))}
    before = jnp.asarray(scan.before, jnp.int32) if counting else None
    hidden = scan.hidden(go, before, inputs.whole, last)
    asks = (lambda _, hidden: hidden.go) if stopping else None
    return scan.traced(step, asks, hidden, inputs.slice_types, settings, rest)


@ft.partial(jax.jit, static_argnames=("loop", "split_transpose"), inline=True)
def _stored_scan(*operands: jax.Array, loop: Loop, split_transpose: bool) -> list:
    """A scan that stores the residuals of every step: that of lax, of the step as it was traced."""
    given, _ = loop.split(operands)
    if loop.length == 0:  # which lax refuses where nothing is traced
        return engine_steps.evaluate(loop, given)
    return engine_steps.scan(loop, given, split_transpose)


def _last_ys(scan: Scan, rest: Sequence[Any]) -> list:
    """Zeros for the leaves of y of which only the last is wanted."""
    inputs, carried, names = scan.inputs, scan.carried, scan.names
    leaves, tree = jax.tree.flatten((scan.init, inputs.whole))

    def last(*values: jax.Array) -> list:
        given, x = parts(values, len(leaves))
        carry, whole = tree.unflatten(given)
        step = carried.by_hand(lambda x, carry: scan.step(carry, x)[:2])
        _, y = step(inputs.join(x, whole), carry)
        return _stacked(scan, y)[1]

    types = [*map(jax.typeof, leaves), *inputs.slice_types]
    key = ("last", names, tree, type_key(leaves), *types, carried.flags, scan.rest, tuple(rest))
    functions = scan.functions if carried.hashable else ()
    trace = lambda: _jax.trace(last, types, "scan_ys")[0].out_avals
    return list(map(_jax.zeros, remember(functions, key, trace)))


def _stacked(scan: Scan, y: PyTree[Any]) -> tuple[Any, list]:
    """y without the leaves of which only the last is wanted, and those."""
    return without_last(scan.out_axes, wrapped(scan.names.function, scan.names.body, y))


def _stacking(traced: Traced, out_axes: Axes) -> Traced:
    """The loop with its ys stacked where they will be, except those to be transposed after."""
    _, places = stacks(traced.y_tree, traced.loop.ys_types, out_axes)
    if not any(places):
        return traced
    make = lambda: shared(traced.loop.replace(ys=tuple(map(Output, places))))
    return replace(traced, loop=traced.loop.derived(("ys", places), make))
