"""The loops of the frontier: steps with inputs and outputs, from small to large carries.

| name   | step                                            | carry | steps  | bound by            |
| ------ | ----------------------------------------------- | ----- | ------ | ------------------- |
| mlp    | residual two-layer network on a 64x64 state     | 16 kB | 1000   | matrix products     |
| vector | `x + 1e-3 * sin(p * x)` on 10,000 numbers       | 40 kB | 2000   | memory traffic      |
| lorenz | one Runge-Kutta step of three numbers           | 12 B  | 10,000 | overhead of a step  |
| gru    | a gated recurrent unit, batch 32, width 128, ys | 16 kB | 1000   | weights, every step |
| field  | reaction and diffusion on a 1024x1024 grid      | 4 MB  | 100    | memory, not cache   |
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import workloads


class Case(NamedTuple):
    """A loop to differentiate: `step(params, carry, x) -> (carry, y)`."""

    name: str
    step: Callable
    params: Any
    init: Any
    xs: Any
    length: int


def gru_step(params, h, x):
    w, u, b = params
    update, reset, candidate = jnp.split(x @ w + b, 3, axis=-1)
    u_update, u_reset, u_candidate = jnp.split(h @ u, 3, axis=-1)
    z = jax.nn.sigmoid(update + u_update)
    r = jax.nn.sigmoid(reset + u_reset)
    h = z * h + (1 - z) * jnp.tanh(candidate + r * u_candidate)
    return h, h


def field_step(p, x, _):
    laplacian = (
        jnp.roll(x, 1, 0) + jnp.roll(x, -1, 0) + jnp.roll(x, 1, 1) + jnp.roll(x, -1, 1) - 4 * x
    )
    return x + p[0] * laplacian + p[1] * (x - x**3), None


def make(name: str, length: int | None = None) -> Case:
    keys = jax.random.split(jax.random.key(1), 4)
    if name == "gru":
        params = (
            jax.random.normal(keys[0], (128, 384)) / 11,
            jax.random.normal(keys[1], (128, 384)) / 11,
            jnp.zeros(384),
        )
        length = length or 1000
        xs = jax.random.normal(keys[2], (length, 32, 128))
        return Case(name, gru_step, params, jnp.zeros((32, 128)), xs, length)
    if name == "field":
        init = jax.random.normal(keys[0], (1024, 1024)) / 10
        return Case(name, field_step, jnp.array([0.1, 0.01]), init, None, length or 100)
    if name == "decay":  # stays finite however long it runs
        init = jax.random.normal(keys[0], (256,))
        step = lambda p, x, _: (x - 1e-3 * p * jnp.sin(x), None)
        return Case(name, step, jnp.ones(256), init, None, length or 1000)
    load = workloads.make(name)

    def step(params, x, _):
        return load.body(params, x), None

    return Case(name, step, load.params, load.init, None, length or load.steps)


NAMES = (*workloads.NAMES, "gru", "field")


def gradient(run: Callable, case: Case) -> Callable:
    """`(params, init, xs, n) -> gradients` of `run(step, init, xs, length, n) -> (carry, ys)`."""

    def loss(params, init, xs, n):
        def step(carry, x):
            return case.step(params, carry, x)

        carry, ys = run(step, init, xs, case.length, n)
        total = jnp.sum(carry**2)
        return total if ys is None else total + jnp.sum(ys**2)

    return jax.grad(loss, argnums=(0, 1))
