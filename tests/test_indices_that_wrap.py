"""Indices and counters that wrap around, so that a loop writes rows twice."""

import jax
import jax.numpy as jnp
import pytest

import loopkit
from derivatives import assert_close

WRAPPING = {
    "uint32 as int32": (jnp.uint32(2**32 - 6), lambda i: i.astype(jnp.int32), 11),
    "int64 as int32": (jnp.int64(2**32 - 6), lambda i: i.astype(jnp.int32), 11),
    "an offset": (jnp.int32(2**31 - 3), lambda i: i + (2**31 - 1), 9),
    "int8": (jnp.int8(-6), lambda i: i.astype(jnp.int32), 11),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPING)
def test_an_index_that_wraps_around_writes_rows_twice(name):
    start, index, steps = WRAPPING[name]

    def f(x, **how):
        def body(c):
            i, k, rows, total = c
            new = jnp.sin(rows[k * 5 % 6] * 1.3 + total) + 0.1 * total
            return i + 1, k + 1, rows.at[index(i)].set(new), total + 0.3 * new * new

        init = start, jnp.int32(0), jnp.linspace(0.1, 1, 6) * x, x
        goes_on = lambda c: (c[1] < steps) & (c[3] < 1e9)
        c = loopkit.while_loop(goes_on, body, init, checkpoints=2, **how)
        return c[3] + jnp.sum(c[2] ** 2)

    with_buffer = lambda x: f(x, buffers=(False, False, True, False))
    assert_close(jax.jit(jax.grad(with_buffer))(0.7), jax.jit(jax.grad(f))(0.7))
    assert_close(jax.grad(with_buffer)(0.7), jax.grad(f)(0.7))


NARROW = {
    "int8": (jnp.int8(127), lambda k: k.astype(jnp.int32), 20),
    "uint8 as int8": (jnp.uint8(250), lambda k: k.astype(jnp.int8).astype(jnp.int32), 2),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NARROW)
def test_an_outer_counter_that_wraps_around(name):
    """The inner loop then starts below zero, and writes rows from the end and from the start."""
    start, index, checkpoints = NARROW[name]

    def f(x, is_buffer):
        def step(c, _):
            k, total, rows = c

            def body(c):
                i, b, total, n = c
                new = jnp.sin(b[n * 3 % 4] * 1.3 + total)
                return i + 1, b.at[i].set(new), total + 0.3 * new * new, n + 1

            init = index(k), jnp.linspace(0.1, 1, 4) * total, total, 0
            how = {"buffers": (False, is_buffer, False, False), "checkpoints": checkpoints}
            goes_on = lambda c: (c[0] < 3) & (c[2] < 1e9)
            _, b, new, _ = loopkit.while_loop(goes_on, body, init, **how)
            return (k + 1, new + jnp.sum(b), rows.at[k * 0].add(new)), None

        init, buffers = (start, x, jnp.zeros(2)), (False, False, True)
        _, total, rows = loopkit.scan(step, init, None, 2, buffers=buffers)[0]
        return total + rows.sum()

    got = jax.jit(jax.grad(lambda x: f(x, True)))(0.7)
    assert_close(got, jax.jit(jax.grad(lambda x: f(x, False)))(0.7))
