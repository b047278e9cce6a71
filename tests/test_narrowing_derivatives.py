"""Derivatives of lanes that narrow: with rules of users, with buffers, in groups of lanes."""

import jax
import jax.numpy as jnp
import pytest

import loopkit
from derivatives import assert_close
from test_surrogate_rules import surrogate

NS = jnp.array([4, 1, 2])


@jax.custom_vjp
def own_vjp(x):
    return jnp.sin(x)


own_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.cos(x),))


@jax.custom_jvp
def own_jvp(x):
    return jnp.sin(x)


own_jvp.defjvp(lambda p, t: (jnp.sin(p[0]), jnp.cos(p[0]) * t[0]))


def in_python(goes_on, step, value):
    for _ in range(6):
        on = goes_on(value)
        new = step(value)
        value = jax.tree.map(lambda n, v, on=on: jnp.where(on, n, v), new, value)
    return value


def narrowing(checkpoints, buffers=None):
    how = {"max_steps": 6, "lanes": (2, 1), "checkpoints": checkpoints, "buffers": buffers}
    return lambda *loop: loopkit.while_loop(*loop, **how)


@pytest.mark.parametrize("f", [own_vjp, own_jvp, surrogate])
def test_second_derivatives_with_rules(f):
    def orders(loop):
        def one(w, n):
            return loop(lambda c: c[0] < n, lambda c: (c[0] + 1, f(c[1] * w)), (0, w))[1] ** 2

        total = lambda w: jnp.sum(jax.vmap(one, (None, 0))(w, NS))
        slopes = lambda w: jnp.sum(jax.vmap(jax.grad(one), (None, 0))(w, NS))
        forward = lambda g: lambda w: jax.jvp(g, (w,), (1.0,))[1]
        found = [jax.grad(jax.grad(total)), jax.grad(slopes)]
        found += [forward(jax.grad(total)), forward(slopes)] if f is not own_vjp else []
        return jax.jit(lambda w: [order(w) for order in found])(0.7)

    wanted = orders(in_python)
    for checkpoints in (None, "all"):
        assert_close(orders(narrowing(checkpoints)), wanted)


@pytest.mark.parametrize("adds", [True, False])
def test_buffers_in_groups_of_which_one_waits(adds):
    """The lanes of a group that is done with a phase write nothing until the others are."""
    xs = jnp.arange(1.0, 9.0).reshape(2, 4) / 5
    ns = jnp.array([[1, 0, 5, 1], [5, 5, 4, 3]])

    def one(x, n, loop):
        def step(c):
            i, table = c
            new = jnp.sin(x * table[(i + 1) % 2])
            here = table.at[i % 2]
            return i + 1, here.add(new) if adds else here.set(new)

        return jnp.sum(loop(lambda c: c[0] < n, step, (0, jnp.stack([x, x + 1.0])))[1])

    def found(loop):
        group = lambda x, n: jnp.sum(jnp.sin(jax.vmap(lambda x, n: one(x, n, loop))(x, n)))
        return jax.jit(jax.vmap(jax.value_and_grad(group)))(xs, ns)

    wanted = found(in_python)
    for checkpoints in (None, "all"):
        assert_close(found(narrowing(checkpoints, lambda v: v[1])), wanted)
