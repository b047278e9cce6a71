"""Loops in loops made one, in which each lane is in a step of its own: every number stays."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from derivatives import assert_close, derivative, in_numpy
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


@pytest.mark.slow
@pytest.mark.parametrize("program", [rows_from_the_end, ends_early])
def test_one_lane(program):
    got, want = (program(lanes, 0.4, COUNTS[3]) for lanes in ("flatten", "wait"))
    assert_close(got, want)


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


def test_results_of_weak_types():
    """Values computed from weak types have the same types as where lanes wait."""

    def total(lanes, w, ns):
        step = lambda c, n: (sines(n, c * 0.9, 1.1) * 0.5, c)
        c, ys = loopkit.scan(step, 0.3, ns, lanes=lanes)
        return w * c, w * ys

    for lanes in ("flatten", "wait"):
        found = jax.eval_shape(ft.partial(total, lanes), jnp.float32(2), COUNTS[0])
        assert [v.dtype for v in found] == [jnp.float32] * 2


@pytest.mark.slow
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
