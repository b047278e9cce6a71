"""Run a `LoopSpec`: as a loop of the engine, as lax's scan, or in Python.

A loop runs in Python under `jax.disable_jit`, so that debuggers and print work.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from loopkit import _jax
from loopkit._arguments import errors, validate
from loopkit._arguments.error_on_use import ErrorIf, error_on_use
from loopkit._arguments.static_leaves import bare
from loopkit._engine.loop import Loop, parts
from loopkit._jaxprs import equations
from loopkit._jaxprs.kernels import lax_takes_longer
from loopkit._plans.budget import said, stores_every_step
from loopkit._progress.open_bars import bar
from loopkit._tracing.axes import stacks, y_axes
from loopkit._tracing.finite_steps import Given
from loopkit._tracing.functions import ask
from loopkit._tracing.spec import LoopInfo, LoopSpec
from loopkit._tracing.trace import FlatSteps, Traced, names_of, trace


def run_scan(spec: LoopSpec) -> tuple[Any, Any, Any]:
    """Run a scan; return the final carry, ys, and a LoopInfo or None."""
    carried, inputs, stopping = spec.carried, spec.inputs, spec.predicate is not None
    in_python = inputs.length != 0 and not spec.keeps_some
    if in_python and (ran := validate.in_python(lambda: _python_scan(spec))) is not None:
        carry, ys, info = ran
        return carried.returned(carry), ys, info
    counting = spec.counts or (spec.return_info and stopping)
    go = jnp.logical_not(jnp.zeros((), bool) | spec.stopped) if stopping else None
    steps = jnp.asarray(spec.before, jnp.int32) if counting else None
    traced, leaves, tree = trace(spec, spec.hidden(go=go, steps=steps))
    axes, places = stacks(traced.y_tree, traced.loop.ys_types, spec.out_axes)
    traced = traced.stacked(places)
    split = spec.split_transpose if _runs_as_lax(spec, traced) else None
    carry, ys = traced.run(leaves, inputs.arrays, split)
    final, hidden = tree.unflatten(carry)
    ys = traced.y_tree.unflatten(map(jnp.moveaxis, ys, places, axes))
    info = None
    if spec.return_info:
        steps = hidden.steps if stopping else jnp.asarray(inputs.length, jnp.int32)
        if stopping and spec.finite is not None:
            steps = steps - spec.before
        info = LoopInfo(steps, jnp.logical_not(hidden.go) if stopping else jnp.array(False))
    return carried.returned(final), ys, info


def row_types(spec: LoopSpec) -> tuple[_jax.TreeDef, list]:
    """Trace the loop that stacks all ys; return the tree of y and the types of its leaves."""
    stopping = spec.predicate is not None
    hidden = spec.hidden(go=np.True_ if stopping else None)
    traced, _, _ = trace(spec._replace(checking=False, finite=None), hidden)
    return traced.y_tree, traced.loop.y_types


def _runs_as_lax(spec: LoopSpec, traced: Traced) -> bool:
    """Return whether to run the loop as lax's scan: it stores every step, with no other setting."""
    asked = {
        "checkpoints": spec.budget != "all",
        "until": spec.predicate is not None,
        "in_axes": any(traced.loop.x_axes),
        "out_axes": any(traced.loop.y_axes),
        "buffers": spec.carried.any,
        "progress": spec.progress is not None,  # lax shows no progress in the backward pass
    }
    beyond = [name for name, is_asked in asked.items() if is_asked]
    check_split(spec, beyond)
    if beyond or _jax.is_symbolic(spec.length):
        return not beyond
    slower, loses = traced.loop.derived("as lax", lambda: _as_lax(traced.loop))
    return not loses and (spec.split_transpose or not slower)


def _as_lax(loop: Loop) -> tuple[bool, bool]:
    """Return whether lax's scan takes longer, and whether its derivatives lose rules or calls."""
    slower = lax_takes_longer(loop.body, loop.const_count, loop.length)
    return slower, equations.lax_loses_rules(loop.body) or equations.lax_loses_calls(loop.body)


def check_split(spec: LoopSpec, beyond: Sequence[str]) -> None:
    """Raise if `_split_transpose` is combined with arguments that lax's scan lacks."""
    if spec.split_transpose and beyond:
        expected = "can be True only if the loop stores all steps on leading axes, as lax.scan does"
        got = f"it is True, with {', '.join(f'`{name}`' for name in beyond)}"
        argument, advice = "_split_transpose", "Leave it out."
        raise errors.wrong_value(spec.names.function, argument, expected, got, advice)


