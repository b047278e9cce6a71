"""Lanes of several axes that are lanes of one loop: where they lie, and when they are joined."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from loopkit import _jax
from loopkit._engine.lanes.many_lanes import (
    COPIED_FOR_LANES,
    AxisPair,
    join,
    waiting_lanes,
    with_lanes,
)
from loopkit._engine.loop import Operands

from .small_loops import assert_same, make_loop, run

OUTER, INNER = 3, 2
NARROW = (4, 2)


def body(consts, carry, x):
    (w, table), (n, h, free) = consts, carry
    h = jnp.sin(h * w) + x[0] + table.sum()
    return [n + 1, h, free * 0.5], [h * 2.0, x[0]]


def small(table=2, **how):
    asks = lambda limit, carry: carry[0] < limit[0]
    consts, xs = [0.9, np.cos(np.arange(1.0 * table))], [0.1 * np.arange(6.0)]
    how = {"lane_policy": NARROW, "cond": asks, "cond_consts": [4]} | how
    return make_loop(body, consts, [0, 0.3, 1.0], xs, **how)


def numbered(value, batched, axis, count, by):
    """The values of an operand, with an axis there in which they differ."""
    if not batched:
        return value, None
    steps = np.arange(count).reshape(-1, *[1] * np.ndim(value))
    integer = np.issubdtype(np.asarray(value).dtype, np.integer)
    values = np.asarray(value) + steps * (1 if integer else by)
    axis = min(axis, np.ndim(value))
    return np.moveaxis(values, 0, axis), axis


def pick(value, axis, lane):
    return value if axis is None else np.asarray(value).take(lane, axis)


@pytest.mark.slow
def test_two_axes_made_one():
    """Wherever they are, and if a value has only one of them, or none."""
    two, size = AxisPair(OUTER, INNER), OUTER * INNER
    value = np.sin(np.arange(20.0)).reshape(4, 5)
    for place, outer, has in itertools.product([0, 1], [None, 0, 2], [False, True]):
        inner = place if has else None
        within, _ = numbered(value, has, place, INNER, 0.1)
        whole, _ = numbered(within, outer is not None, outer, OUTER, 0.7)
        found = two.joined(whole, place, outer, inner)
        assert found.shape[place] == size
        for a, b in itertools.product(range(OUTER), range(INNER)):
            wanted = pick(pick(whole, outer, a), inner, b)
            assert_same([pick(found, place, a * INNER + b)], [wanted])
        apart = two.apart(found, place)
        assert apart.shape[place : place + 2] == (OUTER, INNER)
        assert_same([apart.reshape(found.shape)], [found])
    assert two.joined(value, None, None, None) is value


def in_lanes(loop, operands, flags, count=INNER):
    """The loop of inner lanes, operands of it, and where those have lanes."""
    pairs = zip(operands.flat, flags.flat, strict=True)
    given = [numbered(v, f, 0, count, 0.1) for v, f in pairs]
    lanes = with_lanes(loop, _jax.axis(count), [d for _, d in given])
    return lanes, given


FLAGS = Operands([True], [True, False], [False, True, False], [True])


def assert_lanes(lanes, given, one):
    """Assert that the results are those of each lane of the outermost axis by itself."""
    results = run(lanes.loop, lanes.loop.split(lanes.map_operands(given))[0])
    found = lanes.map_results(results)
    axes = [a for _, a in given if a is not None]
    assert axes
    count = next(v.shape[a] for v, a in given if a is not None)
    for lane in range(count):
        own = [pick(v, axis, lane) for v, axis in given]
        wanted = one(own)
        assert_same([pick(v, a, lane) for v, a in zip(found, lanes.results, strict=True)], wanted)


@pytest.mark.slow
def test_lanes_of_one_axis():
    loop, operands = small()
    lanes, given = in_lanes(loop, operands, FLAGS)
    assert lanes.loop.lane is not None
    assert (lanes.lane.count, lanes.lane.flags, lanes.lane.loop) == (INNER, FLAGS, loop)
    assert lanes.loop.lanes == (INNER,)
    assert_lanes(lanes, given, lambda own: run(loop, loop.split(own)[0]))


@pytest.mark.slow
def test_lanes_of_two_axes():
    loop, operands = small()
    inner, _ = in_lanes(loop, operands, FLAGS)
    many = inner.loop
    outer = Operands([False], [True, False], [True, False, False], [False])
    groups = zip(waiting_lanes(inner.lane).axes.flat, FLAGS.flat, operands.flat, strict=True)
    each = [numbered(v, f, a or 0, INNER, 0.1) for a, f, v in groups]
    each = [
        v if a is not None or t.shape == np.shape(v) else np.broadcast_to(v, t.shape)
        for (v, a), t in zip(each, many.operand_types, strict=True)
    ]
    for place in (0, 1, 2):
        given = [numbered(v, f, place, OUTER, 1.3) for v, f in zip(each, outer.flat, strict=True)]
        lanes = with_lanes(many, _jax.axis(OUTER), [d for _, d in given])
        assert lanes.lane.count == OUTER * INNER
        either = [a or b for a, b in zip(FLAGS.flat, outer.flat, strict=True)]
        assert (lanes.lane.flags.flat, lanes.lane.loop) == (either, loop)
        assert lanes.loop.lanes == (OUTER * INNER,)
        assert_lanes(lanes, given, lambda own: run(many, many.split(own)[0]))


def found(loop, flags, count=6):
    return with_lanes(loop, _jax.axis(count), [0 if f else None for f in flags.flat])


def test_lanes_that_are_not_to_narrow():
    loop, _ = small(lane_policy="wait")
    assert found(loop, FLAGS) is None
    loop, _ = small()
    still = Operands([False], [True, True], [False, True, True], [True])
    assert found(loop, still) is None, "the predicate does not hang on it"


def test_lanes_that_narrow_are_joined_by_none_that_do_not():
    loop, _ = small()
    many = found(loop, FLAGS).loop
    still = Operands([False], [False, False], [False, False, True], [False])
    assert found(many, still) is None
    # Of these no phases are made: the axis goes into the loop itself.
    fewer, _ = small(lane_policy="compact")
    few = found(fewer, FLAGS, 2).loop
    assert found(few, still, 3) is None
    assert found(few, FLAGS, 3) is None, "six lanes wait"
    assert found(few, FLAGS, 8).lane.count == 16
    # Of two axes that are apart, the outer narrows if its lanes are enough.
    apart = few.derived("apart", few.replace)
    assert found(apart, FLAGS, 3) is None
    assert found(apart, FLAGS, 16).lane.loop is apart
    # What differs between lanes inside is had by each, so that lanes outside can be moved.
    inside = FLAGS._replace(consts=[False, False])
    assert found(apart, inside, 16).loop.const_lanes == (2, 0)


def joined(loop, inner, outer, count=6):
    lane = found(loop, inner, 3).lane
    return join(lane, _jax.axis(count), [0 if f else None for f in outer.flat])


def test_what_is_shared_is_copied_if_it_is_small():
    inner = FLAGS._replace(consts=[True, False])
    outer = FLAGS._replace(consts=[True, True])
    most = COPIED_FOR_LANES // 8 // 18
    loop, _ = small(most)
    lane = joined(loop, inner, outer)
    assert (lane.loop, lane.count) == (loop, 18)
    assert lane.flags == outer
    loop, _ = small(most + 1)
    assert joined(loop, inner, outer) is None
    assert joined(loop, outer, inner) is None
    assert joined(loop, outer, outer) is not None, "each lane has its own"
    assert joined(loop, inner, inner) is not None, "all have the same"


def test_where_lanes_cannot_be_joined_the_inner_narrow_if_they_are_enough():
    """Or else the outer."""
    loop, _ = small(COPIED_FOR_LANES, lane_policy="compact")
    outer = FLAGS._replace(consts=[True, True])
    many, few = (found(loop, FLAGS, n).loop for n in (16, 2))
    assert found(many, outer, 16) is None
    assert found(few, outer, 16).lane.loop is few


def test_what_is_shared_may_be_as_large_as_the_carry():
    def step(consts, carry, x):
        return [carry[0] + 1, carry[1] + consts[0].sum()], []

    asks = lambda limit, carry: carry[0] < limit[0]
    init = [0, np.ones(5000)]
    inner, outer = (Operands([True], [flag], [False, True], []) for flag in (True, False))
    for more, wanted in [(1, True), (2, False)]:
        how = {"cond": asks, "cond_consts": [4], "lane_policy": NARROW}
        loop, _ = make_loop(step, [np.ones(5000 + more)], init, **how)
        assert (joined(loop, inner, outer) is not None) == wanted


def test_what_is_not_joined():
    loop, _ = small()
    assert joined(loop, FLAGS, FLAGS).count == 18
    still = Operands([False], [True, True], [False, True, True], [True])
    assert joined(loop, FLAGS, still) is None
    loop, _ = small(lane_policy="compact")
    assert joined(loop, FLAGS, FLAGS, 2) is None
    spread = dataclasses.replace(_jax.axis(6), spmd_name="d")
    assert join(found(loop, FLAGS, 3).lane, spread, [0] * 7) is None
