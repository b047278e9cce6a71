from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopkit.schedules import binomial, online, reversal
from loopkit.schedules.actions import Save
from loopkit.schedules.replay import replay

from . import exact


@pytest.mark.slow
def test_gradient_is_the_optimum_on_a_grid():
    optimum = exact.advances(301, 39)
    for slots in (*range(1, 13), 16, 24, 32, 40):
        for segments in (*range(21), 45, 55, 100, 101, 165, 220, 300):
            cost = replay(reversal.gradient(segments, slots), segments, slots=slots)
            assert cost.advances == optimum[slots - 1, segments + 1]
            assert cost.replays == segments
            assert cost.peak_slots == min(segments, slots)


@pytest.mark.slow
def test_every_length_and_number_of_slots():
    """The schedules of a grid, online and offline, are executable: nothing crashes."""
    for slots in range(1, 11):
        for place in (online.thinning, online.cheapest):
            program = place(slots, 40)
            for segments in range(41):
                positions = program.positions(segments)
                cost = replay(reversal.online_gradient(program, segments), segments, slots=slots)
                ahead = reversal.advances(positions, segments, slots)
                assert cost.advances == segments + ahead
                assert cost.peak_slots <= slots
                worth = reversal.kept(positions, segments, slots)
                cost = replay(
                    reversal.reverse(worth, segments, slots), segments, slots=slots, positions=worth
                )
                assert cost.advances == reversal.advances(worth, segments, slots) <= ahead


@pytest.mark.parametrize("slots", [3, 8, 40])
def test_long_online_loops_are_executable(slots):
    for segments in (50 * slots, 130 * slots):  # the second has given up checkpoints
        program = online.cheapest(slots)
        cost = replay(reversal.online_gradient(program, segments), segments, slots=slots)
        assert cost.evaluations <= 1.1 * (segments + binomial.evaluations(segments, slots))
        saves = sum(
            isinstance(action, Save) for action in reversal.online_gradient(program, segments)
        )
        assert cost.saves == saves


@pytest.mark.parametrize(
    ("segments", "slots", "held", "body_evaluations"),
    [
        (200, 8, (0, 192, 193, 194, 195, 196, 197, 199), 949),
        (200, 16, (0, 153, 169, *range(184, 195), 198, 199), 720),
        (300, 4, (0, 295, 296, 299), 2205),
        (200, 2, (0, 199), 2851),
    ],
)
def test_from_the_checkpoints_of_a_minimal_repetition_scheme(
    segments, slots, held, body_evaluations
):
    """Bisecting the same stretches takes 1053, 870, 2947 and 7154."""
    positions = dict(enumerate(held))
    cost = replay(
        reversal.reverse(positions, segments, slots), segments, slots=slots, positions=positions
    )
    assert segments + cost.evaluations == body_evaluations
    ours = reversal.online_gradient(online.cheapest(slots), segments)
    assert replay(ours, segments, slots=slots).evaluations <= 0.95 * body_evaluations


def test_slots_in_any_order():
    ordered = {0: 0, 1: 10, 2: 25}
    shuffled = {4: 10, 1: 25, 2: 0}
    costs = [
        replay(reversal.reverse(held, 40, 6), 40, slots=6, positions=held)
        for held in (ordered, shuffled)
    ]
    assert costs[0] == costs[1]
    assert costs[0].advances == reversal.advances(shuffled, 40, 6)


@pytest.mark.slow
def test_kept_against_every_way_to_reverse():
    """Among all reversals a computer could do, keeping the best checkpoints is best but rarely.

    What is better then is to move a checkpoint on before the stretch behind it is reversed.
    """
    worse = 0
    cases = 0
    for segments in range(1, 8):
        for slots in range(1, 4):
            for more in range(slots):
                for starts in combinations(range(1, segments), more):
                    positions = dict(enumerate((0, *starts)))
                    worth = reversal.kept(positions, segments, slots)
                    found = reversal.advances(worth, segments, slots)
                    best = exact.reversal(positions.values(), segments, slots)
                    assert best <= found <= best + 2
                    worse += found > best
                    cases += 1
    assert worse <= 0.06 * cases


