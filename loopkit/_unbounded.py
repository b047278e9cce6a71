"""`unbounded_scan`: a scan that grows, outside jit, until it has seen enough.

XLA must know how many rows the results have; nobody knows how many steps this loop takes. So it
runs in segments of a known length, each a compiled loop, and between two of them looks, on the
host, whether to go on. The lengths grow geometrically, so that few programs are ever compiled.

A segment is a loop of the engine, with a predicate: it stops after the last step, not after its
last row. Derivatives are those of its segments, one after another.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from loopkit import _arguments, _errors, _jax
from loopkit._axes import Inputs
from loopkit._budget import check_budget
from loopkit._cache import remember
from loopkit._capture import Names, Traced, scalar_bool, trace_loop, type_key
from loopkit._exhausted import ran_out, ran_out_after
from loopkit._info import LoopInfo
from loopkit._scan import pair

Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")

NAMES = Names("unbounded_scan", "f", "init", "until")

LONGEST = 4096
"""Steps to which segments grow."""


class Progress(NamedTuple):
    """Where a loop is: a part of the carry of its segments."""

    left: Any
    """Steps that the segment, or `xs`, still has."""
    stopped: Any
    """Whether `until` has held."""


def unbounded_scan(
    f: Callable[[Carry, X], tuple[Carry, Y]],
    init: Carry,
    xs: X | None = None,
    *,
    until: Callable[[Carry, Y], Any],
    segment: int = 64,
    max_segments: int | None = None,
    checkpoints: Any = None,
    growth: float = 2.0,
    progress: Callable[[int], Any] | None = None,
    return_info: bool = False,
) -> Any:
    """Scan until `until` holds, however long that takes; outside `jax.jit`.

        def unbounded_scan(f, init, xs=None, *, until):
            carry, ys = init, []
            for x in xs or itertools.repeat(None):
                carry, y = f(carry, x)
                ys.append(y)
                if until(carry, y):
                    break
            return carry, jnp.stack(ys)

    It runs compiled segments of growing length, and looks between them whether to go on. Memory
    follows the steps taken. `jax.grad`, `jax.jvp` and `jax.vmap` go through it, in any order;
    inside `jax.jit`, where shapes must be known, use `loopkit.scan` with `until` and a `length`.

    **Arguments:**

    - `f`: `(Carry, X) -> (Carry, Y)`.
    - `init`: a pytree of arrays, the initial carry.
    - `xs`: a pytree of arrays, scanned over along their leading axis; the loop also ends after
      their last row. None for no input.
    - `until`: `(Carry, Y) -> bool[]`. Stop after the first step for which it holds.
    - `segment`: steps in the first segment.
    - `max_segments`: the most segments to run; None for no bound. A bound on the steps, for
      loops that may not end.
    - `checkpoints`: what the backward pass keeps of each segment. None: about the square root of
      its steps, in carries. An int c: at most c carries. "all": what the derivative of every step
      reads.
    - `growth`: how many times longer each segment is than the one before, at least 1. No segment
      is longer than 4096 steps, unless the first is.
    - `progress`: called after each segment with the number of steps taken so far, an int.
    - `return_info`: also return a `LoopInfo`.

    **Returns:**

    The final carry and the `ys`, with as many rows as steps were taken; with `return_info`, a
    `LoopInfo(steps, stopped)` as well. Under `jax.vmap` there are as many rows as the longest lane
    took steps, and a lane's rows past its own stop are zero.

    **Raises:**

    `TypeError` inside `jax.jit`, or if a function returns something of another structure or type
    than it should; `ValueError` if an argument has a wrong value; `MemoryError` if the device has
    no memory left, with the steps taken until then and an estimate of how many would fit.

    !!! example

        ```python
        import jax
        import loopkit

        def halve(rate):  # how long it takes is nobody's guess
            def step(x, _):
                return x * rate, x
            _, xs = loopkit.unbounded_scan(step, 1.0, until=lambda x, _: x < 0.5)
            return xs.sum()

        halve(0.999), jax.grad(halve)(0.999)
        ```
    """
    name = NAMES.function
    _arguments.check_callable(name, "f", f)
    _arguments.check_callable(name, "until", until)
    if progress is not None:
        _arguments.check_callable(name, "progress", progress)
    init = _arguments.as_arrays(name, "init", init)
    xs = _arguments.as_arrays(name, "xs", xs)
    rows = Inputs.of(xs, 0, None, name).length if jax.tree.leaves(xs) else None
    segment = _arguments.check_whole(name, "segment", segment, 1, "an int >= 1, in steps")
    if max_segments is not None:
        expected = "an int >= 1 or None (no bound)"
        max_segments = _arguments.check_whole(name, "max_segments", max_segments, 1, expected)
    checkpoints = check_budget(name, checkpoints, None, segment)
    sizes = segment_lengths(segment, check_growth(name, growth), max_segments)
    if _arguments.runs_in_python() and rows != 0:
        carry, ys, info = _python_scan(f, init, xs, until, rows, sizes, progress)
    else:
        carry, ys, info = _run(f, init, xs, until, rows, sizes, checkpoints, progress)
    return (carry, ys, info) if return_info else (carry, ys)


def segment_lengths(first: int, growth: float, most: int | None) -> Iterator[int]:
    """The lengths of the segments: first, first * growth, first * growth**2, ..., to a cap."""
    k = 0
    size, cap = float(first), max(first, LONGEST)
    while k != most:
        yield min(int(size), cap)
        size, k = min(size * growth, cap), k + 1


def _run(
    f: Callable,
    init: Any,
    xs: Any,
    until: Callable,
    rows: int | None,
    sizes: Iterator[int],
    checkpoints: Any,
    progress: Callable | None,
) -> tuple[Any, Any, LoopInfo]:
    traced, tree = trace_segment(NAMES, f, init, xs, until, checkpoints)
    carry, stopped, steps = init, np.array(False), np.int32(0)
    longest, size, chunks = 0, 0, []
    try:
        for size, left, x in _segments(jax.tree.leaves(xs), rows, sizes):
            start = jax.tree.leaves((carry, Progress(np.int32(left), stopped)))
            leaves, ys = traced.of_length(size).run(start, x)
            carry, place = tree.unflatten(leaves)
            unused, stopped = map(_fetched, place)
            taken = left - unused  # none in a lane that had stopped
            steps = steps + taken
            most, done = _on_host(taken, stopped)
            longest += most
            chunks.append(ys if most == size else [lax.slice_in_dim(y, 0, most) for y in ys])
            if progress is not None:
                progress(longest)
            if done:
                break
        ys = [jnp.concatenate(parts) for parts in zip(*chunks, strict=True)]
    except jax.errors.JaxRuntimeError as error:
        if not ran_out(error):
            raise
        widths = _bytes(traced.loop.ys_types), _bytes(traced.carry_types)
        raise MemoryError(ran_out_after(NAMES.function, longest, size, *widths)) from error
    return carry, traced.y_tree.unflatten(ys), LoopInfo(jnp.asarray(steps), jnp.asarray(stopped))


def _fetched(value: Any) -> Any:
    """On the host, where counting is cheaper, if it is known."""
    return value if _jax.is_tracer(value) else np.asarray(value)


def _segments(xs: list, rows: int | None, sizes: Iterator[int]) -> Iterator[tuple[int, int, list]]:
    """For each segment its length, the steps it may take, and its rows of `xs`."""
    if rows is None:
        yield from ((size, size, []) for size in sizes)
        return
    lengths = []
    while sum(lengths) < rows and (size := next(sizes, None)) is not None:
        lengths.append(size)
    starts = [sum(lengths[:k]) for k in range(len(lengths))]
    steps = [min(size, rows - start) for size, start in zip(lengths, starts, strict=True)]
    if any(map(_jax.is_tracer, xs)):
        # The transpose of a split is a concatenation; that of a slice is as long as `xs`.
        parts = [lax.split(x, [*steps, rows - sum(steps)])[:-1] for x in xs]
        slices = [list(x) for x in zip(*parts, strict=True)]
    else:
        spans = zip(starts, steps, strict=True)
        slices = ([lax.dynamic_slice_in_dim(x, *span) for x in xs] for span in spans)
    if not lengths:
        yield 0, 0, xs
    for size, left, x in zip(lengths, steps, slices, strict=True):
        yield size, left, [_lengthened(row, size - left) for row in x] if left < size else x


def _lengthened(x: Any, rows: int) -> Any:
    """With rows at the end that no step reads."""
    return jnp.concatenate([x, jnp.broadcast_to(x[-1:], (rows, *x.shape[1:]))])


def trace_segment(
    names: Names, f: Callable, init: Any, xs: Any, until: Callable | None, checkpoints: Any
) -> tuple[Traced, Any]:
    """A loop over `(carry, Progress)`, of a length still to be set, and the tree of that carry."""
    state = (init, Progress(jnp.int32(0), jnp.array(False)))
    leaves, tree = jax.tree.flatten(state)
    x_leaves, x_tree = jax.tree.flatten(xs)
    x_types = [_jax.slice_type(jax.typeof(x)) for x in x_leaves]

    def step(carry: list, x: list) -> tuple[Any, Any]:
        value, place = tree.unflatten(carry)
        new, y = pair(names, f(value, x_tree.unflatten(x)))
        stop = False if until is None else scalar_bool(names.function, "until", until(new, y))
        return (new, Progress(place.left - 1, stop)), y

    def goes_on(carry: list) -> Any:
        place = tree.unflatten(carry)[1]
        return (place.left > 0) & ~place.stopped

    settings = {"length": 1, "checkpoints": checkpoints, "name": names.function}
    traced = remember(
        (f, until),
        (names, tree, type_key(leaves), x_tree, tuple(x_types), checkpoints),
        lambda: trace_loop(names, step, goes_on, state, x_types, settings),
    )
    return traced, tree


def _on_host(taken: Any, stopped: Any) -> tuple[int, bool]:
    """Most steps of any lane, and whether all have stopped, as Python values."""
    if _jax.is_tracer(taken) or _jax.is_tracer(stopped):
        taken, stopped = _over_lanes(taken, stopped)
    try:
        return int(taken), bool(stopped)
    except jax.errors.ConcretizationTypeError:
        pass
    advice = (
        "Inside jit use `loopkit.scan` with `length`, the most steps, and `until`: it costs the "
        "steps it takes."
    )
    got = "a predicate that is traced"
    expected = "must be known between segments, outside jax.jit"
    raise TypeError(_errors.wrong(NAMES.function, "until", expected, got, advice))


@jax.custom_batching.custom_vmap
def _over_lanes(taken: Any, stopped: Any) -> tuple[Any, Any]:
    return taken, stopped


@_over_lanes.def_vmap
def _(size: int, batched: Any, taken: Any, stopped: Any) -> tuple:
    taken = taken.max(0) if batched[0] else taken
    stopped = stopped.all(0) if batched[1] else stopped
    return _over_lanes(taken, stopped), (False, False)


def _python_scan(
    f: Callable,
    init: Any,
    xs: Any,
    until: Callable,
    rows: int | None,
    sizes: Iterator[int],
    progress: Callable | None,
) -> tuple[Any, Any, LoopInfo]:
    """Step by step, under jax.disable_jit."""
    carry, ys, stopped = init, [], False
    for size in sizes:
        for t in range(len(ys), len(ys) + size if rows is None else min(len(ys) + size, rows)):
            carry, y = pair(NAMES, f(carry, jax.tree.map(operator.itemgetter(t), xs)))
            ys.append(jax.tree.map(jnp.asarray, y))
            stopped = bool(until(carry, y))
            if stopped:
                break
        if progress is not None:
            progress(len(ys))
        if stopped or len(ys) == rows:
            break
    stacked = jax.tree.map(lambda *y: jnp.stack(y), *ys)
    return carry, stacked, LoopInfo(jnp.int32(len(ys)), jnp.array(stopped))


def _bytes(types: Sequence[Any]) -> int:
    return sum(t.size * t.dtype.itemsize for t in types)


def check_growth(function: str, growth: Any, what: str = "segment") -> float:
    got = f"{growth!r} of type {type(growth).__name__}"
    expected = f"must be a number >= 1, how much longer each {what} is than the last"
    if isinstance(growth, bool) or not isinstance(growth, (int, float)):
        raise TypeError(_errors.wrong(function, "growth", expected, got, "Pass a Python number."))
    if not 1 <= growth < math.inf:
        advice = "Less than 1 would have them shrink."
        raise ValueError(_errors.wrong(function, "growth", expected, got, advice))
    return float(growth)
