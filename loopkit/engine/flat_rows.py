"""Rows of several short axes, carried as vectors.

Compilers turn a row of shape [10, 5] into ten runs of five numbers, each too short for a vector
unit, and one of shape [50] into one run. So the last axes of a buffer that every read and write
takes whole are made one, outside the loop, where that is free; in a step only what is read and
written is reshaped. The same for constants that steps read slices of.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from loopkit import _jax, _jaxpr
from loopkit._jax import Jaxpr
from loopkit._slices import read_p, write_p
from loopkit._window import Window
from loopkit.engine.loop import Loop, parts
from loopkit.engine.primitives import while_p

SHORT = 64
"""Elements of a last axis from which on nothing is gained."""

Counts = tuple[int, ...]
"""For each of several arrays, how many of its last axes are made one; 0: none."""


class FlatRows(NamedTuple):
    """A loop over arrays with flat rows, and which those are."""

    loop: Loop
    consts: Counts
    carry: Counts


class Rows(NamedTuple):
    """Stands for an array whose last axes are one, while a jaxpr is evaluated."""

    value: Any
    tail: tuple[int, ...]
    """The sizes of the axes that are one."""

    @property
    def ndim(self) -> int:
        return self.value.ndim - 1 + len(self.tail)

    @property
    def lead(self) -> int:
        return self.value.ndim - 1


def flat_rows(loop: Loop, free: Sequence[bool]) -> FlatRows:
    """The loop over flat rows. `free`: carry leaves that are not buffers of a loop around it."""
    return loop.derived(("flat rows", tuple(free)), lambda: _flat(loop, free))


def merged(values: Iterable[Any], counts: Counts) -> list:
    """The arrays, their last axes made one."""
    pairs = zip(values, counts, strict=True)
    return [v.reshape(_merged(v.shape, n)) if n else v for v, n in pairs]


def _merged(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The shape with its last axes made one."""
    return (*shape[:-count], _jax.volume(shape[-count:])) if count else shape


def restored(values: Iterable[Any], like: Iterable[Any]) -> list:
    """The arrays, in the shapes of others."""
    return [
        v if jnp.shape(v) == t.shape else v.reshape(t.shape)
        for v, t in zip(values, like, strict=True)
    ]


def _flat(loop: Loop, free: Sequence[bool]) -> FlatRows:
    consts = tuple(_count(loop, loop.const_types[i], i) for i in range(loop.const_count))
    carry = tuple(
        _count(loop, t, loop.const_count + i, i) if has and alone else 0
        for i, (t, has, alone) in enumerate(
            zip(loop.carry_types, loop.is_buffer, free, strict=True)
        )
    )
    return FlatRows(_over(loop, consts, carry), consts, carry)


def _count(loop: Loop, kind: Any, place: int, leaf: int | None = None) -> int:
    """How many of the last axes of an input of the body can be made one, to any use."""
    shape = kind.shape
    plain = all(isinstance(n, int) for n in shape) and not _jax.is_spread(kind)
    if not plain or len(shape) < 3 or not jnp.issubdtype(kind.dtype, jnp.number):
        return 0
    if not 0 < shape[-1] < SHORT:
        return 0
    body = _jax.open_jaxpr(loop.body)
    count, outputs = _whole_axes(body, {body.invars[place]})
    if outputs != ([] if leaf is None else [leaf]):
        return 0
    if leaf is not None and loop.cond is not None:
        cond = _jax.open_jaxpr(loop.cond)
        of_cond, outputs = _whole_axes(cond, {cond.invars[loop.cond_const_count + leaf]})
        count = min(count, of_cond) if not outputs else 0
    # Ones change nothing.
    count = min(count, len(shape) - 1)
    return count if sum(n > 1 for n in shape[len(shape) - count :]) > 1 else 0


def _over(loop: Loop, consts: Counts, carry: Counts) -> Loop:
    """The loop, where some constants and carry leaves have flat rows."""
    if not any(consts) and not any(carry):
        return loop
    body = _flattened(loop.body, [*consts, *carry, *[0] * loop.xs_count])
    cond = loop.cond
    if cond is not None:
        cond = _flattened(cond, [*[0] * loop.cond_const_count, *carry])
    return loop.replace(cond=cond, body=body)


