"""Types of buffers and arrays that grow, as type checkers see them; the program also runs."""

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import loopkit
from loopkit import Buffer, TensorArray


def write(i: Array, ys: Buffer) -> Buffer:
    assert_type(ys[i], Array)
    assert_type(ys[..., None], Array)
    assert_type(ys.at[i].get(mode="fill", fill_value=0.0), Array)
    assert_type(jnp.asarray(ys), Array)
    ys = ys.at[i].set(1.0).at[0].add(ys[i], pred=i > 1).at[[0, 1]].multiply(np.ones(2))
    assert_type(ys.shape, tuple[int, ...])
    return ys.at[1:].apply(jnp.sin, mode="drop")


# The body of a loop with `buffers` sees a Buffer where its caller has an array.
ys: Array = loopkit.fori_loop(0, 5, write, jnp.zeros(5), buffers=True)
ys = loopkit.fori_loop(0, 5, lambda i, ys: ys.at[i].set(ys[i - 1] + 1), ys, buffers=True)
total, ys = loopkit.while_loop(
    lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1].at[c[0]].set(1.0)), (0, ys), buffers=(False, True)
)
(count, ys), sums = loopkit.scan(
    lambda c, x: ((c[0] + 1, c[1].at[c[0]].set(x)), c[1][0]), (0, ys), ys, buffers=lambda c: c[1]
)
assert_type(Buffer(jnp.ones(3)).at[0].set(2.0), Buffer)

# The type of the element that it was made for.
arrays = TensorArray.empty(4, 0.0)
assert_type(arrays, TensorArray[Array])
assert_type(TensorArray.empty(4, jax.ShapeDtypeStruct((3,), jnp.float32)), TensorArray[Array])
assert_type(TensorArray.from_array(np.ones((3, 2)))[0], Array)
assert_type(arrays.append(1.0).append(jnp.sin(2.0)).write(0, 3), TensorArray[Array])
assert_type(arrays.append(1.0).read(-1), Array)
assert_type(arrays.append(1.0).stack(), Array)
assert_type(arrays.append(1.0).unstack(), list[Array])
pairs: TensorArray[tuple[Array, Array]] = TensorArray.empty(4, (0.0, jnp.ones(3)))
assert_type(pairs.append((1.0, jnp.ones(3)))[0], tuple[Array, Array])
for first, second in pairs:
    assert_type((first, second), tuple[Array, Array])
grown = loopkit.fori_loop(0, 3, lambda i, a: a.append(i * 1.0), arrays)
assert_type(grown, TensorArray[Array])
anything: TensorArray[Any] = grown
