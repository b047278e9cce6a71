"""Inner loops that are run again where the residuals of every step are kept: which, and rightly."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import loopkit
from derivatives import assert_close
from loopkit._engine.derivative import linearised
from loopkit._engine.derivative.linearised import FEW_STEPS, ROOM

ROWS = ROOM // 8 + 1
X = jnp.asarray([0.4, 0.9])


def squared(y):
    return y * y


@jax.custom_vjp
def by_rule(y):
    return y * y


by_rule.defvjp(lambda y: (y * y, y), lambda y, ct: (2 * y * ct,))


def of_the_host(y):
    kind = jax.ShapeDtypeStruct((), y.dtype)
    return y * io_callback(np.asarray, kind, jax.lax.stop_gradient(y))


class Unrolled:
    """The loop unrolled to the most steps that any loop here takes; only the steps taken count."""

    @staticmethod
    def while_loop(goes_on, step, init, **_):
        for _ in range(4):
            go, new = goes_on(init), step(init)
            init = jax.tree.map(lambda n, o, go=go: jnp.where(go, n, o), new, init)
        return init


def program(loops, x, bound=ROWS, square=squared, start=lambda y, x: y, **how):
    """Each step runs a loop of a few steps, of which there could be many."""

    def halved(y):
        step = lambda c: (c[0] + 1, c[1] * (0.4 + 0.1 * jnp.sin(square(c[1]) * x[1])))
        goes_on = lambda c: (c[0] < bound) & (c[1] > 0.2)
        return loops.while_loop(goes_on, step, (0, y), **how)[1]

    def step(c):
        i, y, total = c
        end = halved(start(y, x))
        return i + 1, 0.3 + end * x[1] * i, total + jnp.cos(3 * end) * y

    goes_on = lambda c: (c[0] < 3) & (c[2] < 1e3)
    c = loops.while_loop(goes_on, step, (0, x[0], x[0] * 0), checkpoints="all")
    return c[2] + c[1]


def row_bytes(**how):
    """Return the bytes that the outer loop keeps of a step."""
    every = {"checkpoints": "all"} | how
    loops = loopkit.explain(lambda x: program(loopkit, x, **every), X).loops
    (around,) = (loop.plan for loop in loops if loop.plan.bound == 3)
    return around.step.residual_bytes


def test_rows_have_no_room_for_what_might_be():
    assert row_bytes() == row_bytes(bound=10 * ROWS) < 100


def test_what_is_kept():
    """Few steps, small rooms, and what cannot, or need not, be run again."""
    assert row_bytes(bound=FEW_STEPS) >= 8 * FEW_STEPS
    assert row_bytes(bound=ROOM // 32) >= ROOM // 4
    assert row_bytes(square=by_rule) >= 8 * ROWS
    assert row_bytes(square=of_the_host) >= 8 * ROWS


def many_inside(loops, x, **how):
    """Steps that run loops of vectors, of which nobody knows how many steps they take."""

    def step(c, k):
        v, total = c
        shrink = lambda v: v * (0.6 + 0.1 * jnp.sin(v * x[1]))
        v = loops.while_loop(lambda v: jnp.max(v) > 0.4, shrink, v + 0.3 * k * jnp.cos(total[3]))
        return (v * x[1] + 0.1, total * 0.9 + jnp.sum(v)), jnp.sum(v * v)

    start = jnp.full(60, x[0]), jnp.ones(2000)
    (v, total), sums = loopkit.scan(step, start, jnp.arange(1.0, 61.0) / 40, **how)
    return jnp.sum(v) + jnp.sum(sums) + jnp.sum(jnp.sin(total)) * x[1]


def in_few_rounds(loops, x):
    """At most three steps, which run loops of vectors without a bound."""

    def step(c):
        shrink = lambda v: v * (0.6 + 0.1 * jnp.sin(v * x[1]))
        v = loops.while_loop(lambda v: jnp.max(v) > 0.4, shrink, c[1] + x[0])
        return c[0] + 1, jnp.cos(v * x[1])

    goes_on = lambda c: (c[0] < 3) & (c[1][0] < 10)
    return jnp.sum(loops.while_loop(goes_on, step, (0, jnp.full(60, x[0])))[1])


@pytest.mark.slow
def test_few_steps_are_kept_where_only_inner_loops_are_run_again():
    f, wanted = (ft.partial(in_few_rounds, loops) for loops in (loopkit, Unrolled))
    (around,) = (e.plan for e in loopkit.explain(f, X).loops if e.plan.bound == 3)
    assert around.keeps_all
    assert around.step.residual_bytes < 2000  # not what the inner loops would store
    assert_close(jax.jit(jax.grad(f))(X), jax.grad(wanted)(X))


@pytest.mark.exhaustive
def test_steps_are_kept_where_only_inner_loops_are_run_again():
    f = lambda x, **how: many_inside(loopkit, x, **how)
    plan_of = lambda **how: loopkit.explain(ft.partial(f, **how), X).loops[0].plan
    assert plan_of().keeps_all
    assert not plan_of(checkpoints=1).keeps_all
    assert plan_of(memory="200 kB").keeps_all
    assert not plan_of(memory="40 kB").keeps_all
    wanted = lambda x: many_inside(Unrolled, x)
    for how in ({}, {"memory": "200 kB"}, {"memory": "40 kB"}):
        got = ft.partial(f, **how)
        assert_close(jax.jit(jax.grad(got))(X), jax.jit(jax.grad(wanted))(X))
        hessians = (jax.jit(jax.jacfwd(jax.grad(g))) for g in (got, wanted))
        assert_close(*(h(X) for h in hessians))


def test_few_steps(monkeypatch):
    """Up to which they are kept, whatever room they take."""
    monkeypatch.setattr(linearised, "ROOM", 0)
    start = lambda y, x: y * 1.25  # no loop that is known already
    assert row_bytes(bound=FEW_STEPS, start=start) >= 8 * FEW_STEPS
    assert row_bytes(bound=FEW_STEPS + 1, start=start) < 100


@pytest.mark.exhaustive
def test_what_depends_on_constants_alone_is_run_once():
    """Nothing of it is kept with a step, however many it might take."""
    of_constants = lambda y, x: x[0] + 1
    assert row_bytes(start=of_constants) < 100
    grad = jax.grad(lambda loops, x: program(loops, x, start=of_constants, checkpoints="all"), 1)
    assert_close(jax.jit(grad, static_argnums=0)(loopkit, X), grad(Unrolled, X))


def with_totals(loops, x, **how):
    """A sum goes through the loops, on which no residual of theirs depends."""

    def step(c):
        i, y, totals = c
        add = lambda k: (k[0] + 1, jnp.sin(k[1] * x[0]), k[2] + k[1] * jnp.arange(50.0))
        inner = lambda c: (c[0] < ROWS) & (c[1] > 0.2)
        _, y, totals = loops.while_loop(inner, add, (0, y, totals), **how)
        return i + 1, 0.5 + y * x[1], totals

    init = 0, x[0] + 0.3, jnp.ones(50) * x[1]
    c = loops.while_loop(lambda c: c[0] < 3, step, init, **how)
    return jnp.sum(jnp.sin(c[2]) * c[1])


@pytest.mark.exhaustive
def test_what_residuals_do_not_depend_on_is_not_kept():
    every = lambda x: with_totals(loopkit, x, checkpoints="all")
    (around,) = (e.plan for e in loopkit.explain(every, X).loops if e.plan.bound == 3)
    assert around.step.residual_bytes < 100
    wanted = lambda x: with_totals(Unrolled, x)
    assert_close(jax.jit(jax.grad(every))(X), jax.jit(jax.grad(wanted))(X))


def test_what_follows_from_more_than_it_is_kept():
    """A vector of the carry would have to be, to make it again."""

    def f(x):
        def step(c):
            i, y, v = c
            each = lambda k: (k[0] + 1, jnp.sin(k[1] * jnp.sum(k[2])), k[2] * 0.99)
            inner = lambda c: (c[0] < ROWS) & (c[1] > 0.2)
            _, y, v = loopkit.while_loop(inner, each, (0, y, v), checkpoints="all")
            return i + 1, y + 0.3, v

        init = 0, x[0], jnp.ones(10 * ROWS) * x[1]
        return loopkit.while_loop(lambda c: c[0] < 3, step, init, checkpoints="all")[1]

    (around,) = (e.plan for e in loopkit.explain(f, X).loops if e.plan.bound == 3)
    assert 8 * ROWS <= around.step.residual_bytes < 80 * ROWS


DERIVATIVES = {
    "vjp": jax.grad,
    "reverse over reverse": lambda f: jax.grad(lambda x: jnp.sum(jnp.sin(jax.grad(f)(x)))),
    "forward over reverse": lambda f: jax.jacfwd(jax.grad(f)),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.exhaustive] * (n == "reverse over forward"))
        for n in DERIVATIVES
    ],
)
def test_derivatives(name):
    derived = lambda loops: jax.jit(
        DERIVATIVES[name](lambda x: program(loops, x, checkpoints="all"))
    )
    assert_close(derived(loopkit)(X), derived(Unrolled)(X))


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", [lambda y, x: y, lambda y, x: x[0]], ids=["carry", "constant"])
def test_lanes_that_stop_apart(start):
    xs = jnp.stack([X, 2 * X, X[::-1], 0.1 * X])
    how = {"start": start, "checkpoints": "all"}
    total = lambda loops: lambda xs: jax.vmap(lambda x: program(loops, x, **how))(xs).sum()
    each = lambda loops: jax.vmap(jax.grad(lambda x: program(loops, x, **how)))
    wanted = jax.jit(each(Unrolled))(xs)
    assert_close(jax.jit(each(loopkit))(xs), wanted)
    assert_close(jax.jit(jax.grad(total(loopkit)))(xs), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("square", [by_rule, squared], ids=["rule", "none"])
def test_outside_jit(square):
    grad = jax.grad(lambda x: program(loopkit, x, square=square, checkpoints="all"))
    assert_close(grad(X), jax.grad(lambda x: program(Unrolled, x))(X))
