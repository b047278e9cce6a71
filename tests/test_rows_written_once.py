"""Rows that are written once, and where: taken back without a log of what they displaced."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from derivatives import assert_close, derivative
from loopkit import Plan
from loopkit._engine.derivative.write_log import find_undo
from test_undo import the_loop
from turns import in_turn

N = 9
X = jnp.asarray([0.4, -0.7])


class Plain:
    """The loops in Python, on plain arrays."""

    lesser = min

    @staticmethod
    def while_loop(cond, body, init, **_):
        while cond(init):
            init = body(init)
        return init


class Loops:
    lesser = staticmethod(jnp.minimum)

    def __init__(self, checkpoints=None, max_steps=None):
        self.how = {"checkpoints": checkpoints, "max_steps": max_steps}

    def while_loop(self, cond, body, init, **outermost):
        how = self.how | outermost if outermost else {}
        return loopkit.while_loop(cond, body, init, **how)


def rows(x):
    return jnp.sin(jnp.arange(2.0 * N)).reshape(N, 2) * x


def new(b, i, x):
    """Compute from a row written before, one still to be written, and what a step has read."""
    return jnp.tanh(b[(i - 1) % N] * x + 0.3 * b[(i + 2) % N] * b[(i - 1) % N])


def counting(loops, x, stop, start=1, by=1, off=0):
    def body(c):
        i, b = c
        return i + by, b.at[i + off].set(new(b, i + off, x))

    go = lambda c: (c[0] < stop) if by > 0 else (c[0] > -stop)
    return loops.while_loop(go, body, (start, rows(x)), buffers=lambda c: c[1])[1]


def from_below_zero(loops, x, stop):
    return counting(loops, x, stop, start=-4)


def far_below_zero(loops, x, stop):
    """Every row is written twice, from the end and from the start."""
    return counting(loops, x, stop + 2, start=-N)


def downwards(loops, x, stop):
    return counting(loops, x, stop, start=3, by=-1)


def one_before(loops, x, stop):
    """The first step writes the last row, which a later one writes again."""
    return counting(loops, x, stop + 8, start=0, off=-1)


def start_unknown(loops, x, stop):
    start = 1 if loops is Plain else 1 + jnp.sum(x > 9)
    return counting(loops, x, stop, start=start)


def runs(loops, x, stop, start=1):
    """Each step writes a run of rows, of which the next one's length depends."""

    def body(c):
        i, b = c
        end = loops.lesser(i + 1 + i % 3, stop)
        inner = lambda c: (c[0] + 1, c[1].at[c[0]].set(new(c[1], c[0], x)))
        return loops.while_loop(lambda c: c[0] < end, inner, (i, b))

    init = (start, rows(x))
    return loops.while_loop(lambda c: c[0] < stop, body, init, buffers=lambda c: c[1])[1]


def runs_from_below_zero(loops, x, stop):
    return runs(loops, x, stop, start=-3)


def runs_of_runs(loops, x, stop):
    def innermost(c, x):
        i, b, k = c
        return i + 1, b.at[i].set(new(b, i, x)), k + 1

    def middle(c, x):
        i, b = c
        some = lambda c: (c[2] < 2) & (c[0] < stop)
        return loops.while_loop(some, lambda c: innermost(c, x), (i, b, 0))[:2]

    def body(c):
        i, b, scale = c
        end = loops.lesser(i + 3, stop)
        run = lambda c: loops.while_loop(lambda c: c[0] < end, lambda c: middle(c, scale), c)
        i, b = jax.jit(run)((i, b)) if isinstance(loops, Loops) else run((i, b))
        return i, b, jnp.cos(b[i - 1])

    init = (1, rows(x), x)
    return loops.while_loop(lambda c: c[0] < stop, body, init, buffers=lambda c: c[1])[1]


def two_tables(loops, x, stop):
    """One is written in runs, one by the steps."""

    def body(c):
        i, k, a, b = c
        end = loops.lesser(i + 2, stop)
        inner = lambda c: (c[0] + 1, c[1].at[c[0]].set(new(c[1], c[0], x)))
        i, a = loops.while_loop(lambda c: c[0] < end, inner, (i, a))
        return i, k + 1, a, b.at[k, :].set(new(b, k, a[i - 1]))

    init = (1, 1, rows(x), rows(x + 1))
    out = loops.while_loop(lambda c: c[0] < stop, body, init, buffers=lambda c: c[2:])
    return jnp.stack(out[2:])


