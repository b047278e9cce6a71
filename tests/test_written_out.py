"""Loops that are written out in Python: what runs again, and cotangents of what they slice."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from derivatives import assert_close
from loopkit._jaxprs import equations
from test_one_budget import compiled_bytes
from test_straight_line import RUNS_AGAIN, least


def recurrent(w, x):
    """Steps in a Python loop that share their weights."""
    h = x
    for _ in range(24):
        h = jnp.tanh(h @ w + x)
    return jnp.sum(h**2)


@pytest.mark.slow
def test_cotangents_of_shared_weights_do_not_wait_for_each_other():
    """A compiler that sums all of them at the end keeps all of them until then."""
    args = jnp.sin(jnp.arange(64.0 * 64).reshape(64, 64)), jnp.cos(jnp.arange(256.0).reshape(4, 64))
    budget = least(recurrent, *args)
    budgeted = loopkit.checkpointed(recurrent, memory=budget)
    used, whole = (compiled_bytes(f, *args) for f in (budgeted, recurrent))
    assert 1.25 * budget < 0.3 * whole
    assert (used <= 1.25 * budget) == RUNS_AGAIN
    slopes = (jax.jit(jax.grad(f, (0, 1)))(*args) for f in (budgeted, recurrent))
    assert_close(*slopes)


@pytest.mark.slow
def test_complex_values_that_a_plan_would_store_run_again():
    """JAX raises an error if a policy saves complex values by name."""
    x = jnp.linspace(0.1, 1.0, 16 * 24).reshape(16, 24).astype(complex)
    w = jnp.sin(jnp.arange(12.0 * 24 * 24)).reshape(12, 24, 24).astype(complex) / 5

    def f(x):
        for k in range(12):
            x = x + jnp.tanh(x @ w[k]) * jnp.cos(x)
        return jnp.sum(jnp.abs(x) ** 2)

    got = jax.jit(jax.grad(loopkit.checkpointed(f, memory=200_000)))(x)
    assert_close(got, jax.jit(jax.grad(f))(x))


def gated(read, xs, w, h):
    """A gated unit that reads a row of `xs` in each of its steps."""
    for k in range(len(xs)):
        x = read(xs, k)
        update = jax.nn.sigmoid(x + h @ w[0])
        h = update * h + (1 - update) * jnp.tanh(x - (jnp.cos(h) * h) @ w[1])
    return jnp.mean(h**2)


READS = {
    "static": lambda xs, k: xs[k],
    "traced": lambda xs, k: xs[jnp.asarray(k)],
    "overlapping": lambda xs, k: jnp.sum(xs[max(0, k - 2) : k + 1], 0),
    "columns": lambda xs, k: lax.dynamic_index_in_dim(jnp.swapaxes(xs, 0, 1), k, 1, False),
    "several rows": lambda xs, k: jnp.sum(xs[jnp.array([k, 0, -1])], 0),
}


def rows(steps=8, batch=4, width=8):
    wave = lambda *shape: jnp.sin(jnp.arange(np.prod(shape) * 1.0)).reshape(shape)
    return wave(steps, batch, width), wave(2, width, width) / 5, wave(batch, width)


def primitives(f, *args):
    jaxpr = equations.inlined(jax.make_jaxpr(f)(*args))
    return Counter(eqn.primitive.name for eqn in equations.all_equations(jaxpr))


BUDGETS = 1.0, 1.5, 100.0
"""Times the fewest bytes that will do."""


def within(f, args, times):
    return loopkit.checkpointed(f, memory=int(times * least(f, *args)))


@pytest.mark.slow
@pytest.mark.parametrize("times", BUDGETS)
@pytest.mark.parametrize("read", READS)
def test_every_derivative_is_that_without_a_budget(read, times):
    f, args = partial(gated, READS[read]), rows()
    budgeted = within(f, args, times)

    def all_of(f):
        slope = jax.grad(f, (0, 1, 2))
        second = jax.jvp(slope, args, args)
        lanes = jax.vmap(slope, (0, None, None))(jnp.stack([args[0], jnp.cos(args[0])]), *args[1:])
        return f(*args), jax.jvp(f, args, args), second, lanes

    assert_close(jax.jit(lambda: all_of(budgeted))(), jax.jit(lambda: all_of(f))())


@pytest.mark.slow
@pytest.mark.parametrize("times", BUDGETS)
def test_cotangents_of_slices_are_added_in_place(times):
    """JAX pads each to the size of the array: steps times steps in all."""
    f, args = partial(gated, READS["static"]), rows()
    gradients = [jax.grad(f, (0, 1, 2)) for f in (f, within(f, args, times))]
    plain, budgeted = (primitives(g, *args) for g in gradients)
    assert plain["pad"] >= len(args[0])
    assert budgeted["pad"] == 0
    assert_close(*(jax.jit(g)(*args) for g in gradients))


def test_cotangents_of_slices_beside_loops_are_added_in_place():
    """In every budget, also if nothing runs again."""

    def f(xs, w, h):
        h = h * gated(READS["static"], xs, w, h)
        return jnp.sum(lax.scan(lambda c, x: (jnp.tanh(c @ w[0]) + x, None), h, xs)[0])

    args = rows()
    gradients = [jax.grad(f, (0, 1, 2)) for f in (f, within(f, args, 1.0), within(f, args, 100.0))]
    counts = [primitives(g, *args)["pad"] for g in gradients]
    assert counts[0] >= len(args[0])
    assert counts[1:] == [0, 0]
    assert_close(*(jax.jit(g)(*args) for g in (gradients[0], gradients[2])))


@pytest.mark.slow
def test_steps_are_not_fused_with_each_other():
    """XLA for CPUs would compute what several kernels read in each of them."""

    def f(xs, h):
        for k in range(len(xs)):
            h = jnp.sin(h * xs[k]) + jnp.cos(h) * jnp.exp(xs[k - 1])
        return jnp.sum(h**2)

    args = jnp.linspace(0.1, 1.0, 24 * 500).reshape(24, 500), jnp.ones(500)
    gradients = [jax.jit(jax.grad(g, (0, 1))) for g in (f, loopkit.checkpointed(f, memory="1 GB"))]
    texts = [g.lower(*args).compile().as_text() for g in gradients]
    computed = [sum(text.count(f" {name}(") for name in ("sine", "cosine")) for text in texts]
    assert (computed[1] < 0.5 * computed[0]) == RUNS_AGAIN
    assert_close(*(g(*args) for g in gradients))


def test_a_few_slices_are_left_to_jax():
    f = lambda x: jnp.sum(jnp.sin(x[:4]) * jnp.cos(x[4:])) + jnp.sum(x)
    budgeted = loopkit.checkpointed(f, memory="1 MB")
    x = jnp.arange(8.0)
    assert primitives(jax.grad(budgeted), x) == primitives(jax.grad(f), x)


@pytest.mark.parametrize("act", [jax.nn.sigmoid, jnp.tanh, jnp.exp, jnp.sqrt, lambda x: x**-1.5])
def test_what_a_plan_stores_is_not_run_again(act):
    """JAX's derivative of exp reads its result as it was before it got the name that saves it."""

    def f(w, h):
        for _ in range(12):
            update = act(1.5 + 0.01 * h @ w[0])
            h = jnp.sin(h) * update + jnp.cos(update)
        return jnp.sum(h**2)

    args = rows(1, 16, 256)[1:]
    gradients = [jax.grad(f, (0, 1)), jax.grad(loopkit.checkpointed(f, memory="3 MB"), (0, 1))]
    if not getattr(jax.config, "jax_remat3", False):  # which finds later what runs again
        plain, stored = (primitives(g, *args) for g in gradients)
        assert stored["name"] > 0
        assert stored["dot_general"] == plain["dot_general"]
    assert_close(*(jax.jit(g)(*args) for g in gradients))
