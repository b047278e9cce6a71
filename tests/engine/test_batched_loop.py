"""A loop with one more axis: against the same loop run lane by lane, and where the axis is."""

import functools as ft

import jax.numpy as jnp
import numpy as np
import pytest

from loopkit import _jax
from loopkit._buffers.slices import read, write
from loopkit._buffers.window import Window
from loopkit._engine.derivative.split import batch_split, split_step
from loopkit._engine.lanes.batched_loop import MANY_LANES, batch_loop, leaves_in_rows
from loopkit._engine.loop import Active, Input, Operands, kept

from .small_loops import assert_same, make_loop, run

LANES = 3
LENGTH = 4


@ft.cache
def scan():
    def body(consts, carry, x):
        (w,), (h, n) = consts, carry
        h = jnp.sin(h @ w) + x[0][0]
        return [h, n + 1], [h.sum() * x[1], n * 2]

    w = np.cos(np.arange(4.0)).reshape(2, 2)
    xs = [np.sin(np.arange(LENGTH * 2.0)).reshape(LENGTH, 2), np.arange(LENGTH) / 3]
    return make_loop(body, [w], [np.array([0.3, -0.2]), 1], xs)


@ft.cache
def other_axes():
    """Rows of xs and ys along axes of their own, last one first."""

    def body(consts, carry, x):
        h = carry[0] * 0.5 + x[0].sum(0) + x[1] * consts[0]
        return [h], [jnp.outer(h, h), x[0] * 2.0]

    xs = [
        np.sin(np.arange(3.0 * LENGTH * 2)).reshape(3, LENGTH, 2),
        np.cos(np.arange(2.0 * LENGTH)).reshape(2, LENGTH),
    ]
    how = {"x_axes": [1, 1], "y_axes": [2, 1], "reverse": True}
    return make_loop(body, [0.7], [np.array([0.1, 0.2])], xs, **how)


@ft.cache
def counted():
    """A predicate of a leaf that nothing else enters."""

    def body(consts, carry, x):
        return [carry[0] + 1, jnp.sin(carry[1] + consts[0])], []

    cond = lambda limit, carry: carry[0] < limit[0]
    return make_loop(body, [0.4], [0, 0.3], cond=cond, cond_consts=[3])


@ft.cache
def until():
    """An input of a step reaches the predicate after two steps; the loop has xs and ys."""

    def body(consts, carry, x):
        a, b, c, free = carry
        return [a + b, c * 1.0, consts[0] + x[0], free * 1.5], [a, x[0] * 2.0]

    def cond(limit, carry):
        return carry[0] < limit[0]

    xs = [0.3 + 0.1 * np.arange(6.0)]
    return make_loop(body, [0.5], [0.1, 0.2, 0.3, 0.4], xs, cond=cond, cond_consts=[1.9])


LOOPS = (scan, other_axes, counted, until)


def lanes_of(operands, flags, count=LANES):
    """Operands for each lane; what is not flagged is the same in all."""

    def differing(v, flag, lane):
        integer = np.issubdtype(v.dtype, np.integer)
        return v + np.array(lane if integer else 0.2 * lane, v.dtype) if flag else v

    return [
        Operands(
            *(
                [differing(v, f, lane) for v, f in zip(group, marks, strict=True)]
                for group, marks in zip(operands, flags, strict=True)
            )
        )
        for lane in range(count)
    ]


def together(places, lanes):
    """The operands of the batched loop."""

    def stacked(values, place):
        return values[0] if place is None else np.stack(values, place)

    groups = (list(zip(*(lane[g] for lane in lanes), strict=True)) for g in range(4))
    pairs = zip(groups, places, strict=True)
    return Operands(*([stacked(v, p) for v, p in zip(*pair, strict=True)] for pair in pairs))


def lane_results(batched, results, lane):
    places = batched.results
    pairs = zip(results, places, strict=True)
    return [v if place is None else v.take(lane, place) for v, place in pairs]


