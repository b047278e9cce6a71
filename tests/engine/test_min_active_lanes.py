"""A loop that ends before all of its lanes have stopped, as one that says so in each lane."""

import jax.numpy as jnp
import numpy as np
import pytest

from loopkit import _jax
from loopkit._engine.lanes.predicates import ended_in_each_lane
from loopkit._engine.loop import CarryLeaf

from .small_loops import assert_same, make_loop, run

LIMITS = np.array([2, 5, 3, 7])


def counting(limits, **how):
    """Each lane adds up to its limit."""
    body = lambda consts, carry, x: ([carry[0] + 1, carry[1] + jnp.sin(carry[0].astype(float))], [])
    asks = lambda limit, carry: carry[0] < limit[0]
    init = [np.zeros(limits.shape, int), np.zeros(limits.shape)]
    return make_loop(body, [], init, cond=asks, cond_consts=[limits], **how)


def steps_taken(limits, left):
    loop, operands = counting(limits, min_active_lanes=left)
    new = ended_in_each_lane(loop)
    assert (new.min_active_lanes, new.lanes) == (0, limits.shape)
    return run(new, operands)[0].tolist()


@pytest.mark.slow
def test_none_goes_on_once_no_more_are_active_than_are_left():
    assert steps_taken(LIMITS, 1) == [2, 5, 3, 5]
    assert steps_taken(LIMITS, 2) == [2, 3, 3, 3]
    assert steps_taken(LIMITS, 3) == [2, 2, 2, 2]
    assert steps_taken(LIMITS, 4) == [0] * 4


def test_a_lane_counts_if_one_in_it_is_active():
    """The first axis is that of the lanes."""
    limits = np.array([[5, 4], [2, 2], [3, 0]])
    assert steps_taken(limits, 1) == [[3, 3], [2, 2], [3, 0]]
    assert steps_taken(limits, 2) == [[2, 2], [2, 2], [2, 0]]


def test_where_all_lanes_are_run_it_is_the_same_loop():
    loop, _ = counting(LIMITS)
    assert ended_in_each_lane(loop) is loop
    ends, _ = counting(LIMITS, min_active_lanes=2)
    assert ended_in_each_lane(ends) is ended_in_each_lane(ends)


def test_a_flag_says_so_too():
    """The flag tells a step in which lanes to write nothing."""
    added = lambda go, x: jnp.where(go, x, 0.0)
    body = lambda _, carry, x: ([carry[0] + 1, carry[1], carry[2] + added(carry[1], x[0])], [])
    asks = lambda _, carry: carry[1] & (carry[0] < LIMITS)
    go, n, total = np.array([True, True, False, True]), np.array([1, 5, 0, 6]), np.zeros(4)
    given = [n, go, total]
    loop, _ = make_loop(body, [], given, [np.arange(1.0, 9.0)], cond=asks, min_active_lanes=1)
    carry = [CarryLeaf(), CarryLeaf(flag=True), CarryLeaf()]
    loop = loop.replace(carry=tuple(carry))
    step = lambda loop: _jax.call_jaxpr(loop.body)(*map(jnp.asarray, given), 2.0)
    assert_same(step(loop)[1:], [go, 2.0 * go])
    on = np.array([True, False, False, True])  # that are active, more than one
    assert_same(step(ended_in_each_lane(loop))[1:], [on, 2.0 * on])
    fewer = loop.replace(min_active_lanes=2)
    assert_same(step(ended_in_each_lane(fewer))[1:], [go & False, 0.0 * go])
