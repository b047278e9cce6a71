"""Rows of several short axes, carried as vectors.

Compilers turn a row of shape [10, 5] into ten runs of five numbers, each too short for a vector
unit, and a row of shape [50] into one run. So this pass merges the last axes of a buffer, if every
read and write takes them whole. Constants that steps slice are treated in the same way.

A TPU keeps arrays in tiles of 8 by 128 numbers. There, reshaping a row to a vector is an operation
of its own, and a stack of [10, 5] rows takes eight times the memory of a stack of vectors. So
slices stay vectors through elementwise equations, and so do constants and carry leaves that have
the shape of a row. Any other equation gets slices in their own shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopkit import _jax
from loopkit._buffers.slices import read_p, write_p
from loopkit._engine.loop import Loop, Rewritten, parts
from loopkit._engine.primitives import while_p
from loopkit._jaxprs.dataflow import analyse, interpret_marked

SHORT = 16
"""The length of a last axis that fills a vector unit, so that reshaping slices gains nothing."""

_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type
    copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow
    is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not one_minus_square or
    pow real rem round rsqrt select_n sign sin sinh sqrt square stop_gradient sub tan tanh xor
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
"""Primitives that compute each element of the result from operand elements at the same index."""
RESHAPES = frozenset(("broadcast_in_dim", "reshape", "squeeze"))
"""Primitives that may change nothing but the shape."""

Counts = tuple[int, ...]
"""For each array, how many of its last axes are merged; 0 for none."""


class Rows(NamedTuple):
    """An array with merged last axes, marked as such while a jaxpr is evaluated."""

    value: Any
    tail: tuple[int, ...]
    """The sizes of the axes that are merged."""
    sliced: bool = False
    """Whether steps take slices of it, all of them with merged axes."""

    @property
    def lead(self) -> int:
        """The number of axes before the merged ones."""
        return self.value.ndim - 1

    def of_row(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of slices, with the merged axes as one."""
        return (*sizes[: self.lead], self.value.shape[-1])


def flat_rows(loop: Loop) -> Loop | Rewritten:
    """Return the loop over flat rows; constants and carry leaves of their shape are vectors."""
    types = [*loop.const_types, *loop.carry_types]
    # An enclosing loop decides about its own buffers.
    own = [True] * loop.const_count + [leaf.buffer and not leaf.outer for leaf in loop.carry]
    pairs = enumerate(zip(types, own, strict=True))
    found = [_count(loop, t, i) if is_own else 0 for i, (t, is_own) in pairs]
    if not any(found):
        return loop
    rows = {t.shape[-n:] for t, n in zip(types, found, strict=True) if n}
    of_row = lambda t: t.ndim if t.shape in rows and _has_numbers(t) else 0
    buffers = [False] * loop.const_count + list(loop.is_buffer)
    triples = zip(types, found, buffers, strict=True)
    counts = tuple(n if n or is_buffer else of_row(t) for t, n, is_buffer in triples)
    carry = counts[loop.const_count :]

    def map_operands(operands: Sequence[Any]) -> list:
        every = [*[0] * loop.cond_const_count, *counts, *[0] * loop.xs_count]
        pairs = zip(operands, every, strict=True)
        return [v.reshape(_merged(v.shape, n)) if n else v for v, n in pairs]

    def map_results(results: Sequence[Any], _: object = ()) -> list:
        final, ys = parts(results, loop.carry_count)
        triples = zip(final, carry, loop.carry_types, strict=True)
        return [*(v.reshape(t.shape) if n else v for v, n, t in triples), *ys]

    return Rewritten(_over(loop, counts), map_operands, map_results)


