"""Two primitives that read slices of a buffer, and write slices into it, in place.

    read   (b, starts)             -> x, b
    write  (b, x, starts[, mask])  -> b'

A read also returns its buffer, which the next read or write takes. So the transpose of a chain of
reads and writes passes one buffer of cotangents back along the chain, and adds to it in place.
JAX's own transpose of a slice makes an array of zeros as large as the buffer.

    read   ct_b = write(ct_b', ct_x, starts, add)
    write  ct_x, ct_b' = read(ct_b'', starts);  ct_b = write(ct_b', 0, starts)

A write is `fresh` if nothing needs the cotangent of the entries that it overwrites: ct_b = ct_b'.
It is `alone` if nothing else in the step touches the buffer: then no write has to wait until the
cotangents have been read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from loopkit import _jax
from loopkit._buffers.window import Starts, Window, outside

read_p = _jax.declare("loopkit_read")
write_p = _jax.declare("loopkit_write")


def read(buffer: jax.Array, starts: Starts, window: Window, held: bool = True) -> tuple[Any, Any]:
    """Return the slices, and the buffer for the next read or write.

    `held`: the next write waits until the slices have been read."""
    buffer, starts = _varying_together(buffer, starts)
    value, buffer = read_p.bind(buffer, starts, window=window, value=True, held=held)
    return value, buffer


def write(
    buffer: jax.Array,
    value: jax.Array,
    starts: Starts,
    window: Window,
    mask: jax.Array | None = None,
    add: bool = False,
) -> Any:
    """Return the buffer with the slices set to `value`, or with `value` added to them.

    Nothing is written where the mask is false. Slices that are set do not overlap."""
    masks = () if mask is None else (mask,)
    operands = _varying_together(buffer, value, starts, *masks)
    return write_p.bind(*operands, window=window, add=add, fresh=False, alone=False)[0]


def _varying_together(*values: jax.typing.ArrayLike) -> list:
    """Make values vary over the same mesh axes, so that no rule has to do it later."""
    types = [jax.typeof(v) for v in values]
    return [_jax.vary_like(v, types) for v in values]


def _is_single(starts: jax.Array) -> bool:
    return math.prod(starts.shape[:-1]) == 1


def _evaluate_read(
    buffer: jax.Array, *operands: jax.Array, window: Window, value: bool, held: bool
) -> list:
    if not value:
        return [buffer]
    (starts,) = operands
    if not window.fits(buffer.shape):
        types = map(jax.typeof, (buffer, starts))
        (found, _), _ = _read_types(*types, window=window, value=True)
        return [_jax.zeros(found), buffer]
    at, inside = window.starts_in(buffer.shape, starts, reads=True)

    def look(buffer: jax.Array, at: jax.Array) -> Any:
        if not _is_single(starts):
            return _gather(buffer, at, window)
        return lax.dynamic_slice(buffer, window.point(at.reshape(-1)), window.sizes)

    # Keep the compiler from fusing an earlier write into this read, which would write twice.
    if held and window.axes and not _jax.keeps_barriers():
        nothing = lambda buffer, at: _jax.zeros(jax.typeof(look(buffer, at)))
        found = lax.cond(_holds(starts), look, nothing, buffer, at)
    else:
        buffer = lax.optimization_barrier(buffer) if held else buffer
        found = look(buffer, at)
    found = found.reshape(*starts.shape[:-1], *window.sizes)
    if inside is not None:
        inside = inside.reshape(*inside.shape, *[1] * len(window.sizes))
        found = jnp.where(inside, found, _jax.zeros(jax.typeof(found)))
    # Order the next write after this read, or the compiler would have to copy the buffer first.
    return list(lax.optimization_barrier((found, buffer)) if held else (found, buffer))


def _gather(buffer: jax.Array, at: jax.Array, window: Window) -> Any:
    at, axes = window.every_start(at)
    batch = at.ndim - 1
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(batch, batch + buffer.ndim)),
        collapsed_slice_dims=(),
        start_index_map=axes,
    )
    return lax.gather(buffer, at, numbers, window.sizes, mode="clip")


def _evaluate_write(
    buffer: jax.Array,
    value: jax.Array,
    starts: jax.Array,
    *masks: jax.Array,
    window: Window,
    add: bool,
    **_: object,
) -> list:
    if not window.fits(buffer.shape):
        return [buffer]
    at, inside = window.starts_in(buffer.shape, starts)
    if _is_single(starts):
        return [_write_one(buffer, value, at, inside, masks, window, add)]
    outside = inside is not None
    if masks:
        mask = masks[0]
        if mask.shape[mask.ndim - buffer.ndim :] == (1,) * buffer.ndim:
            # Move slices that are not to be written out of bounds.
            written = mask.reshape(starts.shape[:-1])
            room = window.along(buffer.shape, starts.dtype)
            at, outside = jnp.where(written[..., None], at, room), True
        elif add:
            value = jnp.where(mask, value, jnp.zeros_like(value))
        else:
            value = jnp.where(mask, value, _gather(buffer, at, window))
    at, axes = window.every_start(at)
    batch = at.ndim - 1
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(batch, batch + buffer.ndim)),
        inserted_window_dims=(),
        scatter_dims_to_operand_dims=axes,
    )
    scatter = lax.scatter_add if add else lax.scatter
    mode = "drop" if outside else "clip"
    return [scatter(buffer, at, value, numbers, unique_indices=not add, mode=mode)]


def _write_one(
    buffer: jax.Array,
    value: jax.Array,
    at: jax.Array,
    inside: jax.Array | None,
    masks: Sequence[jax.Array],
    window: Window,
    add: bool,
) -> Any:
    point, value = window.point(at.reshape(-1)), value.reshape(window.sizes)
    keep = None if inside is None else inside.reshape((1,) * len(window.sizes))
    if masks:
        mask = masks[0].reshape(masks[0].shape[at.ndim - 1 :])
        keep = mask if keep is None else keep & mask
    if add or keep is not None:
        old = lax.dynamic_slice(buffer, point, window.sizes)
        value = old + value if add else value
        value = value if keep is None else jnp.where(keep, value, old)
    return lax.dynamic_update_slice(buffer, value, point)


def _read_types(
    buffer: _jax.ShapedArray, *starts: _jax.ShapedArray, window: Window, value: bool, **_: object
) -> tuple:
    if not value:
        return [buffer], set()
    shape = (*starts[0].shape[:-1], *window.sizes)
    found = _jax.type_like(_jax.type_of_part(buffer, shape), [buffer, *starts])
    return [found, buffer], set()


def _write_types(
    buffer: _jax.ShapedArray, *others: _jax.ShapedArray, **_: object
) -> tuple[list, Any]:
    return [_jax.type_like(buffer, others)], set()


def _read_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple:
    out = read_p.bind(*primals, **params)
    if type(tangents[0]) is _jax.Zero:
        return out, [_jax.float0_zero(jax.typeof(o)) for o in out]
    return out, read_p.bind(tangents[0], *primals[1:], **params)


def _read_transpose(
    cts: Sequence[Any], buffer: Any, *starts: jax.Array, window: Window, **how: bool
) -> list:
    none = [None] * len(starts)
    if all(type(c) is _jax.Zero for c in cts):
        return [_jax.float0_zero(buffer.aval), *none]
    total = _jax.instantiate(cts[-1])
    if how["value"] and type(cts[0]) is not _jax.Zero:
        total = write(total, cts[0], starts[0], window, add=True)
    return [total, *none]


def _write_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple:
    out = write_p.bind(*primals, **params)
    if all(type(t) is _jax.Zero for t in tangents):
        return out, [_jax.float0_zero(jax.typeof(out[0]))]
    linear = [_jax.instantiate(t) for t in tangents[:2]]
    return out, write_p.bind(*linear, *primals[2:], **params)


def _write_transpose(
    cts: Sequence[Any],
    buffer: Any,
    value: Any,
    starts: jax.Array,
    *masks: Any,
    window: Window,
    **how: bool,
) -> list:
    none = [None] * (1 + len(masks))
    of_buffer, of_value = _jax.is_undefined(buffer), _jax.is_undefined(value)
    if type(cts[0]) is _jax.Zero:
        linear = [(of_buffer, buffer), (of_value, value)]
        return [*(_jax.float0_zero(v.aval) if has else None for has, v in linear), *none]
    ct_buffer, ct_value = cts[0], None
    if of_value:
        ct_value, ct_buffer = read(ct_buffer, starts, window, held=not how["alone"])
        if masks:
            ct_value = jnp.where(masks[0], ct_value, jnp.zeros_like(ct_value))
    if of_buffer and not how["add"] and not how["fresh"]:
        kind = value.aval if of_value else jax.typeof(value)
        zero = _jax.zeros(kind.to_tangent_aval())
        if of_value:
            ct_value, zero = in_order(ct_value, zero, starts, window)
        ct_buffer = write(ct_buffer, zero, starts, window, *masks)
    return [ct_buffer if of_buffer else None, ct_value, *none]


def in_order(found: Any, new: jax.Array, starts: jax.Array, window: Window) -> tuple[Any, Any]:
    """Make a write wait until the read before it has happened.

    A compiler that drops barriers reads a slice again wherever it is used, and then copies the
    buffer before the write. It cannot look through a branch whose condition it does not know."""
    if _jax.KEEPS_BARRIERS or not window.axes:
        return found, new
    branch = lambda s, *v: lax.cond(_holds(s), lambda x, y: (x, y), lambda x, y: (y, x), *v)
    return lax.platform_dependent(starts, found, new, cpu=branch, default=lambda _, *v: v)


def _holds(starts: jax.Array) -> Any:
    """Return a bool that is always true, although the compiler cannot tell."""
    return ((starts | 1) != 0).all()


def _own_places(starts: jax.Array, size: int) -> Any:
    """Append to the starts of each batch element its place along the buffer's batch axis."""
    place = jnp.arange(size, dtype=starts.dtype).reshape(size, *[1] * (starts.ndim - 1))
    return jnp.concatenate([starts, jnp.broadcast_to(place, (*starts.shape[:-1], 1))], -1)


