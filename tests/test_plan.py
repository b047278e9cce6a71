"""Budgets and plans: what is asked for, what is predicted, what the compiler then needs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import loopkit
from derivatives import assert_close
from loopkit import Plan
from loopkit._plans.plan import Bytes, Step
from loopkit._plans.planner import make_plan
from loopkit.schedules import binomial

X = jnp.linspace(0.1, 1.0, 5000)
MATRIX = jnp.eye(96) * 0.9 + 0.01


def vector(x, _):
    return x + 1e-3 * jnp.sin(X * x), None


def network(x, _):
    return jnp.tanh(x @ MATRIX), jnp.sum(x)


def gradient(loop, step, init, length, **options):
    def loss(init):
        carry, ys = loop(step, init, None, length, **options)
        return jnp.sum(carry**2) + (0 if ys is None else jnp.sum(ys))

    return jax.jit(jax.grad(loss))


def temporary(*args, **options):
    function = gradient(*args, **options)
    return function.lower(args[2]).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("memory", [300_000, "1 MB", "0.5 MiB", 5_000_000])
def test_a_budget_in_bytes_is_kept(memory):
    count = {"1 MB": 10**6, "0.5 MiB": 2**19}.get(memory, memory)
    needed = temporary(loopkit.scan, vector, X, 300, memory=memory)
    least = temporary(loopkit.scan, vector, X, 1)
    assert needed - least <= 1.05 * count + 64_000
    assert needed - least >= 0.5 * count, "a budget is there to be used"


def test_the_result_does_not_depend_on_the_budget():
    want = gradient(lax.scan, network, jnp.ones((7, 96)), 13)(jnp.ones((7, 96)))
    plans = [
        Plan(13),
        Plan(13, segment=4),
        Plan(4, segment=4),
        Plan(3, segment=2, store="residuals"),
        Plan(2),
        Plan(1),
        Plan(0, keeps_all=True, store="residuals"),
    ]
    for options in [{"memory": "1 MB"}, *({"checkpoints": p} for p in plans)]:
        got = gradient(loopkit.scan, network, jnp.ones((7, 96)), 13, **options)
        assert_close(got(jnp.ones((7, 96))), want)


@pytest.mark.parametrize("segment", [1, 4, 5])
@pytest.mark.parametrize("store", ["carries", "residuals"])
@pytest.mark.parametrize("slots", [3, 20])
def test_gradients_of_large_matrices(segment, store, slots):
    """Their products are put off to the end of a segment."""
    plan = Plan(slots, segment=segment, store=store)
    x = jnp.linspace(-1, 1, 4 * 96).reshape(4, 96)
    xs = jnp.linspace(0, 1, 11 * 4 * 96).reshape(11, 4, 96)

    def grads(loop, **options):
        def loss(w, v, x, n):
            def step(carry, x):
                i, h = carry
                return (i + 1, jnp.tanh(h @ w + x @ v + h @ w.T)), jnp.sum(h)

            if loop is loopkit.scan:
                options["until"] = lambda c, _: c[0] >= n
            (_, h), ys = loop(step, (0, x), xs, 11, **options)
            return jnp.sum(h**2) + jnp.sum(ys)

        return jax.jit(jax.grad(loss, (0, 1, 2)))(MATRIX, MATRIX - 0.3, x, 11)

    assert_close(grads(loopkit.scan, checkpoints=plan), grads(lax.scan))


def test_predicted_peak():
    step = Step(carry_bytes=1000, residual_bytes=3000)
    plan = make_plan(8, 100, True, step)
    assert plan.peak_bytes <= 8 * 1004 + plan.least_bytes
    assert make_plan("all", 100, True, step).slot_bytes == 300_000
    assert make_plan(100, 100, True, step).slot_bytes == 100_000


@pytest.mark.parametrize("slots", [1, 2, 5, 9])
def test_predicted_runs_are_the_optimum(slots):
    plan = make_plan(Plan(slots), 60, True, Step(8, 8))
    assert sum(plan.evaluations()) == binomial.evaluations(60, slots) + 60


def test_more_memory_takes_no_more_runs():
    step = Step(1000, 2000, 100.0, 120.0, 60.0)
    runs = [
        make_plan(Bytes(count), 500, True, step).nanoseconds(500)
        for count in (4000, 10_000, 40_000, 200_000)
    ]
    assert runs == sorted(runs, reverse=True)


def test_the_least_budget():
    with pytest.raises(ValueError, match=r"loopkit\.scan: `memory` must be at least \d+ bytes"):
        gradient(loopkit.scan, vector, X, 30, memory=100)(X)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"memory": 1.5}, TypeError, r"`memory` must be an int >= 1 \(bytes\) or a string"),
        ({"memory": "many"}, ValueError, r"`memory` must be .* got 'many'"),
        ({"memory": "3 bags"}, ValueError, r"Units are B, kB, MB"),
        ({"memory": -1}, ValueError, r"`memory` must be an int >= 1"),
        ({"memory": 10, "checkpoints": 2}, ValueError, r"`memory` cannot be given together"),
    ],
)
def test_what_is_no_budget(options, error, message):
    with pytest.raises(error, match=r"loopkit\.scan: .*" + message):
        loopkit.scan(vector, X, length=3, **options)


def test_a_plan_that_stores_every_step_needs_a_bound():
    plan = Plan(0, keeps_all=True, store="residuals")
    with pytest.raises(ValueError, match=r"`checkpoints` can be a plan that stores every step"):
        jax.grad(
            lambda x: loopkit.while_loop(lambda x: x < 9, lambda x: x * x, x, checkpoints=plan)
        )(2.0)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"slots": 0}, ValueError, r"`slots` must be an int >= 1, carries to keep, got 0"),
        ({"slots": 2.5}, TypeError, r"`slots` must be .* got 2\.5 of type float"),
        ({"slots": 3, "segment": -2}, ValueError, r"`segment` must be an int >= 1, .* got -2"),
        ({"slots": 3, "store": "rows"}, ValueError, r"`store` must be one of .* got 'rows'"),
        (
            {"slots": 3, "bound": "x"},
            TypeError,
            r"`bound` must be an int >= 0, steps, or None, got",
        ),
        ({"slots": 3, "exact": 3}, TypeError, r"`exact` must be a bool, got 3 of type int"),
        ({"slots": 3, "step": 3}, TypeError, r"`step` must be a Step, got 3\. Leave it out"),
    ],
)
def test_plans_that_no_loop_can_follow(fields, error, message):
    with pytest.raises(error, match=r"loopkit\.Plan: " + message):
        Plan(**fields)
    with pytest.raises(error, match=r"loopkit\.Plan: " + message):
        replace(Plan(1), **fields)


def test_a_plan_of_every_step_written_by_hand():
    every = Plan(1, keeps_all=True)
    gradient = lambda plan: jax.grad(
        lambda x: jnp.sum(loopkit.scan(vector, x, length=3, checkpoints=plan)[0] ** 2)
    )(X)
    assert_close(gradient(every), gradient("all"))


def test_runs_of_a_loop_without_a_bound():
    with pytest.raises(ValueError, match=r"loopkit\.Plan\.evaluations: `steps` must be given"):
        Plan(4).evaluations()


def test_printed():
    assert "8 carries, then the carries of 4 steps at a time" in str(Plan(8, segment=4))
    assert "runs       60 forward" in str(make_plan(Plan(5), 60, True, Step(8, 8)))
