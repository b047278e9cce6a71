"""A loop of many lanes in phases of fewer and fewer: as if each lane were run alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopkit import _jax
from loopkit._engine.lanes.batched_loop import batch_loop
from loopkit._engine.lanes.many_lanes import OneLane, waiting_lanes
from loopkit._engine.lanes.phases import phases_of
from loopkit._engine.loop import Operands
from loopkit._engine.primitives import dual_p, while_p
from loopkit._jaxprs import equations
from loopkit._progress.progress import check_progress

from .small_loops import assert_same, make_loop, run

STOPS = np.array([3, 1, 7, 2, 5, 0])
COUNT = len(STOPS)


def below(limit, carry):
    return carry[0] < limit[0]


def bounded(rows, **how):
    """Rows along other axes than the first, read, written, both or none, and lanes in some."""

    def body(consts, carry, x):
        (w, b), (n, h, m) = consts, carry
        h = jnp.sin(h * w) + b + (x[0].sum() * x[1] if x else 0.1)
        ys = [jnp.ones(2) * h, n * 2] if "y" in rows else []
        return [n + 1, h, m @ m * 0.5], ys

    xs = [np.sin(np.arange(18.0)).reshape(3, 6), np.arange(6.0)] if "x" in rows else []
    init = [0, 0.3, np.array([[0.5, 0.1], [0.2, 0.9]])]
    how |= {"x_axes": [1, 0][: len(xs)], "y_axes": [1, 0] if "y" in rows else []}
    how |= {"cond": below, "cond_consts": [3], "lane_policy": (4, 2)}
    loop, operands = make_loop(body, [0.9, 0.1], init, xs, length=6, **how)
    flags = Operands([True], [True, False], [False, True, False], [True, False][: len(xs)])
    return loop, operands, flags


def of_all(operands, flags, stops, places):
    """Return the inputs of each lane alone, and of all together."""

    def own(v, flag, lane):
        return v + np.asarray(0.1 * lane, v.dtype) if flag else v

    each = []
    for lane, stop in enumerate(stops):
        groups = zip(operands[1:], flags[1:], strict=True)
        values = ([own(*p, lane) for p in zip(*pair, strict=True)] for pair in groups)
        each.append(Operands([stop], *values))
    columns = zip(*(values.flat for values in each), strict=True)
    pairs = zip(columns, places.flat, strict=True)
    return each, [column[0] if p is None else np.stack(column, p) for column, p in pairs]


def assert_as_alone(loop, operands, flags, stops=STOPS):
    many = OneLane(loop, COUNT, flags).many
    waiting, phases = waiting_lanes(many.lane), phases_of(many)
    assert phases.widths == (6, 4, 2)
    each, given = of_all(operands, flags, stops, waiting.axes)
    found = phases.run(*given)
    for lane, values in enumerate(each):
        pairs = zip(found, waiting.results, strict=True)
        assert_same([np.asarray(v).take(lane, p) for v, p in pairs], run(loop, values))


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "reverse"), [("xy", True), ("x", False), ("y", False)])
def test_every_lane_as_if_alone(rows, reverse):
    assert_as_alone(*bounded(rows, reverse=reverse))


@pytest.mark.slow
def test_lanes_of_which_each_has_lanes():
    """A lane goes on while one in it does; a constant that differs between those goes with it."""
    loop, operands, flags = bounded("y")
    inside = Operands([True], [False, True], [False] * 3, [])
    two = batch_loop(loop, _jax.axis(2), inside)
    wide = [np.stack([v] * 2, a or 0) for v, a in zip(operands.init, two.axes.init, strict=True)]
    operands = Operands([np.array([3, 1])], [operands.consts[0], np.array([0.1, 0.4])], wide, [])
    stops = np.stack([STOPS, STOPS[::-1]], 1)
    assert_as_alone(two.loop, operands, flags, stops)


# ---------------------------------------------------------------- what is traced


def unbounded():
    """Its last leaf is a key, of which there is no largest."""

    def body(consts, carry, x):
        n, h, key = carry
        return [n + 1, jnp.sin(h), jax.random.split(key, 1)[0]], []

    keys = jax.make_jaxpr(lambda: jax.random.key(0))().out_avals
    loop, _ = make_loop(lambda _, carry, x: (carry, []), [], [0, 0.3], cond=below, cond_consts=[3])
    types = [*loop.carry_types, *keys]
    step = _jax.trace_closed(lambda *carry: body([], carry, [])[0], types, "step")
    asks = _jax.trace_closed(lambda l, *carry: [below([l], carry)], [types[0], *types], "asks")
    return loop.replace(
        cond=asks, body=step, carry=(*loop.carry, loop.carry[-1]), lane_policy=(4, 2)
    )


def test_without_a_bound_nothing_is_counted():
    loop = unbounded()
    many = OneLane(loop, COUNT, Operands([True], [], [False, True, False], [])).many
    phases = phases_of(many)
    assert phases.one is loop
    eqns = equations.all_equations(jax.make_jaxpr(phases.run)(*many.operand_types))
    loops = [eqn.params["loop"] for eqn in eqns if eqn.primitive is while_p]
    assert [(l.lanes, l.min_active_lanes, l.lane_policy) for l in loops] == [
        ((6,), 4, "wait"),
        ((4,), 2, "wait"),
        ((2,), 0, "wait"),
    ]


def test_a_tangent_that_is_zero_stays_so():
    """Each phase has one dual loop."""
    loop, _, flags = bounded("xy")
    many = OneLane(loop, COUNT, flags).many
    phases, moving = phases_of(many), []
    at = len(many.operand_types) - 4
    assert many.operand_types[at].shape == (COUNT,)

    def tangents(*values):
        given = [_jax.float0_zero(t) for t in many.operand_types]
        given[at] = values[at]
        results, moves = phases.jvp(values, given)
        moving[:] = _jax.nonzero(moves)
        return results

    eqns = equations.all_equations(jax.make_jaxpr(tangents)(*many.operand_types))
    assert [eqn.primitive for eqn in eqns].count(dual_p) == 3
    assert moving == [False, True, False, True, False]


def test_which_loops_have_phases():
    loop, _, flags = bounded("")
    assert phases_of(loop) is None
    for narrows, widths in [
        ((4, 2), (6, 4, 2)),
        ((8, 6, 5), (6, 5)),
        ((8, 6), None),
        ("wait", None),
    ]:
        phases = phases_of(OneLane(loop.replace(lane_policy=narrows), COUNT, flags).many)
        assert (phases and phases.widths) == widths


def test_all_phases_have_one_bar():
    loop, _, flags = bounded("")
    for given, whole in [(None, 6), (20, 20)]:
        shown = check_progress("scan", "line").part(True, True, whole=given)
        many = OneLane(loop.replace(progress=shown), COUNT, flags).many
        found = [phases_of(many).phase(number).progress for number in range(3)]
        assert [p.first for p in found] == [True, False, False]
        assert [p.last for p in found] == [False, False, True]
        assert [p.whole for p in found] == [whole] * 3
    assert phases_of(OneLane(loop, COUNT, flags).many).phase(0).progress is None