@settings(deadline=None)
@given(st.data())
def test_kept_is_the_best_part(data):
    slots = data.draw(st.integers(1, 7))
    segments = data.draw(st.integers(1, 60))
    others = data.draw(st.sets(st.integers(1, segments), max_size=slots - 1)) - {segments}
    positions = dict(enumerate((0, *others)))
    give_up = data.draw(st.integers(0, 7))
    parts = [
        {0: 0} | {slot: positions[slot] for slot in chosen}
        for more in range(max(0, len(others) - give_up), len(others) + 1)
        for chosen in combinations(range(1, len(positions)), more)
    ]
    best = min(reversal.advances(part, segments, slots) for part in parts)
    worth = reversal.kept(positions, segments, slots, give_up=give_up)
    assert worth in parts
    assert reversal.advances(worth, segments, slots) == best
    cost = replay(reversal.reverse(worth, segments, slots), segments, slots=slots, positions=worth)
    assert cost.advances == best


def test_how_many_are_given_up_by_default():
    worth = reversal.kept(dict(enumerate(range(30))), 10**6, 30)
    assert len(worth) == 30 - 16
    assert len(reversal.kept(dict(enumerate(range(30))), 10**6, 30, give_up=17)) == 30 - 17


@pytest.mark.slow
def test_thinning_needs_to_give_up_and_cheapest_does_not():
    for slots in (4, 16):
        for segments in range(10 * slots, 100 * slots, 37):
            best = binomial.evaluations(segments, slots)
            held = online.thinning(slots).positions(segments)
            worth = reversal.kept(held, segments, slots)
            assert segments + reversal.advances(worth, segments, slots) <= 1.2 * best
            held = online.cheapest(slots).positions(segments)
            assert reversal.kept(held, segments, slots) == held


def test_nothing_to_reverse():
    assert list(reversal.gradient(0, 3)) == []
    assert list(reversal.reverse({}, 0, 3)) == []
    assert list(reversal.online_gradient(online.cheapest(3), 0)) == []
    assert reversal.kept({}, 0, 3) == {}
    assert reversal.advances({}, 0, 3) == 0


ERRORS = [
    (
        lambda: reversal.gradient(-1, 2),
        "reversal.gradient: `segments` must be an int >= 0. Count",
        "-1",
    ),
    (
        lambda: reversal.gradient(1, 0),
        "reversal.gradient: `slots` must be an int >= 1. Count the",
        "0",
    ),
    (
        lambda: reversal.reverse({0: 0}, -1, 2),
        "reversal.reverse: `segments` must be an int >= 0.",
        "-1",
    ),
    (lambda: reversal.reverse({0: 0}, 1, 0), "reversal.reverse: `slots` must be an int >= 1.", "0"),
    (
        lambda: reversal.reverse({0: 0, 2: 1}, 3, 2),
        "loopkit.schedules.reversal.reverse: `positions` must use slots 0 to 1. Number the "
        "slots from 0, or pass a larger number as `slots`",
        "slot 2",
    ),
    (
        lambda: reversal.advances({0: 0, 1: 3}, 3, 2),
        "reversal.advances: `positions` must hold segments 0 to 2. Leave out a state "
        "from which nothing is reversed",
        "segment 3 in slot 1",
    ),
    (
        lambda: reversal.reverse({0: 0, 1: 1}, 1, 2),
        "reversal.reverse: `positions` must hold segments 0 to 0. Leave",
        "segment 1 in slot 1",
    ),
    (
        lambda: reversal.kept({0: 1, 1: 2}, 3, 2),
        "reversal.kept: `positions` must hold segment 0. Keep the initial",
        "segments [1, 2]",
    ),
    (
        lambda: reversal.reverse({0: 0, 1: 0}, 3, 2),
        "`positions` must hold each segment once. Leave out the second copy",
        "segments [0, 0]",
    ),
    (
        lambda: reversal.kept({0: 0}, 3, 2, give_up=-1),
        "reversal.kept: `give_up` must be an int >= 0. Pass 0 to keep every checkpoint",
        "-1",
    ),
    (
        lambda: reversal.online_gradient(online.cheapest(2, 5), 6),
        "online.Placement.positions: `segments` must be <= 5, the bound of this placement. Make",
        "6",
    ),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("call", "text", "got"), ERRORS)
def test_errors(call, text, got):
    """Raised by the call, before the first action is asked for."""
    with pytest.raises(ValueError) as error:
        call()
    assert text in str(error.value)
    assert str(error.value).endswith(f" Got: {got}.")
