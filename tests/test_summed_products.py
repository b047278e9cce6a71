"""Loops that store all residuals, and sum products of a weight's gradient many steps at once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from derivatives import assert_close
from loopkit import Plan
from loopkit._jaxprs.kernels import summed_at_once
from loopkit._plans.costs import StepCosts

WIDTH = 66  # a matrix of 64 bits is larger than `cost.SMALLEST`
ROWS = 7


def data(length):
    k = jax.random.split(jax.random.key(length), 3)
    w = jax.random.normal(k[0], (2, WIDTH, WIDTH)) / WIDTH**0.5
    return (
        tuple(w),
        jax.random.normal(k[1], (ROWS, WIDTH)),
        jax.random.normal(k[2], (length, WIDTH)),
    )


def dense(w, h, x):
    h = jnp.tanh(h @ w[0] + x @ w[1])
    return h, h.sum(0)


def stacked(w, h, x):
    """A step whose matrices are parts of one array; one of them is read twice."""
    h = jnp.tanh(h @ w[0] + x @ w[1])
    return jnp.sin(h @ w[0].T), h[0]


def sorted_rows(w, h, x):
    """A step that is no single kernel, whose rows are copied a few at a time."""
    h = jnp.sort(jnp.tanh(h @ w[0] + x @ w[1]), 0)
    return h, h[0]


def unrolled(step, h, xs, reverse=False, **_):
    ys = []
    for x in xs[::-1] if reverse else xs:
        h, y = step(h, x)
        ys.append(y)
    return h, jnp.stack(ys[::-1] if reverse else ys)


def loss(scan, step, w, h, xs, **how):
    h, ys = scan(partial(step, w), h, xs, **how)
    return jnp.sum(jnp.sin(h)) + jnp.sum(ys**2)


def gradient(scan, step, **how):
    return jax.grad(partial(loss, scan, step, **how), argnums=(0, 1, 2))


WAYS = [{"checkpoints": "all"}, {"memory": 10**9}, {"checkpoints": "all", "reverse": True}]


@pytest.mark.every_case
@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize(
    ("step", "length"), [(dense, 127), (dense, 130), (stacked, 130), (sorted_rows, 130)]
)
def test_gradients_are_those_of_a_python_loop(step, length, how):
    at = data(length)
    if step is stacked:
        at = jnp.stack(at[0]), *at[1:]
    with jax.disable_jit():
        wanted = gradient(unrolled, step, **how)(*at)
    assert_close(jax.jit(gradient(loopkit.scan, step, **how))(*at), wanted)


@pytest.mark.parametrize("outer", ["vmap", "jvp", "second"])
def test_other_derivatives_are_those_of_lax(outer):
    w, h, xs = data(128)

    def derivative(scan, **how):
        grad = gradient(scan, dense, **how)
        if outer == "vmap":
            return jax.vmap(lambda s: grad(w, s * h, xs))(jnp.arange(3.0))
        if outer == "jvp":
            return jax.jvp(lambda w: loss(scan, dense, w, h, xs, **how), (w,), (w,))
        return jax.jvp(lambda w, h: grad(w, h, xs), (w, h), (jax.tree.map(jnp.cos, w), jnp.sin(h)))

    assert_close(derivative(loopkit.scan, checkpoints="all"), derivative(jax.lax.scan))


def test_loops_of_lax_are_replaced():
    """Lax's own loop, which adds to the sum in every step, takes longer."""
    at = data(128)
    replaced = loopkit.checkpointed(partial(loss, jax.lax.scan, dense), checkpoints="all")
    found = jax.grad(replaced, argnums=(0, 1, 2))
    assert_close(found(*at), gradient(jax.lax.scan, dense)(*at))
    assert "loopkit" in str(jax.make_jaxpr(replaced)(*at))


@pytest.mark.parametrize("step", [dense, stacked])
def test_factors_of_many_steps_are_kept(step):
    w, *at = data(128)
    w = jnp.stack(w) if step is stacked else w
    lowered = jax.jit(gradient(loopkit.scan, step, checkpoints="all")).lower(w, *at)
    assert f"tensor<16x{ROWS}x{WIDTH}xf64>" in lowered.as_text()


def test_when_products_are_summed():
    """The number of steps divides all steps, and they are at most an eighth of them."""
    numbers = [summed_at_once(steps) for steps in (0, 100, 127, 128, 1000, 1024)]
    assert numbers == [0, 0, 0, 16, 20, 16]
    step = StepCosts(8, 8, factor_bytes=64, product_bytes=1 << 16)
    whole = Plan(1, segment=128, store="residuals", keeps_all=True, bound=128, exact=True)
    plan = lambda **how: Plan(**{**vars(whole), "step": step, **how})
    assert plan().summed == 16
    assert plan(step=step._replace(factor_bytes=0)).summed == 0
    assert plan(exact=False).summed == plan(host=True).summed == 0
    assert plan().row_bytes == 16 * (8 + 64)
    assert plan().nanoseconds(128) < plan(exact=False).nanoseconds(128)


def test_bounded_while_loops_add_in_every_step():
    """The number of steps is not known, so rows of steps not taken would be read."""
    w, h, xs = data(128)

    def total(loops, w, **how):
        go = lambda c: c[0] < 100
        body = lambda c: (c[0] + 1, dense(w, c[1], xs[c[0]])[0])
        return loops.while_loop(go, body, (0, h), **how)[1].sum()

    found = jax.grad(lambda w: total(loopkit, w, max_steps=128, checkpoints="all"))(w)
    h_end = lambda w: unrolled(partial(dense, w), h, xs[:100])[0].sum()
    with jax.disable_jit():
        assert_close(found, jax.grad(h_end)(w))


def test_a_policy_sums_products_of_many_steps():
    at = data(128)
    policy = jax.checkpoint_policies.dots_saveable
    found = jax.jit(gradient(loopkit.scan, dense, checkpoints=policy))(*at)
    assert_close(found, gradient(jax.lax.scan, dense)(*at))
    assert all(np.isfinite(v).all() for v in found)
