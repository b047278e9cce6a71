"""`scan`: as in lax, checkpointed, and able to stop early."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from loopkit import _arguments, _carried, _checks, _errors, _jax
from loopkit._axes import Inputs, arranged, has_none, stacks, without_last
from loopkit._budget import check_budget
from loopkit._buffer import plain
from loopkit._cache import Learnt, remember
from loopkit._capture import Names, Traced, pair, scalar_bool, shared, trace_loop, type_key
from loopkit._in_python import python_scan
from loopkit._info import LoopInfo
from loopkit._stored_scan import run_stored
from loopkit._truncate import truncated
from loopkit.engine.loop import Input, Output, parts

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
    unroll: int | bool | str = 1,
    _split_transpose: bool = False,
    *,
    until: Callable[[Carry, Y], Any] | None = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    truncate: int | None = None,
    checkpoints: Any = None,
    memory: int | str | dict | None = None,
    buffers: Any = None,
    checks: bool | None = None,
    return_info: bool = False,
) -> Any:
    """Scan `f` over an axis of `xs`, the leading one by default, carrying state along.

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

    - `f`: `(Carry, X) -> (Carry, Y)`, pure: the very same function may be traced only once.
    - `init`: a pytree of arrays, the initial carry.
    - `xs`: a pytree of arrays, scanned over along `in_axes`; None for no input.
    - `length`: steps, a static int; needed if no leaf of `xs` is scanned over. Where it is
      symbolic (`jax.export`), the loop is lax's, without settings that it lacks.
    - `reverse`: go from the last row of `xs` and `ys` to the first.
    - `unroll`: steps to an iteration of the compiled loop; True or 0 for all of them; "auto" for
      what takes least time, compilation included, by a trial that is kept in the user's cache
      folder.
    - `_split_transpose`: as in `jax.lax.scan`, for which every step is stored.
    - `until`: `(Carry, Y) -> bool[]`. Stop after the first step for which it holds. Cost follows
      the steps taken.
    - `in_axes`: the axis of `xs` to scan over: an int, or a tree of ints that is a prefix of `xs`.
      Negative axes count from the end. None: every step is given the whole array. Arrays are sliced
      where they lie, without a transposed copy, unless that would be slower.
    - `out_axes`: the axis of `ys` along which they are stacked: an int, or a tree of ints that is a
      prefix of `Y`. None: the y of the last step taken, not stacked (zeros if none is taken).
    - `truncate`: stop the gradient in the carry every so many steps, counted from the first, as
      with `jax.lax.stop_gradient`, in every mode. The backward pass then keeps the residuals of at
      most `truncate` steps, and the carry once every `truncate` steps.
    - `checkpoints`: what the backward pass keeps. None: about the square root of the number of
      steps in carries, about one extra forward pass. An int c: at most c carries, at the price of
      more recomputation. "all": what the derivative of every step reads, as lax.scan. A `Plan`:
      what it says.
    - `memory`: the same as a budget in bytes, an int or a string such as "64 MB": what the backward
      pass may need beyond what it needs for a single step. A dict of two, `{"device": "64 MB",
      "host": "4 GB"}`, keeps the checkpoints in the host's memory. Give one of the two.
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
        in_axes=in_axes,
        out_axes=out_axes,
        truncate=truncate,
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
    until: Callable | None = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    truncate: Any = None,
    checkpoints: Any = None,
    memory: Any = None,
    buffers: Any = None,
    checks: Any = None,
    return_info: bool = False,
    stopped: Any = False,
    made_of: tuple | None = None,
) -> Any:
    """`scan`, under the names of the function that the user called.

    `xs` may be `Inputs`, with axes and length. With `until`, it takes no step if it is `stopped`
    from the start. `made_of`: the functions of the user, a tuple, and then all else, that `f`, made
    anew on every call, depends on.
    """
    name, stopping = names.function, until is not None
    reverse = _arguments.check_flag(name, "reverse", reverse)
    split_transpose = _arguments.check_flag(name, "_split_transpose", split_transpose)
    return_info = _arguments.check_flag(name, "return_info", return_info)
    _arguments.check_callable(name, names.body, f)
    if until is not None:
        _arguments.check_callable(name, names.predicate, until)
    init = _arguments.as_arrays(name, names.init, init)
    carried = _carried.find(names, buffers, init)
    checking = _checks.wanted(name, checks) and carried.any
    carried = carried.checked(checking)
    init = plain(init)
    if isinstance(xs, Inputs):
        inputs = xs
    else:
        inputs = Inputs.of(_arguments.as_arrays(name, "xs", xs), in_axes, length)
    length = inputs.length
    budget = check_budget(name, checkpoints, memory, length)
    truncate = _arguments.check_truncate(name, truncate)
    if _jax.is_symbolic(length):
        others = {"until": until, "truncate": truncate, "buffers": buffers, "checkpoints": budget}
        at_once = _arguments.check_unroll(name, unroll, _jax.SYMBOLIC)
        others["unroll"] = None if at_once == (1, False) else unroll
        _check_symbolic(name, length, others, in_axes, out_axes)
        budget, unroll, auto = "all", 1, False
    else:
        unroll, auto = _arguments.check_unroll(name, unroll, length)
    if split_transpose and budget is None:
        budget = "all"
    if truncate is not None and truncate < length:
        at_once = "auto" if auto else unroll
        part = ft.partial(run_scan, names, unroll=at_once, split_transpose=split_transpose)
        of_block = {"buffers": buffers, "checks": checking}
        result = truncated(
            part, f, init, inputs, reverse, until, out_axes, truncate, budget, of_block
        )
        return result if return_info else result[:2]
    known_by, *rest = made_of or ((f,),)
    functions = (*known_by, until) if carried.hashable else ()
    lasts = []
    if has_none(out_axes):
        lasts = _last_ys(names, carried, f, init, inputs, out_axes, functions, rest)
    if _arguments.runs_in_python() and length > 0:
        ran, result = _arguments.in_python(
            lambda: python_scan(names, carried, f, init, inputs, out_axes, reverse, until, stopped)
        )
        if ran:
            carry, ys, info = result
            carry = carried.returned(carry)
            return (carry, ys, info) if return_info else (carry, ys)
    # A step counter, a flag that says whether to go on, whole inputs and last ys are carried where
    # they are needed.
    counting = checking or (return_info and stopping)
    go = jnp.logical_not(jnp.asarray(stopped)) if stopping else None
    masks = carried.first_written(init) if checking else []
    state = (init, go, jnp.int32(0) if counting else None, inputs.whole, lasts, masks)
    leaves, tree = jax.tree.flatten(state)

    def step(carry: list, x: list) -> tuple[Any, Any]:
        value, _, steps, whole, _, masks = tree.unflatten(carry)
        new, y = pair(names, f(value, inputs.join(x, whole)))
        go = None if until is None else ~scalar_bool(name, names.predicate, until(new, y))
        last = []
        if lasts:
            y, last = without_last(out_axes, y)
        return (new, go, steps + 1 if counting else None, whole, last, masks), y

    def goes_on(carry: list) -> Any:
        return tree.unflatten(carry)[1]

    def trace() -> Traced:
        goes = goes_on if stopping else None
        traced = trace_loop(names, step, goes, state, x_types, settings, found, flag)
        return _stacking(traced, out_axes)

    x_types = inputs.slice_types
    settings = {
        "xs": tuple(map(Input, inputs.places)),
        "length": length,
        "reverse": reverse,
        "checkpoints": budget,
        "unroll": unroll,
        "auto_unroll": auto,
        "name": name,
    }
    values = len(carried.flags)
    flag = values if carried.any and stopping else None
    step_leaf = values + stopping if checking else None
    found = carried.followed_by(len(leaves) - values, step_leaf) if carried.any else None
    traced = remember(
        functions,
        (
            *(names, tree, type_key(leaves), tuple(x_types), counting, *settings.values()),
            *(inputs.tree, *inputs.axes, jax.tree.structure(out_axes), *jax.tree.leaves(out_axes)),
            *(carried.flags, carried.free, checking, *rest),
        ),
        trace,
    )
    leading = not any((*traced.loop.x_axes, *traced.loop.y_axes))
    as_lax = budget == "all" and not stopping and leading and not carried.any
    if split_transpose and (truncate is not None or not as_lax):
        raise _errors.wrong_value(
            name,
            "_split_transpose",
            "can be True only where every step is stored, along leading axes, as in lax.scan",
            f"checkpoints={checkpoints!r} and other settings that lax.scan lacks",
            "Leave it out.",
        )
    if as_lax:
        carry, ys = run_stored(traced, leaves, inputs.arrays, split_transpose)
    else:
        carry, ys = traced.run(leaves, inputs.arrays)
    final, go, steps, _, last, _ = tree.unflatten(carry)
    final = carried.returned(final)
    ys = arranged(traced.y_tree, ys, traced.loop.ys_types, out_axes, last)
    if not return_info:
        return final, ys
    if not stopping:
        steps, go = jnp.asarray(length, jnp.int32), jnp.array(True)
    stopped = jnp.logical_not(go)
    return final, ys, LoopInfo(steps, stopped)


