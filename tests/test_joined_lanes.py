"""Lanes of several axes that narrow as one set, and those that do not."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from derivatives import assert_close
from loopkit import _jax
from test_lanes import grow, grow_in_python
from test_nested_lanes import GRID, NS, SLOPE, WIDTHS, both, of_each, run, table


def lanes_of(f, *args):
    return [loop.lanes for loop in loopkit.explain(f, *args).loops]


@pytest.mark.exhaustive
def test_the_product_narrows():
    """One long lane in each row: rows alone would gain nothing."""
    ns = np.where(np.arange(16) == 3, 200, 2) * np.ones((16, 1), int)
    f = table(lambda n, x: grow(n, x, 0.9, lanes="compact"))
    xs = np.full((16, 16), 0.4)
    assert lanes_of(f, ns, xs) == [(256,), (112,), (40,), (12,)]
    between = jax.vmap(jax.jit(jax.vmap(lambda n, x: grow(n, x, 0.9, lanes="compact"))))
    assert lanes_of(between, ns, xs) == [(256,), (112,), (40,), (12,)]
    slope = jax.grad(lambda x: jnp.sum(f(ns, x)))
    assert {n for (n,) in lanes_of(slope, xs)} == {256, 112, 40, 12}
    each = table(jax.grad(lambda x, n: grow(n, x, 0.9, lanes="compact")))
    assert {n for (n,) in lanes_of(each, xs, ns)} == {256, 112, 40, 12}
    curve = table(jax.grad(jax.grad(lambda x, n: grow(n, x, 0.9, lanes="compact"))))
    assert {n for (n,) in lanes_of(curve, xs, ns)} == {256, 112, 40, 12}
    steps = []  # What is run is what is said: counted by the host, once a step of a lane.

    def counting(n, x, lanes):
        def body(c):
            jax.debug.callback(lambda _: steps.append(1), c[0])
            return c[0] + 1, jnp.sin(c[1])

        return loopkit.while_loop(lambda c: c[0] < n, body, (0, x), lanes=lanes)[1]

    taken = {}
    for lanes in ("wait", "compact"):
        steps.clear()
        jax.block_until_ready(table(ft.partial(counting, lanes=lanes))(ns, xs))
        jax.effects_barrier()
        taken[lanes] = len(steps)
    assert taken["wait"] == 256 * 200
    assert taken["compact"] < taken["wait"] / 6


@pytest.mark.slow
def test_few_lanes_of_many():
    """Eight, which are too few alone, in each of eight."""
    f = table(lambda n, x: grow(n, x, 0.9, lanes="compact"))
    ns, xs = np.resize(NS, (8, 8)), np.resize(GRID, (8, 8))
    assert lanes_of(f, ns, xs)[0] == (64,)
    assert len(lanes_of(f, ns, xs)) > 1
    want = [grow_in_python(n, x, 0.9) for n, x in zip(ns.ravel(), xs.ravel(), strict=True)]
    assert_close(jax.jit(f)(ns, xs).ravel(), jnp.asarray(want))


@pytest.mark.slow
def test_results_that_nobody_uses():
    def pair(n, x):
        body = lambda c: (c[0] + 1, jnp.sin(c[1]), jnp.cos(c[2]))
        return loopkit.while_loop(lambda c: c[0] < n, body, (0, x, x), lanes=WIDTHS)[1:]

    rows = jax.make_jaxpr(jax.vmap(pair))(NS[0], GRID[0])
    used, _ = _jax.dce(rows, [True, False], [True, True])
    assert " cos" not in str(used)
    f = lambda n, x: jax.vmap(_jax.call_jaxpr(used))(n, x)[0]
    assert lanes_of(f, NS, GRID) == [(24,), (8,), (3,)]
    assert_close(f(NS, GRID), of_each(lambda n, x: pair(n, x)[0], NS, GRID))


@pytest.mark.exhaustive
def test_what_would_have_to_be_copied():
    """A large array that each row has is not copied for each lane of it: the rows narrow then."""
    large = jnp.ones((4, 100, 100))

    def read(n, x, w):
        body = lambda c: (c[0] + 1, jnp.sin(c[1]) + w[c[0] % 100, 3])
        return loopkit.while_loop(lambda c: c[0] < n, body, (0, x), lanes=(3, 2))[1]

    f = table(read, (0, 0, 0), (0, 0, None))
    assert lanes_of(f, NS, GRID, large) == [(4, 6), (4, 3), (4, 2)]
    want = jax.vmap(lambda n, x, w: jax.vmap(lambda n, x: read(n, x, w))(n, x))(NS, GRID, large)
    assert_close(jax.jit(f)(NS, GRID, large), want)


@pytest.mark.exhaustive
def test_a_bound_where_the_outer_lanes_narrow():
    """Those inside are too few to do so, and each of them counts its steps."""
    ns, xs, large = np.resize(NS, (16, 2)), np.resize(GRID, (16, 2)), jnp.ones((16, 400))

    def every(lanes):
        def one(n, x, w):
            body = lambda x, t: (jnp.sin(x) * t + w[n], x * 2.0)
            ends = lambda x, _: x > 0.3 * n.astype(float)
            x, ys = loopkit.scan(body, x, jnp.arange(1.0, 6.0), until=ends, lanes=lanes)
            return x + jnp.sum(ys * jnp.arange(5.0))

        return table(one, (0, 0, 0), (0, 0, None))

    assert lanes_of(every("compact"), ns, xs, large) == [(16, 2), (8, 2)]
    total = lambda lanes: lambda xs: jnp.sum(jnp.sin(every(lanes)(ns, xs, large)))
    got, want = (jax.jit(jax.value_and_grad(total(how)))(xs) for how in ("compact", "wait"))
    assert_close(got, want)


@pytest.mark.exhaustive
def test_widths_of_all_lanes():
    """Those that are given are of all axes together; of one axis alone some are left out."""
    of = lambda lanes: lambda n, x: grow(n, x, 0.9, lanes=lanes)
    f, waits = of((20, 3)), of("wait")
    assert_close(table(f)(NS, GRID), table(waits)(NS, GRID))
    modes = lambda f: (f, jax.grad(f, 1), lambda n, x: jax.jvp(ft.partial(f, n), (x,), (x,)))
    for program, wanted in zip(modes(f), modes(waits), strict=True):
        for how in (lambda p: p, jax.jit):
            assert_close(how(jax.vmap(program))(NS[0], GRID[0]), jax.vmap(wanted)(NS[0], GRID[0]))


@pytest.mark.slow
@pytest.mark.parametrize("transform", [lambda f: f, jax.grad], ids=["value", "grad"])
def test_an_inner_loop_of_fewer_lanes_than_its_widths(transform):
    """The outer loop has narrowed before."""

    def run(lanes):
        def f(x, n):
            inner = lambda y: loopkit.fori_loop(0, n % 3, lambda _, y: jnp.sin(y), y, lanes=lanes)
            body = lambda c: (c[0] + 1, inner(c[1]) * x)
            return loopkit.while_loop(lambda c: c[0] < n, body, (0, x), max_steps=6, lanes=lanes)[1]

        return jax.jit(jax.vmap(transform(f)))(jnp.array([0.4, 1.1, 0.7]), jnp.array([1, 5, 2]))

    assert_close(run((2, 1)), run("wait"))


@pytest.mark.slow
@pytest.mark.parametrize("outer", ["scan", "while"])
def test_what_an_inner_loop_saves_has_its_place(outer):
    """It would narrow, and waits in lanes of a loop that does not."""
    keys = jnp.array([[3, 0, 7, 1], [0, 0, 1, 5], [2, 9, 3, 0], [1, 1, 2, 8]])
    xs = jnp.array([0.3, 0.7, 0.2, 0.5])
    widths = {"lanes": (4, 2, 1), "max_steps": 6, "checkpoints": "all"}

    def f(x, keys, inner, scan):
        def step(x, key):
            halve = lambda c: (jnp.where(c[1] % 2 == 0, jnp.sin(c[0]), c[0] + 0.1), c[1] // 2)
            return jnp.sin(inner(lambda c: c[1] > 0, halve, (x, key))[0] * 1.1), None

        return scan(step, x, keys)[0]

    def counted(while_loop):
        """A scan that is a loop whose lanes stop apart."""

        def scan(step, x, keys):
            go = lambda c: (c[0] < 4) & (c[1] < 0.93)
            return while_loop(go, lambda c: (c[0] + 1, step(c[1], keys[c[0]])[0]), (0, x))[1], None

        return scan

    how = {"max_steps": 5, "lanes": "wait", "checkpoints": "all"}
    ours, theirs = {
        "scan": (loopkit.scan, lax.scan),
        "while": (counted(ft.partial(loopkit.while_loop, **how)), counted(lax.while_loop)),
    }[outer]
    inner = ft.partial(loopkit.while_loop, **widths)
    got = jax.jit(jax.vmap(jax.grad(lambda x, keys: f(x, keys, inner, ours))))(xs, keys)
    wanted = jax.vmap(jax.jacfwd(lambda x, keys: f(x, keys, lax.while_loop, theirs)))(xs, keys)
    assert_close(got, wanted)


@pytest.mark.slow
def test_vectors_in_every_direction():
    """Derivatives in lanes of two axes, and a third axis of what goes in."""
    xs = np.stack([GRID, 0.5 - GRID], -1)

    def wound(lanes, n, x):
        body = lambda c: (c[0] + 1, jnp.sin(c[1]) + c[1][::-1] * c[1] / 4)
        return loopkit.while_loop(lambda c: c[0] < n, body, (0, x), lanes=lanes)[1]

    both(lambda lanes, n, x: jax.jacrev(ft.partial(wound, lanes, n))(x), NS, xs)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["pushforward", "pullback"])
def test_what_is_linear_is_transposed(way):
    slope = lambda n, x: (
        jax.linearize(lambda x: run(n, x, 0.9), x)[1]
        if way == "pushforward"
        else lambda t: jax.vjp(lambda x: run(n, x, 0.9), x)[1](t)[0]
    )
    many = lambda ts: table(lambda n, x, t: slope(n, x)(t), (0, 0, 0), (0, 0, 0))(NS, GRID, ts)
    (got,) = jax.linear_transpose(many, GRID)(np.cos(GRID))
    assert_close(got, of_each(SLOPE, NS, GRID, np.full((4, 6), 0.9)) * np.cos(GRID))