def now_and_then(loops, x, stop):
    """The counter of rows moves in some steps only."""

    def body(c):
        k, i, b = c
        end = loops.lesser(i + 2 * (k % 2), stop)
        inner = lambda c: (c[0] + 1, c[1].at[c[0]].set(new(c[1], c[0], x)))
        i, b = loops.while_loop(lambda c: c[0] < end, inner, (i, b))
        return k + 1, i, b

    init = (0, 1, rows(x))
    return loops.while_loop(lambda c: c[0] < stop + 2, body, init, buffers=lambda c: c[2])[2]


PROGRAMS = [
    counting,
    from_below_zero,
    far_below_zero,
    downwards,
    one_before,
    start_unknown,
    runs,
    runs_from_below_zero,
    runs_of_runs,
    two_tables,
    now_and_then,
]


every_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
bounded_or_not = pytest.mark.parametrize("bound", [None, 2 * N])


def derivatives(loops, program, patterns):
    # Where `stop` is not known, the predicate has no bound.
    every = lambda x, stop: [
        derivative(lambda x: program(loops, x, stop), modes)(x) for modes in patterns
    ]
    return jax.jit(every)(X, 7)


@ft.cache
def expected(program, modes):
    """Not jitted: there are hundreds of equations, and few different ones."""
    return derivative(lambda x: program(Plain, x, 7), modes)(X)


@pytest.mark.exhaustive
@pytest.mark.parametrize("program", in_turn(PROGRAMS))
def test_gradients(program):
    (got,) = derivatives(Loops(3, 2 * N), program, ["r"])
    assert_close(got, expected(program, "r"))


KEPT = [None, 3, Plan(2, 2, "residuals"), Plan(2, 3, "carries")]
CASES = [
    pytest.param(program, bound, KEPT[(i + j) % 4], id=f"{program.__name__}-{bound}-{(i + j) % 4}")
    for i, program in enumerate(PROGRAMS)
    for j, bound in enumerate((None, 2 * N))
]


@pytest.mark.slow
@pytest.mark.parametrize(("program", "bound", "checkpoints"), CASES)
def test_derivatives(program, bound, checkpoints):
    patterns = ["r", "fr", "rr"]
    got = derivatives(Loops(checkpoints, bound), program, patterns)
    assert_close(got, [expected(program, modes) for modes in patterns])


@pytest.mark.slow
@bounded_or_not
@every_program
def test_lanes_that_stop_apart(program, bound):
    loops, stops = Loops(None, bound), jnp.asarray([2, 7, 4])
    xs = jnp.stack([X, 1.5 * X, -X])
    total = lambda loops, x, stop: jnp.sum(jnp.sin(program(loops, x, stop)))
    pairs = zip(xs, stops.tolist(), strict=True)
    wanted = [jax.value_and_grad(lambda x, n=n: total(Plain, x, n))(x) for x, n in pairs]
    wanted = jax.tree.map(lambda *v: jnp.stack(v), *wanted)
    one = lambda x, n: jax.value_and_grad(lambda x: total(loops, x, n))(x)
    assert_close(jax.jit(jax.vmap(one))(xs, stops), wanted)
    every = lambda xs: jax.vmap(lambda x, n: total(loops, x, n))(xs, stops)
    values, grads = every(xs), jax.jit(jax.grad(lambda xs: every(xs).sum()))(xs)
    assert_close((values, grads), wanted)


LOGS = {
    "counting": ([], []),
    "from_below_zero": (None, ["int32", "float64"]),
    "far_below_zero": (None, ["int32", "float64"]),
    "downwards": (None, ["int32", "float64"]),
    "one_before": (None, ["int32", "float64"]),
    "start_unknown": (None, ["int32", "float64"]),
    "runs": (None, ["int64", "int64"]),
    "runs_from_below_zero": (None, None),
    "runs_of_runs": (None, ["int64", "int64"]),
    "two_tables": ([], ["int64", "int64"]),
    "now_and_then": (None, ["int64", "int64"]),
}
"""The types that a step logs, without a bound and with one; None if checkpoints hold the buffer."""


