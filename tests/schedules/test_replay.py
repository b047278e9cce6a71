import pytest

from loopkit.schedules import replay as machine
from loopkit.schedules.actions import Advance, Discard, Restore, Reverse, Save
from loopkit.schedules.replay import Cost, replay


def test_a_schedule_by_hand():
    actions = [
        Save(0, 0),
        Advance(0, 1),
        Save(1, 5),
        Advance(1, 2),
        Reverse(2),
        Restore(1, 5),
        Reverse(1),
        Discard(5),
        Restore(0, 0),
        Reverse(0),
    ]
    cost = replay(actions, 3)
    assert cost == Cost(advances=2, replays=3, saves=2, restores=2, peak_slots=2)
    assert cost.evaluations == 5
    assert {cost: "found"}[Cost(2, 3, 2, 2, 2)] == "found"
    assert repr(actions[2]) == "Save(segment=1, slot=5)"


def test_saving_replaces_what_the_slot_held():
    actions = [Save(0, 0), Advance(0, 1), Save(1, 0), Reverse(1), Restore(0, 0)]
    with pytest.raises(ValueError, match="slot 0 holds the start of segment 1"):
        replay(actions, 2, slots=1)


VIOLATIONS = [
    ([Advance(1, 2)], "needs the start of segment 1, but the start of segment 0 is live"),
    ([Reverse(0), Advance(0, 1)], "needs the start of segment 0, but nothing is live"),
    ([Advance(0, 0)], "action 0, Advance(start=0, stop=0): must end after 0, where it begins"),
    (
        [Save(1, 0)],
        "action 0, Save(segment=1, slot=0): needs the start of segment 1, but the start of",
    ),
    ([Save(0, 2)], "action 0, Save(segment=0, slot=2): uses slot 2, but there are 2 slots"),
    ([Restore(0, 1)], "action 0, Restore(segment=0, slot=1): slot 1 holds nothing"),
    ([Save(0, 1), Restore(1, 1)], "slot 1 holds the start of segment 0"),
    ([Discard(0)], "action 0, Discard(slot=0): slot 0 is empty already"),
    ([Save(0, 0), Reverse(0)], "reverses segment 0, but segment 1 is next"),
    ([Save(0, 0), Advance(0, 1), Reverse(1), Reverse(0)], "but nothing is live"),
    ([], "loopkit.schedules.replay: the end: segments 0 to 1 are not reversed"),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("actions", "text"), VIOLATIONS)
def test_violations(actions, text):
    segments = 1 if actions[:1] == [Reverse(0)] else 2
    with pytest.raises(ValueError) as error:
        replay(actions, segments, slots=2)
    assert str(error.value).startswith("loopkit.schedules.replay: ")
    assert text in str(error.value)


def test_a_segment_is_reversed_once():
    with pytest.raises(ValueError, match="reverses segment 0, but none is left"):
        replay([Save(0, 0), Reverse(0), Restore(0, 0), Reverse(0)], 1)


def test_the_segment_that_is_due():
    again = [Restore(0, 0), Advance(0, 1), Reverse(1)]
    with pytest.raises(ValueError, match="reverses segment 1, but segment 0 is next"):
        replay([Save(0, 0), Advance(0, 1), Reverse(1), *again], 2)


def test_nothing_to_reverse():
    assert replay([], 0) == Cost(0, 0, 0, 0, peak_slots=0)


def test_positions_are_measured_and_nothing_is_live():
    assert replay([Restore(0, 1), Reverse(0)], 1, slots=2, positions={1: 0}).peak_slots == 1
    with pytest.raises(ValueError, match="what `positions` holds: uses slot 4, but there are 2"):
        replay([], 1, slots=2, positions={4: 0})
    with pytest.raises(ValueError, match="needs the start of segment 0, but nothing is live"):
        replay([Advance(0, 1)], 1, positions={})


ERRORS = [
    (
        {"segments": -1},
        "replay.replay: `segments` must be >= 0, got -1. Count the segments to be reversed",
    ),
    ({"slots": -1}, "replay.replay: `slots` must be >= 0, got -1. Count the slots"),
]


@pytest.mark.parametrize(("arguments", "text"), ERRORS)
def test_errors(arguments, text):
    with pytest.raises(ValueError) as error:
        machine.replay([], **({"segments": 0} | arguments))
    assert text in str(error.value)
