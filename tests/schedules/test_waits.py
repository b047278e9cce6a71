"""Schedules where the host waits for each segment that is run to get to another."""

import pytest

from loopkit import Plan
from loopkit._plans.costs import MORE, StepCosts
from loopkit._plans.waiting_hosts import waits
from loopkit.schedules import binomial, reversal

from .machine import replay

STEP = StepCosts(1024, 2048, run=3000.0, record=3000.0, remake=3000.0)
LENGTHS = 20, 50, 100, 257, 300, 1000, 5000
CASES = [(length, slots) for length in LENGTHS for slots in (2, 3, 4, 8, 16, 40) if slots < length]


def planned(length, slots, **step):
    return Plan(slots, bound=length, exact=True, step=STEP._replace(**step))


@pytest.mark.every_case
@pytest.mark.parametrize(("length", "slots"), CASES)
def test_steps_against_the_optimum(length, slots):
    """Advances as the schedule takes them, and what is replayed and recorded of each segment."""
    plan = planned(length, slots)
    gpu = plan.on_gpu
    segments = -(-length // gpu.segment)
    cost = replay(reversal.gradient(segments, gpu.slots), segments, slots=gpu.slots)
    runs = cost.advances * gpu.segment + length * (2 - 1 / gpu.segment)
    optimum = binomial.evaluations(length, slots) + length
    assert runs <= MORE * optimum + gpu.segment
    assert waits(gpu, length) == cost.advances
    assert waits(gpu, length) <= waits(plan, length)


@pytest.mark.every_case
@pytest.mark.parametrize(("length", "slots"), CASES)
def test_slots_and_rows_share_the_memory(length, slots):
    plan = planned(length, slots)
    gpu = plan.on_gpu
    kept = gpu.slots - plan.spared + gpu.segment - 1
    assert kept <= max(plan.rows, 1)
    assert (gpu == plan) == (gpu.segment == 1)


def test_eight_carries_of_a_thousand_steps():
    gpu = planned(1000, 8).on_gpu
    assert (gpu.slots, gpu.segment) == (6, 3)
    assert waits(gpu, 1000) == 1345
    assert waits(planned(1000, 8), 1000) == 4290


def test_large_steps_are_not_run_more_often():
    """A wait is short beside them."""
    plan = planned(1000, 8, run=1e9, record=1e9, remake=1e9)
    assert plan.on_gpu == plan


@pytest.mark.every_case
@pytest.mark.parametrize(
    "plan",
    [
        Plan(1000, bound=1000, exact=True, step=STEP),
        Plan(8, segment=4, bound=1000, exact=True, step=STEP),
        Plan(8, bound=1000, exact=True, step=STEP, host=True),
        Plan(0, bound=1000, step=STEP, keeps_all=True),
    ],
)
def test_other_plans_stay(plan):
    assert plan.on_gpu == plan


def test_without_a_bound():
    plan = Plan(8, step=STEP)
    assert plan.on_gpu.segment > 1
    assert "on a GPU   6 carries, then the carries of 3 steps at a time" in str(plan)


@pytest.mark.every_case
@pytest.mark.parametrize("segment", [1, 3])
@pytest.mark.parametrize("bound", [None, 1000])
@pytest.mark.parametrize("room", [None, 4_000, 20_000, 200_000])
def test_rows_of_slots_on_the_host_lie_in_what_room_there_is(room, bound, segment):
    """Beside the carry that is being brought back."""
    how = {"bound": bound, "exact": bound is not None, "step": STEP, "host": True, "room": room}
    plan = Plan(8, segment=segment, **how)
    gpu = plan.on_gpu
    assert gpu.slots == 8
    assert gpu.host_bytes <= plan.host_bytes
    assert gpu.segment % segment == 0
    assert (gpu.segment > segment) == (room is not None and room > 4_000)
    if room is not None:
        assert gpu.peak_bytes <= max(room - STEP.carry_bytes, plan.peak_bytes)
    assert waits(gpu, 1000) <= 1.1 * waits(plan, 1000) * segment / gpu.segment
