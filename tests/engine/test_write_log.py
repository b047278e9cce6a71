"""Write logs: what steps log of their writes, and buffers restored from it, a step at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopkit import _jax
from loopkit._buffers.slices import read, read_p, write
from loopkit._buffers.window import Window
from loopkit._engine.derivative.write_log import batch_undo, find_undo
from loopkit._engine.loop import Operands, kept, parts
from loopkit._engine.primitives import while_p
from loopkit._jaxprs import equations

from .small_loops import assert_same, make_loop

ROW = Window((0,), (0, 0), (1, 2), "drop", wrap=False)
TWO = Window((0,), (0, 0), (2, 2), "drop", wrap=False)
STEPS = 5
ROWS = 2 * STEPS


def numbers(seed=0, rows=ROWS):
    return np.sin(1.3 * np.arange(2 * rows) + seed).reshape(rows, 2)


def at(i):
    return jnp.asarray(i)[None]


def row(value, columns=2):
    return jnp.full((1, columns), value, float)


def displacing(consts, carry, x):
    """Write the same rows again and again, and one that is read from elsewhere."""
    i, k, b = carry
    old, b = read(b, at((i + 1) % 3), ROW)
    return [i + 1, 3 - k, write(b, jnp.cos(3 * old), at(i % 3), ROW)], []


def updating(consts, carry, x):
    """Write a value that is computed from the entries there."""
    i, k, b = carry
    where = at(i % 3)
    old, b = read(b, where, ROW)
    return [i + 1, 3 - k, write(b, jnp.cos(3 * old), where, ROW)], []


def narrower(consts, carry, x):
    """Read more than is written."""
    i, k, b = carry
    where = at(i % 3)
    old, b = read(b, where, TWO)
    return [i + 1, 3 - k, write(b, old[1:] + 1, where, ROW)], []


def counted(consts, carry, x):
    """A row for each step: nothing is logged."""
    i, k, b = carry
    old, b = read(b, at(i - 1), ROW)
    return [i + 1, 3 - k, write(b, jnp.cos(3 * old), at(i), ROW)], []


def columns(consts, carry, x):
    """A row for each step; of which elements, no counter says."""
    i, k, b = carry
    window = Window((0, 1), (0, 0), (1, 1), "drop", wrap=False)
    return [i + 1, 3 - k, write(b, row(9 + i, 1), jnp.stack([i, k % 2]), window)], []


def called(consts, carry, x):
    """Two writes in a call, then one more."""
    i, k, b = carry

    def inside(b, i):
        b = write(b, row(9 + i), at(i % 3), ROW)
        return write(b, row(7 + i), at(i % 2), ROW)

    b = jax.jit(inside)(b, i)
    return [i + 1, 3 - k, write(b, row(5 - i), at(2 * i % 3), ROW)], []


def reading(consts, carry, x):
    """A call, and a loop, that read the buffer, and write nothing."""
    i, k, b = carry

    def inside(b, i):
        old, b = read(b, at(i % 3), ROW)
        return old * 0.5, b

    def each(consts, carry, x):
        n, b = carry
        _, b = read(b, at(n), ROW)
        return [n + 1, b], []

    old, b = jax.jit(inside)(b, i)
    _, b = inner([], [k, b], each, length=3)
    return [i + 1, 3 - k, write(b, old + 3, at(i % 3), ROW)], []


BODIES = [displacing, updating, narrower, counted, columns, called, reading]


def the_undo(body, init=None, **how):
    init = [1, 2, numbers()] if init is None else init
    buffers = [i for i, v in enumerate(init) if np.ndim(v) == 2]
    loop, given = make_loop(body, [], init, length=STEPS, buffers=buffers, **how)
    return loop, given, find_undo(loop, [True] * loop.carry_count)


def bring_back(loop, given, undo):
    """Each step's buffers from those after it."""
    forward = jax.jit(_jax.call_jaxpr(undo.forward))
    back = jax.jit(_jax.call_jaxpr(undo.back))
    plain = jax.jit(_jax.call_jaxpr(loop.body))
    carries, logs = [list(map(np.asarray, given.init))], []
    for _ in range(STEPS):
        new, _, log = parts(forward(*carries[-1]), loop.carry_count, loop.ys_count)
        assert_same(new, plain(*carries[-1])[: loop.carry_count])
        carries.append(list(map(np.asarray, new)))
        assert [(v.shape, v.dtype) for v in log] == [(t.shape, t.dtype) for t in undo.log_types]
        logs.append(log)
    initial, buffers = (kept(carries[i], undo.leaves) for i in (0, -1))
    for step in reversed(range(STEPS)):
        counts = kept(carries[step], undo.counted)
        buffers = back(*initial, *counts, *buffers, *logs[step])
        assert_same(buffers, kept(carries[step], undo.leaves), tol=0)


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_buffers_are_brought_back(body):
    bring_back(*the_undo(body))


