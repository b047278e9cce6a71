"""Functions that close over differentiated values: compiled once, told apart, and let go."""

import functools
import gc
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from test_caching import TRANSFORMS
from tolerances import assert_near
from turns import in_turn


def closed_over(kind, w):
    """A loop whose functions close over a value of two numbers that is differentiated."""
    other, pair = w + 1.0, {"w": w, "rest": (w * 2.0, 0.5)}
    if kind == "cell":
        scaled = lambda x: jnp.sin(w.sum() * x)
    elif kind == "two of them":
        scaled = lambda x: jnp.sin(w.sum() * x) + other[0]
    elif kind == "dict":
        scaled = lambda x: jnp.sin(pair["w"].sum() * x) + pair["rest"][0][1]
    elif kind == "partial":
        scaled = functools.partial(applied, pair)
    elif kind == "module":
        scaled = Layer(w, "sin")

    def body(_, x):
        return scaled(x)

    return loopkit.fori_loop(0, 3, body, 0.3, checkpoints=2)


def applied(params, x):
    return jnp.sin(params["w"].sum() * x) * params["rest"][1]


class Layer(eqx.Module):
    weight: jax.Array
    function: str = eqx.field(static=True)

    def __call__(self, x):
        return getattr(jnp, self.function)(self.weight.sum() * x)


def python_closed_over(kind, w):
    with jax.disable_jit():
        return closed_over(kind, w)


PLACES = ["cell", "two of them", "dict", "partial", "module"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "transform"), in_turn(PLACES, TRANSFORMS))
def test_closing_over_a_differentiated_value(kind, transform, compilations):
    """Its body is compiled once, and used again with another value in its place."""
    first, second = jnp.array([0.3, 0.4]), jnp.array([0.9, -0.2])

    def derivative(f):
        f = functools.partial(f, kind)
        if transform == "value":
            return f
        if transform == "jvp":
            return lambda w: jax.jvp(f, (w,), (jnp.ones(2),))
        if transform == "vmap of grad":
            return lambda w: jax.vmap(jax.grad(f))(jnp.stack([w, 2 * w]))
        return {"grad": jax.grad, "hessian": jax.hessian}[transform](f)

    loop = derivative(closed_over)
    jax.block_until_ready(loop(first))
    compilations.clear()
    got = jax.block_until_ready(loop(second))
    assert compilations == []
    if transform == "vmap of grad":
        wanted = [jax.grad(lambda w: python_closed_over(kind, w))(k * second) for k in (1, 2)]
        wanted = jnp.stack(wanted)
    else:
        wanted = derivative(python_closed_over)(second)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert_near(a, b)


def test_a_differentiated_number_that_sets_a_shape():
    """Some functions of jax.numpy take a derivative's tracer for its value."""

    def f(w):
        return loopkit.fori_loop(0, 2, lambda _, x: x * w + jnp.arange(w).size, 1.0)

    slopes = [float(jax.grad(f)(w)) for w in (3.0, 2.0, 3.0)]
    assert slopes == [9.0, 6.0, 9.0]  # of w**2 + n * w + n


def test_functions_that_write_to_what_they_close_over():
    def f(w):
        seen = [w]

        def body(_, x):
            seen.append(1)
            return x * w

        loopkit.fori_loop(0, 3, body, 2.0)
        return w * len(seen)

    assert jax.grad(f)(3.0) == jax.grad(f)(3.0) > 1


@pytest.mark.slow
def test_tracers_that_are_the_same_are_told_from_others():
    def f(w, v):
        return loopkit.fori_loop(0, 2, lambda _, x: x * w + v, jnp.ones(2))

    x = jnp.array([2.0, 3.0])
    same = jax.grad(lambda x: jnp.sum(f(x, x)))(x)
    apart = jax.grad(lambda x: jnp.sum(f(x, x + 1.0)))(x)
    np.testing.assert_allclose(same, 4 * x + 1)  # w**2 + w*v + v
    np.testing.assert_allclose(apart, 4 * x + 2)


@pytest.mark.slow
def test_differentiated_values_are_let_go():
    alive = []

    def f(w):
        alive.append(weakref.ref(w))
        return jnp.sum(loopkit.fori_loop(0, 2, lambda _, x: x * w, jnp.ones(2)))

    jax.grad(f)(jnp.array([2.0, 3.0]))
    gc.collect()
    assert alive[0]() is None
