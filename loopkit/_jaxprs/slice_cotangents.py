"""Add in place to the cotangents of arrays that are read in slices.

JAX transposes a slice to an array of zeros with one slice set. If every step reads a row of a
table, each step then does as much work as the table is large. Here, each read of a constant's
tangent passes the tangent on to the next read, and the last one is a result. So the transpose gets
the cotangent so far, and adds to it slice by slice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopkit import _jax
from loopkit._buffers.slices import read, read_p
from loopkit._buffers.window import Window
from loopkit._jaxprs.dataflow import interpret_marked

SEVERAL = 8
"""The fewest slices for which adding in place takes less time than adding padded slices."""


SLICES = lax.slice_p, lax.dynamic_slice_p, lax.gather_p
"""The primitives that read slices of an array."""


class Latest(NamedTuple):
    """A mark for a constant's tangent, as the latest read has passed it on."""

    place: int


def passed_on(jaxpr: _jax.Jaxpr, known: Sequence[Any], tangents: Sequence[Any], count: int) -> list:
    """Return the first `count` tangents, as last reads pass them on, and the jaxpr's outputs."""
    latest = list(tangents[:count])
    now = lambda v: latest[v.place] if isinstance(v, Latest) else v

    def rule(eqn: _jax.Equation, ins: list) -> list:
        first, given = ins[0], list(map(now, ins))
        if not isinstance(first, Latest) or (found := as_read(eqn, given)) is None:
            return _jax.bind_equation(eqn, given)
        outs, latest[first.place] = found
        return [outs[0], first] if eqn.primitive is read_p else outs

    given = [*known, *map(Latest, range(count)), *tangents[count:]]
    outs = interpret_marked(_jax.open_jaxpr(jaxpr), given, Latest, rule)
    return [*latest, *map(now, outs)]


def read_in_slices(eqns: Sequence[_jax.Equation]) -> frozenset[_jax.Var]:
    """Return the variables of which `SEVERAL` equations or more read a slice."""
    read = (eqn.invars[0] for eqn in eqns if eqn.primitive in SLICES)
    counts = Counter(v for v in _jax.variables(read) if _jax.is_differentiable(v.aval))
    return frozenset(v for v, count in counts.items() if count >= SEVERAL)


def as_read(eqn: _jax.Equation, ins: Sequence[Any]) -> tuple[list, Any] | None:
    """Return the results of an equation that reads slices, and its first operand, passed on.

    Return None for any other equation.
    """
    params, buffer = eqn.params, ins[0]
    if eqn.primitive is lax.gather_p:
        return _gathered(*ins, **params)
    if eqn.primitive is lax.slice_p and params["strides"] is None:
        starts, ends = params["start_indices"], params["limit_indices"]
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        at, window = jnp.zeros(0, jnp.int32), Window((), starts, sizes, "clip")
    elif eqn.primitive is read_p and params["value"]:
        at, window = ins[1], params["window"]
    elif eqn.primitive is lax.dynamic_slice_p and len(ins) == 1 + buffer.ndim:
        starts, sizes = ins[1:], params["slice_sizes"]
        # A slice that is as long as the axis starts at index 0.
        axes = tuple(i for i, size in enumerate(sizes) if size != buffer.shape[i])
        window = Window(axes, (0,) * buffer.ndim, sizes, "clip", wrap=False)
        at = _wide(jnp.stack([starts[i] for i in axes]) if axes else jnp.zeros(0, jnp.int32))
    else:
        return None
    found, after = read(buffer, at, window, held=False)
    return [found, after] if eqn.primitive is read_p else [found], after


def _wide(starts: jax.Array) -> Any:
    """Return starts in a type that holds every size."""
    return starts if starts.dtype.itemsize >= 4 else starts.astype(jnp.int32)


def _gathered(buffer: jax.Array, starts: jax.Array, **params: Any) -> tuple[list, Any] | None:
    mode, fill_value = params["mode"], params["fill_value"]
    numbers, sizes = params["dimension_numbers"], tuple(params["slice_sizes"])
    label = "drop" if mode == lax.GatherScatterMode.FILL_OR_DROP else mode.name.lower()
    if label == "drop" and fill_value != 0:
        return None
    starts = _wide(starts)
    batch = starts.ndim - 1
    own = [
        lax.broadcasted_iota(starts.dtype, (*starts.shape[:-1], 1), int(d))
        for d in numbers.start_indices_batching_dims
    ]
    of_batch = [int(a) for a in numbers.operand_batching_dims]
    mapped = list(map(int, numbers.start_index_map))
    # If slices are clipped into the array, one that is as long as the axis starts at index 0.
    kept = [i for i, a in enumerate(mapped) if label != "clip" or sizes[a] != buffer.shape[a]]
    axes = (*(mapped[i] for i in kept), *of_batch)
    window = Window(axes, (0,) * buffer.ndim, sizes, label, wrap=False)
    columns = [lax.slice_in_dim(starts, i, i + 1, axis=-1) for i in kept]
    at = jnp.concatenate([starts[..., :0], *columns, *own], -1)
    found, after = read(buffer, at, window, held=False)
    gone = [*map(int, numbers.collapsed_slice_dims), *of_batch]
    found = jnp.squeeze(found, tuple(batch + a for a in gone))
    offsets = list(map(int, numbers.offset_dims))
    of_slices = iter(range(batch))
    order = [
        batch + offsets.index(i) if i in offsets else next(of_slices) for i in range(found.ndim)
    ]
    return [jnp.transpose(found, order)], after