def logged(body, **how):
    """Shapes of what a step logs, and how many reads there are that the step has not."""
    loop, _, undo = the_undo(body, **how)
    reads = lambda j: sum(e.primitive is read_p for e in equations.all_equations(j))
    return [t.shape for t in undo.log_types], reads(undo.forward) - reads(loop.body)


def test_what_is_logged():
    """The log has the place and the old value of a write, unless they follow from the step's
    number."""
    assert logged(displacing) == ([(1,), (1, 2)], 1)
    assert logged(updating) == ([(1,), (1, 2)], 0)
    assert logged(narrower) == ([(1,), (1, 2)], 1)
    assert logged(counted) == ([], 0)
    assert logged(columns) == ([(2,)], 0)
    assert logged(called) == ([(1,), (1, 2)] * 3, 3)


def inner(consts, init, step, **how):
    """Return the result of a loop in a step that begins with `init`."""
    buffers = [i for i, v in enumerate(init) if v.ndim == 2]
    zeros = lambda values: [np.zeros(v.shape, v.dtype) for v in values]
    loop, _ = make_loop(step, zeros(consts), zeros(init), buffers=buffers, **how)
    limit = [consts[0]] if loop.cond_const_count else []
    return while_p.bind(*limit, *consts, *init, loop=loop)


def known_number(consts, carry, x):
    """Three writes by a loop, then one by the step."""
    i, k, b = carry

    def each(consts, carry, x):
        (i,), (n, b) = consts, carry
        return [n + 1, write(b, row(9 * i + n), at(n % 2 + i % 2), ROW)], []

    _, b = inner([i], [k, b], each, length=3)
    return [i + 1, 3 - k, write(b, row(5 - i), at(2 * i % 3), ROW)], []


def runs(consts, carry, x):
    """Rows one after the other, two or one a step: where they begin and end says all."""
    i, k, b, c = carry

    def each(consts, carry, x):
        n, b = carry
        old, b = read(b, at(n - 1), ROW)
        return [n + 1, write(b, jnp.cos(3 * old), at(n + 1), ROW)], []

    how = {"cond": lambda limit, carry: carry[0] < limit[0], "cond_consts": [0]}
    i, b = inner([i + k], [i, b], each, **how)
    return [i, 3 - k, b, write(c, row(5 + k), at(k), ROW)], []


def two_in_turn(consts, carry, x):
    """A write to each of two buffers in a loop, one of them of rows written once."""
    i, k, b, c = carry

    def each(consts, carry, x):
        n, b, c = carry
        b = write(b, row(5 + n), at(n % 3), ROW)
        return [n + 1, b, write(c, row(7 - n), at(n), ROW)], []

    i, b, c = inner([], [i, b, c], each, length=2)
    return [i, 3 - k, b, c], []


def two_runs(consts, carry, x):
    """Write runs to two buffers, each with its own beginning."""
    i, k, b, c = carry

    def each(consts, carry, x):
        n, m, b, c = carry
        b = write(b, row(5 + n), at(n), ROW)
        return [n + 1, m + 1, b, write(c, row(7 - n), at(m + 1), ROW)], []

    how = {"cond": lambda limit, carry: carry[0] < limit[0], "cond_consts": [0]}
    i, k, b, c = inner([i + 2], [i, k, b, c], each, **how)
    return [i, k, b, c], []


def of_each_kind(consts, carry, x):
    """Write in three ways: one logs nothing, one its place, and one what it displaces."""
    i, k, b, c, d = carry
    window = Window((0, 1), (0, 0), (1, 1), "drop", wrap=False)
    b = write(b, row(5 + k), at(i), ROW)
    c = write(c, row(6 + k, 1), jnp.stack([i, k % 2]), window)
    return [i + 1, 3 - k, b, c, write(d, row(7 + k), at(i % 2), ROW)], []


def never(consts, carry, x):
    """A loop of no steps would write."""
    i, k, b = carry

    def each(consts, carry, x):
        n, b = carry
        return [n + 1, write(b, row(9), at(n % 2), ROW)], []

    _, b = inner([], [k, b], each, length=0)
    return [i + 1, 3 - k, write(b, row(5 - i), at(i % 3), ROW)], []


