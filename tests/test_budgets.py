"""More memory is never worse, and is kept to: a dozen programs under a range of budgets."""

import re

import jax
import numpy as np
import pytest

import loopkit
from budgeted_programs import PROGRAMS
from loopkit._plans.budget import Bytes
from loopkit._plans.planner import make_plan
from turns import later

RANGE = 1, 1.5, 2.5, 5, 12, 40, 200, 2000
"""Budgets, over the least that will do."""
SLACK = 1024
"""Bytes by which the compiler lays out arrays less tightly than they are counted."""
EARLY = 1 << 14
"""The most bytes of rows that may be there twice: arrays of up to 4 kB are made at once."""
QUICK = "big_vector", "table", "nested"


def outer(name, **options):
    """The plan of a program's loop; of two, the outer one's."""
    loss, args, steps = PROGRAMS[name]
    return loopkit.explain(lambda *a: loss(*a, steps, **options), *args).loops[0].plan


def least(name):
    """The least budget, as it is named where it is refused."""
    with pytest.raises(ValueError, match="`memory` must be at least") as refused:
        outer(name, memory=1)
    return int(re.search(r"at least (\d+) bytes", str(refused.value))[1])


def body_runs(plan, steps):
    """Evaluations of the body, in whole or for its residuals alone."""
    replays = plan.segment > 1 and plan.strategy != "every carry"
    again = steps if replays and plan.store == "carries" else 0
    return sum(plan.evaluations(steps)) + again


@pytest.mark.parametrize("name", PROGRAMS)
def test_more_memory_runs_fewer_steps(name):
    """A plan with more memory is not predicted slower, nor slower than the default if that fits."""
    steps = PROGRAMS[name].steps
    default = outer(name)
    last = None
    for factor in RANGE:
        budget = int(factor * least(name))
        plan = outer(name, memory=budget)
        assert plan.peak_bytes <= budget
        runs, time = body_runs(plan, steps), plan.nanoseconds(steps)
        # Without a bound, plans are compared for another number of steps than is taken here.
        share = 1 if plan.bound else 1.001
        assert last is None or (runs <= last[0] and time <= share * last[1]), (budget, plan)
        if default.peak_bytes <= budget:
            assert time <= share * default.nanoseconds(steps), (budget, plan)
        last = runs, time


@pytest.mark.parametrize("name", PROGRAMS)
def test_more_bytes_take_neither_more_time_nor_more_runs(name):
    steps, lowest, before = PROGRAMS[name].steps, least(name), None
    known = outer(name, memory=lowest)
    largest = 1.5 * max(steps * known.step.residual_bytes, 4 * lowest)
    for budget in np.geomspace(lowest, largest, 60).astype(int).tolist():
        plan = make_plan(Bytes(budget), known.bound, known.exact, known.step)
        # Without a bound, plans are compared for more steps the more carries fit in the budget.
        time = plan.nanoseconds(steps) if plan.bound else 0.0
        runs = body_runs(plan, steps)
        assert before is None or (time <= before[0] and runs <= before[1]), (budget, plan)
        before = time, runs


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [n if n in QUICK else later(n) for n in PROGRAMS])
def test_budgets_are_kept(name):
    """Up to a carry: in the least plan, the one it begins with may be that on its way.

    Rows of a few thousand bytes are made as a program begins, beside those of the forward pass.
    """
    loss, args, steps = PROGRAMS[name]

    def needed(**options):
        function = jax.jit(jax.grad(lambda *a: loss(*a, steps, **options)))
        return function.lower(*args).compile().memory_analysis().temp_size_in_bytes

    lowest, carry = least(name), outer(name).step.carry_bytes
    base = needed(memory=lowest) - lowest
    for factor in RANGE[1:]:
        budget = int(factor * lowest)
        plan = outer(name, memory=budget)
        early = plan.row_bytes if plan.keeps_last and plan.row_bytes <= EARLY else 0
        assert needed(memory=budget) - base <= 1.02 * budget + carry + early + SLACK
