"""The loops that are timed: three bodies, from compute-bound to overhead-bound.

| name   | body                                        | carry | steps  | what bounds it         |
| ------ | ------------------------------------------- | ----- | ------ | ---------------------- |
| mlp    | residual two-layer network on a 64x64 state | 16 kB | 1000   | matrix products        |
| vector | `x + 1e-3 * sin(p * x)` on 10,000 numbers   | 40 kB | 2000   | memory traffic         |
| lorenz | one Runge-Kutta step of three numbers       | 12 B  | 10,000 | the overhead of a step |
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Params = Any
Body = Callable[[Params, Array], Array]
Run = Callable[..., Array]  # run(body, params, init, n, bound), see contenders.py


class Workload(NamedTuple):
    name: str
    body: Body
    params: Params
    init: Array
    steps: int


def mlp_step(params: Params, x: Float[Array, "64 64"]) -> Float[Array, "64 64"]:
    w_in, b_in, w_out, b_out = params
    return x + 1e-2 * (jnp.tanh(x @ w_in + b_in) @ w_out + b_out)


def vector_step(p: Float[Array, " n"], x: Float[Array, " n"]) -> Float[Array, " n"]:
    return x + 1e-3 * jnp.sin(p * x)


def lorenz_step(p: Float[Array, "3"], x: Float[Array, "3"]) -> Float[Array, "3"]:
    def velocity(x):
        return jnp.stack(
            [p[0] * (x[1] - x[0]), x[0] * (p[1] - x[2]) - x[1], x[0] * x[1] - p[2] * x[2]]
        )

    dt = 1e-3
    k1 = velocity(x)
    k2 = velocity(x + dt / 2 * k1)
    k3 = velocity(x + dt / 2 * k2)
    k4 = velocity(x + dt * k3)
    return x + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def make(name: str) -> Workload:
    """Return the workload called `name`, with the same random parameters every time."""
    key_in, key_out, key_state = jax.random.split(jax.random.key(0), 3)
    if name == "mlp":
        params = (
            jax.random.normal(key_in, (64, 128)) / 8,
            jnp.zeros(128),
            jax.random.normal(key_out, (128, 64)) / 11,
            jnp.zeros(64),
        )
        return Workload(name, mlp_step, params, jax.random.normal(key_state, (64, 64)), 1000)
    if name == "vector":
        init = jax.random.normal(key_state, (10_000,))
        return Workload(name, vector_step, jnp.ones(10_000), init, 2000)
    if name == "lorenz":
        return Workload(name, lorenz_step, jnp.array([10.0, 28.0, 8 / 3]), jnp.ones(3), 10_000)
    raise ValueError(f"no workload is called {name!r}; there are {', '.join(NAMES)}")


NAMES = ("mlp", "vector", "lorenz")


# --- what is asked of a loop -----------------------------------------------------------------


def value_of(loop: Run, load: Workload, bound: int) -> Callable:
    def value(params, init, n):
        return loop(load.body, params, init, n, bound)

    return value


def jvp_of(loop: Run, load: Workload, bound: int) -> Callable:
    def tangent(params, init, n):
        def value(params, init):
            return loop(load.body, params, init, n, bound)

        return jax.jvp(value, (params, init), (params, init))

    return tangent


def grad_of(loop: Run, load: Workload, bound: int) -> Callable:
    def gradient(params, init, n):
        def loss(params, init):
            return jnp.sum(loop(load.body, params, init, n, bound) ** 2)

        return jax.grad(loss, argnums=(0, 1))(params, init)

    return gradient


def arguments(load: Workload, n: int) -> tuple:
    return load.params, load.init, jnp.int32(n)
