"""A step cut at the loops in it, and the one loop that this becomes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from loopkit import Plan, _jax
from loopkit._engine.lanes.batched_loop import batch_loop
from loopkit._engine.lanes.flattened import _cut, flattened
from loopkit._engine.lanes.nest import Inside, Nest
from loopkit._engine.loop import Operands
from loopkit._engine.primitives import while_p

from .small_loops import assert_same, make_loop, run

COUNTS = np.array([2, 0, 5, 3, 1])


def sines(n, h, w, **how):
    n, step = jnp.asarray(n, jnp.int32), lambda c: (c[0] + 1, jnp.sin(c[1] * w))
    return loopkit.while_loop(lambda c: c[0] < n, step, (jnp.int32(0), h), **how)[1]


def with_rows(most=None):
    """Two inner loops, of which the second reads what was made before the first; xs and ys."""

    def body(consts, carry, x):
        (w,), (h, total), (n, y) = consts, carry, x
        before = jnp.cos(h) * y.sum()
        h = sines(n, h + y[0], w, max_steps=most)
        v = sines(n // 2 + 1, before, h, max_steps=most)
        return [h + v, total + before], [jnp.stack([v, h]), n * 2, y * before]

    xs = [COUNTS, np.sin(np.arange(10.0)).reshape(2, 5)]
    how = {"x_axes": [0, 1], "y_axes": [1, 0, 1], "reverse": True, "lane_policy": "flatten"}
    return make_loop(body, [0.9], [0.3, 0.0], xs, **how)


def until(most=None, length=None):
    """A predicate, which may have a bound, around an inner loop."""

    def body(consts, carry, x):
        n, h = carry
        return [n + 1, h + sines(n, 0.2, h, max_steps=most)], []

    asks = lambda limit, carry: carry[1] < limit[0]
    how = {"cond": asks, "cond_consts": [0.9], "length": length, "lane_policy": "flatten"}
    return make_loop(body, [], [0, 0.3], **how)


LOOPS = {
    "rows": lambda: with_rows(most=6),
    "until": until,
    "at most": lambda: until(length=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_the_same_results(name):
    loop, operands = LOOPS[name]()
    flat = flattened(loop.replace(unroll=3))
    one = flat.loop
    assert (one.masks_itself, one.reverse, one.xs, one.ys) == (True, False, (), ())
    assert one.unroll == 1
    found = flat.map_results(
        run(one, one.split(flat.map_operands(operands.flat))[0]), operands.flat
    )
    assert_same(found, run(loop, operands))


def test_what_the_leaves_are():
    """The flag is for the ys, which are buffers."""
    loop, _ = with_rows()
    carry = flattened(loop).loop.carry
    assert [leaf.flag for leaf in carry] == [True] + [False] * (len(carry) - 1)
    assert [leaf.buffer for leaf in carry] == [False] * (len(carry) - 3) + [True] * 3
    assert [leaf.name for leaf in carry][:5] == ["go", "", "", "carry 0", "carry 1"]
    loop, _ = until()
    assert flattened(loop).loop.flag is None


# ---------------------------------------------------------------- steps inside


def inside(few, **how):
    loop, _ = until(**how)
    (eqn,) = (e for e in _jax.open_jaxpr(loop.body).eqns if e.primitive is while_p)
    return Inside.of(eqn, few)


def test_a_few_steps_at_a_time():
    """The inner loop takes a few steps at a time, as often as it takes to reach its bound, if it
    has one."""
    for few, most, wanted in [(3, 7, (3, 3)), (7, 7, (7, 1)), (9, 7, (7, 1)), (4, None, (4, None))]:
        found = inside(few, most=most)
        assert (found.loop.length, found.most) == wanted
        assert found.loop.carry_count == 2 + (most is not None)
        assert found.loop.lane_policy == "wait"


def test_the_most_steps():
    """Each inner loop is left in the step in which its last steps are taken."""
    nest = _cut(with_rows(most=6)[0])
    assert [i.most for i in nest.inside] == [1, 1]
    few = [Inside.of(i.eqn, n) for i, n in zip(nest.inside, (2, 5), strict=True)]
    slower = Nest(nest.outer, nest.pieces, few, nest.made)
    assert nest.flat().loop.length == 5
    assert slower.flat().loop.length == 5 * (3 + 2 - 1)
    for loop, _ in (with_rows(), until(most=6), until()):
        assert flattened(loop).loop.length is None
    assert flattened(until(most=6, length=4)[0]).loop.length == 4


def test_checkpoints_of_all_steps_need_a_bound():
    for checkpoints, most, wanted in [
        ("all", 6, "all"),
        ("all", None, None),
        (3, 6, 3),
        (3, None, 3),
        (Plan(2), None, Plan(2)),
    ]:
        loop = with_rows(most)[0].replace(checkpoints=checkpoints)
        assert flattened(loop).loop.checkpoints == wanted


def test_a_piece_is_one_step():
    """A piece is a loop of one step or none, so that no derivative is taken of what does not
    run."""
    loop, _ = with_rows()
    body = flattened(loop).loop.body
    inner = [e.params["loop"] for e in _jax.open_jaxpr(body).eqns if e.primitive is while_p]
    pieces = [l for l in inner if _jax.open_jaxpr(l.cond).eqns == []]
    assert (len(inner), [l.length for l in pieces]) == (5, [1] * 3)


def test_whether_it_is_worth_it():
    """If steps inside cost at least half of what is around them."""

    def nest(around):
        def body(consts, carry, x):
            h, n = carry
            for _ in range(around):
                h = jnp.sin(h)
            return [sines(n, h, 0.9), n], []

        return _cut(make_loop(body, [], [0.3, 3], length=4, lane_policy="flatten")[0])

    assert nest(1).is_worth_it
    assert not nest(200).is_worth_it


@pytest.mark.slow
def test_weak_types():
    """No leaf of the one loop is of weak type; results are, where they were."""

    def body(consts, carry, x):
        n, h, c = carry
        weak = jnp.where(n > 1, 2.0, 3.0)
        return [n + 1, sines(n, h, 0.9) * weak, c * 0.5], [weak]

    loop, operands = make_loop(body, [], [0, np.array(0.3), 1.0], length=3, lane_policy="flatten")
    assert [t.weak_type for t in loop.result_types] == [True, False, True, True]
    flat = flattened(loop)
    assert not any(t.weak_type for t in flat.loop.body.in_avals + flat.loop.body.out_avals)
    back = _jax.trace_closed(lambda *v: flat.map_results(v), flat.loop.result_types, "back")
    assert [t.weak_type for t in back.out_avals] == [True, False, True, True]
    found = flat.map_results(run(flat.loop, flat.loop.split(flat.map_operands(operands.flat))[0]))
    assert_same(found, run(loop, operands))


# ---------------------------------------------------------------- in lanes


@pytest.mark.exhaustive
def test_lanes_are_in_steps_of_their_own():
    loop, operands = with_rows()
    flat, axes = flattened(loop), [0, 0, None, 1, None]
    given = [np.array([0.9, 0.7]), np.array([0.3, 0.5]), operands.init[1]]
    given += [np.stack([COUNTS, COUNTS + 2], 1), operands.xs[1]]
    start = jax.vmap(lambda *values: flat.map_operands(values), axes)(*given)
    flags = Operands(*([True] * len(group) for group in flat.loop.split(start)[0]))
    many = batch_loop(flat.loop, _jax.axis(2), flags)
    found = run(many.loop, many.loop.split(list(map(np.asarray, start)))[0])
    assert found[1].tolist() == [5, 5]
    for lane in range(2):
        own = [v if a is None else v.take(lane, a) for v, a in zip(given, axes, strict=True)]
        one = [v.take(lane, p) for v, p in zip(found, many.results, strict=True)]
        assert_same(flat.map_results(one), run(loop, loop.split(own)[0]))
