"""`scan`: as in lax, checkpointed, and able to stop early."""

from __future__ import annotations

import functools as ft
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from loopkit import _arguments, _carried, _checks, _errors, _jax
from loopkit._budget import check_budget
from loopkit._buffer import plain
from loopkit._capture import Names, Traced, remember, scalar_bool, trace_loop, type_key
from loopkit._info import LoopInfo
from loopkit.engine.loop import Loop, kept, parts, spread

Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")

NAMES = Names("scan", "f", "init", "until")


def scan(
    f: Callable[[Carry, X], tuple[Carry, Y]],
    init: Carry,
    xs: X | None = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    _split_transpose: bool = False,
    *,
    until: Callable[[Carry, Y], Any] | None = None,
    checkpoints: Any = None,
    memory: int | str | None = None,
    buffers: Any = None,
    checks: bool | None = None,
    return_info: bool = False,
) -> Any:
    """Scan `f` over the leading axis of `xs`, carrying state along.

        def scan(f, init, xs, length=None, *, until=None):
            carry, ys = init, zeros
            for t in range(length):  # reversed(range(length)) if reverse
                carry, ys[t] = f(carry, xs[t])
                if until is not None and until(carry, ys[t]):
                    break
            return carry, ys

    It takes the place of `jax.lax.scan`, with the same positional arguments. Its backward pass
    keeps checkpoints instead of the residuals of every step.

    **Arguments:**

    - `f`: `(Carry, X) -> (Carry, Y)`.
    - `init`: a pytree of arrays, the initial carry.
    - `xs`: a pytree of arrays, scanned over along their leading axis; None for no input.
    - `length`: steps, a static int; needed if `xs` has no leaves.
    - `reverse`: go from the last row of `xs` and `ys` to the first.
    - `unroll`: steps to an iteration of the compiled loop; True for all of them.
    - `until`: `(Carry, Y) -> bool[]`. Stop after the first step for which it holds. Cost follows
      the steps taken.
    - `checkpoints`: what the backward pass keeps. None: about the square root of the number of
      steps in carries, about one extra forward pass. An int c: at most c carries, at the price of
      more recomputation. "all": what the derivative of every step reads, as lax.scan. A `Plan`:
      what it says.
    - `memory`: the same as a budget in bytes, an int or a string such as "64 MB": what the backward
      pass may need beyond what it needs for a single step. Give one of the two.
    - `buffers`: which leaves of the carry are read and written in slices: a function of the carry
      that returns them, or a tree of bools that matches it. In the body they are
      `loopkit.Buffer`s, written in place, forward and backward.
    - `checks`: raise an error at run time where a buffer is read in a row that nothing has been
      written to, or read or written out of bounds: the error names buffer, index and step. Slow.
      None: as the environment variable LOOPKIT_CHECKS says.
    - `return_info`: also return a `LoopInfo`.

    **Returns:**

    The final carry and the stacked `ys`; with `return_info`, a `LoopInfo(steps, stopped)` as well.
    Rows of `ys` that no step wrote are zero; `info.steps` says how many were.

    **Raises:**

    `TypeError` if `f` or `until` return something of another structure or type than they should,
    `ValueError` if lengths disagree or an argument has a wrong value.

    !!! example

        ```python
        import jax.numpy as jnp
        import loopkit

        def step(total, x):
            return total + x, total

        total, before = loopkit.scan(step, 0.0, jnp.arange(5.0))
        total, before, info = loopkit.scan(
            step, 0.0, jnp.arange(5.0), until=lambda total, _: total > 3, return_info=True
        )
        ```

    The backward pass is checkpointed in the manner of Griewank (1992).
    """
    return run_scan(
        NAMES,
        f,
        init,
        xs,
        length,
        reverse,
        unroll,
        _split_transpose,
        until=until,
        checkpoints=checkpoints,
        memory=memory,
        buffers=buffers,
        checks=checks,
        return_info=return_info,
    )


