"""Budgets and plans that are none, and plans that no loop can follow."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import loopkit
from loopkit import Plan


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"memory": 1.5}, TypeError, r"`memory` must be an int >= 1 \(bytes\) or a string"),
        ({"memory": "many"}, ValueError, r"`memory` must be .* Got: 'many'"),
        ({"memory": "3 bags"}, ValueError, r"Write a number and a unit: B, kB, MB"),
        ({"memory": -1}, ValueError, r"`memory` must be an int >= 1"),
        ({"memory": 10, "checkpoints": 2}, ValueError, r"`memory` cannot be given together"),
    ],
)
def test_what_is_no_budget(options, error, message):
    with pytest.raises(error, match=r"loopkit\.scan: .*" + message):
        loopkit.scan(lambda x, _: (jnp.sin(x), x), jnp.ones(3), length=3, **options)


def test_a_plan_that_stores_every_step_needs_a_bound():
    plan = Plan(0, keeps_all=True, store="residuals")
    with pytest.raises(
        ValueError, match=r"while_loop: `checkpoints` can be a plan that stores every"
    ):
        jax.grad(
            lambda x: loopkit.while_loop(lambda x: x < 9, lambda x: x * x, x, checkpoints=plan)
        )(2.0)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"slots": 0}, ValueError, r"`slots` must be an int >= 1 \(carries to keep\)[.] .*Got: 0"),
        ({"slots": 2.5}, TypeError, r"`slots` must be .* Got: 2\.5 of type float"),
        ({"slots": 3, "segment": -2}, ValueError, r"`segment` must be an int >= 1 .* Got: -2"),
        ({"slots": 3, "store": "rows"}, ValueError, r"`store` must be one of .* Got: 'rows'"),
        (
            {"slots": 3, "bound": "x"},
            TypeError,
            r"`bound` must be an int >= 0 \(steps\) or None[.] .*Got:",
        ),
        (
            {"slots": 3, "room": -1},
            ValueError,
            r"`room` must be an int >= 0 \(bytes\) or None[.] .*Got:",
        ),
        ({"slots": 3, "exact": 3}, TypeError, r"`exact` must be a bool[.] .*Got: 3 of type int"),
        (
            {"slots": 3, "step": 3},
            TypeError,
            r"`step` must be StepCosts[.] Leave it out.* Got: 3\.",
        ),
    ],
)
def test_plans_that_no_loop_can_follow(fields, error, message):
    with pytest.raises(error, match=r"loopkit\.Plan: " + message):
        Plan(**fields)
    with pytest.raises(error, match=r"loopkit\.Plan: " + message):
        replace(Plan(1), **fields)


def test_runs_of_a_loop_without_a_bound():
    with pytest.raises(ValueError, match=r"loopkit\.Plan\.evaluations: `steps` must be given"):
        Plan(4).evaluations()
