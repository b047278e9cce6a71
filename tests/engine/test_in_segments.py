"""A schedule where the host waits: longer segments, whose rows lie in slots that are left free."""

import functools as ft
import itertools

import pytest

from loopkit import Plan
from loopkit._engine.sweeps import segments
from loopkit._engine.sweeps.in_segments import InSegments

from .swept_loops import (
    GPUS,
    MIXED,
    assert_swept,
    decided,
    known,
    loops_back,
    loops_there,
    run_again,
    written_out,
)

LONG, END = 8, 7
LOOPS = {
    "known": (lambda **how: known(LONG, **how), LONG),
    "decided": (lambda **how: decided(LONG, END, **how), END),
}


@ft.cache
def wanted(name):
    return written_out(*LOOPS[name][0]())


def assert_counts(name, plan, on_gpu):
    make, steps = LOOPS[name]
    found = assert_swept(*make(checkpoints=plan), wanted(name), on_gpu)
    again = sum(run_again(found, steps))
    assert found.runs == {"again": again, "replayed": steps, "reversed": steps}
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("large", [False, True])
def test_longer_segments(large, monkeypatch):
    """Segments of two steps; large carries are saved only where they have to be."""
    if large:
        monkeypatch.setattr(segments, "LARGE_CARRY", -1)
    for name, on_gpu in itertools.product(LOOPS, [*GPUS, *MIXED]):
        found = assert_counts(name, Plan(4), on_gpu)
        assert isinstance(found.both, InSegments) == on_gpu[1]
        if on_gpu[1]:
            assert found.both.wider == 2
            assert found.both.predicated_store is not large


@pytest.mark.exhaustive
def test_segments_of_three():
    found = assert_swept(*decided(13, 12, checkpoints=Plan(7)), on_gpu=(True, True))
    assert found.both.wider == 3


@pytest.mark.slow
def test_of_large_carries_the_steps_beyond_the_last_segment(monkeypatch):
    monkeypatch.setattr(segments, "LARGE_CARRY", -1)
    found = assert_swept(*known(checkpoints=Plan(2, segment=2)), on_gpu=(True, True))
    assert not found.both.predicated_store


@pytest.mark.exhaustive
def test_longer_segments_whose_slots_are_on_the_host():
    for name, on_gpu in itertools.product(LOOPS, [*GPUS, *MIXED]):
        found = assert_counts(name, Plan(2, host=True, room=1000), on_gpu)
        if on_gpu[1]:
            assert found.both.wider > 1


@pytest.mark.exhaustive
def test_slots_that_all_have_memory():
    """The first one, too."""
    plan = Plan(17)
    assert not plan.spared
    for loop, given in [known(18, checkpoints=plan), decided(18, 17, checkpoints=plan)]:
        assert_swept(loop, given, on_gpu=(True, True))


@pytest.mark.parametrize("plan", [Plan(4), Plan(2, segment=2)], ids=range(2))
def test_of_small_carries_a_host_waits_once_a_step(plan, monkeypatch):
    """Not once a run of steps as well; large ones are not written over themselves for that."""
    make = LOOPS["decided"][0]
    assert loops_there(*make(checkpoints=plan), on_gpu=True) == [False]
    monkeypatch.setattr(segments, "LARGE_CARRY", -1)
    assert loops_there(*make(checkpoints=plan), on_gpu=True) == [False, False]


def test_climbs_of_small_carries_are_one_loop(monkeypatch):
    """Over segments; to large ones, of loops from one that is saved to the next."""
    loop, given = decided(checkpoints=Plan(2))
    assert loops_back(loop, given, on_gpu=True) == [False, False]
    monkeypatch.setattr(segments, "LARGE_CARRY", -1)
    assert loops_back(loop, given, on_gpu=True) == [False, False, False]


def test_climbs_of_large_carries_are_loops_over_segments_of_known_length(monkeypatch):
    """The loops over the replayed steps of a segment, and over the reversed ones, have known
    lengths, too."""
    monkeypatch.setattr(segments, "LARGE_CARRY", -1)
    loop, given = decided(checkpoints=Plan(2, segment=3))
    of_whole = loops_back(loop, given, on_gpu=True)
    assert of_whole.count(True) == len(["climb", "climb", "replayed", "reversed"])


@pytest.mark.slow
@pytest.mark.parametrize("slots", [2, 3])
def test_as_few_steps_again_as_can_be(slots):
    """For a known number of segments, slots that become free going back are used again."""
    loop, given = known(15, checkpoints=Plan(slots))
    found = assert_swept(loop, given, on_gpu=(True, True))
    assert found.runs["again"] == found.both.how.plan.evaluations()[1] - 15


def test_of_a_known_number_of_small_ones_it_does_not_wait(monkeypatch):
    """The host waits for large carries alone, where it has to know how many segments a stretch
    has."""
    make = LOOPS["known"][0]
    assert loops_there(*make(checkpoints=Plan(2, segment=2)), on_gpu=True) == [True, True]
    monkeypatch.setattr(segments, "LARGE_CARRY", -1)
    assert loops_there(*make(checkpoints=Plan(2, segment=2)), on_gpu=True) == [True, False, True]
