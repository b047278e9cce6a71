"""`unbounded_scan`: a scan outside jit that grows until its predicate holds.

XLA must know how many rows the results have, but this loop may take any number of steps. So the
loop runs in segments of a known length, each a compiled loop. Between two segments, the host checks
whether to go on. The lengths grow geometrically, so that few programs are compiled.

A segment is a loop of the engine, whose predicate may stop it before its last row. JAX
differentiates the segments one after another.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from loopkit import _jax
from loopkit._arguments import errors, validate
from loopkit._arguments.static_leaves import bare, wrapped
from loopkit._extras.growing import (
    compiled,
    divided,
    joined,
    light_steps,
    memory_left,
    on_device,
    ran_out,
    ran_out_after,
    segment,
    segment_lengths,
    together,
)
from loopkit._keywords import No, UnboundedKw, Yes
from loopkit._progress.open_bars import bar, in_parts
from loopkit._tracing.axes import Inputs
from loopkit._tracing.carry_buffers import NONE
from loopkit._tracing.run import python_steps
from loopkit._tracing.spec import LoopInfo, LoopOptions, LoopSpec, Names
from loopkit._types import C, Checkpoints, Debug, Like, Progress, Step, Until, X, Y

NAMES = Names("unbounded_scan", "f", "init", "until", "carry, x")


@overload
def unbounded_scan(
    f: Step[C, X, Y], init: Like[C], xs: Like[X] = ..., **kw: Unpack[UnboundedKw[C, Y, No]]
) -> tuple[C, Y]: ...
@overload
def unbounded_scan(
    f: Step[C, X, Y], init: Like[C], xs: Like[X] = ..., **kw: Unpack[UnboundedKw[C, Y, Yes]]
) -> tuple[C, Y, LoopInfo]: ...
@overload
def unbounded_scan(
    f: Step[C, X, Y], init: Like[C], xs: Like[X] = ..., **kw: Unpack[UnboundedKw[C, Y, bool]]
) -> Any: ...
def unbounded_scan(
    f: Step[C, X, Y],
    init: Like[C],
    xs: Like[X] = None,
    *,
    until: Until[C, Y],
    segment: int = 64,
    max_segments: int | None = None,
    checkpoints: Checkpoints = None,
    growth: float = 2.0,
    progress: Progress | Callable[[int], Any] = None,
    return_info: bool = False,
    debug: Debug = None,
) -> tuple[C, Y] | tuple[C, Y, LoopInfo]:
    """Scan until `until` holds, however long that takes; outside `jax.jit`.

        def unbounded_scan(f, init, xs=None, *, until):
            carry, ys = init, []
            for x in xs or itertools.repeat(None):
                carry, y = f(carry, x)
                ys.append(y)
                if until(carry, y):
                    break
            return carry, jnp.stack(ys)

    This runs compiled segments of growing length, and checks between them whether to go on.
    Segments with up to 64 kB of results and checkpoints run as one. Memory follows the steps taken.
    You can apply `jax.grad`, `jax.jvp` and `jax.vmap`, in any order. Inside `jax.jit`, shapes must
    be known: use `loopkit.scan` with `until` and a `length`.

    **Arguments:**

    - `f`: `(Carry, X) -> (Carry, Y)`.
    - `init`: a pytree of arrays, the initial carry. Leaves that are not arrays pass through
      unchanged, as in `loopkit.scan`.
    - `xs`: a pytree of arrays, scanned over along their leading axis; None for no input. The loop
      also ends after the last row.
    - `until`: `(Carry, Y) -> bool[]`. The loop stops after the first step for which this holds.
    - `segment`: the number of steps in the first segment.
    - `max_segments`: the most segments to run; None for no bound. It bounds the steps of loops that
      may not end. A loop that reaches it returns what it has, without an error:
      `LoopInfo.stopped` is then False.
    - `checkpoints`: what the backward pass keeps of each segment, as in `loopkit.scan`.
    - `growth`: how many times longer each segment is than the one before, at least 1. No segment
      is longer than 4096 steps, unless the first is.
    - `progress`: as in `loopkit.while_loop`; the total is the number of rows of `xs`. It may also
      be a function, which is called after each segment with the number of steps taken, an int.
    - `return_info`: also return a `LoopInfo`.
    - `debug`: as in `loopkit.while_loop`.

    **Returns:**

    The final carry and the `ys`, with a row for each step taken; with `return_info`, a
    `LoopInfo(steps, stopped)` as well. Under `jax.vmap`, there is a row for each step of the lane
    that took the most steps. Rows of a lane after its own last step are zero.

    **Raises:**

    `TypeError` inside `jax.jit`, or if a function returns something of the wrong structure or type;
    `ValueError` if an argument has a wrong value; `MemoryError` if the device has no memory left
    for the forward pass, which also stores the checkpoints. That error says how many steps were
    taken, and about how many would fit. A backward pass runs after this function has returned. If
    memory runs out there, in the part that one segment computes again, the error is JAX's own
    (RESOURCE_EXHAUSTED). Pass a smaller int for `checkpoints`, or a smaller `segment` and
    `growth=1`.

    !!! example

        ```python
        import jax
        import loopkit

        def halve(rate):  # the number of steps depends on the rate
            def step(x, _):
                return x * rate, x
            _, xs = loopkit.unbounded_scan(step, 1.0, until=lambda x, _: x < 0.5)
            return xs.sum()

        halve(0.999), jax.grad(halve)(0.999)
        ```
    """
    name = NAMES.function
    validate.check_callable(name, "until", until)
    told: Any = None
    if callable(progress) and not hasattr(progress, "start"):
        told, progress = progress, None
    xs = wrapped(name, "xs", xs)
    endless = Inputs(jax.tree.structure(xs), [], [], sys.maxsize)
    inputs = Inputs.of(xs, 0, None, name) if jax.tree.leaves(xs) else endless
    segment = validate.check_whole(name, "segment", segment, 1, "an int >= 1 (steps)")
    max_segments = validate.check_bound(name, "max_segments", max_segments)
    asked = LoopOptions(checkpoints=checkpoints, buffers=NONE, return_info=return_info)
    asked = asked._replace(progress=progress, debug=debug)
    spec = LoopSpec.of(NAMES, (f, until), init, inputs, 1, asked)
    sizes = segment_lengths(segment, check_growth(name, growth), max_segments)
    run = _python_scan if _jax.jit_is_disabled() and inputs.length else _run
    whole = None if inputs is endless else inputs.length
    with in_parts(spec.progress, whole) as of_segments:
        result = run(spec._replace(progress=of_segments), sizes, told)
    return bare(result if spec.return_info else result[:2])


def _run(
    spec: LoopSpec, sizes: Iterator[int], progress: Callable | None
) -> tuple[Any, Any, LoopInfo]:
    (traced, _), (carry, tree) = segment(spec), jax.tree.flatten(spec.init)
    xs, rows = spec.inputs.leaves, spec.inputs.length
    if spec.budget is None and progress is None:
        sizes = together(sizes, light_steps(traced, [*carry, *xs]), rows)
    steps, stopped = on_device(0, np.int32), on_device(False, bool)
    closed_over, chunks, ys = traced.closed_over, [], []
    longest = size = 0
    # For a CPU, this is the machine's whole memory, also after memory has run out.
    room = None if jax.default_backend() == "cpu" else memory_left(carry)
    try:
        for size, left, x in divided(xs, rows, sizes):
            run = compiled(traced, size, spec.counts)
            carry, steps, stopped, taken, ys = run(
                closed_over, carry, steps, stopped, on_device(left, np.int32), x
            )
            most, done = _on_host(taken, stopped)
            longest += most
            chunks.append((ys, most))
            if progress is not None:
                progress(longest)
            if done:
                break
        ys = [joined([(ys[k], most) for ys, most in chunks]) for k in range(len(ys))]
    except jax.errors.JaxRuntimeError as error:
        if not ran_out(error):
            raise
        widths = _jax.byte_count(*traced.loop.ys_types), _jax.byte_count(*traced.init_types)
        room = memory_left(carry) if room is None else room
        raise MemoryError(ran_out_after(longest, size, *widths, room)) from error
    return tree.unflatten(carry), traced.y_tree.unflatten(ys), LoopInfo(steps, stopped)


def _on_host(taken: jax.Array, stopped: jax.Array) -> tuple[int, bool]:
    """Return the most steps of any lane, and whether all lanes stopped, as Python values."""
    if not (_jax.is_tracer(taken) or _jax.is_tracer(stopped)):
        most, done = jax.device_get((taken, stopped))
        return most.item(), done.item()
    for over in (lambda *values: values, _over_lanes):
        with contextlib.suppress(jax.errors.ConcretizationTypeError):
            most, done = over(taken, stopped)
            return int(most), bool(done)
    advice = "Inside jit, use `loopkit.scan` with `until` and with the most steps as `length`."
    got = "a traced predicate"
    expected = "must be known between segments, outside jax.jit"
    raise errors.wrong_type(NAMES.function, "until", expected, got, advice)


@jax.custom_batching.custom_vmap
def _over_lanes(taken: jax.Array, stopped: jax.Array) -> tuple[Any, Any]:
    return taken, stopped


@_over_lanes.def_vmap
def _(size: int, batched: Any, taken: jax.Array, stopped: jax.Array) -> tuple:
    taken = taken.max(0) if batched[0] else taken
    stopped = stopped.all(0) if batched[1] else stopped
    return _over_lanes(taken, stopped), (False, False)


def _python_scan(
    spec: LoopSpec, sizes: Iterator[int], progress: Callable | None
) -> tuple[Any, Any, LoopInfo]:
    """Run the scan step by step in Python, under jax.disable_jit."""
    carry, ys, stopped, rows = spec.init, [], False, spec.inputs.length
    for size in sizes:
        order = range(len(ys), min(len(ys) + size, rows))
        with bar(spec.progress, None) as taken:
            carry, stopped = python_steps(spec, carry, order, ys, taken)
        if progress is not None:
            progress(len(ys))
        if stopped or len(ys) == rows:
            break
    stacked = jax.tree.map(lambda *y: jnp.stack(y), *ys)
    return carry, stacked, LoopInfo(jnp.int32(len(ys)), jnp.array(stopped))


def check_growth(function: str, growth: object, what: str = "segment") -> float:
    got = errors.shown(growth)
    expected = f"must be a finite number >= 1 (the factor from a {what} to the next)"
    if isinstance(growth, bool) or not isinstance(growth, (int, float, np.integer, np.floating)):
        raise errors.wrong_type(function, "growth", expected, got, "Pass a Python number.")
    if not 1 <= growth < math.inf:
        advice = f"Pass at least 1, so that no {what} is shorter than the last."
        raise errors.wrong_value(function, "growth", expected, got, advice)
    return float(growth)
