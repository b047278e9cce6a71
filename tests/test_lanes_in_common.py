"""Loops whose lanes go on together, as equinox writes them, and what all lanes share in them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import loopkit
from derivatives import assert_close

eqxi = pytest.importorskip("equinox.internal")

STEPS = jnp.array([3, 0, 7, 2, 9, 1, 4, 4, 8, 2, 1, 0])
STARTS = jnp.linspace(-1.0, 1.0, len(STEPS))
POLICIES = [None, "wait", "compact", (6, 3), "flatten"]


def of_equinox(n, x):
    """Take n steps, each of which also changes a number and rows of a table."""

    def step(c):
        k, x, table = c
        return k + 1, jnp.sin(x) + x / 2, table.at[k % 4].set(x)

    table = jnp.zeros(4)
    goes_on, how = lambda c: c[0] < n, {"max_steps": 16, "kind": "lax"}
    return eqxi.while_loop(goes_on, step, (0, x, table), buffers=lambda c: c[2], **how)


def beside_each_other(n, x):
    """Take n steps in this lane; other leaves change until the last lane stops."""

    def step(c):
        go = c["k"] < n
        k, new = jnp.where(go, c["k"] + 1, c["k"]), jnp.where(go, jnp.sin(c["x"]), c["x"])
        rest = {"each": c["each"] + 1.5, "up": c["up"] + 2, "product": 2 * c["product"]}
        return {"k": k, "x": new, **rest}

    init = {"k": 0, "x": x, "each": x, "up": 5, "product": 1}
    return lax.while_loop(lambda c: eqxi.unvmap_any(c["k"] < n), step, init)


LOOPS = [of_equinox, beside_each_other]


@pytest.mark.parametrize("lanes", POLICIES, ids=str)
@pytest.mark.parametrize("f", LOOPS)
def test_results_are_those_of_lax(f, lanes):
    """Also of a lane that changes after it has stopped, and of what all lanes share."""
    wanted = jax.vmap(f)(STEPS, STARTS)
    around = jax.vmap(loopkit.checkpointed(f, lanes=lanes))
    assert_close(around(STEPS, STARTS), wanted)
    inside = jax.jit(loopkit.checkpointed(jax.vmap(f), lanes=lanes))
    assert_close(inside(STEPS, STARTS), wanted)


@pytest.mark.parametrize("lanes", POLICIES, ids=str)
@pytest.mark.parametrize("f", LOOPS)
@pytest.mark.parametrize("crossed", [False, True])
def test_lanes_of_two_axes(f, lanes, crossed):
    ns, xs, inner, outer = STEPS.reshape(3, 4), STARTS.reshape(3, 4), (0, 0), (0, 0)
    if crossed:
        ns, xs, inner, outer = STEPS[:3], STARTS[:4], (None, 0), (0, None)
    twice = lambda f: jax.vmap(jax.vmap(f, inner), outer)
    replaced = twice(loopkit.checkpointed(f, lanes=lanes))
    assert_close(replaced(ns, xs), twice(f)(ns, xs))


@pytest.mark.parametrize("lanes", POLICIES, ids=str)
def test_derivatives_are_those_of_each_lane(lanes):
    def alone(n, x):
        for _ in range(int(n)):
            x = jnp.sin(x) + x / 2
        return x**2

    in_python = lambda xs: sum(alone(*of) for of in zip(STEPS, xs, strict=True))
    many = jax.vmap(loopkit.checkpointed(of_equinox, lanes=lanes))
    loss = lambda xs: jnp.sum(many(STEPS, xs)[1] ** 2)
    assert_close(jax.grad(loss)(STARTS), jax.grad(in_python)(STARTS))
    moved = lambda f: jax.jvp(jax.grad(f), (STARTS,), (jnp.cos(STARTS),))[1]
    assert_close(moved(loss), moved(in_python))


def test_which_of_them_narrow():
    loops = lambda f: len(loopkit.explain(jax.vmap(f), STEPS, STARTS).loops)
    assert loops(loopkit.checkpointed(of_equinox, lanes=(6, 3))) == 3
    assert loops(loopkit.checkpointed(of_equinox, lanes="wait")) == 1
    assert loops(loopkit.checkpointed(beside_each_other, lanes=(6, 3))) == 1


@pytest.mark.parametrize("count", [2, 70])
@pytest.mark.parametrize("lanes", [None, "compact", "flatten"], ids=str)
def test_loops_that_must_not_differ_between_lanes(lanes, count):
    """Equinox's checkpointed loop has a rule of its own, which counts steps for all lanes."""

    def last(x):
        how = {"max_steps": 16, "kind": "checkpointed", "checkpoints": 4}
        return eqxi.while_loop(lambda y: y < 1, lambda y: 1.5 * y + 0.1, x, **how)

    xs = jnp.linspace(0.01, 0.9, count)
    loss = lambda f: lambda xs: jnp.sum(f(xs) ** 2)
    wanted = jax.grad(loss(jax.vmap(last)))(xs)
    inside = loopkit.checkpointed(jax.vmap(last), lanes=lanes)
    assert_close(jax.grad(loss(inside))(xs), wanted)
    around = jax.vmap(loopkit.checkpointed(last, lanes=lanes))
    assert_close(jax.jit(jax.grad(loss(around)))(xs), wanted)
