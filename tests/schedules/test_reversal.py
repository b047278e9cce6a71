import pytest

from loopkit.schedules import binomial, online, reversal
from loopkit.schedules.reversal import Save

from . import exact
from .machine import replay


def reverse(positions, segments, slots):
    """Reverse from checkpoints that a sweep has left, and return the cost."""
    actions = reversal._Stack(positions, slots).reverse(segments)
    return replay(actions, segments, slots=slots, positions=positions)


def advances(positions, segments, slots):
    """Count the advances of a reversal in which each stretch is reversed optimally."""
    starts = [*sorted(positions.values()), segments]
    return sum(
        binomial.advances(starts[i + 1] - starts[i], slots - 1 - i) for i in range(len(positions))
    )


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
                ahead = advances(positions, segments, slots)
                assert cost.advances == segments + ahead
                assert cost.peak_slots <= slots
                assert reverse(positions, segments, slots).advances == ahead


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
    assert segments + reverse(positions, segments, slots).evaluations == body_evaluations
    ours = reversal.online_gradient(online.cheapest(slots), segments)
    assert replay(ours, segments, slots=slots).evaluations <= 0.95 * body_evaluations


def test_slots_in_any_order():
    ordered = {0: 0, 1: 10, 2: 25}
    shuffled = {4: 10, 1: 25, 2: 0}
    cost = reverse(ordered, 40, 6)
    assert cost == reverse(shuffled, 40, 6)
    assert cost.advances == advances(shuffled, 40, 6)


def test_nothing_to_reverse():
    assert list(reversal.gradient(0, 3)) == []
    assert list(reversal.online_gradient(online.cheapest(3), 0)) == []


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
