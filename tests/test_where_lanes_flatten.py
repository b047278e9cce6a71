"""Which loops in loops become one, and what makes lanes wait instead."""

import functools as ft
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from derivatives import assert_close
from loopkit._jaxprs import equations
from test_flattened import COUNTS, XS, rows_from_the_end, sines, three_deep


def steps_of_all(lanes):
    """Steps that all lanes take together in the inner loop, counted by a callback in it."""
    seen = []

    def one(ns):
        def step(c, n):
            def inner(s):
                jax.debug.callback(lambda _: seen.append(1), 0)
                return s[0] + 1, jnp.sin(s[1] + jnp.ones((64, 64)) @ jnp.ones(64)[0:64])

            begin = jnp.int32(0), c
            return loopkit.while_loop(lambda s: s[0] < n, inner, begin)[1], None

        return loopkit.scan(step, jnp.ones(64), ns, lanes=lanes)[0]

    ns = np.asarray([[30, 1] * 4, [1, 30] * 4], np.int32)
    jax.block_until_ready(jax.jit(jax.vmap(one))(ns))
    jax.effects_barrier()
    return len(seen)


@pytest.mark.slow
def test_a_lane_goes_on_with_its_next_step():
    """Two lanes that take 30 steps in turns: 8 times 30 where they wait, 4 times 31 each alone."""
    assert steps_of_all("wait") >= 240
    assert steps_of_all("flatten") <= 160


def inner_loops(fn, *args):
    """Count the loops in the first loop that stop by themselves."""
    closed = jax.make_jaxpr(fn)(*args)
    loops = [e.params["loop"] for e in closed.eqns if "loop" in e.params]
    body = loops[0].body
    return sum("loop" in eqn.params for eqn in equations.all_equations(body))


def test_which_loops_become_one(monkeypatch):
    def one(inner):
        f = lambda x, ns: loopkit.scan(lambda c, n: (inner(n, c), c), x, ns, lanes="flatten")
        eqns = jax.make_jaxpr(f)(0.3, COUNTS[0]).eqns
        return next(e.params["loop"] for e in eqns if "loop" in e.params)

    inner = lambda n, c, **how: sines(n, c, 1.1, **how)
    assert one(inner).masks_itself
    assert one(jax.jit(inner)).masks_itself, "a call of nothing else"
    assert not one(lambda n, c: lax.cond(n > 2, lambda: inner(n, c), lambda: c)).masks_itself
    assert one(inner).length is None
    module = importlib.import_module("loopkit._engine.lanes.flattened")
    monkeypatch.setattr(module, "STEPS_BETWEEN_CHECKS", 5)
    bounded = one(lambda n, c: inner(n, c, max_steps=12))
    assert bounded.length == 6 * 3, "5, 5 and 2 steps in each of 6"


def test_a_loop_without_inner_loops_is_as_it_was():
    for inner in (lambda x: x, lambda x: loopkit.fori_loop(0, 3, lambda _, x: jnp.sin(x), x)):
        text = lambda lanes, inner=inner: (
            jax.jit(
                lambda x: loopkit.scan(lambda c, _: (inner(c) + 1, c), x, length=5, lanes=lanes)
            )
            .lower(1.0)
            .as_text()
        )
        assert text("flatten") == text("wait")


@pytest.mark.slow
def test_inner_loops_with_rows_stay():
    """Read or written, whether they end by themselves or not."""

    def run(lanes, x, ns):
        stop = lambda c, _: c > 1.5

        def step(c, n):
            c, _ = loopkit.scan(lambda c, x: (c + x, None), c, XS[:4], until=stop)
            c, ys = loopkit.scan(lambda c, _: (c * 0.9, c), c, length=3, until=stop)
            return sines(n, c, 1.1) + ys[0], None

        return loopkit.scan(step, x, ns, lanes=lanes)[0]

    total = lambda lanes: lambda xs: jnp.sum(jax.vmap(ft.partial(run, lanes))(xs, COUNTS))
    got, want = (jax.jit(jax.value_and_grad(total(lanes)))(XS) for lanes in ("flatten", "wait"))
    assert_close(got, want)


@pytest.mark.exhaustive
def test_inside_shard_map_lanes_wait():
    """Lanes wait where the carry differs between devices."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")

    def run(lanes):
        one = lambda x, ns: rows_from_the_end(lanes, x, ns)[0]
        every = jax.shard_map(jax.vmap(one), mesh=mesh, in_specs=spec, out_specs=spec)
        return jax.jit(jax.grad(lambda xs: jnp.sum(every(xs, COUNTS))))(XS)

    assert_close(run("flatten"), run("wait"))


def test_flattened_once():
    """Its parts are no loops to be flattened again, in whatever it stands."""
    ns = COUNTS[0]
    one = lambda x: three_deep("flatten", x, ns)[0]
    twice = lambda x: loopkit.fori_loop(0, 2, lambda _, x: one(x), x, lanes="flatten")
    assert inner_loops(one, 0.3) < 10
    assert inner_loops(twice, 0.3) < 16
    assert_close(twice(0.3), three_deep("wait", three_deep("wait", 0.3, ns)[0], ns)[0])


def test_steps_of_lanes_in_different_steps_are_not_shown():
    step = lambda c, n: (sines(n, c, 1.1), None)
    text = 'loopkit.scan: `progress` must be None if `lanes` is "flatten".*Leave it out'
    with pytest.raises(ValueError, match=text):
        loopkit.scan(step, 0.3, COUNTS[0], lanes="flatten", progress="line")
    with pytest.raises(ValueError, match="`progress` must be None if"):
        loopkit.checkpointed(jnp.sin, lanes="flatten", progress="line")


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"debug": "bounds"}, {"debug": "finite"}])
def test_what_is_checked_of_steps_makes_lanes_wait(how):
    """Also where lanes that are elsewhere would be out of bounds, or have a NaN."""

    def run(lanes, x, ns, **how):
        def step(t, c):
            rows, v = c
            v = sines(ns[t], v, 1.1)
            return rows.at[t].set(v), v

        begin = jnp.zeros(6), x
        fields = {"buffers": lambda c: c[0], "lanes": lanes, **how}
        return loopkit.fori_loop(0, 6, step, begin, **fields)

    got = jax.vmap(ft.partial(run, "flatten", **how))(XS, COUNTS)
    assert_close(got, jax.vmap(ft.partial(run, "wait"))(XS, COUNTS))
