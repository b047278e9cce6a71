"""Flattening: the cuts of a step, values that outlive its pieces, and steps of inner loops at a
time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopkit._engine.lanes.flattened import LEAF, STEPS_BETWEEN_CHECKS, _cut, _few, flattened
from loopkit._engine.lanes.nest import steps_nanoseconds
from loopkit._engine.loop import run_rewritten
from loopkit._engine.primitives import while_p
from loopkit._jaxprs.cost import UNKNOWN_TRIPS, nanoseconds

from .small_loops import assert_same, make_loop, run

VALUE = np.array([0.3, -0.7])


def inner_loop(length=None, step=jnp.sin):
    """x <- step(x), n times."""
    return make_loop(
        lambda _, carry, __: ([carry[0] - 1, step(carry[1])], []),
        [],
        [2, VALUE],
        cond=lambda _, carry: carry[0] > 0,
        length=length,
    )[0]


def outer_loop(step):
    """A loop of so many carry leaves: t, x, and of a constant."""
    body = lambda consts, carry, _: ([carry[0] + 1, step(consts[0], *carry)], [])
    return make_loop(body, [np.eye(2)], [0, VALUE], length=3, lane_policy="flatten")


def around(inner):
    """Put equations before an inner loop, whose values `before` and `t` are read after it."""

    def step(w, t, x):
        before = jax.jit(jnp.cos)(x) * 2.0
        _, x = while_p.bind(t + 1, jnp.exp(before), loop=inner)
        return x @ w + before + t

    return outer_loop(step)


@pytest.mark.parametrize(("length", "inside"), [(2, 1), (1, 0)])
def test_loops_of_one_step_stay(length, inside):
    loop, operands = around(inner_loop(length))
    nest = _cut(loop)
    assert (len(nest.inside) if nest else 0) == inside
    new = flattened(loop)
    if nest is None:
        assert new is loop
        return
    given, _ = new.loop.split(new.map_operands(operands.flat))
    assert_same(new.map_results(run(new.loop, given)), run(loop, operands))


def test_what_outlives_a_piece():
    """Values that later pieces read outlive a piece; results that none reads do not."""
    nest = _cut(around(inner_loop())[0])
    first, last = nest.made
    assert [v.aval.shape for v in first] == [(), (2,), (), (2,)], "t, before, where it begins"
    assert last == []
    names = [[eqn.primitive.name for eqn in piece] for piece in nest.pieces]
    assert {"jit", "pjit"} & set(names[0]), "a call of no loop stays one"
    assert "dot_general" in names[1]


def test_steps_that_are_taken_at_once():
    """Take as many steps at a time as make the sum least of what runs around them and of what
    waits."""
    for size in (4, 40, 400, 4000):
        inner = inner_loop(step=lambda x, size=size: jnp.resize(jnp.sin(jnp.resize(x, size)), 2))
        loop, _ = around(inner)
        nest = _cut(loop)
        arrays = sum(map(len, nest.made)) + inner.carry_count + loop.carry_count
        once = arrays * LEAF + sum(map(steps_nanoseconds, nest.pieces))
        step = nanoseconds(inner.body)
        cost = lambda n: UNKNOWN_TRIPS / n * once + n / 2 * step  # noqa: B023
        best = min(range(1, STEPS_BETWEEN_CHECKS + 1), key=cost)
        assert abs(nest.inside[0].loop.length - best) <= 1
        assert nest.inside[0].loop.length == _few(nest.inside[0].eqn, once)


@pytest.mark.slow
def test_loops_inside_that_are_flattened_before():
    """Inner loops are flattened first, and loops that are flat are not cut again."""
    middle, _ = make_loop(
        lambda _, carry, __: (
            [carry[0] - 1, while_p.bind(carry[0], carry[1], loop=inner_loop())[1]],
            [],
        ),
        [],
        [2, VALUE],
        cond=lambda _, carry: carry[0] > 0,
    )
    loop, operands = around(middle)
    new = flattened(loop)
    given, _ = new.loop.split(new.map_operands(operands.flat))
    assert_same(new.map_results(run(new.loop, given)), run(loop, operands))
    (inside,) = _cut(loop).inside
    assert inside.loop.masks_itself
    flat = flattened(middle.replace(lane_policy="flatten"))
    bind = lambda *values: while_p.bind(*values, loop=flat.loop)
    again, _ = outer_loop(lambda w, t, x: run_rewritten(bind, [flat], [t + 1, x])[1] @ w)
    (inside,) = _cut(again).inside
    assert inside.loop is flat.loop