def run_scan(
    names: Names,
    f: Callable,
    init: Any,
    xs: Any,
    length: Any,
    reverse: Any,
    unroll: Any,
    split_transpose: Any,
    *,
    until: Callable | None,
    checkpoints: Any,
    memory: Any,
    buffers: Any,
    checks: Any,
    return_info: bool,
) -> Any:
    """`scan`, under the names of the function that the user called."""
    name, reverse, stopping = names.function, bool(reverse), until is not None
    _arguments.check_callable(name, names.body, f)
    if until is not None:
        _arguments.check_callable(name, names.predicate, until)
    init = _arguments.as_arrays(name, names.init, init)
    carried = _carried.find(names, buffers, init)
    checking = _checks.wanted(name, checks) and carried.any
    init = plain(init)
    xs = _arguments.as_arrays(name, "xs", xs)
    length = _length(xs, length)
    budget = check_budget(name, checkpoints, memory, length)
    unroll = length if unroll is True else _arguments.check_unroll(name, unroll)
    unroll = min(max(1, unroll), max(1, length))
    if split_transpose and (budget != "all" or stopping):
        raise ValueError(
            _errors.wrong(
                name,
                "_split_transpose",
                'can be True only if checkpoints="all", without `until`',
                f"checkpoints={checkpoints!r}",
                "It splits the transpose of a loop that stores every step.",
            )
        )
    if _arguments.runs_in_python() and length > 0:
        ran, result = _arguments.in_python(
            lambda: _python_scan(carried, f, init, xs, length, reverse, until)
        )
        if ran:
            carry, ys, info = result
            carry = carried.returned(carry)
            return (carry, ys, info) if return_info else (carry, ys)
    # A step counter and a flag that says whether to go on are carried where they are needed.
    counting = checking or (return_info and stopping)
    go, steps = jnp.array(True) if stopping else None, jnp.int32(0) if counting else None
    state = (init, go, steps, carried.first_written(init) if checking else [])
    leaves, tree = jax.tree.flatten(state)
    x_leaves, x_tree = jax.tree.flatten(xs)

    def step(carry: list, x: list) -> tuple[Any, Any]:
        value, _, steps, masks = tree.unflatten(carry)
        new, y = _pair(names, f(value, x_tree.unflatten(x)))
        go = None if until is None else jnp.logical_not(_stop(names, until, new, y))
        return (new, go, steps + 1 if counting else None, masks), y

    def goes_on(carry: list) -> Any:
        return tree.unflatten(carry)[1]

    x_types = [_jax.slice_type(jax.typeof(x)) for x in x_leaves]
    settings = {
        "length": length,
        "reverse": reverse,
        "checkpoints": budget,
        "unroll": unroll,
        "name": name,
    }
    values = len(carried.flags)
    found = carried.followed_by(len(leaves) - values, checking) if carried.any else None
    flag = values if carried.any and stopping else None
    predicate = goes_on if stopping else None
    traced = remember(
        (f, until) if carried.hashable else (),
        (
            *(
                names,
                tree,
                type_key(leaves),
                x_tree,
                tuple(x_types),
                counting,
                carried.flags,
                checking,
            ),
            *settings.values(),
        ),
        lambda: trace_loop(names, step, predicate, state, x_types, settings, found, flag),
    )
    if budget == "all" and not stopping and not carried.any:
        carry, ys = _run_stored(traced, leaves, x_leaves, bool(split_transpose))
    else:
        carry, ys = traced.run(leaves, x_leaves)
    final, go, steps, _ = tree.unflatten(carry)
    final = carried.returned(final)
    ys = traced.y_tree.unflatten(ys)
    if not return_info:
        return final, ys
    if not stopping:
        steps, go = jnp.int32(length), jnp.array(True)
    stopped = jnp.logical_not(go)
    return final, ys, LoopInfo(steps, stopped)


