"""More memory is never worse, and is kept to: ten programs under a range of budgets."""

import re

import jax
import pytest

import loopkit
from budgeted_programs import PROGRAMS
from turns import later

RANGE = 1, 1.5, 2.5, 5, 12, 40, 200, 2000
"""Budgets, over the least that will do."""
SLACK = 1024
"""Bytes by which the compiler lays out arrays less tightly than they are counted."""
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
    again = steps if plan.segment > 1 and plan.store == "carries" else 0
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [n if n in QUICK else later(n) for n in PROGRAMS])
def test_budgets_are_kept(name):
    """Up to a carry: in the least plan, the one it begins with may be that on its way."""
    loss, args, steps = PROGRAMS[name]

    def needed(**options):
        function = jax.jit(jax.grad(lambda *a: loss(*a, steps, **options)))
        return function.lower(*args).compile().memory_analysis().temp_size_in_bytes

    lowest, carry = least(name), outer(name).step.carry_bytes
    base = needed(memory=lowest) - lowest
    for factor in RANGE[1:]:
        budget = int(factor * lowest)
        assert needed(memory=budget) - base <= 1.02 * budget + carry + SLACK
