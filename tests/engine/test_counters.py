"""Counters in the carry, and their values before a step: see also `test_counters.py`."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from loopkit._engine.facts.bounds import at_step, find_counters

from .small_loops import assert_same, make_loop


def counters(step, *init):
    body = lambda consts, carry, x: (step(*carry), [])
    return find_counters(make_loop(body, [], init, length=4)[0])


def test_through_what_passes_numbers_on():
    """Counters are found through equations that pass numbers on, several at once, and not through
    others."""
    several = np.zeros(3, np.int32)
    filled = lambda by: lax.broadcast_in_dim(np.int32(by), (3,), ())
    assert counters(lambda i, j: [i + filled(2), j - filled(3)], several, several) == (2, -3)
    assert counters(lambda i: [i + lax.neg(filled(2))], several) == (None,)
    assert counters(lambda i: [i + lax.neg(np.int32(2))], np.int32(0)) == (None,)


def flagged(cond, cond_consts=()):
    """A loop that counts to five, and whose second leaf says that it has not got there."""
    step = lambda consts, carry, x: ([carry[0] + 3, carry[0] < 5], [])
    loop, given = make_loop(step, [], [0, True], cond=cond, cond_consts=cond_consts)
    counter, flag = loop.carry
    return loop.replace(carry=(counter, flag._replace(flag=True))), given


def test_a_flag_alone_says_whether_a_step_counts():
    both = lambda limit, carry: carry[1] & (carry[0] < limit[0])
    assert find_counters(flagged(lambda _, carry: carry[1])[0]) == (3, 0)
    assert find_counters(flagged(lambda _, carry: carry[1], [7])[0]) == (3, 0)
    assert find_counters(flagged(both, [7])[0]) == (3, None)
    assert find_counters(flagged(lambda _, carry: carry[0] < 5)[0]) == (3, None)


def test_before_a_step():
    loop, given = flagged(lambda _, carry: carry[1])
    assert_same(at_step(loop, given.init, (3, 0), 2, 4), [6, True])
    assert_same(at_step(loop, given.init, (-3, 0), jnp.asarray(2), 4), [-6, True])
    assert at_step(loop, given.init, (None, None), 2, 4) == [None, None]
