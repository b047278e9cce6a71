"""A batch axis that is moved or put in, where operands of a loop with one more axis need it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopkit._jax import move

from .small_loops import assert_same


def test_move():
    value = np.arange(6.0).reshape(2, 3)
    assert move(value, None, None, 4) is value
    assert move(value, None, 1, 4).shape == (2, 4, 3)
    assert_same([move(value, None, 1, 4)[:, 2]], [value])
    assert_same([move(value, 1, 0, 3)], [value.T])
    with pytest.raises(AssertionError, match="a batched operand"):
        move(value, 0, None, 2)


def test_move_along_a_mesh():
    """The axis that is put in is laid out over the mesh; the axis that moves stays as it was."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    value = np.arange(8.0).reshape(4, 2)
    with jax.set_mesh(mesh):
        made = [
            move(jnp.asarray(v), *how, 4, "d") for v, *how in ((value[0], None, 1), (value, 0, 1))
        ]
    assert jax.typeof(made[0]).sharding.spec[1] == "d"
    assert_same(made, [np.repeat(value[0][:, None], 4, 1), value.T])
