"""Ranges of integers in loops: where counters start, and how many steps inner loops take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from loopkit._engine.facts.ranges import LARGEST_START, with_ranges
from loopkit._engine.primitives import while_p
from loopkit._jaxprs.equations import all_equations
from loopkit._jaxprs.integers import FAR

from .small_loops import assert_same, make_loop

BUFFER = jnp.zeros(20)


def filled(i, rows, n=9):
    """Rows from the i-th on, one a step."""
    step = lambda c: (c[0] + 1, c[1].at[c[0]].set(1.0))
    how = {"buffers": lambda c: c[1]}
    below = lambda c: c[0] < jnp.asarray(n, c[0].dtype)
    return loopkit.while_loop(below, step, (i, rows), **how)[1]


def starts(f):
    """The least that the counter of each loop can be, the outer ones first."""
    jaxpr = jax.make_jaxpr(f)(jnp.int32(9), True)
    loops = [e.params["loop"] for e in all_equations(jaxpr.jaxpr) if e.primitive is while_p]
    return [loop.carry[0].counter_lower_bound for loop in loops]


def test_of_a_number_in_the_program():
    of = lambda first: starts(lambda n, _: filled(first, BUFFER, n))
    assert of(0) == [0]
    assert of(3) == [3]
    assert of(LARGEST_START + 40) == [LARGEST_START]
    assert of(-1) == of(FAR) == of(jnp.int16(3)) == [None]


def test_of_an_argument_nothing():
    assert starts(lambda n, _: filled(n, BUFFER)) == [None]


def around(inside):
    """A loop that counts from 2, and passes its counter on to another in each step."""

    def f(n, flag):
        step = lambda c: (c[0] + 1, inside(c[0], c[1], n, flag))
        how = {"buffers": lambda c: c[1]}
        return loopkit.while_loop(lambda c: c[0] < n, step, (2, BUFFER), **how)[1]

    return f


def nested(inside):
    return starts(around(inside))


def test_of_what_follows_from_a_counter():
    def of(start):
        return nested(lambda i, rows, n, flag: filled(start(i, n, flag), rows, n))

    assert of(lambda i, n, flag: i) == [2, 2]
    assert of(lambda i, n, flag: i + 1) == [2, 3]
    assert of(lambda i, n, flag: i + 0) == [2, 2]
    assert of(lambda i, n, flag: lax.add(np.int32(1), np.int32(1))) == [2, 2]
    assert of(lambda i, n, flag: i + 2) == [2, None]  # twice as fast as steps are counted
    assert of(lambda i, n, flag: i - 1) == [2, None]
    assert of(lambda i, n, flag: -i) == [2, None]
    assert of(lambda i, n, flag: jnp.minimum(i, 1)) == [2, 1]
    assert of(lambda i, n, flag: jnp.where(flag, i, 5)) == [2, 2]
    assert of(lambda i, n, flag: jnp.where(flag, i, n)) == [2, None]
    assert of(lambda i, n, flag: i.astype(jnp.uint32)) == [2, 2]
    assert of(lambda i, n, flag: i.astype(jnp.int16)) == [2, None]


def test_in_both_branches():
    def branches(i, rows, n, flag):
        return lax.cond(flag, lambda: filled(i, rows, n), lambda: filled(jnp.minimum(i, 1), rows))

    assert sorted(nested(branches)) == [1, 2, 2]


def test_in_one_branch():
    def branches(i, rows, n, flag):
        return lax.cond(flag, lambda: filled(i, rows, n), lambda: rows.at[0].set(2.0))

    assert nested(branches) == [2, 2]


def test_in_a_call():
    f = around(lambda i, rows, n, flag: jax.jit(filled)(i, rows, n))
    assert starts(f) == [2, 2]
    assert_same([jax.jit(f)(5, True)], [np.eye(20)[2:5].sum(0)])


def test_a_step_without_loops_stays_the_same_object():
    def step(consts, carry, x):
        i, rows = carry
        return [i + 1, rows * 2], []

    how = {"cond": lambda limit, carry: carry[0] < limit[0], "cond_consts": [9], "buffers": [1]}
    loop, given = make_loop(step, [], [np.int32(3), np.ones(20)], **how)
    found = with_ranges(loop, given)
    assert [leaf.counter_lower_bound for leaf in found.carry] == [3, None]
    assert found.body is loop.body


def lengths(f, *args):
    """Return the most steps of each while loop of loopkit's, the outer ones first."""
    jaxpr = jax.make_jaxpr(f)(*args)
    loops = [e.params["loop"] for e in all_equations(jaxpr.jaxpr) if e.primitive is while_p]
    return [(loop.length, loop.cond is None) for loop in loops]


def halved(x, n):
    """`n` steps of a loop whose bound depends on what is known of `n`."""
    zero = jnp.asarray(0, n.dtype)
    return loopkit.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] / 2), (zero, x))[1]


