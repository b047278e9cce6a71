"""Loops that show how far they are, for tests of bars."""

import jax
import jax.numpy as jnp

import loopkit
from kinds import loop

N = 11


def looped(kind, show, x, n=N, **how):
    most = n + 1 if kind in ("until", "while") else None
    return loop(kind, lambda i, y: jnp.sin(y) + i / 8, x, n, most=most, progress=show, **how)


def jvp(f):
    return lambda x: jax.jvp(f, (x,), (1.0,))


TRANSFORMS = {
    "value": (lambda f: f, [N], []),
    "jit": (jax.jit, [N], []),
    "jvp": (jvp, [N], []),
    "jit of jvp": (lambda f: jax.jit(jvp(f)), [N], []),
    "grad": (jax.grad, [N], [N]),
    "jit of grad": (lambda f: jax.jit(jax.grad(f)), [N], [N]),
    "value and grad": (lambda f: jax.jit(jax.value_and_grad(f)), [N], [N]),
    "linearize": (lambda f: lambda x: jax.linearize(f, x)[1](1.0), [N], []),
    "remat": (lambda f: jax.grad(jax.checkpoint(f)), [N], [N]),
    "jit of remat": (lambda f: jax.jit(jax.value_and_grad(jax.checkpoint(f))), [N], [N]),
    "vmap": (lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x, x])), [N], []),
    "vmap of grad": (lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, x])), [N], [N]),
}


def nested(show, x, inner="while", **how):
    body = lambda i, y: looped(inner, show, y, 3)
    return loop("scan", body, x, 4, progress=show, **how)


def stops_at(show, x, n, **how):
    body = lambda c: (c[0] + 1, jnp.sin(c[1]))
    return loopkit.while_loop(lambda c: c[0] < n, body, (0, x), max_steps=9, progress=show, **how)[
        1
    ]


def step(c, x):
    return jnp.sin(c) + x, c


ONES = jnp.ones(N)


STOPS = {"until": lambda _, y: y > 1.9}