NESTED = {known_number: 1, runs: 2, two_in_turn: 2, two_runs: 2, of_each_kind: 3, never: 1}
"""The number of buffers of each body."""


def of_nested(body):
    return the_undo(body, [1, 2, *(numbers(i, rows=12) for i in range(NESTED[body]))])


@pytest.mark.slow
@pytest.mark.parametrize("body", NESTED, ids=lambda body: body.__name__)
def test_loops_in_a_step_are_brought_back(body):
    bring_back(*of_nested(body))


def test_what_is_logged_of_loops_in_a_step():
    """All that a loop displaces, but of rows written once, which numbers tell."""
    shapes = lambda body: [t.shape for t in of_nested(body)[2].log_types]
    assert shapes(known_number) == [(3, 1), (3, 1, 2), (1,), (1, 2)]
    assert shapes(runs) == [(), (), (1,), (1, 2)]
    assert shapes(two_in_turn) == [(2, 1), (2, 1, 2), (), ()]
    assert shapes(two_runs) == [()] * 4
    assert shapes(of_each_kind) == [(2,), (1,), (1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("body", [displacing, counted, of_each_kind])
@pytest.mark.parametrize("reverse", [False, True])
def test_several_steps_back(body, reverse):
    """The log has a row for each step, and counters of that step restore it."""
    loop, given, undo = of_nested(body) if body in NESTED else the_undo(body)
    loop = loop.replace(reverse=reverse)
    forward = jax.jit(_jax.call_jaxpr(undo.forward))
    carries, logs = [list(map(np.asarray, given.init))], []
    for _ in range(STEPS):
        new, log = parts(forward(*carries[-1]), loop.carry_count)
        carries.append(list(map(np.asarray, new)))
        logs.append(log)
    log = [jnp.stack(rows[::-1] if reverse else rows) for rows in zip(*logs, strict=True)]
    counts = lambda step: [given.init[0] + jnp.int64(step), 2 - step % 2, *given.init[2:]]
    buffers = [jnp.asarray(b) for b in kept(carries[4], undo.leaves)]
    back = jax.jit(lambda log, b: undo.rewound(loop, given.init, log, counts, 1, 3, b))
    assert_same(back(log, buffers), kept(carries[1], undo.leaves), tol=0)


def test_which_leaves_are_brought_back():
    """Buffers that are saved, of steps that are bounded if they log anything."""
    still = lambda consts, carry, x: [carry[0] + 1, carry[1], displacing(consts, carry, x)[0][2]]
    init = [1, 2, numbers()]
    loop, _ = make_loop(lambda *of: (still(*of), []), [], init, length=STEPS, buffers=[2])
    assert find_undo(loop, [True, True, True]).leaves == (False, False, True)
    assert find_undo(loop, [True, True, False]) is None
    how = {"cond": lambda limit, carry: carry[0] < limit[0], "cond_consts": [6], "buffers": [2]}
    for body, there in [(counted, True), (displacing, False), (reading, False)]:
        loop, _ = make_loop(body, [], init, **how)
        assert loop.length is None
        assert (find_undo(loop, [True] * 3) is not None) == there


@pytest.mark.slow
def test_lanes_of_buffers():
    """The log of each is its own, behind the ys."""

    def step(consts, carry, x):
        new, _ = displacing(consts, carry, x)
        return new, [carry[0] * 2, carry[2].sum()]

    loop, given, undo = the_undo(step)
    places = Operands([], [], [None, None, 0], [])
    batched = batch_undo(undo, loop, _jax.axis(3), places, [None, 1])
    assert batched.leaves == undo.leaves
    assert batched.batched == (False, True)
    assert [t.shape for t in batched.log_types] == [(1,), (3, 1, 2)]
    i, k, b = map(jnp.asarray, given.init)
    lanes = jnp.stack([b, 2 * b, b + 1])
    over = lambda jaxpr, *axes: jax.jit(jax.vmap(_jax.call_jaxpr(jaxpr), axes))
    each = over(undo.forward, None, None, 0)(i, k, lanes)
    outs = jax.jit(_jax.call_jaxpr(batched.forward))(i, k, lanes)
    assert_same([outs[2], *outs[4:]], [each[2], each[4], each[5][0], each[6]])
    back = jax.jit(_jax.call_jaxpr(batched.back))
    assert_same(back(lanes, outs[2], *outs[5:]), [lanes], tol=0)
