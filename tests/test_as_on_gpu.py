"""Every loop as it is lowered for a GPU, with few loops of unknown length: the same numbers."""

from types import SimpleNamespace

import jax
import jax.export
import jax.numpy as jnp
import pytest

import loopkit
from derivatives import assert_close, derivative, direction, expected
from loopkit import Plan, _jax
from loopkit._engine.sweeps import segments, tables
from loopkit._engine.sweeps.in_segments import InSegments
from loopkit._engine.sweeps.strategy import PART
from loopkit._jax import devices
from loopkit.schedules import online
from problems import CHECKPOINTS, PROBLEMS, Problem
from turns import in_turn

PLANS = [*CHECKPOINTS, 4, Plan(2, segment=3), Plan(100, segment=3, store="residuals")]


@pytest.mark.slow
@pytest.mark.parametrize(("problem", "checkpoints"), in_turn(PROBLEMS, PLANS, of=14))
def test_gradients(problem: Problem, checkpoints):
    with _jax.host_waits(True):
        got = jax.jit(derivative(problem.flat_loop(checkpoints), "r"))(problem.vector())
    assert_close(got, expected(problem.name, "r"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("problem", "pattern"), in_turn(PROBLEMS, ["rr", "fr", "rf"], of=14))
def test_second_derivatives(problem: Problem, pattern):
    with _jax.host_waits(True):
        got = jax.jit(derivative(problem.flat_loop(4), pattern))(problem.vector())
    assert_close(got, expected(problem.name, pattern))


def chaotic(x, length, checkpoints):
    step = lambda x, _: (3.7 * x * (1 - x), x)
    x, ys = loopkit.scan(step, x, length=length, checkpoints=checkpoints)
    return x + jnp.sum(ys**2)


@pytest.mark.slow
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize(("length", "checkpoints"), [(9, 3), (20, 8), (23, 1), (100, 2), (100, 8)])
def test_what_is_saved_elsewhere(length, checkpoints, there):
    """A gradient whose two sweeps run on devices of two kinds."""
    x = jnp.linspace(0.3, 0.6, 3)
    wanted = jax.vjp(lambda x: chaotic(x, length, "all"), x)[1](direction(x, 0))
    with _jax.host_waits(there):
        pullback = jax.vjp(lambda x: chaotic(x, length, checkpoints), x)[1]
    with _jax.host_waits(not there):
        assert_close(pullback(direction(x, 0)), wanted, 1e-9)


STOPPING = [Plan(10, segment=4), Plan(40), Plan(2, segment=4), Plan(3), Plan(4, thinned=True)]


def stopped(x, steps, checkpoints, most=40, unroll=1):
    step = lambda c: (c[0] + 1, c[1] + 0.2 * jnp.sin(4 * c[1] + c[0]))  # no slope vanishes
    how = {"max_steps": most, "checkpoints": checkpoints, "unroll": unroll}
    return jnp.sum(loopkit.while_loop(lambda c: c[0] < steps, step, (0, x), **how)[1])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("steps", "most", "unroll"), in_turn([0, 1, 2, 11, 12, 39], [40, None], [1, 3], of=3)
)
def test_steps_that_are_counted(steps, most, unroll):
    """None; fewer than a segment; all segments whole."""
    x = jnp.linspace(0.3, 0.6, 3)
    wanted = jax.grad(stopped)(x, steps, "all")
    for plan in STOPPING:
        gradient = jax.grad(lambda x, n, p=plan: stopped(x, n, p, most, unroll))
        with _jax.host_waits(True):
            got = jax.jit(gradient)(x, steps)
        assert_close(got, wanted)


def with_rows(x, length, checkpoints):
    step = lambda x, rate: (rate * x * (1 - x), None)
    return loopkit.scan(step, x, jnp.linspace(2.5, 3.4, length), checkpoints=checkpoints)[0]


LARGE = [Plan(3), Plan(3, segment=3), Plan(3, segment=2, host=True, room=4000)]


