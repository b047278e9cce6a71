"""Tiles of 8 by 128 numbers on a TPU: which arrays are rows, and what tiles take."""

import jax
import jax.numpy as jnp

from loopkit import _jax
from loopkit._engine.lowering.tiles import LONGEST_TILE, is_row, is_stack, padded_bytes, saved_bytes
from loopkit._engine.passes.flat_rows import SHORT


def array(*shape, dtype="float32", **how):
    return _jax.ShapedArray(shape, jnp.dtype(dtype), **how)


def test_rows():
    """Rows have several axes, the last of them short, and not too many numbers."""
    long = LONGEST_TILE // 2
    rows = [(2, 2), (3, 2, 1), (3, SHORT - 1), (1, 3, 2), (long, 2)]
    others = [(), (6,), (1, 6), (6, 1), (3, SHORT), (3, 20 * SHORT), (SHORT, 1), (3, 2, 0)]
    others += [(0, 3, 2), (long + 1, 2)]
    for shape in rows + others:
        assert is_row(array(*shape)) is (shape in rows), shape
        assert is_stack(array(3, *shape)) is (shape in rows), shape
        assert is_stack(array(2, *shape)) is (shape in rows), shape
        assert not is_stack(array(1, *shape))


def test_what_is_no_stack():
    assert not is_stack(array(4, 2))
    assert not is_stack(array())
    assert not is_stack(object()), "a token has no shape"


def test_sizes_that_are_symbols():
    (n,) = jax.export.symbolic_shape("n")
    for shape in [(n, 2), (2, n), (n, 3, n)]:
        assert not is_row(array(*shape))
    for shape in [(n, 3, 2), (3, n, 2), (3, 2, n)]:
        assert not is_stack(array(*shape))


def test_rows_of_numbers():
    for dtype in ["float64", "int32", "complex64", "bfloat16", "bool"]:
        assert is_row(array(3, 2, dtype=dtype)), dtype
    keys = jax.make_jaxpr(lambda key: jax.random.split(key, (3, 2)))(jax.random.key(0))
    assert not is_row(*keys.out_avals)


def test_only_the_shape_may_matter():
    """A type may say more of values than their shape: then they stay as they are."""
    assert not is_row(array(3, 2, weak_type=True))
    assert not is_row(array(3, 2, memory_space=jax.memory.Space.Host))
    axis = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((1,), ("d",), axis_types=(axis,))
    spread = jax.sharding.NamedSharding(mesh.abstract_mesh, jax.P("d", None))
    assert not is_row(array(3, 2, sharding=spread))


def test_bytes_in_tiles():
    """The last two axes are made up to 8 by 128, the better of them in the lanes."""
    assert padded_bytes((), 4) == 4
    assert padded_bytes((5,), 4) == 5 * 4
    assert padded_bytes((3, 2), 4) == 8 * 128 * 4
    assert padded_bytes((2, 200), 2) == padded_bytes((200, 2), 2) == 8 * 256 * 2
    assert padded_bytes((8, 128), 1) == 8 * 128
    assert padded_bytes((5, 7, 9, 2), 4) == 5 * 7 * 8 * 128 * 4
    assert padded_bytes((5, 7, 9, 130), 4) == 5 * 7 * 16 * 256 * 4


def test_bytes_that_vectors_save():
    rows = array(7, 3, 2)
    assert saved_bytes(rows) == (7 * 8 * 128 - 8 * 128) * 4
    assert saved_bytes(array(20, 3, 2, dtype="bfloat16")) == (20 * 8 * 128 - 8 * 128) * 2
    wide = array(300, 2, 70)
    assert saved_bytes(wide) == (300 * 8 * 128 - min(304 * 256, 144 * 384)) * 4