def halved_until(x, n):
    below = lambda c: (c[0] < n) & (c[1] > 1.0)
    zero = jnp.asarray(0, n.dtype)
    return loopkit.while_loop(below, lambda c: (c[0] + 1, c[1] / 2), (zero, x))[1]


def each_of(rows, inside=halved):
    return lambda x, *args: loopkit.scan(lambda c, n: (inside(c, n), None), x, rows(*args))[0]


def test_bounds_from_rows_that_are_scanned():
    of = lambda rows, *args, inside=halved: lengths(each_of(rows, inside), 1.0, *args)[1]
    one, many = np.array([1, 1, 1], np.int32), np.array([3, 9, 4], np.int32)
    assert of(lambda: jnp.asarray(one)) == (1, True)
    assert of(lambda: jnp.asarray(many)) == (9, False)
    assert of(lambda: many) == (9, False)
    assert of(lambda: jnp.arange(5)) == (4, False)
    assert of(lambda: jnp.where(jnp.arange(5) == 0, 7, 7)) == (7, True)
    assert of(lambda: jnp.where(jnp.arange(5) == 0, 7, 7), inside=halved_until) == (7, False)
    assert of(lambda: jnp.where(jnp.arange(5) == 0, 7, 8)) == (8, False)
    assert of(lambda n: jnp.clip(n, 2, 6), many) == (6, False)
    assert of(lambda n: jnp.minimum(n, 6), many) == (6, False)
    assert of(lambda n: n, many) == (None, False)
    assert of(lambda n: n + 1, many) == (None, False)
    assert of(lambda n: jnp.maximum(n, 6), many) == (None, False)


def test_bounds_from_counters():
    def doubling(x, limit, flag):
        inside = lambda c: (c[0] + 1, halved_until(c[1], jnp.left_shift(1, c[0])))
        below = lambda c: (c[0] < jnp.asarray(limit, c[0].dtype)) & (flag | (c[1] > 0.0))
        return loopkit.while_loop(below, inside, (0, x))[1]

    assert lengths(lambda x, flag: doubling(x, 6, flag), 1.0, True) == [(6, False), (32, False)]
    assert lengths(doubling, 1.0, 6, True) == [(None, False), (None, False)]
    steps = lambda x: loopkit.fori_loop(0, 6, lambda i, c: halved(c, i), x)
    assert lengths(steps, 1.0) == [(6, True), (5, False)]
    down = lambda x: loopkit.fori_loop(-3, 4, lambda i, c: halved(c, 2 - i), x)
    assert lengths(down, 1.0) == [(7, True), (5, False)]


def test_no_bounds_from_what_may_wrap_around():
    sevens = np.full(3, 7, np.int8)
    wraps = lambda n: lax.fori_loop(0, 2, lambda i, n: n * np.int8(16), n)
    for of in (lambda n: n * np.int8(100), lambda n: jnp.left_shift(n, np.int8(6)), wraps):
        assert lengths(each_of(lambda of=of: of(jnp.asarray(sevens))), 1.0)[1][0] is None
    # 1, 4, 7: from there it does not come to 127, but around.
    step = lambda c: (c[0] + np.int8(3), c[1] / 2)
    inside = lambda x, n: loopkit.while_loop(lambda c: c[0] < np.int8(127), step, (n, x))[1]
    assert lengths(each_of(lambda: np.arange(3, dtype=np.int8), inside), 1.0)[1][0] is None


def test_known_arrays_outside_jit_share_programs(compilations):
    f = each_of(lambda n: n)
    f(1.0, np.array([5, 7, 6]))
    del compilations[:]
    assert float(f(64.0, np.array([8, 5, 1]))) == 64.0 / 2**14
    assert not compilations


@pytest.mark.exhaustive
def test_gradients_with_bounds_from_ranges():
    rows = np.array([3, 0, 9], np.int32)

    def unrolled(x):
        for n in rows:
            for _ in range(n):
                x = jnp.sin(x) + x if x > 0.3 else x
        return x

    def inside(x, n):
        below = lambda c: (c[0] < n) & (c[1] > 0.3)
        step = lambda c: (c[0] + 1, jnp.sin(c[1]) + c[1])
        return loopkit.while_loop(below, step, (jnp.int32(0), x))[1]

    f = each_of(lambda: jnp.where(jnp.arange(3) == 1, 0, jnp.asarray(rows)), inside)
    assert lengths(f, 1.0)[1] == (9, False)
    for x in (0.2, 0.4):
        found = [jax.jit(d)(x) for d in (f, jax.grad(f), jax.grad(jax.grad(f)))]
        assert_same(
            found, [d(x) for d in (unrolled, jax.grad(unrolled), jax.grad(jax.grad(unrolled)))]
        )