@pytest.mark.parametrize("name", LOGS)
def test_nothing_is_logged_that_a_counter_says(name):
    (program,) = (p for p in PROGRAMS if p.__name__ == name)
    for bound, wanted in zip((None, 2 * N), LOGS[name], strict=True):
        loop = the_loop(lambda x, stop, b=bound: program(Loops(3, b), x, stop), X, 7)
        undo = find_undo(loop, [True] * loop.carry_count)
        assert (None if undo is None else [str(t.dtype) for t in undo.log_types]) == wanted


def test_an_inner_loop_and_then_a_row_that_is_logged():
    """A step logs two numbers of the one, where it wrote and what it displaced of the other."""

    def f(x, loops=loopkit, **how):
        inner = {"buffers": lambda c: c[1]} if how else {}

        def step(c, _):
            i, b, ring, x = c
            write = lambda c: (c[0] + 1, c[1].at[c[0]].set(b[c[0] - 1] * c[2]), jnp.sin(c[2]))
            i, b, y = loops.while_loop(lambda c: c[2] > 0.5, write, (i, b, x), **inner)
            ring = ring.at[i % 3].set(ring[(i + 1) % 3] * y)
            return (i, b, ring, y + ring[0] + 0.4), None

        init = 0, jnp.ones(90), jnp.ones(3), x
        _, b, ring, x = loops.scan(step, init, None, 4, **how)[0]
        return jnp.sum(b**2) + jnp.sum(ring) * x

    logged = lambda x: f(x, buffers=lambda c: c[1:3], checkpoints=Plan(2, 2))
    loop = the_loop(logged, 0.7)
    types = find_undo(loop, [True] * loop.carry_count).log_types
    assert [t.shape for t in types] == [(), (), (1,), (1,)]
    wanted = jax.jit(jax.jacfwd(lambda x: f(x, jax.lax)))(0.7)
    assert_close(jax.jit(jax.grad(logged))(0.7), wanted)


@pytest.mark.slow
def test_memory_without_a_bound_is_that_of_few_buffers():
    def loss(x):
        def body(c):
            i, b = c
            return i + 1, b.at[i].set(jnp.sin(b[i - 1] * x))

        init = (1, jnp.ones((2000, 50)) * x)
        out = loopkit.while_loop(lambda c: c[0] < 2000.0, body, init, buffers=lambda c: c[1])
        return jnp.sum(out[1])

    compiled = jax.jit(jax.grad(loss)).lower(jnp.ones(50)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 2000 * 50 * 8


@pytest.mark.slow
def test_an_inner_loop_copies_no_buffer():
    """Its residuals are few, so that it needs no buffer as it leaves it."""

    def loss(x):
        def step(c, _):
            i, b = c
            inner = lambda j, b: b.at[i + j].set(jnp.sin(b[i + j - 1] * x))
            return (i + 4, loopkit.fori_loop(0, 4, inner, b)), None

        init = (1, jnp.ones((2000, 50)) * x)
        (_, b), _ = loopkit.scan(step, init, length=400, buffers=lambda c: c[1])
        return jnp.sum(b)

    text = jax.jit(jax.grad(loss)).lower(jnp.ones(50)).compile().as_text()
    copies = [line for line in text.splitlines() if "f64[2000,50]{1,0} copy(" in line]
    assert not [line for line in copies if "while" in line]


def test_few_programs_for_loops_that_start_elsewhere(compilations):
    def from_row(i, other):
        body = lambda c: (c[0] + 1, c[1].at[c[0]].set(1.0), c[2] + 0)
        init = (jnp.int64(i), jnp.zeros(40), jnp.int64(other))
        goes_on = lambda c: c[0].astype(float) < 30.0  # which bounds no integer
        out = loopkit.while_loop(goes_on, body, init, buffers=(False, True, False))
        return np.asarray(out[1])

    from_row(0, 0), from_row(20, 0)
    first = len(compilations)
    for i in range(20, 30):
        assert from_row(i, i).sum() == 30 - i
    assert len(compilations) == first
