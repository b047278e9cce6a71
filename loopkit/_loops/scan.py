"""`scan`: lax's scan with checkpoints and early stopping."""

from __future__ import annotations

from typing import Any, Unpack, overload

import jax
from jaxtyping import Array

from loopkit import _jax
from loopkit._arguments import errors, validate
from loopkit._arguments.static_leaves import bare, wrapped
from loopkit._extras.some_ys import check_words, of_some
from loopkit._extras.truncate import truncated
from loopkit._keywords import No, ScanKw, Yes
from loopkit._tracing.axes import Inputs, has_none
from loopkit._tracing.run import check_split, run_scan
from loopkit._tracing.spec import LoopInfo, LoopOptions, LoopSpec, Names
from loopkit._types import (
    Axes,
    BufferSpec,
    C,
    Checkpoints,
    DebugLoop,
    Lanes,
    Like,
    Memory,
    Progress,
    Reduce,
    Step,
    Unroll,
    Until,
    X,
    Y,
)

NAMES = Names("scan", "f", "init", "until", "carry, x")


@overload
def scan(*args: Any, buffers: BufferSpec, **kw: Any) -> Any: ...
@overload
def scan(
    f: Step[Array, X, Y], init: float, xs: Like[X] = ..., **kw: Unpack[ScanKw[Array, Y, No]]
) -> tuple[Array, Y]: ...
@overload
def scan(
    f: Step[C, X, Y], init: Like[C], xs: Like[X] = ..., *lax: Any, **kw: Unpack[ScanKw[C, Y, No]]
) -> tuple[C, Y]: ...
@overload
def scan(
    f: Step[C, X, Y], init: Like[C], xs: Like[X] = ..., *lax: Any, **kw: Unpack[ScanKw[C, Y, Yes]]
) -> tuple[C, Y, LoopInfo]: ...
@overload
def scan(
    f: Step[C, X, Y], init: Like[C], xs: Like[X] = ..., *lax: Any, **kw: Unpack[ScanKw[C, Y, bool]]
) -> Any: ...
def scan(  # pyright: ignore[reportInconsistentOverload]  # `*lax`: lax takes these by position
    f: Step[C, X, Y],
    init: Like[C],
    xs: Like[X] = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: Unroll = 1,
    _split_transpose: bool = False,
    *,
    until: Until[C, Y] | None = None,
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    every: int | None = None,
    reduce: Reduce = None,
    truncate: int | None = None,
    checkpoints: Checkpoints = None,
    memory: Memory = None,
    buffers: BufferSpec | None = None,
    return_info: bool = False,
    lanes: Lanes = None,
    progress: Progress = None,
    debug: DebugLoop = None,
) -> tuple[C, Y] | tuple[C, Y, LoopInfo]:
    """Scan `f` over an axis of `xs`, the leading one by default, carrying state along.

        def scan(f, init, xs, length=None, *, until=None):
            carry, ys = init, zeros
            for t in range(length):  # reversed(range(length)) if reverse
                carry, ys[t] = f(carry, xs[t])
                if until is not None and until(carry, ys[t]):
                    break
            return carry, ys

    This replaces `jax.lax.scan`, and takes the same positional arguments. Its backward pass keeps
    checkpoints instead of the residuals of every step.

    **Arguments:**

    - `f`: `(Carry, X) -> (Carry, Y)`, pure: loopkit may trace the very same function only once.
    - `init`: a pytree of arrays, the initial carry. Leaves that are not arrays, such as a model's
      functions and names, pass through unchanged: a step returns the same leaves, or equal ones.
    - `xs`: a pytree of arrays, scanned over along `in_axes`; None for no input. Every step gets
      leaves that are not arrays, including Python numbers, unchanged, and `ys` may hold them.
    - `length`: steps, a static int; needed if no leaf of `xs` is scanned over. If it is symbolic
      (`jax.export`), lax runs the loop, and only settings that lax has are allowed.
    - `reverse`: go from the last row of `xs` and `ys` to the first.
    - `unroll`: the steps in one iteration of the compiled loop; True or 0 for all steps.
    - `_split_transpose`: as in `jax.lax.scan`; the loop then stores every step.
    - `until`: `(Carry, Y) -> bool[]`. The loop stops after the first step for which this holds, and
      costs only the steps it takes.
    - `in_axes`: the axis of `xs` to scan over: an int, or a tree of ints that is a prefix of `xs`.
      Negative axes count from the end. With None, every step gets the whole array. Arrays are
      sliced where they lie, unless a transposed copy makes the loop faster.
    - `out_axes`: the axis of `ys` along which they are stacked: an int, or a tree of ints that is a
      prefix of `Y`. With None, the result is the y of the last step taken (zeros without a step).
    - `every`: keep the ys of every k-th step taken only: of steps k, 2k, ..., counted from 1. These
      are the rows `ys[k - 1::k]` (with `reverse`, counted from the last), `length // k` of them.
      The loop needs memory for these rows only, forward and backward.
    - `reduce`: "sum", "mean" or "last" of the ys of each `every` steps or, without `every`, of all
      steps taken. It may be a tree of these words and None that is a prefix of `Y`. With `every`,
      there are `length // every` rows, and None keeps the last y of each. Without it, the result
      has no axis of rows, and None keeps all rows. Dtypes are those of `jnp.sum` and `jnp.mean`.
    - `truncate`: stop the gradient in the carry every so many steps, counted from the first, as
      with `jax.lax.stop_gradient`, in every mode. The backward pass then keeps the residuals of at
      most `truncate` steps, and the carry once every `truncate` steps.
    - `checkpoints`: what the backward pass keeps. None: about the square root of n carries for n
      steps, at about one extra forward pass; or all residuals, if they have at most 1 kB, or at
      most 1 MB and steps are expensive; nothing for a derivative in a single number. An int c: at
      most c carries; fewer carries cost more recomputation. "all": all that the derivative of each
      step reads, as in lax.scan. A policy of `jax.checkpoint`: what it saves of each step. A
      `Plan`: what the plan says.
    - `memory`: a budget in bytes instead, such as "64 MB", as in `loopkit.while_loop`.
    - `buffers`, `return_info`, `lanes`, `progress`, `debug`: as in
      `loopkit.while_loop`.

    **Returns:**

    The final carry and the stacked `ys`; with `return_info`, a `LoopInfo(steps, stopped)` as well.
    Rows of `ys` that no step wrote are zero, and `info.steps` is the number of steps taken. With
    `every`, the rows of windows that the loop did not complete are zero, too.

    **Raises:**

    `TypeError` if `f` or `until` returns something of the wrong structure or type, `ValueError` if
    lengths disagree or an argument has a wrong value.

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
    name = NAMES.function
    validate.check_callable(name, NAMES.body, f)
    # A Python number has no axis. With `in_axes=None`, it becomes an array that every step gets.
    numbers = isinstance(in_axes, int)
    inputs = Inputs.of(wrapped(name, "xs", xs, numbers=numbers), in_axes, length)
    asked = LoopOptions(unroll, checkpoints, memory, buffers, return_info, lanes, progress, debug)
    reverse = validate.check_flag(name, "reverse", reverse)
    split = validate.check_flag(name, "_split_transpose", _split_transpose)
    truncate = validate.check_bound(name, "truncate", truncate)
    every = validate.check_bound(name, "every", every)
    if reduce is not None:
        check_words(reduce)
    beyond = {"truncate": truncate, "every": every, "reduce": reduce}
    own = {"out_axes": out_axes, "reverse": reverse, "split_transpose": split}
    spec = LoopSpec.of(NAMES, (f, until), init, inputs, inputs.length, asked, **own)
    if _jax.is_symbolic(spec.length):
        _check_symbolic(spec, beyond)
        spec = spec._replace(budget="all", unroll=1)
    given = [name for name, value in beyond.items() if value is not None]
    check_split(spec, [*given, *["out_axes"] * has_none(out_axes)])
    if split and spec.budget is None:
        spec = spec._replace(budget="all")
    if every is not None or reduce is not None or has_none(out_axes):
        result = of_some(spec, every, reduce, truncate)
    else:
        result = truncated(spec, truncate) if truncate is not None else run_scan(spec)
    return bare(result if spec.return_info else result[:2])


def _check_symbolic(spec: LoopSpec, others: dict[str, Any]) -> None:
    """Raise if a scan of symbolic length, which lax runs, has settings that lax lacks."""
    others = others | {"until": spec.predicate, "buffers": spec.buffers}
    others |= {"checkpoints": spec.budget, "progress": spec.progress}
    others["unroll"] = (spec.unroll != 1 and spec.unroll) or None
    given = [k for k, v in others.items() if v is not None and v != "all"]
    axes = {"in_axes": spec.inputs.axes, "out_axes": spec.out_axes}
    given += [k for k, v in axes.items() if any(jax.tree.leaves(v)) or has_none(v)]
    if given:
        got = f"the symbolic {spec.length} and {', '.join(f'`{k}`' for k in given)}"
        advice = "Leave those arguments out, or export a program for each length."
        expected = "must be known if the call has arguments that lax.scan lacks"
        raise errors.wrong_value(spec.names.function, "length", expected, got, advice)
