"""Steps that read other lanes without the name of an axis: each lane has what it has in lax."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.custom_batching import custom_vmap

import loopkit
from derivatives import assert_close

eqxi = pytest.importorskip("equinox.internal")

COUNTS, STARTS = jnp.array([1, 6, 4, 0, 5]), jnp.array([0.3, 0.1, 0.2, 0.25, 0.15])
KEYS = jax.random.split(jax.random.key(3, impl="rbg"), 5)


@custom_vmap
def mean(x):
    return x


@mean.def_vmap
def _(size, batched, x):
    return jnp.broadcast_to(jnp.mean(x, 0), x.shape), True


STEPS = {
    "any": lambda x, key: jnp.where(eqxi.unvmap_any(x > 0.5), jnp.sin(x), 0.9 * x + 0.3),
    "custom": lambda x, key: jnp.sin(x * (1 + mean(x))) + 0.3,
    # A generator that draws for a whole batch from its first key.
    "rbg": lambda x, key: jnp.sin(x * (1 + jax.random.normal(key))),
}
SETTINGS = [{}, {"checkpoints": 2}, {"checkpoints": "all", "max_steps": 8}]
SETTINGS += [{"lanes": "compact"}, {"lanes": (3, 2)}, {"lanes": "flatten"}]


def run(name, loop=lax.while_loop):
    def step(c):
        k, x, key = c
        return k + 1, STEPS[name](x, jax.random.fold_in(key, k)), key

    def last(n, x, key):
        return loop(lambda c: c[0] < n, step, (0, x, key))[1]

    return last


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_derivatives_are_those_of_lax(name, settings):
    """A lane that has stopped goes on to be read, and what it holds has a cotangent from others."""
    loss = lambda f: lambda x: jnp.sum(jax.vmap(f)(COUNTS, x, KEYS) ** 2)
    plain = loss(run(name))
    around, inside = (
        loss(loopkit.checkpointed(run(name), **settings)),
        loopkit.checkpointed(plain, **settings),
    )
    assert_close(around(STARTS), plain(STARTS))
    wanted = jax.jacfwd(plain)(STARTS), jax.jacfwd(jax.jacfwd(plain))(STARTS)
    for f in (around, inside):
        slope = jax.grad(f)
        assert_close((slope(STARTS), jax.jacfwd(slope)(STARTS)), wanted)
    assert_close(jax.jacrev(jax.grad(around))(STARTS), wanted[1])


@pytest.mark.parametrize("name", STEPS)
def test_loops_of_loopkit(name):
    loss = lambda f: lambda x: jnp.sum(jax.vmap(f)(COUNTS, x, KEYS) ** 2)
    wanted = jax.jacfwd(loss(run(name)))(STARTS)
    assert_close(jax.jit(jax.grad(loss(run(name, loopkit.while_loop))))(STARTS), wanted)


@pytest.mark.parametrize("name", ["any", "rbg"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_gradients_of_each_lane(name, settings):
    wanted = jax.vmap(jax.jacfwd(run(name), 1))(COUNTS, STARTS, KEYS)
    slope = jax.grad(loopkit.checkpointed(run(name), **settings), 1)
    assert_close(jax.vmap(slope)(COUNTS, STARTS, KEYS), wanted)


def test_a_scan_that_stops():
    """It reads slices that a stopped lane does not take, and returns a row of each step."""
    xs = 0.3 * jnp.sin(jnp.arange(35.0)).reshape(5, 7)

    def scanned(n, x, xs):
        def step(s, x):
            k, h = s
            h = jnp.sin(h + mean(h) / 2 + x)
            return (k + 1, h), h * x

        (_, h), ys = loopkit.scan(step, (0, x), xs, until=lambda s, _: s[0] > n)
        return h, ys

    def in_lax(n, x, xs):
        def step(s):
            k, h, ys = s
            h = jnp.sin(h + mean(h) / 2 + xs[k])
            return k + 1, h, ys.at[k].set(h * xs[k])

        last = lax.while_loop(lambda s: (s[0] < 7) & (s[0] <= n), step, (0, x, jnp.zeros(7)))
        return last[1:]

    def loss(f):
        def of(x, xs):
            h, ys = jax.vmap(f)(COUNTS, x, xs)
            return jnp.sum(h**2) + jnp.sum(jnp.sin(ys))

        return of

    wanted = jax.jacfwd(loss(in_lax), (0, 1))(STARTS, xs)
    assert_close(jax.grad(loss(scanned), (0, 1))(STARTS, xs), wanted)


def test_a_question_of_the_user_to_all_lanes_stays():
    """Equinox's own question is removed where its lanes narrow."""

    def steps(x):
        goes_on = lambda c: (c[0] < 5) & eqxi.unvmap_any(c[1] < 3)
        return eqxi.while_loop(goes_on, lambda c: (c[0] + 1, c[1] + 1), (0, x), kind="lax")[0]

    xs = jnp.array([0.0, 1.0, 2.0])
    narrow = jax.vmap(loopkit.checkpointed(steps, lanes=(2, 1)))
    assert_close(narrow(xs), jax.vmap(steps)(xs))


def test_a_flat_loop_asks_no_other_lanes():
    """There each lane would be in a step of its own, and the question never answered."""

    def run(n, x):
        def outer(c):
            inner = lambda d: (d[0] + 1, jnp.sin(d[1]))
            goes_on = lambda d: d[0] < (c[0] + n) % 4
            return c[0] + 1, eqxi.while_loop(goes_on, inner, (0, c[1]), kind="lax")[1]

        return lax.while_loop(lambda c: c[0] < n, outer, (0, x))

    ns, xs = jnp.array([3, 0, 7]), jnp.linspace(-1.0, 1.0, 3)
    flat = jax.jit(jax.vmap(loopkit.checkpointed(run, lanes="flatten")))
    assert_close(flat(ns, xs), jax.vmap(run)(ns, xs))
