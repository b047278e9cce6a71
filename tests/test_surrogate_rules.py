"""Rules that are not the derivative of their function, and compute its result by other code."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import loopkit
from derivatives import assert_close


@jax.custom_jvp
def surrogate(x):
    return jnp.sin(x)


surrogate.defjvp(lambda p, t: (jnp.sin(p[0]), 2.0 * jnp.cos(p[0]) * t[0]))


@jax.custom_jvp
def by_another(x):
    return jnp.sin(x)


by_another.defjvp(lambda p, t: (surrogate(p[0]), 3.0 * jnp.cos(p[0]) * t[0]))


@jax.custom_jvp
def rounded(x):
    return jnp.round(4 * x) / 4


rounded.defjvp(lambda p, t: (jnp.round(4 * p[0]) / 4, t[0]))


def in_a_loop(x, w):
    return lax.scan(lambda x, _: (surrogate(x * w) * x, None), x, None, 3)[0]


@pytest.mark.parametrize("checkpoints", [None, 2, 5, "all"])
@pytest.mark.parametrize("f", [surrogate, by_another, rounded, in_a_loop])
def test_what_a_rule_computes_itself_has_its_own_derivative(f, checkpoints):
    """A second derivative is that of the rule's own code, which need not call the function."""
    step = (lambda x, w: f(1.1 * x, w)) if f is in_a_loop else (lambda x, w: f(1.1 * x * w) * x)

    def looped(xw):
        one = lambda x, _: (step(x, xw[1]) + 0.2, None)
        return loopkit.scan(one, xw[0], None, 5, checkpoints=checkpoints)[0]

    def unrolled(xw):
        x = xw[0]
        for _ in range(5):
            x = step(x, xw[1]) + 0.2
        return x

    def orders(run):
        loss = lambda xw: jnp.sin(run(xw)) ** 2
        return jax.jacrev(jax.grad(loss)), jax.jacfwd(jax.grad(loss))

    at = jnp.array([0.9, 0.8])
    both = lambda run: jax.jit(lambda at: [order(at) for order in orders(run)])(at)
    assert_close(both(looped), both(unrolled))


@pytest.mark.parametrize("f", [jax.nn.relu, jax.nn.softplus])
def test_a_rule_that_calls_its_function_costs_no_further_sweep(f):
    def sweeps(act, memory=None):
        step = lambda x, _: (act(1.1 * x) * x, None)
        loss = lambda x: jnp.sum(loopkit.scan(step, x, None, 7)[0] ** 2)
        loss = loss if memory is None else loopkit.checkpointed(loss, memory=memory)
        slope = lambda x: jnp.sum(jax.grad(loss)(x))
        return str(jax.make_jaxpr(jax.grad(slope))(jnp.ones(3))).count("loopkit_forward[")

    assert sweeps(f) == sweeps(jnp.tanh) > 0
    assert sweeps(f, "1 MB") == sweeps(jnp.tanh, "1 MB") > 0  # rules are wrapped once more
    assert sweeps(surrogate) > sweeps(jnp.tanh)
