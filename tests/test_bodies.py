"""Other control flow, derivatives and calls in the body of a loop."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from derivatives import assert_close
from test_nesting import XS, derivatives, loop, stopping_scan
from tolerances import assert_near


def scan_body(x, w):
    return lax.scan(lambda x, y: (jnp.sin(x + w * y), x), x, XS)[0]


def map_body(x, w):
    return x / 4 + jnp.sum(lax.map(lambda y: jnp.sin(w * y + x), XS)) / 4


def cond_body(x, w):
    return lax.cond(x < 0.7, lambda: jnp.sin(x + w), lambda: x * w)


def switch_body(x, w):
    branches = [lambda x: x * w, lambda x: jnp.sin(x) + w, lambda x: x / 2]
    return lax.switch(jnp.int32(x * 4) % 3, branches, x)


def fori_body(x, w):
    return lax.fori_loop(0, 3, lambda i, x: jnp.sin(w * x) + i / 10, x)


def jit_body(x, w):
    return jax.jit(lambda x: jnp.sin(w * x))(x) + 0.2


def remat_body(x, w):
    return jax.checkpoint(lambda x, w: jnp.sin(w * x) * x + 0.3)(x, w)


def vmap_body(x, w):
    return jnp.sum(jax.vmap(lambda y: jnp.sin(x + w * y))(XS)) / 3


def grad_body(x, w):
    return x - 0.3 * jax.grad(lambda x: jnp.sin(w * x) * x)(x)


def hessian_body(x, w):
    return x - 0.1 * jax.hessian(lambda x: jnp.sin(w * x) * x)(x)


def loop_body(x, w):
    return loop(x / 2, w)


def stopping_scan_body(x, w):
    return stopping_scan(x / 2, w)


def linear_solve_body(x, w):
    matrix = jnp.asarray([[2.0, 0.5], [0.5, 1.0]]) + w * jnp.eye(2)
    return jnp.sum(jnp.linalg.solve(matrix, jnp.stack([x, jnp.sin(x)])))


def no_body(x, w):
    return x


BODIES = [
    *[scan_body, map_body, cond_body, switch_body, fori_body, jit_body, remat_body, vmap_body],
    *[grad_body, hessian_body, loop_body, stopping_scan_body, linear_solve_body, no_body],
]


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_inside_the_body(body):
    def looped(x, w):
        step = lambda carry: (carry[0] + 1, body(carry[1], w))
        return loopkit.while_loop(lambda c: c[0] < 4, step, (0, x), checkpoints=2)[1]

    def reference(x, w):
        for _ in range(4):
            x = body(x, w)
        return x

    assert_close(derivatives(looped)(0.4, 0.7), derivatives(reference)(0.4, 0.7))


TWO = np.array([1.0, 2.0])
"""A constant of a jitted function that closes over it."""


def table_of_a_call(loops, x):
    table = jnp.ones((5, 3, 2)) * x
    step = jax.jit(lambda table, i, h: h + table[i] * TWO)
    return loops.fori_loop(0, 3, lambda i, h: step(table, i, h), jnp.zeros((3, 2)))


def buffer_of_a_call(loops, x):
    step = jax.jit(lambda b, i: b.at[i].set(jnp.sin(b[i] * TWO)))
    how = {} if loops is lax else {"buffers": True}
    return loops.fori_loop(0, 3, lambda i, b: step(b, i), jnp.ones((5, 2)) * x, **how)


def devices_of_a_call(loops, x):
    step = jax.jit(lambda w: w * TWO)
    mesh, P = jax.sharding.Mesh(jax.devices()[:2], "d"), jax.sharding.PartitionSpec

    @ft.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
    def run(w, h):
        if loops is lax:  # has no gradient
            return lax.fori_loop(0, 3, lambda _, h: 0.5 * h + step(w), h)
        goes_on = lambda s: s[0] + 0 * s[1].sum() < 3  # on each device for itself
        body = lambda s: (s[0] + 1, 0.5 * s[1] + step(w))
        return loops.while_loop(goes_on, body, (0.0, h))[1]

    return jax.jit(run)(x, jnp.ones((2, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("program", [table_of_a_call, buffer_of_a_call, devices_of_a_call])
def test_calls_with_arrays_of_their_own(program):
    def both(loops):
        return jax.value_and_grad(lambda x: jnp.sum(jnp.sin(program(loops, x))))(0.3)

    assert_near(both(loopkit), both(lax))