def _pair(names: Names, out: Any) -> tuple[Any, Any]:
    if isinstance(out, (tuple, list)) and len(out) == 2:
        return out[0], out[1]
    size = f" of length {len(out)}" if isinstance(out, (tuple, list)) else ""
    got = f"{type(out).__name__}{size}"
    advice = "Return `carry, None` if there is nothing to stack."
    raise TypeError(
        _errors.wrong(names.function, names.body, "must return a pair (carry, y)", got, advice)
    )


def _stop(names: Names, until: Callable, carry: Any, y: Any) -> Any:
    return scalar_bool(names.function, "until", until(carry, y))


def _length(xs: Any, length: Any) -> int:
    """The number of steps, on which `length` and every leaf of `xs` must agree."""
    name = NAMES.function
    if length is not None:
        length = _arguments.check_length(name, length)
    first = None
    for path, leaf in jax.tree_util.tree_leaves_with_path(xs):
        if leaf.ndim == 0:
            advice = "Give it a leading axis, one row a step, or close over it."
            got = _errors.short_type(jax.typeof(leaf))
            raise ValueError(
                _errors.wrong(
                    name, "xs", "must have a leading axis to scan over", got, advice, path
                )
            )
        rows = leaf.shape[0]
        if length is not None and rows != length:
            advice = "Leave `length` out, or slice `xs`."
            got = f"leading axis {rows} and length={length}"
            raise ValueError(
                _errors.wrong(name, "xs", "must have `length` rows", got, advice, path)
            )
        if first is not None and rows != first[1]:
            advice = "Every leaf of `xs` is sliced along its leading axis, one row a step."
            got = f"{rows} rows, and {first[1]} in `xs{jax.tree_util.keystr(first[0])}`"
            raise ValueError(
                _errors.wrong(name, "xs", "must have as many rows in every leaf", got, advice, path)
            )
        first = (path, rows)
    if first is not None:
        return first[1]
    if length is None:
        advice = "Pass `length`."
        got = "`xs` without leaves and length=None"
        raise ValueError(
            _errors.wrong(name, "length", "must say how many steps to take", got, advice)
        )
    return length


def _python_scan(
    carried: _carried.Buffers,
    f: Callable,
    init: Any,
    xs: Any,
    length: int,
    reverse: bool,
    until: Callable | None,
) -> tuple[Any, Any, LoopInfo]:
    carry, rows, stopped = init, [], False
    order = range(length - 1, -1, -1) if reverse else range(length)

    def body(x: Any, carry: Any) -> Any:
        return f(carry, x)

    for t in order:
        carry, y = carried.by_hand(body)(jax.tree.map(operator.itemgetter(t), xs), carry)
        rows.append(jax.tree.map(jnp.asarray, y))
        if until is not None and until(carry, y):
            stopped = True
            break
    taken = len(rows)
    rows += [jax.tree.map(jnp.zeros_like, rows[0])] * (length - taken)
    ys = jax.tree.map(lambda *y: jnp.stack(y), *(rows[::-1] if reverse else rows))
    return carry, ys, LoopInfo(jnp.int32(taken), jnp.array(stopped))


def _run_stored(traced: Traced, init: list, xs: list, split_transpose: bool) -> tuple[list, list]:
    """A scan that stores every step is lax.scan, of the step as it was traced."""
    init = traced.converted(init)
    constants = [*traced.consts, *kept(init, traced.fixed)]
    moving = kept(init, [not f for f in traced.fixed])
    carry, ys = _stored_scan(traced.loop, split_transpose, constants, moving, xs)
    return spread(carry, [not f for f in traced.fixed], init), ys


@ft.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _stored_scan(
    loop: Loop, split_transpose: bool, constants: list, init: list, xs: list
) -> tuple[list, list]:
    def step(carry: list, x: list) -> tuple[list, list]:
        outs = _jax.call_jaxpr(loop.body)(*constants, *carry, *x)
        new, y = parts(outs, loop.carry_count)
        return new, y

    return lax.scan(
        step,
        init,
        xs,
        loop.length,
        reverse=loop.reverse,
        unroll=loop.unroll,
        _split_transpose=split_transpose,
    )