def _merged(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the shape with its last axes merged."""
    return (*shape[:-count], _jax.volume(shape[-count:])) if count else shape


def _count(loop: Loop, kind: Any, place: int) -> int:
    """Return how many of the last axes of an input of the body to merge."""
    shape = kind.shape
    if len(shape) < 3 or not _has_numbers(kind):
        return 0
    if any(map(_jax.is_symbolic, shape)) or not 0 < shape[-1] < SHORT:
        return 0
    count = min(_in_loop(loop, [place])[0], len(shape) - 1)
    # Axes of size one make no difference.
    return count if sum(n > 1 for n in shape[len(shape) - count :]) > 1 else 0


def _has_numbers(kind: Any) -> bool:
    return jnp.issubdtype(kind.dtype, jnp.number) and not _jax.is_spread(kind)


def _over(loop: Loop, counts: Counts) -> Loop:
    """Return the loop in which some constants and carry leaves have flat rows."""
    carry, none = counts[loop.const_count :], [0] * loop.xs_count
    body = _flattened(loop.body, [*counts, *none], [*carry, *[0] * loop.ys_count])
    cond = loop.cond
    if cond is not None:
        cond = _flattened(cond, [*[0] * loop.cond_const_count, *carry], [0])
    return loop.replace(cond=cond, body=body)


def _flattened(jaxpr: _jax.Jaxpr, counts: Sequence[int], results: Sequence[int]) -> _jax.Jaxpr:
    j = _jax.open_jaxpr(jaxpr)
    pairs = [(v.aval, n) for v, n in zip(j.invars, counts, strict=True)]
    types = [_jax.of_shape(t, _merged(t.shape, n)) for t, n in pairs]

    def run(*values: jax.Array) -> list:
        triples = zip(values, pairs, strict=True)
        ins = [Rows(v, t.shape[-n:], n < t.ndim) if n else v for v, (t, n) in triples]
        outs = interpret_marked(j, ins, Rows, _on_rows)
        ends = zip(outs, (v.aval for v in j.outvars), results, strict=True)
        return [_flat(v, t.shape[-n:]) if n else _plain(v) for v, t, n in ends]

    return _jax.trace_closed(run, types, "flat_rows")


def _whole_axes(jaxpr: _jax.Jaxpr, arrays: Sequence[int]) -> tuple[int, list[int]]:
    """Return how many last axes all uses of `arrays` take whole, and the outputs that are `arrays`.

    The fact about a value is whether it is one of these arrays.
    """
    counts = [max(jaxpr.in_avals[i].ndim for i in arrays)]

    def transfer(eqn: _jax.Equation, ins: list[bool]) -> list[bool]:
        count, after = _use(eqn, [n for n, is_array in enumerate(ins) if is_array])
        counts.append(count)
        return [n in after for n in range(len(eqn.outvars))]

    flags = [i in arrays for i in range(len(jaxpr.in_avals))]
    outs = analyse(jaxpr, flags, transfer, False)
    return min(counts), [n for n, is_array in enumerate(outs) if is_array]


def _use(eqn: _jax.Equation, where: list[int]) -> tuple[int, list[int]]:
    """Return how many last axes an equation takes whole, and which results are the array again."""
    if eqn.primitive is while_p:
        loop = eqn.params["loop"]
        return _in_loop(loop, [n - loop.cond_const_count for n in where])
    if eqn.primitive is lax.reshape_p:
        return eqn.invars[0].aval.ndim, []
    if where != [0]:
        return 0, []
    again = eqn.primitive in (read_p, write_p)
    return _taken_whole(eqn), [len(eqn.outvars) - 1] if again else []


def _in_loop(loop: Loop, inputs: list[int]) -> tuple[int, list[int]]:
    """Return how many last axes a loop takes whole of some inputs of its body, and their leaves.

    The loop must pass these leaves on from step to step. Otherwise it takes no axis whole.
    """
    leaves = [n - loop.const_count for n in inputs if n >= loop.const_count]
    if min(inputs) < 0 or max(leaves, default=0) >= loop.carry_count:
        return 0, []
    count, outputs = _whole_axes(loop.body, inputs)
    if outputs != leaves:
        return 0, []
    if loop.cond is not None and leaves:
        asked = [loop.cond_const_count + n for n in leaves]
        count = min(count, _whole_axes(loop.cond, asked)[0])
    return count, leaves


def _taken_whole(eqn: _jax.Equation) -> int:
    """Return how many last axes of its first operand an equation takes whole; 0 without slices."""
    shape, params = eqn.invars[0].aval.shape, eqn.params
    most, along = len(shape), ()
    if eqn.primitive in (read_p, write_p):
        if params.get("value") is False:
            return len(shape)
        along, sizes = params["window"].axes, params["window"].sizes
    elif eqn.primitive is lax.dynamic_slice_p and len(eqn.invars) == 1 + len(shape):
        sizes = params["slice_sizes"]
    elif eqn.primitive is lax.slice_p and params["strides"] is None:
        sizes = eqn.outvars[0].aval.shape
    elif eqn.primitive is lax.gather_p:
        numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
        gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        along = (*gone, *numbers.start_index_map)
        # These axes must come last in the result, too.
        offsets, ndim = numbers.offset_dims, eqn.outvars[0].aval.ndim
        most = _last(o == ndim - len(offsets) + i for i, o in enumerate(offsets))
    else:
        return 0
    sized = enumerate(zip(sizes, shape, strict=True))
    count = min(most, _last(a not in along and n == size for a, (n, size) in sized))
    # Using all of it in its own shape, as well as in flat rows, would need a copy.
    return count if count < len(shape) else 0


def _last(flags: Iterable[bool]) -> int:
    """Return how many flags at the end are true."""
    return len(list(itertools.takewhile(bool, reversed(list(flags)))))


def _on_rows(eqn: _jax.Equation, ins: list) -> list:
    arrays = [isinstance(v, Rows) and v.sliced for v in ins]
    if not any(arrays):
        return _on_slices(eqn, ins)
    if eqn.primitive is while_p:
        taken = [v if array else _plain(v) for v, array in zip(ins, arrays, strict=True)]
        return _loop_on_rows(eqn.params["loop"], taken)
    rows, *others = ins
    params, slices = eqn.params, lambda value: Rows(value, rows.tail)
    if eqn.primitive is read_p:
        *found, after = read_p.bind(rows.value, *others, **_windowed(params, rows))
        return [*map(slices, found), rows._replace(value=after)]
    if eqn.primitive is write_p:
        new, starts, *masks = others
        pieces = [_flat(new, rows.tail), starts, *(_merged_mask(m, rows) for m in masks)]
        (after,) = write_p.bind(rows.value, *pieces, **_windowed(params, rows))
        return [rows._replace(value=after)]
    if eqn.primitive is lax.dynamic_slice_p:
        sizes = rows.of_row(params["slice_sizes"])
        starts = others[: rows.lead + 1]
        # Negative starts no longer count from the end: `lax.dynamic_slice` has handled them.
        return [slices(lax.dynamic_slice_p.bind(rows.value, *starts, slice_sizes=sizes))]
    if eqn.primitive is lax.slice_p:
        limits = rows.of_row(params["limit_indices"])
        starts = (*params["start_indices"][: rows.lead], 0)
        return [slices(lax.slice(rows.value, starts, limits))]
    if eqn.primitive is lax.reshape_p:
        return [rows.value.reshape(params["new_sizes"])]
    (starts,) = others
    return [slices(_gathered(rows, starts, params))]


def _on_slices(eqn: _jax.Equation, ins: list) -> list:
    """Return the results of an equation on slices, which stay vectors if that changes nothing."""
    tail, name = next(v.tail for v in ins if isinstance(v, Rows)), eqn.primitive.name
    shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars) if name in ELEMENTWISE | RESHAPES]
    if shapes and (out := shapes[-1])[-len(tail) :] == tail:
        if name in ELEMENTWISE and {*shapes} <= {(), out}:
            values = [_flat(v, tail) if s else v for v, s in zip(ins, shapes, strict=False)]
            (made,) = _jax.bind_equation(eqn, values)
            return [Rows(made, tail)]
        if name in RESHAPES and _jax.volume(out) == _jax.volume(shapes[0]):
            return [Rows(ins[0].value.reshape(*out[: -len(tail)], _jax.volume(tail)), tail)]
    return _jax.bind_equation(eqn, list(map(_plain, ins)))


def _windowed(params: dict, rows: Rows) -> dict:
    window = params["window"]
    offsets = (*window.offsets[: rows.lead], 0)
    return {**params, "window": replace(window, offsets=offsets, sizes=rows.of_row(window.sizes))}


def _plain(value: Any) -> Any:
    """Return a value in its own shape."""
    if not isinstance(value, Rows):
        return value
    return value.value.reshape(*value.value.shape[:-1], *value.tail)


def _flat(value: Any, tail: tuple[int, ...]) -> Any:
    """Return a value with its last axes, those of `tail`, merged."""
    if isinstance(value, Rows) and value.tail == tail:
        return value.value
    value = _plain(value)
    return value.reshape(*value.shape[: value.ndim - len(tail)], _jax.volume(tail))


def _merged_mask(mask: Any, rows: Rows) -> Any:
    mask, count = _plain(mask), len(rows.tail)
    if mask.shape[-count:] == (1,) * count:
        return mask.reshape(*mask.shape[:-count], 1)
    return _flat(jnp.broadcast_to(mask, (*mask.shape[:-count], *rows.tail)), rows.tail)


def _gathered(rows: Rows, starts: jax.Array, params: dict) -> Any:
    numbers, count = params["dimension_numbers"], len(rows.tail)
    offsets = numbers.offset_dims[: len(numbers.offset_dims) - count + 1]
    numbers = numbers._replace(offset_dims=offsets)
    sizes = rows.of_row(params["slice_sizes"])
    how = {**params, "dimension_numbers": numbers, "slice_sizes": sizes}
    return lax.gather_p.bind(rows.value, starts, **how)


def _loop_on_rows(loop: Loop, ins: list) -> list:
    tails = loop.split([v.tail if isinstance(v, Rows) else () for v in ins])[0]
    counts = tuple(map(len, [*tails.consts, *tails.init]))
    flat = loop.derived(("on rows", counts), lambda: _over(loop, counts))
    outs = while_p.bind(*(v.value if isinstance(v, Rows) else v for v in ins), loop=flat)
    pairs = zip(outs, [*tails.init, *[()] * loop.ys_count], strict=True)
    return [Rows(v, tail, True) if tail else v for v, tail in pairs]
