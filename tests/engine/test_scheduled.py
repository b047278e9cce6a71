"""Schedules: what they keep, and the steps that run again to get to the others."""

import functools as ft

import pytest

from loopkit import Plan
from loopkit._engine.sweeps.in_segments import InSegments
from loopkit._engine.sweeps.segments import Scheduled
from loopkit.schedules.online import NEVER, cheapest

from .swept_loops import (
    GPUS,
    assert_swept,
    decided,
    known,
    loops_back,
    run_again,
    unbounded,
    written_out,
)

LONG, END = 9, 8
LOOPS = {
    "known": (lambda **how: known(LONG, **how), LONG),
    "decided": (lambda **how: decided(LONG, END, **how), END),
    "unbounded": (lambda **how: unbounded(END, **how), END),
}


@ft.cache
def wanted(name):
    return written_out(*LOOPS[name][0]())


def assert_counts(plan, names=("known", "decided")):
    """Assert that the loop runs the schedule's number of steps; for a known number, the fewest
    possible."""
    for name in names:
        make, steps = LOOPS[name]
        loop, given = make(checkpoints=plan)
        for on_gpu in GPUS:
            found = assert_swept(loop, given, wanted(name), on_gpu)
            assert type(found.both) is (InSegments if on_gpu[1] else Scheduled)
            climbs, within = run_again(found, steps)
            again = climbs + within
            assert found.runs == {"again": again, "replayed": steps, "reversed": steps}
            if loop.cond is None and not plan.thinned:
                assert climbs == found.both.how.plan.evaluations()[1] - steps


@pytest.mark.exhaustive
@pytest.mark.parametrize("slots", [1, 2])
def test_steps(slots):
    assert_counts(Plan(slots), LOOPS)


@pytest.mark.exhaustive
def test_thinned():
    assert_counts(Plan(4, thinned=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("plan", [Plan(3, 2), Plan(2, 3, "residuals")], ids=range(2))
def test_segments(plan):
    assert_counts(plan)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_rows_are_stored_on_the_way(slots):
    """One loop over steps is all that goes forward, and it is run as often as two would be."""
    plan = Plan(slots, 2, "residuals", thinned=True)
    for name in ("decided", "unbounded"):
        make, steps = LOOPS[name]
        loop, given = make(checkpoints=plan)
        found = assert_swept(loop, given, wanted(name))
        climbs, within = run_again(found, steps)
        assert within == 0
        assert found.runs == {"again": 0, "replayed": steps + climbs, "reversed": steps}
        assert climbs or slots > 2
        apart = make(checkpoints=Plan(slots, 2, "residuals"))
        backward = [len(loops_back(*args, on_gpu=False)) for args in ((loop, given), apart)]
        assert backward[0] == backward[1] - 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("segment", [1, 3])
def test_on_the_host(segment):
    assert_counts(Plan(4 - segment, segment, host=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("slots", [2, 3])
def test_where_checkpoints_are(slots):
    """Checkpoints are where `cheapest` places them, for the steps that were taken."""
    make, steps = LOOPS["decided"]
    loop, given = make(checkpoints=Plan(slots))
    for on_gpu in GPUS:
        found = assert_swept(loop, given, wanted("decided"), on_gpu)
        segments = found.residuals[-2].tolist()
        held = {slot: segment for slot, segment in enumerate(segments) if segment != NEVER}
        assert held == cheapest(slots, LONG).positions(steps)
