"""Loops in loops made one, in which each lane is in a step of its own: every number stays."""

import functools as ft
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from derivatives import assert_close, derivative, in_numpy
from loopkit._jaxprs import equations
from problems import CHECKPOINTS, Problem, named
from test_lanes import of_all, one_by_one, rows
from turns import in_turn

NESTED = named("while_in_while", "while_in_scan")
COUNTS = np.random.default_rng(0).integers(0, 7, (9, 6), np.int32)
XS = np.linspace(0.1, 2.0, 9)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("problem", "pattern"), in_turn(NESTED, ["", "f", "r", "ff", "fr", "rf", "rr"], of=7)
)
def test_vmap_of_a_derivative(problem: Problem, pattern):
    xs = rows(problem)
    one = derivative(problem.flat_loop(3, lanes="flatten"), pattern)
    assert_close(jax.jit(jax.vmap(one))(xs), one_by_one(problem, pattern, xs))


@pytest.mark.parametrize(
    ("problem", "pattern"), in_turn(NESTED, ["", "f", "r", "ff", "fr", "rf"], of=3)
)
def test_derivative_of_vmap(problem: Problem, pattern):
    xs = rows(problem, 3)
    loop, reference = of_all(problem, xs, lanes="flatten")
    got = jax.jit(derivative(loop, pattern))(xs.ravel())
    assert_close(got, in_numpy(derivative(reference, pattern), xs.ravel()))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("problem", "checkpoints"), in_turn(NESTED[1:], CHECKPOINTS))
def test_checkpoints(problem: Problem, checkpoints):
    xs = rows(problem)
    one = derivative(problem.flat_loop(checkpoints=checkpoints, lanes="flatten"), "r")
    assert_close(jax.jit(jax.vmap(one))(xs), one_by_one(problem, "r", xs))


# ---------------------------------------------------------------- what a step may have in it


def sines(n, x, w, **how):
    """x <- sin(x) w, n times."""
    step = lambda s: (s[0] + 1, jnp.sin(s[1]) * w)
    return loopkit.while_loop(lambda s: s[0] < n, step, (jnp.int32(0), x), **how)[1]


def two_inner_loops(lanes, x, ns):
    """One after the other, the second with a bound that ends it, in a while loop."""

    def step(c):
        t, v, total = c
        before = jnp.sin(v)  # read between the two
        v = sines(ns[t], v * 1.01, 1.1)
        w = jnp.cos(v) + 0.1 * before
        halve = lambda s: (s[0] + w * s[1], s[1] * 0.8)
        begin = total, jnp.abs(v)
        more, _ = loopkit.while_loop(lambda s: s[1] > 0.3, halve, begin, max_steps=3)
        return t + 1, v * w, more + v

    return loopkit.while_loop(lambda c: c[0] < 5, step, (0, x, x * 0), lanes=lanes)[1:]


def rows_from_the_end(lanes, x, ns):
    """Rows of xs and ys, the last first, along other axes; keys; ints among ys."""

    def step(c, row):
        n, key = row
        c = sines(n, c + jax.random.normal(key), 1.1)
        return c + 0.1, (c * x, n * jnp.arange(2, dtype=n.dtype))

    inputs = ns, jax.random.split(jax.random.key(0), 6)
    return loopkit.scan(step, x, inputs, reverse=True, out_axes=(0, 1), lanes=lanes)


def ends_early(lanes, x, ns):
    def step(c, n):
        c = sines(n, c * 1.01, 1.1)
        return c + 0.2, c * x

    ends = lambda c, _: c > 0.9
    return loopkit.scan(step, x, ns, until=ends, lanes=lanes, return_info=True)


def three_deep(lanes, x, ns):
    """An inner loop that is flattened itself."""

    def step(c, n):
        middle = lambda s: (s[0] + 1, sines(s[0], s[1], 1.05) * 1.01)
        _, c = loopkit.while_loop(lambda s: s[0] < n, middle, (jnp.int32(0), c))
        return c + 0.1, c

    return loopkit.scan(step, x, ns % 4, lanes=lanes)