def _check_symbolic(
    name: str, length: Any, others: dict[str, Any], in_axes: Any, out_axes: Any
) -> None:
    """A scan of symbolic length is one of lax, which stores every step."""
    given = [k for k, v in others.items() if v is not None and v != "all"]
    axes = {"in_axes": in_axes, "out_axes": out_axes}
    given += [k for k, v in axes.items() if any(jax.tree.leaves(v)) or has_none(v)]
    if given:
        got = f"the symbolic {length} and {', '.join(f'`{k}`' for k in given)}"
        advice = "Leave those out, or export a program for each length."
        expected = "must be known for what lax.scan lacks"
        raise _errors.wrong_value(name, "length", expected, got, advice)


def _last_ys(
    names: Names,
    carried: _carried.Buffers,
    f: Callable,
    init: Any,
    inputs: Inputs,
    out_axes: Any,
    functions: Sequence[Any],
    rest: Sequence[Any],
) -> list:
    """Zeros for the leaves of y of which only the last is wanted."""
    leaves, tree = jax.tree.flatten((init, inputs.whole))

    def last(*values: Any) -> list:
        given, x = parts(values, len(leaves))
        carry, whole = tree.unflatten(given)
        step = carried.by_hand(lambda x, carry: f(carry, x))
        return without_last(out_axes, pair(names, step(inputs.join(x, whole), carry))[1])[1]

    def trace() -> Learnt:
        return Learnt(_jax.trace(last, types, "scan_ys")[0].out_avals)

    types = [*map(jax.typeof, leaves), *inputs.slice_types]
    axes = (jax.tree.structure(out_axes), *jax.tree.leaves(out_axes), *inputs.axes)
    key = ("last", names, tree, type_key(leaves), *types, inputs.tree, axes, carried.flags, *rest)
    return [_jax.zeros(t) for t in remember(functions, key, trace).value]


def _stacking(traced: Traced, out_axes: Any) -> Traced:
    """The loop with its ys stacked where they will be, except those to be transposed after."""
    _, places = stacks(traced.y_tree, traced.loop.ys_types, out_axes)
    if not any(places):
        return traced
    return replace(traced, loop=shared(traced.loop.replace(ys=tuple(map(Output, places)))))
