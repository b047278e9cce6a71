"""Budgets of functions whose rules for derivatives have loops: JAX traces a rule only then."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import loopkit
from derivatives import assert_close

X = jnp.linspace(0.1, 1.0, 5)


def long_loop(x):
    return jnp.sum(lax.scan(lambda c, _: (jnp.sin(c) * c, None), x, None, 200)[0])


def by_jvp(x):
    f = jax.custom_jvp(lambda x: long_loop(x))
    f.defjvp(lambda primals, tangents: jax.jvp(long_loop, primals, tangents))
    return f(x)


def by_backward_code(x):
    f = jax.custom_vjp(lambda x: long_loop(x))
    f.defvjp(lambda x: (long_loop(x), x), lambda x, ct: (ct * jax.grad(long_loop)(x),))
    return f(x)


def by_a_pullback(x):
    f = jax.custom_vjp(lambda x: long_loop(x))
    f.defvjp(lambda x: jax.vjp(long_loop, x), lambda pullback, ct: pullback(ct))
    return f(x)


@pytest.mark.parametrize("f", [by_jvp, by_backward_code, by_a_pullback])
@pytest.mark.parametrize("how", [{}, {"measure": True}], ids=str)
def test_loops_that_a_rule_differentiates_are_within_the_budget(f, how):
    x, budget = jnp.ones(300), 60_000
    slope = jax.jit(jax.grad(loopkit.checkpointed(f, memory=budget, **how)))
    assert slope.lower(x).compile().memory_analysis().temp_size_in_bytes <= budget
    assert_close(slope(x), jax.grad(long_loop)(x))


def test_a_root_whose_solver_has_a_loop():
    """Its equation holds functions, which run, beside a jaxpr, which does not."""

    def loss(b, loop=lax.fori_loop):
        better = lambda f: lambda _, y: y - f(y) / (1.1 - 0.1 * jnp.tanh(y) ** 2)
        solve = lambda f, y: loop(0, 30, better(f), y)
        root = lambda y: y + 0.1 * jnp.tanh(y) - b
        return jnp.sum(lax.custom_root(root, b, solve, lambda g, y: y / g(jnp.ones_like(y))) ** 2)

    f = loopkit.checkpointed(loss, memory="1 MB")
    assert_close(jax.jit(jax.value_and_grad(f))(X), jax.value_and_grad(loss)(X))
    assert_close(jax.jit(jax.value_and_grad(f))(X[0]), jax.value_and_grad(loss)(X[0]))


@pytest.mark.parametrize("budget", [4000, 8000, 11_000])
def test_a_loop_in_a_rule_takes_less_if_the_rest_does_not_fit_beside_it(budget):
    scan = lambda x: lax.scan(lambda c, _: (jnp.cos(c) * 1.1, None), x, None, 40)[0]
    inner = jax.custom_jvp(lambda x: scan(x))
    inner.defjvp(lambda primals, tangents: jax.jvp(scan, primals, tangents))
    f = lambda x: jnp.sum(jax.nn.relu(inner(x)) * scan(x))
    x = jnp.linspace(0.1, 0.9, 64, dtype=jnp.float32)
    slope = jax.jit(jax.grad(loopkit.checkpointed(f, memory=budget, measure=True)))
    assert slope.lower(x).compile().memory_analysis().temp_size_in_bytes <= budget
    assert_close(slope(x), jax.grad(f)(x))