def choices(operands):
    """No operand batched, each alone, all."""
    count = len(operands.flat)
    for flags in [np.zeros(count, bool), *np.eye(count, dtype=bool), np.ones(count, bool)]:
        flags, groups = list(flags), []
        for group in operands:
            groups.append(flags[: len(group)])
            flags = flags[len(group) :]
        yield Operands(*(list(map(bool, group)) for group in groups))


@pytest.mark.slow
@pytest.mark.parametrize("make", LOOPS, ids=lambda f: f.__name__)
def test_against_every_lane(make):
    loop, operands = make()
    for flags in choices(operands):
        batched = batch_loop(loop, _jax.axis(LANES), flags)
        lanes = lanes_of(operands, flags)
        for places, marks in zip(batched.axes[:2], flags[:2], strict=True):
            assert [p is not None for p in places] == marks
        results = run(batched.loop, together(batched.axes, lanes))
        for lane, own in enumerate(lanes):
            assert_same(lane_results(batched, results, lane), run(loop, own))


def test_what_does_not_depend_on_the_axis_does_not_have_it():
    loop, _ = scan()
    none = Operands([], [False], [False, False], [False, False])
    same = batch_loop(loop, _jax.axis(LANES), none)
    assert same.axes.init == [None, None]
    assert same.ys == [None, None]
    # The counter has nothing to do with what is batched.
    batched = batch_loop(loop, _jax.axis(LANES), none._replace(xs=[True, False]))
    assert batched.axes == Operands([], [None], [0, None], [1, None])
    assert batched.ys == [1, None]
    last = batch_loop(loop, _jax.axis(LANES), none._replace(xs=[False, True]))
    assert last.axes.init == [None, None]
    assert last.ys == [1, None]


def test_results_may_be_forced():
    loop, operands = scan()
    flags = Operands([], [False], [False, False], [False, False])
    batched = batch_loop(loop, _jax.axis(LANES), flags, ys=[False, True])
    assert batched.ys == [None, 1]
    results = run(batched.loop, together(batched.axes, [operands] * LANES))
    for lane in range(LANES):
        assert_same(lane_results(batched, results, lane), run(loop, operands))


def test_records_of_rows_along_other_axes():
    loop, _ = other_axes()
    batched = batch_loop(loop, _jax.axis(LANES), Operands([], [True], [True], [True, True]))
    # The axis is the first of a slice, and so before the rows.
    assert batched.loop.xs == (Input(2), Input(2))
    assert batched.loop.y_axes == (3, 2)
    assert batched.axes.xs == [0, 0]
    assert batched.ys == [0, 0]
    assert batched.loop.xs_types[0].shape == (LANES, 3, LENGTH, 2)
    assert batched.loop.ys_types[0].shape == (LANES, 2, 2, LENGTH)


def test_records_keep_what_an_axis_does_not_change():
    """Names, buffers, the flag of a step, and which rows are a log."""
    loop, _ = until()
    facts = {"carry": {"name": "h", "buffer": True, "flag": True}, "ys": {"log": True}}
    for leaves, changes in facts.items():
        for i in range(len(getattr(loop, leaves))):
            records = list(getattr(loop, leaves))
            records[i] = records[i]._replace(**changes)
            one = loop.replace(**{leaves: tuple(records)})
            flags = Operands([False], [True], [False] * 4, [False])
            found = getattr(batch_loop(one, _jax.axis(LANES), flags).loop, leaves)
            kept = [[getattr(r, fact) for fact in changes] for r in found]
            assert kept == [[getattr(r, fact) for fact in changes] for r in records]


