"""`blocked`: compute a batch in blocks whose working set stays in the processor's cache."""

from __future__ import annotations

import contextlib
import functools as ft
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack, overload

import jax
from jaxtyping import PyTree

from loopkit import _jax
from loopkit._arguments import errors, validate
from loopkit._extras.some_ys import of_some
from loopkit._jaxprs import equations
from loopkit._keywords import BlockedKw
from loopkit._programs import remember
from loopkit._progress.open_bars import closing_if_it_fails
from loopkit._progress.progress import check_progress
from loopkit._tracing.axes import (
    Inputs,
    block_axes,
    has_none,
    joined,
    leaf_axes,
    merged,
    normalised,
)
from loopkit._tracing.run import run_scan
from loopkit._tracing.spec import LoopOptions, LoopSpec, Names, type_key
from loopkit._types import Axes, Decorator, P, Progress, R

FUNCTION = "blocked"
NAMES = Names("scan", "f", "init", "until", "carry, x")
ROWS_MULTIPLE = 8
"""Blocks whose number of rows is a multiple of this fill the vector registers."""


@overload
def blocked(fn: Callable[P, R], **kw: Unpack[BlockedKw]) -> Callable[P, R]: ...
@overload
def blocked(fn: None = None, **kw: Unpack[BlockedKw]) -> Decorator: ...
def blocked(
    fn: Callable[P, R] | None = None,
    *,
    block: int | None = None,
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    progress: Progress = None,
) -> Callable[P, R] | Decorator:
    """Compute `fn` of a batch, one block of the batch after another.

        def blocked(fn, *, block):
            def run(x):
                return concatenate([fn(x[i : i + block]) for i in range(0, len(x), block)])
            return run

    A loop over a large batch reads and writes memory in every step. A loop over a block that fits
    in the cache does not. `fn` must treat the rows of its batch independently. Its derivatives, in
    every mode, are computed block by block too. A `jax.debug.callback` in `fn` is called once for
    each block, and not again if a gradient computes the block again.

    **Arguments:**

    - `fn`: a function from arrays with a batch axis, in any pytrees, to such arrays.
    - `block`: the rows in a block, a static int. With None, a block has as many rows as fit in half
      of the second-level cache, by the bytes that `fn` and the loops in it read and write for a
      row. On devices other than CPUs, it then has all rows. Rows left over form a smaller block.
    - `in_axes`, `out_axes`: the batch axes of the positional arguments and of the results, as in
      `jax.vmap`. With None, every block gets the whole argument, or the result is that of the last
      block. Keyword arguments have their batch axis first.
    - `progress`: as in `loopkit.while_loop`; a step is a block. A single block shows nothing.

    **Returns:**

    A function with the signature of `fn`. Without `fn`, a decorator.

    **Raises:**

    `TypeError` and `ValueError` if an argument is wrong, or if a result does not have a row for
    each row of its block, even if one block holds the whole batch.

    !!! example

        ```python
        import jax.numpy as jnp
        import loopkit

        def smooth(rows):
            return loopkit.scan(lambda y, x: (0.9 * y + x, y), rows[:, 0], rows, in_axes=1)[0]

        totals = loopkit.blocked(smooth, block=256)(jnp.ones((1000, 50)))
        ```
    """
    block = validate.check_bound(FUNCTION, "block", block)
    shown = check_progress(FUNCTION, progress)
    if fn is None:
        given = {"block": block, "in_axes": in_axes, "out_axes": out_axes, "progress": progress}
        decorator: Any = ft.partial(blocked, **given)
        return decorator
    validate.check_callable(FUNCTION, "fn", fn)

    @ft.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        args = validate.as_arrays(FUNCTION, "args", args)
        kwargs = validate.as_arrays(FUNCTION, "args", kwargs)
        axes = in_axes if isinstance(in_axes, (tuple, list)) else [in_axes] * len(args)
        if len(axes) != len(args):
            got = f"{in_axes!r} for {len(args)} positional arguments"
            advice = "Pass an axis or None for each, or one for all."
            expected = "must have an entry for each positional argument"
            raise errors.wrong_value(FUNCTION, "in_axes", expected, got, advice)
        inputs = Inputs.of((*args, kwargs), (*axes, 0), None, FUNCTION, "args")
        rows = block or _rows_in_cache(fn, inputs)
        if rows >= inputs.length:
            return _with_rows(fn(*args, **kwargs), out_axes, inputs.length)
        with closing_if_it_fails():
            return _in_blocks(fn, inputs, rows, out_axes, shown)

    return run