def _flattened(jaxpr: Jaxpr, counts: Sequence[int]) -> Jaxpr:
    j = _jax.open_jaxpr(jaxpr)
    types = [v.aval for v in j.invars]
    shapes = [t.shape for t in types]
    types = [_jax.of_shape(t, _merged(t.shape, n)) for t, n in zip(types, counts, strict=True)]

    def run(*values: Any) -> list:
        ins = [
            Rows(v, shape[-n:]) if n else v
            for v, shape, n in zip(values, shapes, counts, strict=True)
        ]
        return [v.value if isinstance(v, Rows) else v for v in _run(j, ins)]

    return _jax.trace(run, types, "flat_rows")[0]


# ---------------------------------------------------------------- which axes are taken whole


def _whole_axes(j: Any, arrays: set) -> tuple[int, list[int]]:
    """How many of the last axes all uses of some inputs take whole, and which outputs they become.

    0 if one is used otherwise than in slices.
    """
    count, arrays = max(v.aval.ndim for v in arrays), set(arrays)
    for eqn in j.eqns:
        where = [n for n, v in enumerate(eqn.invars) if _is_in(v, arrays)]
        if where:
            found, after = _use(eqn, where)
            count = min(count, found)
            arrays.update(after)
    return count, [n for n, v in enumerate(j.outvars) if _is_in(v, arrays)]


def _is_in(v: Any, arrays: set) -> bool:
    return not isinstance(v, _jax.Literal) and v in arrays


def _use(eqn: Any, where: list[int]) -> tuple[int, list]:
    """How many last axes an equation takes whole, and which results are the array again."""
    name, params = eqn.primitive.name, eqn.params
    shape = eqn.invars[where[0]].aval.shape
    if where == [0] and eqn.primitive in (read_p, write_p):
        window, after = params["window"], eqn.outvars[-1:]
        whole = params.get("value") is False
        return len(shape) if whole else _whole_of(window, shape), after
    if where == [0] and eqn.primitive is lax.dynamic_slice_p and len(eqn.invars) == 1 + len(shape):
        return _last(n == size for n, size in zip(shape, params["slice_sizes"], strict=True)), []
    if where == [0] and eqn.primitive is lax.gather_p:
        return _whole_of_gather(eqn), []
    if _jaxpr.is_call(eqn):
        inner = _jax.open_jaxpr(params["jaxpr"])
        count, outputs = _whole_axes(inner, {inner.invars[n] for n in where})
        return count, [eqn.outvars[n] for n in outputs]
    if eqn.primitive is while_p:
        loop = params["loop"]
        inputs = [n - loop.cond_const_count for n in where]
        leaves = [n - loop.const_count for n in inputs if n >= loop.const_count]
        if min(inputs) < 0 or max(leaves, default=0) >= loop.carry_count:
            return 0, []
        body = _jax.open_jaxpr(loop.body)
        count, outputs = _whole_axes(body, {body.invars[n] for n in inputs})
        if loop.cond is not None and leaves:
            cond = _jax.open_jaxpr(loop.cond)
            of_cond, gone = _whole_axes(cond, {cond.invars[loop.cond_const_count + n] for n in leaves})
            count = 0 if gone else min(count, of_cond)
        return (count, [eqn.outvars[n] for n in leaves]) if outputs == leaves else (0, [])
    return 0, []


def _last(whole: Iterable[bool]) -> int:
    """How many flags at the end are true."""
    return len(list(itertools.takewhile(bool, reversed(list(whole)))))


def _whole_of(window: Window, shape: Sequence[int]) -> int:
    sizes = zip(window.sizes, shape, strict=True)
    return _last(a not in window.axes and n == size for a, (n, size) in enumerate(sizes))


def _whole_of_gather(eqn: Any) -> int:
    numbers, shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    sizes = eqn.params["slice_sizes"]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    taken = {*gone, *numbers.start_index_map}
    count = _last(a not in taken and sizes[a] == n for a, n in enumerate(shape))
    # They come last in the result, too.
    ndim, offsets = eqn.outvars[0].aval.ndim, numbers.offset_dims
    at_end = _last(o == ndim - len(offsets) + i for i, o in enumerate(offsets))
    return min(count, at_end)