def test_a_predicate_of_its_own_makes_an_axis_a_lane():
    loop, _ = until()
    flags = Operands([False], [True], [False] * 4, [False])
    batched = batch_loop(loop, _jax.axis(LANES), flags)
    assert batched.loop.lanes == (LANES,)
    assert batched.axes.init == [0, 0, 0, 0]
    assert batched.loop.const_lanes == (1,)
    assert batched.loop.xs_lanes == (0,)
    assert batched.axes.xs == [None]
    assert batched.ys == [1, 1]
    given = batch_loop(loop, _jax.axis(LANES), flags._replace(consts=[False], xs=[True]))
    assert given.loop.xs_lanes == (1,)
    assert given.loop.const_lanes == (0,)
    loop, _ = counted()
    flags = Operands([False], [True], [False, True], [])
    batched = batch_loop(loop, _jax.axis(LANES), flags)
    assert batched.loop.lanes == ()
    assert batched.axes.init == [None, 0]


NESTED = [
    (scan, ([], [0], [1, 0], [0, 0]), ([], [1], [0, 0], [1, 0])),
    (other_axes, ([], [1], [0], [0, 1]), ([], [0], [1], [1, 0])),
    (counted, ([0], [1], [0, 0], []), ([1], [1], [0, 0], [])),
    (counted, ([1], [0], [0, 1], []), ([0], [1], [0, 1], [])),
    (until, ([1], [0], [0] * 4, [0]), ([0], [1], [0] * 4, [0])),
    (until, ([1], [0], [0] * 4, [1]), ([0], [0], [0, 0, 0, 1], [0])),
]


@pytest.mark.parametrize(("make", "first", "second"), NESTED)
@pytest.mark.parametrize("whole", [False, True])
def test_two_axes(make, first, second, whole):
    """The second one is a lane as well, before the others, or lies behind the lanes."""
    loop, operands = make()
    first, second = (Operands(*(list(map(bool, g)) for g in flags)) for flags in (first, second))
    once = batch_loop(loop, _jax.axis(LANES), first)
    twice = batch_loop(once.loop, _jax.axis(2), second, whole=whole)
    outer = [lanes_of(own, first) for own in lanes_of(operands, second, 2)]
    halves = [together(once.axes, lanes) for lanes in outer]
    results = run(twice.loop, together(twice.axes, halves))
    for lane, lanes in enumerate(outer):
        half = lane_results(twice, results, lane)
        for inner, own in enumerate(lanes):
            assert_same(lane_results(once, half, inner), run(loop, own))


def test_lanes_of_two_axes():
    loop, _ = until()
    flags = Operands([True], [False], [False] * 4, [True])
    once = batch_loop(loop, _jax.axis(LANES), flags)
    assert once.loop.lanes == (LANES,)
    # What does not reach the predicate adds no lane.
    free = Operands([False], [False], [False, False, False, True], [False])
    behind = batch_loop(once.loop, _jax.axis(2), free)
    assert behind.loop.lanes == (LANES,)
    assert behind.axes.init == [None, None, None, 1]
    joined = batch_loop(once.loop, _jax.axis(2), flags._replace(xs=[False]))
    assert joined.loop.lanes == (2, LANES)
    assert joined.axes.init == [0, 0, 0, 0]
    assert joined.loop.xs_lanes == (0,)


def test_whole_constants():
    """A constant that differs between some lanes may be given to each."""
    loop, _ = until()
    once = batch_loop(loop, _jax.axis(LANES), Operands([True], [True], [False] * 4, [False]))
    assert once.loop.const_lanes == (1,)
    flags = Operands([True], [False], [False] * 4, [False])
    assert batch_loop(once.loop, _jax.axis(2), flags).loop.const_lanes == (0,)
    whole = batch_loop(once.loop, _jax.axis(2), flags, whole=True)
    assert whole.loop.const_lanes == (2,)
    assert whole.axes.consts == [0]


def test_constants_that_are_the_same_in_all_lanes():
    """They stay so, whatever others do."""

    def body(consts, carry, x):
        return [carry[0] * consts[0] + consts[1]], []

    cond = lambda limit, carry: carry[0] < limit[0]
    loop, _ = make_loop(body, [1.5, 0.3], [0.1], cond=cond, cond_consts=[3.0])
    once = batch_loop(loop, _jax.axis(LANES), Operands([True], [True, False], [False], []))
    flags = Operands([True], [False, False], [False], [])
    whole = batch_loop(once.loop, _jax.axis(2), flags, whole=True)
    assert whole.loop.const_lanes == (2, 0)
    assert whole.axes.consts == [0, None]


