import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopkit.schedules import binomial, mixed
from loopkit.schedules.actions import Record, Save
from loopkit.schedules.replay import replay

from . import exact

SIZES = [(1, 1), (1, 2), (2, 1), (2, 3), (3, 2)]


@pytest.mark.parametrize(("carry_size", "residual_size"), SIZES)
def test_against_every_way_to_store(carry_size, residual_size):
    for units in range(6):
        for budget in range(7):
            problem = units, budget, carry_size, residual_size
            best = exact.mixed(*problem)
            if best is None:
                with pytest.raises(ValueError, match="`budget` must be >= "):
                    mixed.evaluations(*problem)
            else:
                assert mixed.evaluations(*problem) == best


@settings(deadline=None)
@given(
    units=st.integers(0, 60),
    more=st.integers(0, 40),
    carry_size=st.integers(1, 6),
    residual_size=st.integers(1, 6),
)
def test_schedules_cost_what_was_promised(units, more, carry_size, residual_size):
    problem = units, carry_size + more, carry_size, residual_size
    actions = list(mixed.gradient(*problem))
    cost = replay(
        actions, units, budget=problem[1], carry_size=carry_size, residual_size=residual_size
    )
    assert cost.evaluations == mixed.evaluations(*problem)
    slots = {action.slot for action in actions if isinstance(action, Save | Record)}
    assert slots == set(range(cost.peak_slots))


def test_residuals_that_do_not_fit_leave_the_binomial_optimum():
    for slots in range(1, 9):
        for units in range(40):
            found = mixed.evaluations(units, slots, 1, 1000)
            assert found == binomial.evaluations(units, slots) + units


def test_room_for_all_residuals_needs_nothing_else():
    assert mixed.evaluations(50, 150, 7, 3) == 50
    assert mixed.evaluations(50, 10**9, 7, 3) == 50
    assert replay(mixed.gradient(50, 150, 7, 3), 50, residual_size=3).replays == 0


def test_residuals_help_where_they_are_small():
    # one size for both: a slot of residuals spares the last replays
    carries = binomial.evaluations(300, 40) + 300
    assert mixed.evaluations(300, 40, 1, 1) == 568 < 0.7 * carries == 0.7 * 860
    by_size = [mixed.evaluations(100, 24, 2, size) for size in (1, 2, 4, 8, 24, 25)]
    assert by_size == sorted(by_size)
    by_budget = [mixed.evaluations(100, budget, 2, 3) for budget in range(2, 60)]
    assert by_budget == sorted(by_budget, reverse=True)


def test_sizes_in_bytes():
    assert mixed.evaluations(80, 4096 * 20, 4096, 8192) == mixed.evaluations(80, 20, 1, 2)


def test_a_long_loop():
    cost = replay(mixed.gradient(1000, 60, 2, 3), 1000, budget=60, carry_size=2, residual_size=3)
    assert cost.evaluations == mixed.evaluations(1000, 60, 2, 3) == 2692


ERRORS = [
    (lambda: mixed.gradient(-1, 1, 1, 1), "mixed.gradient: `units` must be >= 0, got -1; count"),
    (lambda: mixed.gradient(1, -1, 1, 1), "mixed.gradient: `budget` must be >= 0, got -1; give a"),
    (
        lambda: mixed.evaluations(1, 1, 0, 1),
        "mixed.evaluations: `carry_size` must be >= 1, got 0; give the size of a state",
    ),
    (
        lambda: mixed.evaluations(1, 1, 1, 0),
        "mixed.evaluations: `residual_size` must be >= 1, got 0; give the size of a unit's",
    ),
    (
        lambda: mixed.gradient(4, 5, 7, 2),
        "loopkit.schedules.mixed.gradient: `budget` must be >= 7, got 5; it has to hold a state "
        "(7) or the residuals of all units (8)",
    ),
]


@pytest.mark.parametrize(("call", "text"), ERRORS)
def test_errors(call, text):
    with pytest.raises(ValueError) as error:
        call()
    assert text in str(error.value)
