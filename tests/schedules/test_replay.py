import pytest

from loopkit.schedules import replay as machine
from loopkit.schedules.actions import (
    Advance,
    Discard,
    Record,
    Restore,
    Reverse,
    ReverseRecorded,
    Save,
)
from loopkit.schedules.replay import Cost, replay


def test_a_schedule_by_hand():
    actions = [
        Save(0, 0),
        Advance(0, 1),
        Record(1, 5),
        Advance(2, 3),
        Restore(0, 0),
        Advance(0, 2),
        Reverse(2),
        ReverseRecorded(1, 5),
        Discard(5),
        Restore(0, 0),
        Reverse(0),
    ]
    cost = replay(actions, 3, budget=5, carry_size=2, residual_size=3)
    assert cost == Cost(advances=5, replays=2, saves=2, restores=2, peak_slots=2, peak_size=5)
    assert cost.evaluations == 7
    assert {cost: "found"}[Cost(5, 2, 2, 2, 2, 5)] == "found"
    assert repr(actions[2]) == "Record(unit=1, slot=5)"


def test_saving_replaces_what_the_slot_held():
    actions = [Record(0, 0), Save(1, 0), Restore(1, 0), Record(1, 0), ReverseRecorded(1, 0)]
    with pytest.raises(ValueError, match="the end: units 0 to 0 are not reversed"):
        replay(actions, 2, slots=1)


VIOLATIONS = [
    ([Advance(1, 2)], "needs the start of unit 1, but the start of unit 0 is live"),
    ([Reverse(0), Advance(0, 1)], "needs the start of unit 0, but nothing is live"),
    ([Advance(0, 0)], "action 0, Advance(start=0, stop=0): must end after 0, where it begins"),
    ([Save(1, 0)], "action 0, Save(unit=1, slot=0): needs the start of unit 1, but the start of"),
    ([Save(0, 2)], "action 0, Save(unit=0, slot=2): uses slot 2, but there are 2 slots"),
    ([Record(0, 2)], "uses slot 2, but there are 2 slots"),
    ([Save(0, 0), Record(0, 1)], "stores 7 in all, but the budget is 6"),
    ([Restore(0, 1)], "action 0, Restore(unit=0, slot=1): slot 1 holds nothing"),
    ([Save(0, 1), Restore(1, 1)], "slot 1 holds the start of unit 0"),
    ([Record(0, 1), Restore(0, 1)], "slot 1 holds the residuals of unit 0"),
    ([Discard(0)], "action 0, Discard(slot=0): slot 0 is empty already"),
    ([Save(0, 0), Reverse(0)], "reverses unit 0, but unit 1 is next"),
    ([Save(0, 0), Advance(0, 1), Reverse(1), Reverse(0)], "but nothing is live"),
    ([Record(0, 0), ReverseRecorded(0, 0)], "reverses unit 0, but unit 1 is next"),
    ([Save(0, 0), ReverseRecorded(0, 0)], "slot 0 holds the start of unit 0"),
    ([ReverseRecorded(1, 0)], "slot 0 holds nothing"),
    ([], "loopkit.schedules.replay: the end: units 0 to 1 are not reversed"),
]


@pytest.mark.parametrize(("actions", "text"), VIOLATIONS)
def test_violations(actions, text):
    units = 1 if actions[:1] == [Reverse(0)] else 2
    with pytest.raises(ValueError) as error:
        replay(actions, units, slots=2, budget=6, carry_size=3, residual_size=4)
    assert str(error.value).startswith("loopkit.schedules.replay: ")
    assert text in str(error.value)


def test_a_unit_is_reversed_once():
    with pytest.raises(ValueError, match="reverses unit 0, but none is left"):
        replay([Save(0, 0), Reverse(0), Restore(0, 0), Reverse(0)], 1)


def test_the_unit_that_is_due():
    again = [Restore(0, 0), Advance(0, 1), Reverse(1)]
    with pytest.raises(ValueError, match="reverses unit 1, but unit 0 is next"):
        replay([Save(0, 0), Advance(0, 1), Reverse(1), *again], 2)


def test_sizes_by_default():
    assert replay([], 0) == Cost(0, 0, 0, 0, peak_slots=0, peak_size=0)
    assert replay([Record(0, 0), ReverseRecorded(0, 0)], 1).peak_size == 1
    assert replay([Save(0, 0), Reverse(0)], 1).peak_size == 1


def test_what_takes_no_room():
    actions = [Save(0, 0), Record(0, 1), ReverseRecorded(0, 1)]
    assert replay(actions, 1, budget=3, carry_size=0, residual_size=3).peak_size == 3
    assert replay(actions, 1, budget=2, carry_size=2, residual_size=0).peak_size == 2


def test_positions_are_measured_and_nothing_is_live():
    assert replay([Restore(0, 1), Reverse(0)], 1, slots=2, positions={1: 0}).peak_slots == 1
    with pytest.raises(ValueError, match="what `positions` holds: uses slot 4, but there are 2"):
        replay([], 1, slots=2, positions={4: 0})
    with pytest.raises(ValueError, match="needs the start of unit 0, but nothing is live"):
        replay([Advance(0, 1)], 1, positions={})


ERRORS = [
    ({"units": -1}, "replay.replay: `units` must be >= 0, got -1; count the units to be reversed"),
    ({"slots": -1}, "replay.replay: `slots` must be >= 0, got -1; count the slots"),
    ({"budget": -1}, "replay.replay: `budget` must be >= 0, got -1; give a total size"),
    ({"carry_size": -1}, "replay.replay: `carry_size` must be >= 0, got -1; give the size of a"),
    ({"residual_size": -1}, "replay.replay: `residual_size` must be >= 0, got -1; give the size"),
]


@pytest.mark.parametrize(("arguments", "text"), ERRORS)
def test_errors(arguments, text):
    with pytest.raises(ValueError) as error:
        machine.replay([], **({"units": 0} | arguments))
    assert text in str(error.value)