# ---------------------------------------------------------------- the same on flat rows


def _run(j: Any, values: Sequence[Any]) -> list:
    """The results of a jaxpr, some of whose values are `Rows`."""
    env = dict(zip(j.invars, values, strict=True))

    def value(v: Any) -> Any:
        return v.val if isinstance(v, _jax.Literal) else env[v]

    for eqn in j.eqns:
        ins = list(map(value, eqn.invars))
        if any(isinstance(v, Rows) for v in ins):
            outs = _on_rows(eqn, ins)
        else:
            outs = _jax.bind_equation(eqn, ins)
        env.update(zip(eqn.outvars, outs, strict=True))
    return list(map(value, j.outvars))


def _on_rows(eqn: Any, ins: list) -> list:
    params = eqn.params
    if _jaxpr.is_call(eqn):
        return _run(_jax.open_jaxpr(params["jaxpr"]), ins)
    if eqn.primitive is while_p:
        return _loop_on_rows(params["loop"], ins)
    rows, *others = ins
    if eqn.primitive is read_p:
        *found, after = read_p.bind(rows.value, *others, **_windowed(params, rows))
        return [*(_unmerged(v, rows) for v in found), Rows(after, rows.tail)]
    if eqn.primitive is write_p:
        new, starts, *masks = others
        pieces = [_merged_end(new, rows), starts, *(_merged_mask(m, rows) for m in masks)]
        (after,) = write_p.bind(rows.value, *pieces, **_windowed(params, rows))
        return [Rows(after, rows.tail)]
    if eqn.primitive is lax.dynamic_slice_p:
        starts = [*others[: rows.lead], others[rows.lead]]
        sizes = (*params["slice_sizes"][: rows.lead], rows.value.shape[-1])
        return [_unmerged(lax.dynamic_slice(rows.value, starts, sizes), rows)]
    return [_gathered(rows, *others, params)]


def _windowed(params: dict, rows: Rows) -> dict:
    window = params["window"]
    offsets = (*window.offsets[: rows.lead], 0)
    sizes = (*window.sizes[: rows.lead], rows.value.shape[-1])
    return {**params, "window": replace(window, offsets=offsets, sizes=sizes)}


def _unmerged(value: Any, rows: Rows) -> Any:
    return value.reshape(*value.shape[:-1], *rows.tail)


def _merged_end(value: Any, rows: Rows) -> Any:
    return value.reshape(*value.shape[: -len(rows.tail)], rows.value.shape[-1])


def _merged_mask(mask: Any, rows: Rows) -> Any:
    count = len(rows.tail)
    if mask.shape[-count:] == (1,) * count:
        return mask.reshape(*mask.shape[:-count], 1)
    return _merged_end(jnp.broadcast_to(mask, (*mask.shape[:-count], *rows.tail)), rows)


def _gathered(rows: Rows, starts: Any, params: dict) -> Any:
    numbers, count = params["dimension_numbers"], len(rows.tail)
    offsets = numbers.offset_dims[: len(numbers.offset_dims) - count + 1]
    found = lax.gather_p.bind(
        rows.value,
        starts,
        **{
            **params,
            "dimension_numbers": numbers._replace(offset_dims=offsets),
            "slice_sizes": (*params["slice_sizes"][: rows.lead], rows.value.shape[-1]),
        },
    )
    return _unmerged(found, rows)


def _loop_on_rows(loop: Loop, ins: list) -> list:
    counts = [len(v.tail) if isinstance(v, Rows) else 0 for v in ins]
    _, consts, carry, _ = parts(counts, loop.cond_const_count, loop.const_count, loop.carry_count)
    key = ("on rows", *consts, "carry", *carry)
    flat = loop.derived(key, lambda: _over(loop, tuple(consts), tuple(carry)))
    outs = while_p.bind(*(v.value if isinstance(v, Rows) else v for v in ins), loop=flat)
    leaves = ins[len(ins) - loop.xs_count - loop.carry_count :][: loop.carry_count]
    leaves = [*leaves, *[None] * (len(outs) - loop.carry_count)]
    return [Rows(v, o.tail) if isinstance(o, Rows) else v for v, o in zip(outs, leaves)]
