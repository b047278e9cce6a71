"""Slices of constants that products read are cut out before the forward sweep."""

import functools as ft
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from loopkit._engine.derivative.split import cut_ahead
from loopkit._jaxprs import equations

from .small_loops import assert_same, make_loop, run

W = np.random.default_rng(0).normal(size=(3, 4, 4)) / 2
H = np.linspace(-1, 1, 8).reshape(2, 4)


def names(jaxpr):
    return [eqn.primitive.name for eqn in equations.all_equations(jaxpr)]


def body(consts, carry, x):
    """A slice that two products read, a part of a slice, one for a call, and two that are fused."""
    (w, scale), (h,) = consts, carry
    a = jnp.tanh(h @ w[0] + x[0]) @ w[0]
    b = jnp.einsum("ij,jk->ik", a, w[1])
    c = h[:, :2] @ w[2].reshape(2, 8)[:, 4:]
    return [h * scale[0] + jnp.tanh(b + c) * scale[1]], [a @ w[0, :2].T]


def test_what_products_read_is_cut_out_once():
    loop, operands = make_loop(body, [W, np.array([0.5, 0.7])], [H], [np.arange(3.0)])
    half, new, given = cut_ahead(loop.body, loop, operands)
    pieces = [W[0], W[0], W[1], W[2].reshape(2, 8)[:, 4:], W[0, :2]]
    assert_same(given.consts[2:], pieces)
    assert len(new.consts) == len(loop.consts) + len(pieces)
    assert half is not loop.body
    # The slices of `scale` and of the carry are fused with what reads them.
    assert names(new.body).count("slice") == names(half).count("slice") == 3
    assert_same(run(new, given), run(loop, operands))


def test_without_products_nothing_changes():
    fused = lambda consts, carry, x: ([carry[0] * consts[0][1, 0] + x[0]], [])
    loop, operands = make_loop(fused, [W], [H], [np.arange(3.0)])
    same = cut_ahead(loop.body, loop, operands)
    assert all(a is b for a, b in zip(same, (loop.body, loop, operands), strict=True))


def loss(scan):
    def of(w, h):
        def step(h, x):
            (h,), (y,) = body([w, w[0, 0]], [h], [x])
            return h, y

        h, ys = scan(step, h, jnp.arange(4.0))
        return jnp.sum(h**2) + jnp.sum(jnp.sin(ys))

    return of


def unrolled(step, h, xs):
    pairs = list(itertools.accumulate(xs, lambda s, x: step(s[0], x), initial=(h, None)))
    return pairs[-1][0], jnp.stack([y for _, y in pairs[1:]])


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [None, 2, "all", loopkit.Plan(3)])
def test_numbers_are_those_of_the_steps_written_out(checkpoints):
    """Gradients, their derivative along a direction, and a gradient for each of two lanes."""
    ours = loss(lambda step, h, xs: loopkit.scan(step, h, xs, checkpoints=checkpoints))

    @ft.partial(jax.jit, static_argnums=0)
    def found(f, w, hs):
        gradient = jax.grad(f, (0, 1))
        at = w, hs[0]
        lanes = (
            [gradient(w, h) for h in hs] if f is not ours else jax.vmap(gradient, (None, 0))(w, hs)
        )
        return lanes, jax.jvp(gradient, at, (jnp.sin(w), jnp.cos(hs[0])))

    args = jnp.asarray(W), jnp.stack([H, -H])
    (lanes, there), (apart, wanted) = found(ours, *args), found(loss(unrolled), *args)
    together = jax.tree.map(lambda *values: jnp.stack(values), *apart)
    for pair in ((lanes, together), (there, wanted)):
        for a, b in zip(*map(jax.tree.leaves, pair), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)