def run_while(spec: LoopSpec, throw: bool = False) -> Any:
    """Run a while loop; return the caller's result. `throw` raises if the bound ends the loop."""
    informs = throw or spec.return_info
    if (ran := validate.in_python(lambda: _python_while(spec))) is not None:
        val, steps, stopped = ran
        return _finished(spec, throw, val, steps, informs and not stopped and spec.goes_on(val))
    # Writes to buffers need a mask, so the carry holds the result of the predicate.
    masking = spec.carried.any
    go = ask(spec.goes_on, spec.init) if masking else None
    steps = jnp.int32(0) if informs or spec.counts else None
    traced, leaves, tree = trace(spec, spec.hidden(go=go, steps=steps))
    traced = traced.bounded(leaves)
    if stores_every_step(spec.budget) and traced.loop.length is None:
        name, predicate = spec.names.function, spec.names.predicate
        expected = 'can be "all" or a policy only if the number of steps is bounded'
        got = f"checkpoints={said(spec.budget)} with max_steps=None"
        counted = f"compare a counter with a number in `{predicate}`"
        counted = "pass static bounds" if name == "fori_loop" else counted
        advice = f"Pass `max_steps`, {counted}, or leave `checkpoints` out."
        raise errors.wrong_value(name, "checkpoints", expected, got, advice)
    val, hidden = tree.unflatten(traced.run(leaves, [])[0])
    still = None
    if informs:
        still = hidden.go if masking else ask(spec.goes_on, val)
    return _finished(spec, throw, val, hidden.steps, still)


def _finished(spec: LoopSpec, throw: bool, val: PyTree[Any], steps: Any, goes_on: Any) -> Any:
    """Return the caller's result. `goes_on` says whether the predicate still holds."""
    result = spec.carried.returned(val)
    if spec.return_info:
        result = result, LoopInfo(steps, jnp.logical_not(goes_on))
    if not throw or spec.length is None:
        return bare(result)
    function, predicate = spec.names.function, spec.names.predicate
    expected = f"must be enough for `{predicate}` to become false"
    got = f"{spec.length} steps, after which `{predicate}` still holds"
    message = errors.wrong(function, "max_steps", expected, got, "Pass a larger number.")
    return bare(error_on_use(ErrorIf(message), [jnp.asarray(goes_on)], result))


def _python_scan(spec: LoopSpec) -> tuple[Any, Any, LoopInfo]:
    """Run a scan in Python; return the final carry, ys, and a LoopInfo."""
    carry, length, rows, stopped = spec.init, spec.inputs.length, [], bool(spec.stopped)
    order = range(length)
    with bar(spec.progress, length) as taken:
        if not stopped:
            order = reversed(order) if spec.reverse else order
            carry, stopped = python_steps(spec, carry, order, rows, taken)
    info = LoopInfo(jnp.int32(len(rows)), jnp.array(stopped))
    like = rows[0] if rows else jax.tree.unflatten(*row_types(spec))
    blank = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), like)
    rows += [blank] * (length - len(rows))
    columns = zip(*map(jax.tree.leaves, rows[::-1] if spec.reverse else rows), strict=True)
    axes = [a or 0 for a in y_axes(spec.out_axes, blank)]  # of_some handles any None
    ys = map(jnp.stack, columns, axes)
    return carry, jax.tree.structure(blank).unflatten(ys), info


def _python_while(spec: LoopSpec) -> tuple[Any, jax.Array, bool]:
    ys: list = []
    order = itertools.count() if spec.length is None else range(spec.length)
    with bar(spec.progress, spec.length) as taken:
        val, stopped = python_steps(spec, spec.init, order, ys, taken)
    return val, jnp.int32(len(ys)), stopped


def python_steps(
    spec: LoopSpec,
    carry: PyTree[Any],
    order: Iterable[int],
    ys: list,
    taken: Callable[[int], Any],
) -> tuple[Any, bool]:
    """Take the steps numbered by `order`; return the carry, and whether the predicate ended them.

    The y of each step is appended to `ys`.
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
    """Take a step, and watch its values if they must stay finite."""
    if flat.spec.finite is None:
        return flat.body(*leaves, *x)
    return flat.finite().around(Given([], leaves, x), lambda seen, _: _named(flat, seen))


def _named(flat: FlatSteps, seen: Given) -> tuple[list, Any]:
    outs = flat.body(*seen.carry, *seen.x)
    y = outs[len(seen.carry) :]
    return outs, names_of("ys", flat.y_tree.unflatten(y))
