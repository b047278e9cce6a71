"""Numbers of Python among the xs of a scan: every step is given them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit


@pytest.mark.slow
def test_numbers_of_python_among_the_rows():
    """A stack of layers has settings that are numbers: every step is given them as they are."""
    seen = []

    def step(h, layer):
        seen.append({k: type(v) for k, v in layer.items() if k != "w"})
        scale = layer["rate"] * layer["heads"] if layer["causal"] else 0.0
        return jnp.tanh(h @ layer["w"]) * scale, layer["rate"]

    w = jnp.linspace(-1.0, 1.0, 12).reshape(3, 2, 2)
    layers = {"w": w, "rate": 0.5, "heads": 2, "causal": True}
    h, rates = loopkit.scan(step, jnp.ones(2), layers)
    assert seen[0] == {"rate": float, "heads": int, "causal": bool}
    np.testing.assert_array_equal(rates, [0.5, 0.5, 0.5])

    def expected(h):
        for k in range(3):
            h = jnp.tanh(h @ w[k])
        return h

    np.testing.assert_allclose(h, expected(jnp.ones(2)), rtol=1e-12)
    ours = lambda h: loopkit.scan(step, h, layers)[0]
    np.testing.assert_allclose(jax.jacrev(ours)(h), jax.jacrev(expected)(h), rtol=1e-10, atol=1e-12)
    other = loopkit.scan(step, jnp.ones(2), layers | {"causal": False})[0]
    np.testing.assert_array_equal(other, jnp.zeros(2))


def test_numbers_that_every_step_is_given_as_arrays():
    step = lambda c, x: (c + x[0] * x[1], x[1])
    xs = jnp.arange(3.0), 2.0
    assert loopkit.scan(step, 0.0, xs, in_axes=(0, None))[0] == 6.0
    slope = jax.grad(lambda y: loopkit.scan(step, 0.0, (xs[0], y), in_axes=(0, None))[0])(2.0)
    assert slope == 3.0


def test_a_number_alone_does_not_say_how_many_steps():
    with pytest.raises(ValueError, match="`length` must say how many steps to take"):
        loopkit.scan(lambda c, x: (c + x, None), 0.0, 5.0)
    assert loopkit.scan(lambda c, x: (c + x, None), 0.0, 5.0, length=2)[0] == 10.0


def test_the_function_is_looked_at_first():
    for wrong in (3, None):
        with pytest.raises(TypeError, match="`f` must be a function"):
            loopkit.scan(wrong, 0, 1)
