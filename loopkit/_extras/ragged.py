"""`ragged_scan`: scan sequences of many lengths in batches of similar length.

A batch is padded to the length of its bucket, and each of its lanes stops at its own end. There are
few buckets, so that few programs are compiled. They are narrow, so batches have little padding.
"""

from __future__ import annotations

import bisect
import contextlib
import functools as ft
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import PyTree

from loopkit import _jax
from loopkit._arguments import errors, validate
from loopkit._arguments.static_leaves import bare, wrapped
from loopkit._extras.growing import moved, on_device, segment
from loopkit._extras.unbounded import check_growth
from loopkit._keywords import No, RaggedKw, Yes
from loopkit._progress.open_bars import closing_if_it_fails
from loopkit._tracing.axes import Inputs
from loopkit._tracing.carry_buffers import NONE
from loopkit._tracing.spec import LoopInfo, LoopOptions, LoopSpec, Names
from loopkit._tracing.trace import Traced
from loopkit._types import C, Checkpoints, Debug, Like, Memory, Progress, Step, Until, X, Y

NAMES = Names("ragged_scan", "f", "init", "until", "carry, x")


@overload
def ragged_scan(
    f: Step[C, X, Y], init: Like[C], sequences: Sequence[Like[X]], **kw: Unpack[RaggedKw[C, Y, No]]
) -> tuple[C, list[Y]]: ...
@overload
def ragged_scan(
    f: Step[C, X, Y], init: Like[C], sequences: Sequence[Like[X]], **kw: Unpack[RaggedKw[C, Y, Yes]]
) -> tuple[C, list[Y], LoopInfo]: ...
@overload
def ragged_scan(
    f: Step[C, X, Y],
    init: Like[C],
    sequences: Sequence[Like[X]],
    **kw: Unpack[RaggedKw[C, Y, bool]],
) -> Any: ...
def ragged_scan(
    f: Step[C, X, Y],
    init: Like[C],
    sequences: Sequence[Like[X]],
    *,
    until: Until[C, Y] | None = None,
    batch: int = 64,
    growth: float = 1.25,
    checkpoints: Checkpoints = None,
    memory: Memory = None,
    return_info: bool = False,
    progress: Progress = None,
    debug: Debug = None,
) -> tuple[C, list[Y]] | tuple[C, list[Y], LoopInfo]:
    """Scan each sequence in a list, of any lengths, in batches.

        def ragged_scan(f, init, sequences, *, until=None):
            results = [loopkit.scan(f, init, xs, until=until) for xs in sequences]
            carries, ys = zip(*results)
            return jnp.stack(carries), list(ys)  # without the rows past a stop

    Sequences of similar lengths run together, padded to the length of their bucket, under
    `jax.vmap`. No step is taken in the padding. You can differentiate the function with `jax.grad`
    and `jax.jvp`, with respect to the sequences too. Without `until`, `jax.jit` and `jax.vmap`
    apply as well. Buckets run one after another. If a step takes as long for many lanes as for few,
    `loopkit.scan` with `until` on padded sequences, under `jax.vmap`, takes less time.

    **Arguments:**

    - `f`: `(Carry, X) -> (Carry, Y)`, a step of one sequence.
    - `init`: a pytree of arrays, the initial carry of every sequence. Leaves that are not arrays
      pass through unchanged, as in `loopkit.scan`.
    - `sequences`: a list of pytrees of arrays, each scanned over along its leading axis. They may
      differ only in the length of that axis.
    - `until`: `(Carry, Y) -> bool[]`. A sequence stops after the first step for which this holds.
    - `batch`: the most sequences in a batch.
    - `growth`: how many times longer each bucket is than the one before, as in
      `loopkit.length_buckets`.
    - `checkpoints`: what the backward pass keeps of each batch, as in `loopkit.scan`.
    - `memory`: a budget in bytes instead, for each sequence of a batch.
    - `return_info`: also return a `LoopInfo`, with an entry for each sequence.
    - `progress`: as in `loopkit.while_loop`; a batch takes the steps of its longest sequence.
    - `debug`: as in `loopkit.while_loop`; a lane is a sequence of a batch.

    **Returns:**

    The final carries, stacked along a new leading axis in the order of the sequences, and a list
    of `ys`, each with a row for each step taken; with `return_info`, a `LoopInfo(steps, stopped)`
    as well.

    **Raises:**

    `TypeError` and `ValueError` as `loopkit.scan`, and if the sequences differ in more than
    length.

    !!! example

        ```python
        import jax.numpy as jnp
        import loopkit

        def step(total, x):
            return total + x, total + x

        sequences = [jnp.ones(3), jnp.ones(50), jnp.ones(4)]
        totals, sums = loopkit.ragged_scan(step, 0.0, sequences)
        print(totals)  # [ 3. 50. 4.]
        print([len(s) for s in sums])  # [3, 50, 4]
        ```
    """
    name = NAMES.function
    inputs = _check_sequences(sequences)
    batch = validate.check_whole(name, "batch", batch, 1, "an int >= 1 (sequences in a batch)")
    asked = LoopOptions(checkpoints=checkpoints, memory=memory, buffers=NONE)
    asked = asked._replace(return_info=return_info, progress=progress, debug=debug)
    spec = LoopSpec.of(NAMES, (f, until), init, inputs[0], 1, asked)
    lengths = [x.length for x in inputs]
    buckets = length_buckets(lengths, growth=_check_growth(name, growth))

    batches = [
        (size, places[begin : begin + batch])
        for size, places in buckets.items()
        for begin in range(0, len(places), batch)
    ]
    with closing_if_it_fails():
        return _run(spec, inputs, lengths, batches)