def _read_batched(
    axis: _jax.AxisData, args: Sequence[Any], dims: Sequence[Any], *, window: Window, **how: bool
) -> tuple:
    if not how["value"]:
        return read_p.bind(*args, window=window, **how), list(dims)
    (buffer, starts), (of_buffer, of_starts) = args, dims
    if of_starts is None:
        window = window.with_axis(of_buffer, axis.size)
        out = read_p.bind(buffer, starts, window=window, **how)
        return out, [starts.ndim - 1 + of_buffer, of_buffer]
    starts = jnp.moveaxis(starts, of_starts, 0)
    if of_buffer is None:
        return read_p.bind(buffer, starts, window=window, **how), [0, None]
    starts = _own_places(starts, axis.size)
    window = window.with_index(of_buffer)
    found, buffer = read_p.bind(buffer, starts, window=window, **how)
    return [jnp.squeeze(found, starts.ndim - 1 + of_buffer), buffer], [0, of_buffer]


def _write_batched(
    axis: _jax.AxisData, args: Sequence[Any], dims: Sequence[Any], *, window: Window, **how: Any
) -> tuple:
    (buffer, value, starts, *masks), (of_buffer, of_value, of_starts, *of_masks) = args, dims
    if of_buffer is None:
        buffer, of_buffer = jnp.broadcast_to(buffer, (axis.size, *buffer.shape)), 0
    if of_starts is None:
        place, window = starts.ndim - 1 + of_buffer, window.with_axis(of_buffer, axis.size)
        value = _jax.move(value, of_value, place, axis.size)
        # Masks broadcast, so size one is enough.
        masks = [_jax.move(m, d, place, 1) for m, d in zip(masks, of_masks, strict=True)]
    else:
        starts = _own_places(jnp.moveaxis(starts, of_starts, 0), axis.size)
        place, window = starts.ndim - 1 + of_buffer, window.with_index(of_buffer)
        each = lambda v, d: jnp.expand_dims(_jax.move(v, d, 0, axis.size), place)
        value, masks = each(value, of_value), list(map(each, masks, of_masks))
    out = write_p.bind(buffer, value, starts, *masks, window=window, **how)
    return out, [of_buffer]


def _read_dce(used: list[bool], eqn: _jax.Equation) -> tuple[list[bool], Any]:
    """Reduce a read whose value is unused to passing its buffer on."""
    if not any(used):
        return [False] * len(eqn.invars), None
    if used[0] or not eqn.params["value"]:
        return [True] * len(eqn.invars), eqn
    params = dict(eqn.params, value=False)
    passing = _jax.new_equation(eqn, read_p, eqn.invars[:1], eqn.outvars[1:], params)
    return [True, False], passing


of_read = {"jvp": _read_jvp, "transpose": _read_transpose, "dce": _read_dce}
_jax.define(read_p, _evaluate_read, _read_types, **of_read)
_jax.define(write_p, _evaluate_write, _write_types, jvp=_write_jvp, transpose=_write_transpose)
for primitive, batched in ((read_p, _read_batched), (write_p, _write_batched)):
    _jax.register_bounds(primitive, outside)
    _jax.register_batching(primitive, batched)
