"""Each strategy by itself: what its sweeps hand over, and the cotangents coming back."""

import jax
import jax.numpy as jnp
import pytest

from loopkit import Plan, _jax
from loopkit._engine.derivative.reversal import reversal
from loopkit._engine.facts.activity import forward_activity
from loopkit._engine.loop import parts
from loopkit._engine.sweeps import STRATEGIES, sweeps
from loopkit._engine.sweeps.in_segments import InSegments
from turns import in_turn

from .small_loops import assert_same, run
from .swept_loops import GPUS, LENGTH, MIXED, cotangents_of, decided, known, moving, written_out

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
CASES = [(*which, ways) for which in PLANS for ways in GPUS]
CASES += [("schedule", Plan(4), ways) for ways in MIXED]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "case"), in_turn([known, decided], CASES))
def test_what_is_saved_is_enough(make, case):
    """Also where loops go one way as on a GPU, and the other way as elsewhere."""
    name, plan, on_gpu = case
    loop, given = make(checkpoints=plan)
    active = forward_activity(loop, moving(loop))
    how = reversal(loop, active)
    both = sweeps(how)
    assert how.plan.strategy == name
    assert type(both) is STRATEGIES[name]
    with _jax.host_waits(on_gpu[0]):
        there = sweeps(how)
    with _jax.host_waits(on_gpu[1]):
        back = sweeps(how)
    assert (type(there) is InSegments) == (name == "schedule" and on_gpu[0])
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
    cts = cotangents_of(loop, active)
    backward = jax.jit(lambda v, r, w: back.backward(loop.split(v)[0], r, w, None))
    _, wanted = written_out(loop, given)
    with _jax.host_waits(on_gpu[1]):
        assert_same(backward(values, residuals, cts), wanted)
    several = jax.jit(lambda v, r, w: back.backward(loop.split(v)[0], r, w, 2))
    with _jax.host_waits(on_gpu[1]):
        of_two = several(values, residuals, [jnp.stack([w, -2.0 * w]) for w in cts])
    assert_same([v[0] for v in of_two], wanted)
    assert_same([v[1] for v in of_two], [-2.0 * v for v in wanted])


def test_each_way_is_tried():
    assert {name for name, _ in PLANS} == set(STRATEGIES)