def table_loop(reads):
    """A buffer of which each step writes the next row, and may read the one before."""
    row = lambda mode: Window((0,), (0, 0), (1, 2), mode)

    def body(consts, carry, x):
        n, rows = carry
        new = jnp.broadcast_to(jnp.sin(x[0]), (1, 2))
        if reads:
            before, rows = read(rows, (n - 1)[None], row("clip"))
            new = new + before
        return [n + 1, write(rows, new, n[None], row("drop"))], []

    rows = np.cos(np.arange(8.0)).reshape(4, 2)
    return make_loop(body, [], [1, rows], [np.arange(3.0)], buffers=[1])


@pytest.mark.parametrize("reads", [False, True])
def test_an_axis_in_the_rows_of_a_buffer(reads):
    loop, operands = table_loop(reads)
    flags = Operands([], [], [False, True], [True])
    batched = batch_loop(loop, _jax.axis(LANES), flags, in_rows=[1])
    assert batched.axes.init == [None, 1]
    assert batched.loop.carry_types[1].shape == (4, LANES, 2)
    assert batched.loop.is_buffer == (False, True)
    lanes = lanes_of(operands, flags)
    results = run(batched.loop, together(batched.axes, lanes))
    for lane, own in enumerate(lanes):
        assert_same(lane_results(batched, results, lane), run(loop, own))
    assert batch_loop(loop, _jax.axis(LANES), flags).axes.init == [None, 0]


def test_which_buffers_have_it_in_their_rows():
    """Those that steps only write to, if there are enough lanes and it need not be moved there."""
    loop, _ = table_loop(reads=False)
    found = lambda size, place: leaves_in_rows(loop, _jax.axis(size), [None, place])
    assert found(MANY_LANES, None) == found(MANY_LANES, 1) == (1,)
    assert found(MANY_LANES - 1, 1) == found(MANY_LANES, 0) == ()
    loop, _ = table_loop(reads=True)
    assert found(MANY_LANES, 1) == ()


@pytest.mark.parametrize("joins", [False, True])
def test_where_the_axis_is_in_the_halves_of_a_step(joins):
    """Behind the lanes, or before them; in what is active, and wherever it was said to be."""

    def body(consts, carry, x):
        h, n = carry
        ys = [h[:, None] * jnp.ones(4), x[0] * jnp.ones(3), n * 2, jnp.ones(3)]
        return [jnp.sin(h) * x[0], n + 1], ys

    cond = lambda limit, carry: carry[1] < limit[0]
    init, xs = [np.array([0.3, 0.5, 0.7]), np.ones(3, int)], [np.cos(np.arange(5.0))]
    loop, _ = make_loop(body, [], init, xs, cond=cond, cond_consts=[np.array([2, 3, 4])])
    active = Active((), (True, False), (True,), (True, True, False, False))
    split, at = split_step(loop, active), 0 if joins else 1
    places, ys = Operands([None], [], [at, at], [1]), [at + 1, None, at + 1, None]
    new = batch_split(split, loop, _jax.axis(2), places, ys, active)
    lanes, wide = ((2, 3), (2, 3, 4)) if joins else ((3, 2), (3, 2, 4))
    shapes = [t.shape for t in new.forward.out_avals[: split.results]]
    assert shapes == [lanes, lanes, wide, lanes, lanes, (3,)]
    assert all(t.shape[0] == 2 for t in kept(new.stored_types, new.stored_batched))
    back = new.backward(active, [False, False])
    assert [t.shape for t in back.in_avals[-3:]] == [lanes, wide, lanes]
    assert [t.shape for t in back.out_avals] == [lanes, (2,)]
