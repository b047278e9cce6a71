"""Programs whose gradients are compiled under many budgets; steps as a user writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import loopkit


class Program(NamedTuple):
    """A loss of its arguments, a number of steps and options of its loop."""

    loss: Callable
    args: tuple
    steps: int


PROGRAMS: dict[str, Program] = {}
SMALL = jnp.linspace(-1.0, 1.0, 256).reshape(16, 16) / 8


def program(*args: Any, steps: int) -> Callable:
    """Adds the decorated loss."""

    def add(loss: Callable) -> Callable:
        PROGRAMS[loss.__name__] = Program(loss, args, steps)
        return loss

    return add


@program(SMALL, jnp.ones(16), steps=300)
def small_rnn(w, h, n, **options):
    xs = jnp.cos(jnp.arange(16.0 * n)).reshape(n, 16)
    step = lambda h, x: (jnp.tanh(w @ h + x), jnp.sum(h))
    h, ys = loopkit.scan(step, h, xs, **options)
    return jnp.sum(h) + jnp.sum(ys**2)


@program(jnp.eye(4) * 0.9, jnp.eye(4), steps=200)
def kalman(f, p, n, **options):
    def step(carry, z):
        mean, p = carry
        mean, p = f @ mean, f @ p @ f.T + 0.1 * jnp.eye(4)
        gain = jnp.linalg.solve(p[:2, :2] + jnp.eye(2), p[:2]).T
        return (mean + gain @ (z - mean[:2]), p - gain @ p[:2]), mean[0]

    zs = jnp.sin(jnp.arange(2.0 * n)).reshape(n, 2)
    (mean, _), ys = loopkit.scan(step, (jnp.ones(4), p), zs, **options)
    return jnp.sum(mean**2) + jnp.sum(ys)


@program(SMALL[:5, :5], jnp.ones((5, 1000)), steps=1000)
def hidden_markov(logits, likelihood, n, **options):
    transition = jax.nn.log_softmax(logits)

    def step(alpha, t):
        moved = jax.nn.logsumexp(alpha[:, None] + transition, 0)
        return moved + likelihood[:, t], None

    return jax.nn.logsumexp(loopkit.scan(step, jnp.zeros(5), jnp.arange(n), **options)[0])


@program(jnp.linspace(0.1, 1.0, 5000), steps=100)
def big_vector(x, n, **options):
    step = lambda x, _: (x + 1e-3 * jnp.sin(3 * x), None)
    return jnp.sum(loopkit.scan(step, x, None, n, **options)[0] ** 2)


@program(jnp.ones((400, 20)), jnp.ones(20), steps=400)
def table(rows, x, n, **options):
    step = lambda x, t: (jnp.sin(x + rows[t]), None)
    return jnp.sum(loopkit.scan(step, x, jnp.arange(n), **options)[0])


@program(jnp.ones((200, 20)), steps=200)
def buffers(rows, n, **options):
    def step(c, t):
        rows, x = c
        x = jnp.sin(x + rows[t] * rows[t // 2])
        return (rows.at[t].set(x), x), None

    start = rows, jnp.zeros(20)
    (_, x), _ = loopkit.scan(step, start, jnp.arange(n), buffers=lambda c: c[0], **options)
    return jnp.sum(x)


def newton(x, w, n, **options):
    step = lambda c: (c[0] + 1.0, jnp.tanh(w @ c[1]) + x)
    return jnp.sum(loopkit.while_loop(lambda c: c[0] < n, step, (0.0, x), **options)[1])


@program(jnp.ones(16), SMALL, steps=150)
def while_with_a_bound(x, w, n, **options):
    return newton(x, w, n, max_steps=n, **options)


@program(jnp.ones(16), SMALL, steps=150)
def while_without(x, w, n, **options):
    return newton(x, w, n, **options)


@program(jnp.ones(16), SMALL, steps=40)
def nested(x, w, n, **options):
    inner = lambda x, _: (jnp.tanh(w @ x), None)
    outer = lambda x, _: (loopkit.scan(inner, x, None, 30)[0] + x, None)
    return jnp.sum(loopkit.scan(outer, x, None, n, **options)[0])


@program(jnp.linspace(0.1, 1.0, 8 * 16).reshape(8, 16), SMALL, steps=60)
def lanes(x, w, n, **options):
    stops = n - jnp.arange(8.0)
    alone = lambda x, stop: newton(x, w, stop, max_steps=n, **options)
    return jnp.sum(jax.vmap(alone)(x, stops))


@program(SMALL, jnp.cos(jnp.arange(256.0)).reshape(16, 16), steps=100)
def descent(w, x, n, **options):
    """Steps of gradient descent: to make the residuals of a step takes half of a run."""
    loss = lambda w: jnp.mean((jnp.tanh(x @ w) @ w - x) ** 2)
    step = lambda w, _: (w - 0.5 * jax.grad(loss)(w), None)
    return loss(loopkit.scan(step, w, None, n, **options)[0])


@program(jnp.tile(SMALL, (1, 3)), jnp.ones(16), steps=64)
def decoder(w, x, n, **options):
    """Attention over a cache that the carry holds: there is room for few carries."""

    def step(c, t):
        x, cache = c
        q, k, v = jnp.split(x @ w, 3)
        cache = jax.lax.dynamic_update_index_in_dim(cache, jnp.stack([k, v]), t, 0)
        weights = jax.nn.softmax(jnp.where(jnp.arange(n) <= t, cache[:, 0] @ q, -1e9))
        return (x + weights @ cache[:, 1], cache), None

    (x, _), _ = loopkit.scan(step, (x, jnp.zeros((n, 2, 16))), jnp.arange(n), **options)
    return jnp.sum(x**2)