def _run(
    spec: LoopSpec, inputs: list[Inputs], lengths: list[int], batches: list[tuple[int, list[int]]]
) -> Any:
    (traced, tree), until = segment(spec), spec.predicate
    go = None if until is None else on_device(True, bool)
    order, results, ys = [], [], []
    loops = [traced.with_fields(length=size) for size, _ in batches]
    values = [*traced.closed_over, *jax.tree.leaves((spec.init, [x.leaves for x in inputs]))]
    compiled = any(_jax.is_tracer(_jax.innermost(v)) for v in values)
    if spec.progress is not None and not compiled:  # compiled loops may run in any order
        loops = _with_one_bar(loops, [max(lengths[i] for i in some) for _, some in batches])
    for (size, some), loop in zip(batches, loops, strict=True):
        # Add lanes that take no step, so that there are few batch sizes to compile.
        lanes = 1 << (len(some) - 1).bit_length()
        own = [lengths[i] for i in some]
        left = moved(np.array([*own, *[0] * (lanes - len(some))], np.int32))
        xs = zip(*(inputs[i].leaves for i in some), strict=True)

        def run(left: jax.Array, x: list, loop: Any = loop) -> tuple[list, list]:
            steps = on_device(0, np.int32) if spec.counts else None
            hidden = spec.hidden(go=go, steps=steps, left=left)
            return loop.run(jax.tree.leaves((spec.init, hidden)), x)

        leaves, y = jax.vmap(run)(left, [_stacked(leaf, lanes, size) for leaf in xs])
        *leaves, steps = (lax.slice_in_dim(v, 0, len(some)) for v in (*leaves, left))
        carry, after = tree.unflatten(leaves)
        steps = steps if until is None else steps - after.left
        known = _on_host(steps) if until is not None else own
        rows = (
            [_row(leaf, on_device(lane, np.int32), n) for leaf in y] for lane, n in enumerate(known)
        )
        ys += map(traced.y_tree.unflatten, rows)
        order += some
        results.append((carry, steps, after.go))
    back = np.argsort(order)
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *results)
    leaves, whole = jax.tree.flatten(joined)
    carry, steps, go = whole.unflatten(_taken(leaves, moved(back)))
    ys = [ys[place] for place in back]
    if not spec.return_info:
        return bare((carry, ys))
    stopped = moved(np.zeros(len(ys), bool)) if go is None else ~go
    return *bare((carry, ys)), LoopInfo(steps, stopped)


def _with_one_bar(loops: list[Traced], steps: list[int]) -> list[Traced]:
    """Make loops that run one after another share a progress bar."""
    shown, last = [], len(loops) - 1
    for number, loop in enumerate(loops):
        assert loop.loop.progress is not None, "asked for"
        part = loop.loop.progress.part(number == 0, number == last, whole=sum(steps))
        shown.append(loop.with_fields(progress=part))
    return shown


