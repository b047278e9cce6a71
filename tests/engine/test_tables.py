"""Schedules as tables: the saves of a placement, one after the other, and the best splits."""

import jax.numpy as jnp
import pytest

from loopkit import Plan
from loopkit._engine.sweeps.tables import Schedule, free_slots, latest, saved
from loopkit.schedules import binomial
from loopkit.schedules.online import NEVER, cheapest, thinning

BOUND = 23


def saves(schedule, segments):
    """The slots after each save of so many segments, and where it was."""
    state, segment, found = schedule.start(jnp.int32(0)), 0, []
    while segment < segments:
        slot, run, state = schedule.save(state)
        found.append((segment, int(slot), state.segments.tolist()))
        segment += int(run)
    return found


def positions(segments):
    return {slot: segment for slot, segment in enumerate(segments) if segment != NEVER}


@pytest.mark.slow
@pytest.mark.parametrize("segment", [1, 3])
@pytest.mark.parametrize("thinned", [False, True])
def test_saves_are_those_of_a_placement(thinned, segment):
    """A thinned schedule with more than two slots has spare ones."""
    segments = -(-BOUND // segment)
    for slots in (1, 2, 3, 5):
        spare = {1: 0, 2: 0, 3: 1, 5: 2}[slots]
        placement = thinning(slots, segments, spare=spare) if thinned else cheapest(slots, segments)
        plan = Plan(slots, segment, thinned=thinned, bound=BOUND)
        found = saves(Schedule.of(plan), segments)
        assert [save[:2] for save in found] == [m[1:3] for m in placement.marks(segments)]
        for start, _, held in found:
            assert positions(held) == placement.positions(start + 1)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_of_a_known_number_the_best(slots):
    """The states held after some saves are known without these; a row says what they are."""
    schedule = Schedule.of(Plan(slots, 2, bound=BOUND, exact=True))
    found, free = saves(schedule, 12), slots
    at = 0
    for count, (segment, slot, held) in enumerate(found, 1):
        assert schedule.held(jnp.int32(count)).tolist() == held
        assert list(map(int, schedule.row(count - 1)))[:2] == [segment, slot]
        if count > 1:  # the end of the sweep is one more thing to reach
            free -= 1
            assert segment == at + binomial.split(13 - at, free)
        at = segment
    assert len(found) == slots


@pytest.mark.slow
def test_what_is_held_where_slots_are_used_again():
    schedule = Schedule.of(Plan(3, bound=BOUND))
    for count, (_, _, held) in enumerate(saves(schedule, BOUND), 1):
        assert schedule.held(jnp.int32(count)).tolist() == held


@pytest.mark.slow
def test_splits():
    schedule = Schedule.of(Plan(4, bound=BOUND))
    for free in range(4):
        for segments in range(2, BOUND):
            found = schedule.split(jnp.int32(segments), jnp.int32(free))
            assert int(found) == binomial.split(segments, free)


@pytest.mark.slow
def test_slots():
    segments = jnp.asarray([0, 5, NEVER, 3, NEVER], jnp.int32)
    found = lambda pair: tuple(map(int, pair))
    assert [found(latest(segments, t)) for t in (0, 2, 3, 4, 5, 9)] == [
        (0, 0), (0, 0), (3, 3), (3, 3), (1, 5), (1, 5)
    ]  # fmt: skip
    assert found(free_slots(segments)) == (2, 4)
    assert found(free_slots(segments[:2])) == (0, 0)
    assert saved(segments, 2, 7).tolist() == [0, 5, 7, 3, NEVER]
    assert saved(segments, -1, 7).tolist() == segments.tolist()
