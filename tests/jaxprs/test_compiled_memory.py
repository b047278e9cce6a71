"""XLA's memory for a function and its linear part: the rules, and what it compiles."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from loopkit import _jax
from loopkit._jaxprs import equations
from loopkit._jaxprs.compiled_memory import index_bytes, kept_by_compiler, term_bytes
from loopkit._jaxprs.min_cut import Residuals

X = jnp.ones((4, 8), "float32")
W = jnp.ones((8, 8), "float32")


def kept(step, linear, *args, results=1):
    """Return what is kept of `step`, which returns results and the residuals of `linear`."""
    jaxpr = jax.make_jaxpr(step)(*args)
    residuals = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in jaxpr.out_avals[results:]]
    tangent = jax.ShapeDtypeStruct((4, 8), residuals[0].dtype)
    back = jax.make_jaxpr(linear)(*residuals, tangent)
    some = Residuals(jaxpr, results, 0, len(args), [True] * len(args))
    made = equations.maker_of(_jax.open_jaxpr(jaxpr))
    names = [made(v) for v in kept_by_compiler(some, back)]
    return ["input" if eqn is None else eqn.primitive.name for eqn in names]


times = lambda r, t: r * t


def test_a_cheap_function_of_one_array_is_not_kept():
    def step(x):
        y = jnp.tanh(x)
        return y @ W, 1 - y * y

    assert kept(step, times, X) == ["tanh"]


def test_a_dear_function_is_kept_if_more_than_one_reads_it():
    step = lambda x: (lambda y: (y @ W, y))(jnp.exp(x))
    assert kept(step, times, X) == ["exp"]


def test_what_one_kernel_reads_becomes_a_part_of_it():
    alone = lambda x: (jnp.sin(x) @ W, jnp.exp(jnp.cos(x)))
    assert kept(alone, times, X) == ["input"]


def test_what_a_product_reads_is_kept_as_it_is():
    step = lambda x: (lambda y: (y @ W, y))(jnp.maximum(x, 0))
    assert kept(step, times, X) == ["input"]
    assert kept(step, lambda r, t: r.T @ t, X) == ["max"]


def test_a_product_reads_through_views():
    step = lambda x: (jnp.exp(x) @ W, jnp.exp(x).reshape(8, 4).T)
    assert kept(step, lambda r, t: r @ t.reshape(8, 4), X) == ["exp"]


def test_a_function_of_two_arrays_is_kept():
    step = lambda x, z: (lambda y: (y @ W, y))(jnp.exp(x) + jnp.exp(z))
    assert kept(step, times, X, X) == ["add"]


def test_a_broadcast_is_no_second_array():
    def step(x, b):
        y = jnp.exp(x) * jnp.broadcast_to(b, x.shape)
        return y @ W, y

    assert kept(step, times, X, X[0]) == ["exp", "input"]


@pytest.mark.parametrize(("type", "expected"), [("float32", ["add"]), ("complex64", ["sin"])])
def test_some_functions_are_dear_for_complex_numbers(type, expected):
    def step(x, z):
        y = jnp.sin(x + z)
        return y @ W.astype(type), y

    assert kept(step, times, X.astype(type), X.astype(type)) == expected


def test_a_change_to_bfloat16_is_dear_and_one_from_it_is_not():
    def step(x):
        y = (x * x).astype("bfloat16")
        return y @ W.astype("bfloat16"), y

    assert kept(step, times, X) == ["convert_element_type"]

    def back(x):
        y = jnp.exp(x).astype("float32")
        return y @ W, y

    assert kept(back, times, X.astype("bfloat16")) == ["exp"]


def test_terms_of_a_sum_are_as_large_as_what_products_make():
    def f(x):
        first, second = x[0], x[1]
        return (first @ W).sum() + (first @ W).sum() + (second * 2).sum()

    jaxpr = _jax.open_jaxpr(jax.make_jaxpr(f)(jnp.ones((100, 8), "float32")))
    assert term_bytes(jaxpr.eqns)[jaxpr.invars[0]] == 2 * X[0].nbytes + 4


def test_a_variable_has_no_more_terms_than_readers():
    def f(x):
        y = x * 2
        for _ in range(40):  # each has two paths to the next
            y = y * 2 + y * 3
        return (y @ W).sum()

    jaxpr = _jax.open_jaxpr(jax.make_jaxpr(f)(X))
    assert term_bytes(jaxpr.eqns)[jaxpr.invars[0]] == X.nbytes


def test_indices_for_max_pooling_are_counted():
    window = (2, 2), (2, 2), "VALID"
    pool = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, *window).sum()
    jaxpr = _jax.open_jaxpr(jax.make_jaxpr(lambda x: pool(x) + pool(x + 1) + pool(x[:2]))(X))
    assert index_bytes(jaxpr.eqns, None) == 4 * 2 * (2 * X.size + X[:2].size)
    grad = jax.jit(jax.grad(lambda x: pool(x) + pool(x + 1) + pool(x[:2])))
    made = grad.lower(X).compile().as_text()
    assert [made.count(f"s32[{n},8]{{1,0}} iota(") for n in (4, 2)] == [4, 2]