def length_buckets(
    lengths: Sequence[int], *, growth: float = 1.25, first: int = 8
) -> dict[int, list[int]]:
    """Group sequences by length, with little padding and few different lengths.

    The first bucket holds sequences of at most `first` steps, the next those of at most
    `first * growth`, and so on. So a sequence longer than `first` is padded to at most `growth`
    times its length, and the longest of a bucket to less than twice its length. The number of
    buckets grows with the logarithm of the longest sequence.

    **Arguments:**

    - `lengths`: the length of each sequence.
    - `growth`: how many times longer each bucket is than the one before, more than 1.
    - `first`: the length of the first bucket.

    **Returns:**

    A dict with an entry for each bucket that is not empty, shortest first: from its length to the
    places of its sequences in `lengths`.

    **Raises:**

    `TypeError` or `ValueError` if an argument has a wrong type or value.

    !!! example

        ```python
        import loopkit

        print(loopkit.length_buckets([3, 50, 4, 49, 20]))  # {8: [0, 2], 22: [4], 51: [1, 3]}
        ```
    """
    name = "length_buckets"
    first = validate.check_whole(name, "first", first, 1, "an int >= 1 (a length)")
    growth = _check_growth(name, growth)
    expected = "a list of ints >= 0"
    if isinstance(lengths, (str, Mapping, Set)) or not hasattr(lengths, "__iter__"):
        got = errors.shown(lengths)
        advice = "Pass the length of each sequence, in order."
        raise errors.wrong_type(name, "lengths", f"must be {expected}", got, advice)
    lengths = [validate.check_whole(name, "lengths", n, 0, expected) for n in lengths]
    sizes, longest = [first], max(lengths, default=0)
    while sizes[-1] < longest:
        sizes.append(max(sizes[-1] + 1, math.floor(sizes[-1] * growth)))
    buckets: dict[int, list[int]] = {size: [] for size in sizes}
    for place, length in enumerate(lengths):
        buckets[sizes[bisect.bisect_left(sizes, length)]].append(place)
    return {
        _narrowed(size, first, max(lengths[i] for i in places)): places
        for size, places in buckets.items()
        if places
    }


def _narrowed(size: int, first: int, longest: int) -> int:
    """Return the length of a bucket, a power of 2 if its longest sequence fills less than half."""
    return size if size <= max(first, 2 * longest) else 1 << (longest - 1).bit_length()


def _check_growth(function: str, growth: object) -> float:
    growth = check_growth(function, growth, "bucket")
    if growth == 1:
        advice = "Pass 1.25, say, since buckets of one length never reach the longest sequence."
        raise errors.wrong_value(function, "growth", "must be more than 1", "1", advice)
    return growth


def _check_sequences(sequences: PyTree[Any]) -> list[Inputs]:
    """Return the sequences as arrays, and check that their rows have one type."""
    name = NAMES.function
    if not isinstance(sequences, (list, tuple)) or not sequences:
        got = "none" if isinstance(sequences, (list, tuple)) else type(sequences).__name__
        expected = "must be a list of at least one sequence"
        advice = "Use `loopkit.scan` under `jax.vmap` for the rows of one array."
        raise errors.wrong_type(name, "sequences", expected, got, advice)
    sequences = wrapped(name, "sequences", list(sequences))
    inputs = [Inputs.of(xs, 0, None, name, f"sequences[{i}]") for i, xs in enumerate(sequences)]
    types = [_row_types(xs) for xs in inputs]
    for place, other in enumerate(types):
        if other != types[0]:
            expected = "must all have rows like those of the first"
            got = f"rows of {', '.join(other[0])} at {place} and of {', '.join(types[0][0])} at 0"
            advice = "Cast or reshape the sequences."
            raise errors.wrong_value(name, "sequences", expected, got, advice)
    return inputs


def _row_types(xs: Inputs) -> tuple:
    return [f"{x.dtype}[{','.join(map(str, x.shape[1:]))}]" for x in xs.leaves], xs.tree


def _zeros(x: jax.Array, rows: int) -> Any:
    return _jax.zeros(_jax.stack_type(_jax.slice_type(jax.typeof(x)), rows))


def _stacked(sequences: Sequence[Any], lanes: int, size: int) -> Any:
    """Stack sequences as lanes, padded with rows that no step reads."""
    first = sequences[0]
    concrete = not any(map(_jax.is_tracer, sequences))
    if concrete and isinstance(first.dtype, np.dtype):  # NumPy compiles nothing
        stacked = np.zeros((lanes, size, *first.shape[1:]), first.dtype)
        for row, xs in zip(stacked, sequences, strict=False):
            row[: len(xs)] = jax.device_get(xs)
        return moved(stacked)
    sequences = [*sequences, *[first[:0]] * (lanes - len(sequences))]
    return jnp.stack([jnp.concatenate([xs, _zeros(xs, size - len(xs))]) for xs in sequences])


@ft.partial(jax.jit, static_argnames="steps")
def _row(leaf: jax.Array, lane: jax.Array, steps: int) -> Any:
    return lax.dynamic_index_in_dim(leaf, lane, keepdims=False)[:steps]


@jax.jit
def _taken(values: list, places: jax.Array) -> list:
    return [v[places] for v in values]


def _on_host(steps: jax.Array) -> list[int]:
    traced = jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError
    with contextlib.suppress(*traced):
        return jax.device_get(steps).tolist()
    advice = "Inside jit or vmap, leave `until` out, or use `loopkit.scan` with padded arrays."
    got = "a traced predicate"
    expected = "must be known between batches, since it decides how many `ys` there are"
    raise errors.wrong_type(NAMES.function, "until", expected, got, advice)