@pytest.mark.parametrize(
    ("steps", "large", "plan"),
    in_turn([0, 1, 11, 39, None], [False, True], [*LARGE, Plan(4, host=True, room=4000)], of=4),
)
def test_carries_too_large_to_be_written_in_passing(steps, large, plan, monkeypatch):
    """Large carries, and those on the host, are written once. A loop of unknown length takes 40
    steps."""
    monkeypatch.setattr(segments, "LARGE_CARRY", 8 if large else segments.LARGE_CARRY)
    x = jnp.linspace(0.3, 0.6, 3)
    loss = with_rows if steps is None else stopped
    count = 40 if steps is None else steps
    wanted = jax.grad(lambda x: jnp.sum(loss(x, count, "all")))(x)
    gradient = lambda x, count: jax.grad(lambda x: jnp.sum(loss(x, count, plan)))(x)
    with _jax.host_waits(True):
        got = jax.jit(gradient, static_argnums=[1] if steps is None else [])(x, count)
    assert_close(got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("plan", STOPPING, ids=str)
def test_lanes_that_stop_apart(plan):
    x, steps = jnp.linspace(0.3, 0.6, 12).reshape(4, 3), jnp.array([0, 5, 12, 23])
    wanted = jax.vmap(lambda x, n: jax.grad(stopped)(x, n, "all"))(x, steps)
    with _jax.host_waits(True):
        got = jax.jit(jax.vmap(lambda x, n: jax.grad(stopped)(x, n, plan)))(x, steps)
    assert_close(got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Plan(1), Plan(5, bound=60), Plan(5, segment=3, thinned=True)])
def test_what_slots_hold_follows_from_how_often_was_saved(plan):
    schedule = tables.Schedule.of(plan)
    placed = schedule.start(jnp.int32(0))
    for count in range(min(30, len(schedule.saves) - 1)):
        assert (schedule.held(count) == placed.segments).all()
        placed = schedule.save(placed)[2]


def test_a_plan_that_is_thinned_has_saves_of_its_own():
    thinned, cheapest = (
        tables.Schedule.of(Plan(8, bound=60, thinned=t)).saves for t in (True, False)
    )
    segments, slots, *_ = online.thinning(8, 60, spare=2).table
    assert thinned[:, :2].tolist() == [list(row) for row in zip(segments, slots, strict=True)][:-1]
    assert thinned.tolist() != cheapest.tolist()


@pytest.mark.slow
def test_rows_that_are_counted():
    """Two times a known number of them, and three."""
    gradient, steps = jax.grad(lambda x, n: stopped(x, n, "all", 70)), 2 * PART + 3
    wanted = jax.jit(gradient)(0.3, steps)
    with _jax.host_waits(True):
        got = jax.jit(lambda *args: gradient(*args))(0.3, steps)
    assert abs(wanted) > 1e-3
    assert_close(got, wanted)


def test_a_program_for_both():
    """Each platform has its own way in it."""
    x = jnp.linspace(0.3, 0.6, 3)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(chaotic(x, 50, 4))))
    alone = jax.export.export(gradient, platforms=["cpu"])(x)
    both = jax.export.export(gradient, platforms=["cpu", "cuda"])(x)
    assert both.mlir_module().count("stablehlo.while") > 2 * alone.mlir_module().count(
        "stablehlo.while"
    )
    assert_close(both.call(x), alone.call(x))


def clipped(x):
    """This function has a rule that closes over nothing that lasts, so no two loops of it are
    alike."""

    @jax.custom_vjp
    def rule(x):
        return jnp.sin(x)

    rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (jnp.clip(ct, -1, 1) * jnp.cos(x),))
    return rule(x)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_loops_with_rules_outside_jit_go_as_where_they_run(platform, monkeypatch):
    seen = []
    run = InSegments.run
    monkeypatch.setattr(InSegments, "run", lambda *args: seen.append(args) or run(*args))
    monkeypatch.setattr(devices, "device_of", lambda _: SimpleNamespace(platform=platform))
    x = jnp.linspace(0.3, 0.6, 3)
    scan = lambda x, how: loopkit.scan(lambda x, _: (clipped(x), None), x, None, 20, **how)[0]
    slopes = [
        jax.grad(lambda x, how=how: jnp.sum(scan(x, how)))(x)
        for how in ({"checkpoints": Plan(4)}, {"checkpoints": "all"})
    ]
    assert_close(*slopes)
    assert bool(seen) == (platform == "gpu")
