"""Derivatives of steps in lanes that have stopped: at inputs where they are finite."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopkit import Plan
from loopkit._engine.facts.activity import forward_activity
from loopkit._engine.lanes.safe_inputs import SafeInputs, _substitution
from loopkit._engine.loop import Const, Input

from .small_loops import make_loop
from .swept_loops import GPUS, assert_swept, cotangents_of, moving, written_out

LENGTH = 5
STOPS = np.array([4, 0, 1, 3])


def body(consts, carry, x):
    """Finite where n < stop, its slices are not zero, and `u` is not; of the carry, one is unread.

    The exponential is computed once. It is less than the steps of other lanes.
    """
    (w, stop, u), (h, n, _), (a, b) = consts, carry, x
    stop, k = stop.astype(float), n.astype(float)
    new = jnp.sin(h * w + a) + jnp.sqrt(stop * 3 - k * 3) * jnp.sqrt(b) + jnp.sqrt(u) * h
    new = new + jnp.sqrt(jnp.exp(stop) - k)
    return [new, n + 1, a], [new * b, n]


def below(limit, carry):
    return carry[1] < limit[0]


def numbers(*shape):
    return 1.5 + np.sin(np.arange(float(np.prod(shape)))).reshape(shape)


def of_lanes(stops, shared, **settings):
    """The loop of many lanes, and each by itself. `shared`: whether all read the first xs."""
    lanes, levels = stops.shape, stops.ndim
    step, x_lanes = body, (0 if shared else levels, levels)
    for level in range(levels):
        ins = [None, 0, 0 if level else None], [0, 0, 0], [None if shared else 0, 0]
        outs = [0, 0, 0], [0, 0]
        step = jax.vmap(step, ins, outs)
    u = numbers(*lanes[: levels - 1])
    u = np.where(stops.max(-1) > 0, u, 0.0) if levels > 1 else u
    a = numbers(LENGTH, *(() if shared else lanes))
    rows = np.arange(LENGTH).reshape(-1, *(1,) * levels)
    b = np.where(rows < stops, numbers(LENGTH, *lanes), 0.0)
    init = [numbers(*lanes) / 3, np.zeros(lanes, int), np.zeros(lanes)]
    if shared:
        a[stops.max() :] = np.nan
    consts = [0.7, stops.astype(float), u]
    how = {"cond": below, **settings}
    loop, given = make_loop(step, consts, init, [a, b], cond_consts=[stops], **how)
    of_consts = tuple(map(Const, (0, levels, levels - 1)))
    loop = loop.replace(consts=of_consts, xs=tuple(Input(0, n) for n in x_lanes))
    singles = {}
    for lane in np.ndindex(lanes):
        own = [v[lane] for v in init], [a if shared else a[:, *lane], b[:, *lane]]
        of_lane = [0.7, float(stops[lane]), u[lane[:-1]]]
        singles[lane] = make_loop(body, of_lane, *own, cond_consts=[stops[lane]], **how)
    return loop, given, singles


def lane_by_lane(loop, singles):
    """Results and cotangents, of which those of what lanes have in common are added."""
    active = forward_activity(loop, moving(loop))
    cts = cotangents_of(loop, active)
    results = [np.zeros(t.shape, t.dtype) for t in loop.result_types]
    types = loop.input_types(active)
    cotangents = [np.zeros(t.shape) for t in types]
    carried = sum(active.carry)
    lanes = [*loop.const_lanes, *[len(loop.lanes)] * 2, *loop.xs_lanes]
    rows = [False] * 5 + [True] * 2
    for lane, (one, given) in singles.items():
        own = [ct[lane] for ct in cts[:carried]] + [ct[:, *lane] for ct in cts[carried:]]
        found, back = written_out(one, given, own)
        for i, v in enumerate(found):
            results[i][lane if i < loop.carry_count else (slice(None), *lane)] = v
        for ct, v, n, row in zip(cotangents, back, lanes, rows, strict=True):
            ct[(slice(None), *lane[:n]) if row else lane[:n]] += v
    return results, cotangents


PLANS = ["all", Plan(LENGTH), Plan(2, 3), Plan(3, 2, "residuals"), Plan(2, host=True)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("shared", [False, True])
def test_as_each_lane_by_itself(shared):
    """Whatever is kept: no lane that has stopped, or takes no step at all, makes a NaN."""
    loop, _, singles = of_lanes(STOPS, shared)
    wanted = lane_by_lane(loop, singles)
    assert all(np.isfinite(v).all() for v in wanted[1])
    for plan, on_gpu in zip(PLANS, itertools.cycle(GPUS), strict=False):
        loop, given, _ = of_lanes(STOPS, shared, checkpoints=plan)
        assert_swept(loop, given, wanted, on_gpu)


@pytest.mark.exhaustive
@pytest.mark.parametrize("shared", [False, True])
def test_lanes_of_two_axes_of_which_several_cotangents_come_back(shared):
    """Also where no lane of an inner axis takes a step."""
    stops = np.array([[0, 3, 1], [0, 0, 0]])
    loop, _, singles = of_lanes(stops, shared)
    wanted = lane_by_lane(loop, singles)
    assert all(np.isfinite(v).all() for v in wanted[1])
    for plan, batch in [("all", 2), (Plan(2, 3), None)]:
        loop, given, _ = of_lanes(stops, shared, checkpoints=plan)
        assert_swept(loop, given, wanted, batch=batch)


@pytest.mark.slow
def test_several_steps_to_an_iteration():
    loop, _, singles = of_lanes(STOPS, False)
    wanted = lane_by_lane(loop, singles)
    loop, given, _ = of_lanes(STOPS, False, checkpoints="all", unroll=3)
    assert_swept(loop, given, wanted)


@pytest.mark.slow
def test_no_lane_takes_a_step():
    """No lane is reversed: nothing finite could take its place."""
    stops = np.zeros(2, int)
    for shared, plan in [(False, "all"), (True, Plan(2, 3))]:
        loop, given, singles = of_lanes(stops, shared, checkpoints=plan)
        found = assert_swept(loop, given, lane_by_lane(loop, singles))
        assert found.runs["reversed"] == 0


def safe_inputs(shared):
    loop, given, _ = of_lanes(STOPS, shared)
    every = [True] * loop.carry_count
    return SafeInputs.of(loop, given, jnp.asarray(STOPS > 0), every, loop.body)


@pytest.mark.slow
def test_what_is_not_chosen_again_each_step():
    """If slices are each lane's own, the values of a stopped lane are known at the start."""
    of_one, of_all = safe_inputs(False), safe_inputs(True)
    assert (of_one.shared, of_all.shared) == (False, True)
    assert (of_all.carry, of_all.x) == ([], [])
    consts = of_one.apart_from_carry(jnp.asarray(STOPS > 2), of_one.x)[0]
    assert all(a is b for a, b in zip(consts, of_one.consts, strict=True))


def test_no_lanes_at_all():
    substitute = _substitution(jnp.zeros((0,), bool))
    assert substitute(jnp.zeros((0, 3))).shape == (0, 3)
