"""The tiles of a TPU, of 8 by 128 numbers: which arrays waste them, and how much."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from loopkit import _jax
from loopkit._engine.passes.flat_rows import SHORT

LANES, SUBLANES = 128, 8
"""The sides of a tile."""
LONGEST_TILE = 4096
"""The most numbers of a row that may be a vector."""


def is_row(aval: _jax.ShapedArray) -> bool:
    """Return whether a type is a small array of several axes, the last of them short."""
    shape = getattr(aval, "shape", ())
    if len(shape) < 2 or not all(isinstance(n, int) for n in shape):
        return False
    short = 0 < shape[-1] < SHORT and sum(n > 1 for n in shape) > 1
    return short and 0 < _jax.volume(shape) <= LONGEST_TILE and _is_plain(aval)


def is_stack(aval: _jax.ShapedArray) -> bool:
    """Return whether a type is several such rows."""
    shape = getattr(aval, "shape", ())
    several = len(shape) > 2 and isinstance(shape[0], int) and shape[0] > 1
    return several and is_row(_jax.of_shape(aval, shape[1:]))


def _is_plain(aval: _jax.ShapedArray) -> bool:
    """Return whether a type has numbers, and nothing but its shape matters."""
    kind = aval.dtype
    number = jnp.issubdtype(kind, jnp.number) or jnp.issubdtype(kind, jnp.bool_)
    placed = _jax.is_spread(aval) or bool(_jax.varying(aval)) or _jax.is_on_host(aval)
    return number and not aval.weak_type and not placed


def padded_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Return the bytes of an array in tiles, with the better of its last two axes in the lanes."""
    if len(shape) < 2:
        return _jax.volume(shape) * itemsize
    *lead, a, b = shape
    tile = lambda n, size: -(-n // size) * size
    least = min(tile(a, SUBLANES) * tile(b, LANES), tile(b, SUBLANES) * tile(a, LANES))
    return _jax.volume(lead) * least * itemsize


def saved_bytes(aval: _jax.ShapedArray) -> int:
    """Return the bytes that are saved if rows are vectors."""
    flat, size = (aval.shape[0], _jax.volume(aval.shape[1:])), aval.dtype.itemsize
    return padded_bytes(aval.shape, size) - padded_bytes(flat, size)