def only_where_a_lane_is(lanes, x, ns):
    """Slopes that are infinite where the other part of a step leaves its values."""

    def step(c, n):
        shrink = lambda s: jnp.sqrt(s - 0.2) * s
        c = loopkit.while_loop(lambda s: s > 0.2, shrink, c)
        return 0.9 + jnp.sqrt(0.2 - c) * 0.1, c

    return loopkit.scan(step, x / 4 + 0.3, ns, lanes=lanes)


def within_calls(lanes, x, ns):
    """Under jit, and beside a branch."""

    @jax.jit
    def inner(n, c):
        return lax.cond(n > 2, jnp.sin, jnp.cos, sines(n, c, 1.1))

    return loopkit.fori_loop(0, 6, lambda t, c: inner(ns[t], c) + 0.1, x, lanes=lanes)


def buffers_around(lanes, x, ns):
    """Read and written in the inner loop, and around it."""

    def step(t, c):
        rows, v = c

        def write(s):
            return s[0] + 1, s[1].at[s[0]].multiply(s[2] * x), jnp.sin(s[2]) + 0.1

        begin = jnp.int32(0), rows, v
        how = {"buffers": lambda s: s[1]}
        _, rows, v = loopkit.while_loop(lambda s: s[0] < ns[t], write, begin, **how)
        return rows.at[t].set(v * 1.5), v + rows[t]

    begin = jnp.ones(12), x
    return loopkit.fori_loop(0, 5, step, begin, buffers=lambda c: c[0], lanes=lanes)


PROGRAMS = [two_inner_loops, rows_from_the_end, ends_early, three_deep, only_where_a_lane_is]
PROGRAMS += [within_calls, buffers_around]


def of_lanes(program, lanes, transform):
    """Run the program in all lanes, in their order."""

    def total(x, ns):
        leaves = jax.tree.leaves(program(lanes, x, ns))
        return sum(jnp.sum(jnp.sin(v)) for v in leaves if jnp.issubdtype(v.dtype, jnp.floating))

    every = lambda f: lambda xs: jax.vmap(f)(xs, COUNTS)
    of_all = lambda xs: jnp.sum(every(total)(xs))
    return {
        "value": every(ft.partial(program, lanes)),
        "jvp": lambda xs: jax.jvp(every(total), (xs,), (xs * 0.3,)),
        "grad": jax.value_and_grad(of_all),
        "vmap(grad)": every(jax.value_and_grad(total)),
        "second": lambda xs: jax.jvp(jax.grad(of_all), (xs,), (jnp.cos(xs),)),
    }[transform]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "transform"),
    in_turn(PROGRAMS, ["value", "jvp", "grad", "vmap(grad)", "second"], of=8),
)
def test_as_lanes_that_wait(program, transform):
    got, want = (jax.jit(of_lanes(program, lanes, transform))(XS) for lanes in ("flatten", "wait"))
    assert all(np.isfinite(v).all() for v in jax.tree.leaves(want))
    assert_close(got, want)


@pytest.mark.parametrize("program", [rows_from_the_end, ends_early])
def test_one_lane(program):
    got, want = (program(lanes, 0.4, COUNTS[3]) for lanes in ("flatten", "wait"))
    assert_close(got, want)


# ---------------------------------------------------------------- where lanes are


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


@pytest.mark.exhaustive
def test_an_inner_loop_that_is_flattened_before():
    """The carry of the inner loop has leaves that never change, which became constants."""

    def run(lanes, x, ns):
        def inner(c, n):
            keep, c = c
            return (keep, sines(n, c, keep)), c

        def step(t, c):
            (_, c), ys = loopkit.scan(inner, (1.1, c), ns % 3, lanes=lanes)
            ends = lambda s: (s[0] > 0) & (ys[0] < 9)
            return loopkit.while_loop(ends, lambda s: (s[0] - 1, s[1] * 0.9), (ns[t], c))[1]

        return loopkit.fori_loop(0, 4, step, x, lanes=lanes)

    total = lambda lanes: lambda xs: jnp.sum(jax.vmap(ft.partial(run, lanes))(xs, COUNTS))
    got, want = (jax.jit(jax.value_and_grad(total(lanes)))(XS) for lanes in ("flatten", "wait"))
    assert_close(got, want)


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


