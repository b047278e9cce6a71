"""`blocked`: a batch in blocks whose working set stays in the processor's cache."""

from __future__ import annotations

import functools as ft
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from loopkit import _arguments, _errors, _jax
from loopkit._axes import Inputs, block_axes, joined, leaf_axes, merged, normalised
from loopkit._scan import NAMES, run_scan

NAME = "blocked"
ROWS = 8
"""Blocks of a multiple of this many rows fill the vector registers."""


def blocked(
    fn: Callable, *, block: int | None = None, in_axes: Any = 0, out_axes: Any = 0
) -> Callable:
    """`fn` of a batch, computed one block of the batch after another.

        def blocked(fn, *, block):
            def run(x):
                return concatenate([fn(x[i : i + block]) for i in range(0, len(x), block)])
            return run

    A loop over a large batch reads and writes memory in every step. Over a block that fits in the
    cache it does not. `fn` must treat the rows of its batch independently; its derivatives, in
    every mode, are computed block by block too.

    **Arguments:**

    - `fn`: a function of arrays with a batch axis, any pytrees of them, to such arrays.
    - `block`: rows to a block, a static int. None: as many as fit in half of the second-level
      cache, by the bytes that `fn` and the loops in it read and write for a row; on other devices
      than CPUs, all. What is left over is a smaller block.
    - `in_axes`, `out_axes`: the batch axes of the positional arguments and of the results, as in
      `jax.vmap`. An argument with None is given whole to every block; a result with None is that
      of the last block. Keyword arguments have their batch axis first.

    **Returns:**

    A function with the signature of `fn`.

    **Raises:**

    `TypeError` and `ValueError` if an argument is wrong, or a result has no row for each row of
    its block.

    !!! example

        ```python
        import jax.numpy as jnp
        import loopkit

        def smooth(rows):
            return loopkit.scan(lambda y, x: (0.9 * y + x, y), rows[:, 0], rows, in_axes=1)[0]

        totals = loopkit.blocked(smooth, block=256)(jnp.ones((1000, 50)))
        ```
    """
    _arguments.check_callable(NAME, "fn", fn)
    block = _arguments.check_block(NAME, block)

    @ft.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        args = _arguments.as_arrays(NAME, "args", args)
        kwargs = _arguments.as_arrays(NAME, "args", kwargs)
        axes = in_axes if isinstance(in_axes, (tuple, list)) else [in_axes] * len(args)
        if len(axes) != len(args):
            got = f"{in_axes!r} for {len(args)} arguments"
            advice = "Give an axis or None for each, or one for all."
            expected = "must go with the positional arguments"
            raise ValueError(_errors.wrong(NAME, "in_axes", expected, got, advice))
        inputs = Inputs.of((*args, kwargs), (*axes, 0), None, NAME, "args")
        rows = block or _rows_in_cache(fn, inputs)
        if rows >= inputs.length:
            return fn(*args, **kwargs)
        return _in_blocks(fn, inputs, rows, out_axes)

    return run


def _in_blocks(fn: Callable, inputs: Inputs, rows: int, out_axes: Any) -> Any:
    count, left = divmod(inputs.length, rows)
    head, tail = inputs.divided(count, rows)

    def step(_: None, x: list) -> tuple[None, Any]:
        *args, kwargs = inputs.tree.unflatten(x)
        out = fn(*args, **kwargs)
        _check_rows(out, out_axes, rows)
        return None, out

    axes = block_axes(out_axes)
    _, blocks = run_scan(NAMES, step, None, head, None, False, 1, False, out_axes=axes)
    if left:
        *args, kwargs = tail.tree.unflatten(tail.leaves)
        return joined(NAME, blocks, fn(*args, **kwargs), out_axes)
    leaves, tree = jax.tree.flatten(blocks)
    axes = leaf_axes("out_axes", out_axes, blocks, "what `fn` returns", NAME)
    return tree.unflatten(
        x if a is None else merged(x, a % (x.ndim - 1)) for x, a in zip(leaves, axes, strict=True)
    )


def _check_rows(out: Any, out_axes: Any, rows: int) -> None:
    out = _arguments.as_arrays(NAME, "fn", out)
    axes = leaf_axes("out_axes", out_axes, out, "what `fn` returns", NAME)
    axes = normalised("out_axes", axes, out, NAME)
    for (path, leaf), axis in zip(jax.tree_util.tree_leaves_with_path(out), axes, strict=True):
        if axis is not None and leaf.shape[axis] != rows:
            got = f"{_errors.short_type(jax.typeof(leaf))} for a block of {rows}, axis {axis}"
            advice = "Return a row for each row of the block, or set `out_axes`."
            expected = "must return as many rows as it is given"
            raise ValueError(_errors.wrong(NAME, "fn", expected, got, advice, path))


# ---------------------------------------------------------------- how many rows


def _rows_in_cache(fn: Callable, inputs: Inputs) -> int:
    """Rows whose working set fills half of the cache; a divisor of the batch if one is near."""
    if jax.default_backend() != "cpu":
        return inputs.length

    def flat(*leaves: Any) -> list:
        *args, kwargs = inputs.tree.unflatten(leaves)
        return jax.tree.leaves(fn(*args, **kwargs))

    jaxpr, _ = _jax.trace(flat, [jax.typeof(x) for x in inputs.leaves], NAME)
    batched = [v for v, a in zip(inputs.leaves, inputs.axes, strict=True) if a is not None]
    total = sum(_bytes(jax.typeof(v)) for v in batched)
    total += sum(map(_bytes, jaxpr.out_avals)) + _loop_bytes(jaxpr)
    fitting = max(1, cache_bytes() // 2 * inputs.length // max(total, 1))
    if fitting >= inputs.length:
        return inputs.length
    for rows in range(fitting, fitting // 2, -1):
        if inputs.length % rows == 0:
            return rows
    return max(1, fitting - fitting % ROWS)


def _loop_bytes(jaxpr: Any) -> int:
    """Bytes of what loops return, at any depth of calls: they are written to memory."""
    total = 0
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        inner = eqn.params.get("jaxpr")
        if eqn.primitive.name in ("jit", "pjit") and inner is not None:
            total += _loop_bytes(inner)
        elif eqn.primitive.name in ("scan", "while", "loopkit_while"):
            total += sum(_bytes(v.aval) for v in eqn.outvars)
    return total


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 8)


@ft.cache
def cache_bytes() -> int:
    """Bytes of a core's second-level cache; 1 MiB where the system does not say."""
    path = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")
    units = {"K": 1 << 10, "M": 1 << 20}
    try:
        text = path.read_text().strip()
        return int(text[:-1]) * units[text[-1]]
    except (OSError, ValueError, KeyError):
        pass
    try:
        return os.sysconf("SC_LEVEL2_CACHE_SIZE") or 1 << 20
    except (AttributeError, OSError, ValueError):
        return 1 << 20
