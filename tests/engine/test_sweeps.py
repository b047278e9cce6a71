"""Each way to keep what a plan keeps, alone: what is handed on, and the cotangents coming back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopkit import Plan, _jax
from loopkit._engine.derivative.reversal import reversal
from loopkit._engine.facts.activity import forward_activity
from loopkit._engine.loop import kept, parts, spread
from loopkit._engine.sweeps import STRATEGIES, sweeps
from loopkit._engine.sweeps.in_units import InUnits
from turns import in_turn

from .small_loops import assert_same, make_loop, run

LENGTH = 7


def step(consts, carry, x):
    """A chain in a matrix, a counter, and an accumulator, of which nothing is saved."""
    (w, scale), (h, n, total), (a,) = consts, carry, x
    h = jnp.sin(h @ w + a * n)
    return [h, n + 1, total + h.sum()], [h * scale, n]


def operands():
    w = np.cos(np.arange(9.0)).reshape(3, 3)
    init = [np.array([0.3, -0.2, 0.5]), 1, 0.0]
    return [w, 0.7], init, [np.sin(np.arange(3.0 * LENGTH)).reshape(3, LENGTH)]


def known(**settings):
    return make_loop(step, *operands(), x_axes=[1], y_axes=[1, 0], **settings)


def decided(**settings):
    """Five steps of seven."""
    how = {"cond": lambda limit, carry: carry[1] < limit[0], "cond_consts": [6], **settings}
    return make_loop(step, *operands(), x_axes=[1], y_axes=[1, 0], **how)


PLANS = [
    ("every residual", "all"),
    ("every carry", Plan(LENGTH)),
    ("every segment", Plan(3, segment=3)),
    ("every segment", Plan(4, segment=2, store="residuals")),
    ("schedule", Plan(2)),
    ("schedule", Plan(4)),
    ("schedule", Plan(1, segment=2, store="residuals")),
    ("schedule", Plan(3, thinned=True)),
]


def unrolled_vjp(loop, given, active, steps, cts):
    """Cotangents of the active inputs, of the loop written out."""
    inputs = [*given.consts, *given.init, *given.xs]

    def unrolled(*moving):
        values = spread(moving, active.inputs, inputs)
        consts, carry, xs = parts(values, loop.const_count, loop.carry_count)
        ys = [jnp.zeros(t.shape, t.dtype) for t in loop.ys_types]
        for t in range(steps):
            x = [jnp.take(v, t, axis) for v, axis in zip(xs, loop.x_axes, strict=True)]
            carry, y = parts(_jax.call_jaxpr(loop.body)(*consts, *carry, *x), loop.carry_count)
            at = [(slice(None),) * axis + (t,) for axis in loop.y_axes]
            ys = [v.at[i].set(row) for v, i, row in zip(ys, at, y, strict=True)]
        return kept([*carry, *ys], active.outputs)

    moving = list(map(jnp.asarray, kept(inputs, active.inputs)))
    return jax.vjp(unrolled, *moving)[1](cts)


BOTH = [(False, False), (True, True)]
MIXED = [(True, False), (False, True)]
CASES = [(*which, ways) for which in PLANS for ways in BOTH]
CASES += [("schedule", Plan(4), ways) for ways in MIXED]


@pytest.mark.parametrize(("make", "case"), in_turn([known, decided], CASES))
def test_what_is_saved_is_enough(make, case):
    """Also where loops go one way as on a GPU, and the other way as elsewhere."""
    name, plan, on_gpu = case
    loop, given = make(checkpoints=plan)
    nonzero = loop.split([False] * loop.cond_const_count + [True, True, True, False, True, True])[0]
    active = forward_activity(loop, nonzero)
    how = reversal(loop, active)
    both = sweeps(how)
    assert how.plan.strategy == name
    assert type(both) is STRATEGIES[name]
    with _jax.host_waits(on_gpu[0]):
        there = sweeps(how)
    with _jax.host_waits(on_gpu[1]):
        back = sweeps(how)
    assert (type(there) is InUnits) == (name == "schedule" and on_gpu[0])
    values = list(map(jnp.asarray, given.flat))
    forward = jax.jit(lambda values: there.forward(loop, loop.split(values)[0]))
    with _jax.host_waits(on_gpu[0]):
        results, residuals = parts(forward(values), loop.carry_count + loop.ys_count)
    assert_same(results, run(loop, given))
    wanted = [(t.shape, t.dtype) for t in both.residual_types]
    assert [(v.shape, v.dtype) for v in residuals] == wanted
    assert [(v.shape, v.dtype) for v in residuals[: len(both.stack_types)]] == [
        (t.shape, t.dtype) for t in both.stack_types
    ]
    cts = [jnp.cos(jnp.arange(t.size) + 0.5).reshape(t.shape) for t in loop.output_types(active)]
    backward = jax.jit(lambda v, r, w: back.backward(loop.split(v)[0], r, w, None))
    steps = 5 if loop.cond is not None else LENGTH
    wanted = unrolled_vjp(loop, given, active, steps, cts)
    with _jax.host_waits(on_gpu[1]):
        assert_same(backward(values, residuals, cts), wanted)
    several = jax.jit(lambda v, r, w: back.backward(loop.split(v)[0], r, w, 2))
    with _jax.host_waits(on_gpu[1]):
        of_two = several(values, residuals, [jnp.stack([w, -2.0 * w]) for w in cts])
    assert_same([v[0] for v in of_two], wanted)
    assert_same([v[1] for v in of_two], [-2.0 * v for v in wanted])


def test_each_way_is_tried():
    assert {name for name, _ in PLANS} == set(STRATEGIES)