def test_results_of_weak_types():
    """Values computed from weak types have the same types as where lanes wait."""

    def total(lanes, w, ns):
        step = lambda c, n: (sines(n, c * 0.9, 1.1) * 0.5, c)
        c, ys = loopkit.scan(step, 0.3, ns, lanes=lanes)
        return w * c, w * ys

    for lanes in ("flatten", "wait"):
        found = jax.eval_shape(ft.partial(total, lanes), jnp.float32(2), COUNTS[0])
        assert [v.dtype for v in found] == [jnp.float32] * 2


def test_a_loop_of_no_steps():
    """Whose inputs have no rows, around others and inside one."""
    step = lambda c, n: (sines(n, c, 1.1) + 0.1, c)
    none = lambda c: loopkit.scan(step, c, COUNTS[0][:0], lanes="flatten")
    last, ys = none(0.3)
    assert (last, ys.shape) == (0.3, (0,))
    around = lambda lanes: (
        lambda c: loopkit.scan(
            lambda c, n: (sines(n, none(c)[0], 1.1), None), c, COUNTS[0], lanes=lanes
        )
    )
    assert_close(
        jax.grad(lambda c: around("flatten")(c)[0])(0.3),
        jax.grad(lambda c: around("wait")(c)[0])(0.3),
    )


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


@pytest.mark.exhaustive
def test_loops_of_lax():
    """In `checkpointed`, the outermost one is flattened with those in it."""

    def chain(x, ns):
        def step(c, n):
            inner = lambda s: (s[0] + 1, jnp.sin(s[1]) * 1.1)
            c = lax.while_loop(lambda s: s[0] < n, inner, (jnp.int32(0), c))[1]
            return c + 0.1, c

        return lax.scan(step, x, ns)

    flat = loopkit.checkpointed(chain, lanes="flatten")
    assert_close(jax.jit(jax.vmap(flat))(XS, COUNTS), jax.vmap(chain)(XS, COUNTS))
    loss = lambda f: lambda xs: jnp.sum(jax.vmap(f)(xs, COUNTS)[1] ** 2)
    forward = jax.jit(jax.jacfwd(loss(chain)))(XS)
    assert_close(jax.jit(jax.grad(loss(flat)))(XS), forward)
    (loop,) = [e for e in jax.make_jaxpr(flat)(XS[0], COUNTS[0]).eqns if "loop" in e.params]
    assert loop.params["loop"].masks_itself


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


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"checkpoints": "all"}, {"truncate": 2}])
def test_everything_is_kept_where_nobody_knows_how_much(how):
    """Also of a scan that would be lax's own, and of the blocks of one."""
    step = lambda c, n: (sines(n, c, 1.1) + 0.1, c)
    run = lambda lanes: lambda x, ns: loopkit.scan(step, x, ns, lanes=lanes, **how)[0]
    total = lambda lanes: lambda xs: jnp.sum(jax.vmap(run(lanes))(xs, COUNTS))
    got, want = (jax.jit(jax.grad(total(lanes)))(XS) for lanes in ("flatten", "wait"))
    assert_close(got, want)


@pytest.mark.slow
def test_a_bound_of_all_steps():
    """Everything can be stored where outer and inner loops have bounds."""

    def run(lanes, x, ns):
        step = lambda c, n: (sines(n, c, 1.1, max_steps=6) + 0.1, c)
        return loopkit.scan(step, x, ns, checkpoints="all", lanes=lanes)[0]

    total = lambda lanes: lambda xs: jnp.sum(jax.vmap(ft.partial(run, lanes))(xs, COUNTS))
    got, want = (jax.jit(jax.grad(total(lanes)))(XS) for lanes in ("flatten", "wait"))
    assert_close(got, want)
