"""Where counters of rows start: known of a loop and of those inside it, or not."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import loopkit
from loopkit._engine.facts.least import FAR, FEW, with_least
from loopkit._engine.primitives import while_p
from loopkit._jaxprs.equations import all_equations

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
    return [loop.carry[0].least for loop in loops]


def test_of_a_number_in_the_program():
    of = lambda first: starts(lambda n, _: filled(first, BUFFER, n))
    assert of(0) == [0]
    assert of(3) == [3]
    assert of(FEW + 40) == [FEW]
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
    assert of(lambda i, n, flag: i + 1) == [2, 2]
    assert of(lambda i, n, flag: i + 0) == [2, 2]
    assert of(lambda i, n, flag: lax.add(np.int32(1), np.int32(1))) == [2, 1]
    assert of(lambda i, n, flag: i + 2) == [2, None]  # twice as fast as steps are counted
    assert of(lambda i, n, flag: i - 1) == [2, None]
    assert of(lambda i, n, flag: -i) == [2, None]
    assert of(lambda i, n, flag: jnp.maximum(i, 1)) == [2, 1]
    assert of(lambda i, n, flag: jnp.where(flag, i, 5)) == [2, 2]
    assert of(lambda i, n, flag: jnp.where(flag, i, n)) == [2, None]
    assert of(lambda i, n, flag: i.astype(jnp.uint32)) == [2, 2]
    assert of(lambda i, n, flag: i.astype(jnp.int16)) == [2, None]


def test_in_both_branches():
    def branches(i, rows, n, flag):
        return lax.cond(flag, lambda: filled(i, rows, n), lambda: filled(jnp.maximum(i, 1), rows))

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
    found = with_least(loop, given.init)
    assert [leaf.least for leaf in found.carry] == [3, None]
    assert found.body is loop.body