def _in_blocks(fn: Callable, inputs: Inputs, rows: int, out_axes: Axes, shown: Any) -> Any:
    count, left = divmod(inputs.length, rows)
    head, tail = inputs.divided(count, rows)
    shown = None if shown is None else replace(shown, whole=count + bool(left))
    first, last = shown and shown.part(True, not left), shown and shown.part(False, True)
    blocks = _over_blocks(fn, inputs.tree, head, rows, out_axes, first)
    if not left:
        return _merged(blocks, out_axes)
    # The rest is one more block, so that it too is traced once and runs as one program.
    rest, _ = tail.divided(1, left)
    end = _merged(_over_blocks(fn, inputs.tree, rest, left, out_axes, last), out_axes)
    return joined(FUNCTION, blocks, end, out_axes)


def _over_blocks(
    fn: Callable, tree: PyTree[Any], blocks: Inputs, rows: int, out_axes: Axes, shown: Any
) -> Any:
    """Return what `fn` returns for each block, stacked just before the batch axes."""

    def step(_: None, x: list) -> tuple[None, Any]:
        *args, kwargs = tree.unflatten(x)
        return None, _with_rows(fn(*args, **kwargs), out_axes, rows)

    axes, asked = block_axes(out_axes), LoopOptions(progress=shown)
    spec = LoopSpec.of(NAMES, (step, None), None, blocks, blocks.length, asked, out_axes=axes)
    # Each call makes a new step function; its trace depends on these instead.
    made_of = FUNCTION, tree, jax.tree.structure(axes), *jax.tree.leaves(axes)
    spec = spec._replace(functions=(fn,), rest=made_of)
    return (of_some(spec) if has_none(axes) else run_scan(spec))[1]


def _merged(blocks: PyTree[Any], out_axes: Axes) -> Any:
    leaves, tree = jax.tree.flatten(blocks)
    axes = leaf_axes("out_axes", out_axes, blocks, "what `fn` returns", FUNCTION)
    return tree.unflatten(
        x if a is None else merged(x, a % (x.ndim - 1)) for x, a in zip(leaves, axes, strict=True)
    )


def _with_rows(out: PyTree[Any], out_axes: Axes, rows: int) -> Any:
    """Return the result of `fn`; raise if it does not have a row for each row of its block."""
    out = validate.as_arrays(FUNCTION, "fn", out)
    axes = leaf_axes("out_axes", out_axes, out, "what `fn` returns", FUNCTION)
    axes = normalised("out_axes", axes, out, FUNCTION)
    for (path, leaf), axis in zip(jax.tree_util.tree_leaves_with_path(out), axes, strict=True):
        if axis is not None and leaf.shape[axis] != rows:
            got = f"{errors.short_type(jax.typeof(leaf))} for a block of {rows}, axis {axis}"
            advice = "Return a row for each row of the block, or set `out_axes`."
            expected = "must return as many rows as it gets"
            raise errors.wrong_value(FUNCTION, "fn", expected, got, advice, path)
    return out


def _rows_in_cache(fn: Callable, inputs: Inputs) -> int:
    """Return how many rows fill half of the cache; a divisor of the batch if one is near."""
    if jax.default_backend() != "cpu":
        return inputs.length
    key = (FUNCTION, inputs.tree, *inputs.axes, type_key(inputs.leaves))
    total = remember((fn,), key, lambda: _working_set(fn, inputs))
    fitting = max(1, cache_bytes() // 2 * inputs.length // max(total, 1))
    if fitting >= inputs.length:
        return inputs.length
    divisors = (n for n in range(fitting, fitting // 2, -1) if inputs.length % n == 0)
    return next(divisors, max(1, fitting - fitting % ROWS_MULTIPLE))


def _working_set(fn: Callable, inputs: Inputs) -> int:
    """Return the bytes that `fn` and the loops in it read and write for the whole batch."""

    def flat(*leaves: jax.Array) -> list:
        *args, kwargs = inputs.tree.unflatten(leaves)
        return jax.tree.leaves(fn(*args, **kwargs))

    jaxpr, _ = _jax.trace(flat, list(map(jax.typeof, inputs.leaves)), FUNCTION)
    read = [jax.typeof(x) for x, _ in inputs.sliced]
    return _jax.byte_count(*read, *jaxpr.out_avals) + _loop_bytes(jaxpr)


def _loop_bytes(jaxpr: _jax.Jaxpr) -> int:
    """Return the bytes that loops at any depth return, and so write to memory.

    If an equation has several jaxprs, such as branches, the one with the most bytes counts.
    """
    total = 0
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name in ("scan", "while", "loopkit_while"):
            total += _jax.byte_count(*(v.aval for v in eqn.outvars))
        total += max(map(_loop_bytes, equations.jaxprs_in(eqn)), default=0)
    return total


@ft.cache
def cache_bytes() -> int:
    """Return the bytes of a core's second-level cache; 1 MiB if the system does not say."""
    path = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")
    units = {"K": 1 << 10, "M": 1 << 20}
    with contextlib.suppress(OSError, ValueError, KeyError):
        text = path.read_text().strip()
        return int(text[:-1]) * units[text[-1]]
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_LEVEL2_CACHE_SIZE") or 1 << 20
    return 1 << 20
