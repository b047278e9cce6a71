import pytest

from loopkit.schedules.reversal import Advance, Discard, Restore, Reverse, Save

from .machine import Cost, replay


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
    with pytest.raises(
        ValueError, match="slot 0 must hold the start of segment 0, but holds that of segment 1"
    ):
        replay(actions, 2, slots=1)


VIOLATIONS = [
    ([Advance(1, 2)], "the start of segment 1 must be live, but the start of segment 0 is"),
    ([Reverse(0), Advance(0, 1)], "the start of segment 0 must be live, but nothing is"),
    ([Advance(0, 0)], "an advance must end after 0, where it begins"),
    ([Save(1, 0)], "the start of segment 1 must be live, but the start of segment 0 is"),
    ([Save(0, 2)], "slot 2 must not be used, as there are 2 slots"),
    ([Restore(0, 1)], "slot 1 must hold the start of segment 0, but holds nothing"),
    (
        [Save(0, 1), Restore(1, 1)],
        "slot 1 must hold the start of segment 1, but holds that of segm",
    ),
    ([Discard(0)], "slot 0 must hold a state, but is empty already"),
    (
        [Save(0, 0), Reverse(0)],
        "segments must be reversed once each, the last one first, and segment 1 is",
    ),
    ([Save(0, 0), Advance(0, 1), Reverse(1), Reverse(0)], "the start of segment 0 must be live"),
    ([], "a schedule must reverse all segments"),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("actions", "text"), VIOLATIONS)
def test_violations(actions, text):
    segments = 1 if actions[:1] == [Reverse(0)] else 2
    with pytest.raises(ValueError) as error:
        replay(actions, segments, slots=2)
    got = (
        f"action {len(actions) - 1}, {actions[-1]!r}"
        if actions
        else "the end, with segments 0 to 1"
    )
    assert str(error.value).startswith(text)
    assert f": {got}" in str(error.value)


def test_a_segment_is_reversed_once():
    with pytest.raises(ValueError, match="once each, the last one first, and none is left: action"):
        replay([Save(0, 0), Reverse(0), Restore(0, 0), Reverse(0)], 1)


def test_the_segment_that_is_due():
    again = [Restore(0, 0), Advance(0, 1), Reverse(1)]
    with pytest.raises(ValueError, match="once each, the last one first, and segment 0 is next"):
        replay([Save(0, 0), Advance(0, 1), Reverse(1), *again], 2)


def test_nothing_to_reverse():
    assert replay([], 0) == Cost(0, 0, 0, 0, peak_slots=0)


def test_positions_are_measured_and_nothing_is_live():
    assert replay([Restore(0, 1), Reverse(0)], 1, slots=2, positions={1: 0}).peak_slots == 1
    with pytest.raises(
        ValueError, match=r"slot 4 must not be used, as there are 2 slots: positions=\{4: 0\}"
    ):
        replay([], 1, slots=2, positions={4: 0})
    with pytest.raises(ValueError, match="the start of segment 0 must be live, but nothing is"):
        replay([Advance(0, 1)], 1, positions={})
