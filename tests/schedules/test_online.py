from itertools import pairwise
from math import isqrt

import jax.numpy as jnp
import numpy as np
import pytest

from loopkit.schedules import binomial, online
from loopkit.schedules._cheapest import Prices

PLACEMENTS = [online.thinning, online.cheapest]
placements = pytest.mark.parametrize("place", PLACEMENTS, ids=lambda place: place.__name__)


def evaluations(held, segments, slots):
    """A forward sweep and the reversal from what it left, each stretch reversed optimally."""
    start = [*sorted(held.values()), segments]
    return segments + sum(
        binomial.advances(start[i + 1] - start[i], slots - 1 - i) for i in range(len(held))
    )


@pytest.mark.slow
@placements
def test_every_length_on_a_grid(place):
    for slots in range(1, 41):
        program = place(slots, 120)
        for segments in range(121):
            held = program.positions(segments)
            assert len(held) <= slots
            assert set(held) <= set(range(slots))
            assert len(set(held.values())) == len(held)
            assert all(0 <= segment < segments for segment in held.values())
            if segments:
                assert held[0] == 0
            if segments <= slots:
                assert sorted(held.values()) == list(range(segments))
        # another bound is the same program, cut short
        short = place(slots, 60)
        assert all(short.positions(n) == program.positions(n) for n in range(61))


@placements
def test_marks_follow_each_other(place):
    marks = place(5, 1000).marks(1000)
    assert [mark.count for mark in marks] == list(range(len(marks)))
    for mark, after in pairwise(marks):
        assert mark.run > 0
        assert mark.segment + mark.run == after.segment
    assert marks[-1].segment + marks[-1].run == 1000
    assert place(5, 0).marks(0) == []


@pytest.mark.every_case
@placements
@pytest.mark.parametrize("segments", [0, 1, 2, 8, 9, 100])
def test_no_save_stands_at_the_bound_or_beyond(place, segments):
    *saved, bound, again = place(4, segments).table.segment
    assert saved == sorted(set(saved))
    assert saved[-1] < max(1, segments)
    assert bound == again == max(1, segments)


def test_thinning_doubles_the_spacing():
    program = online.thinning(8)
    for segments in (9, 17, 33, 1000, 10**6, 2**31 - 2):
        held = sorted(program.positions(segments).values())
        spacing = min(after - segment for segment, after in pairwise(held))
        assert all(segment % spacing == 0 for segment in held)
        assert 8 * spacing / 2 < segments <= 2 * spacing * 8
    assert len(program.table.segment) < 8 + 4 * 30


@pytest.mark.every_case
@pytest.mark.parametrize("slots", [1, 2, 3, 4, 6, 10, 16])
def test_cheapest_is_optimal_in_the_range_of_algorithm_one(slots):
    segments = min(binomial.reach(slots, 2) - 1, 150)
    program = online.cheapest(slots, segments)
    for n in range(segments + 1):
        best = binomial.evaluations(n, slots)
        assert evaluations(program.positions(n), n, slots) == best


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("slots", [1, 2, 3, 4, 5, 8, 12, 16, 24, 40])
def test_cheapest_is_near_the_optimum(slots):
    """Body evaluations: the replays, one a segment, included."""
    segments = 100 * slots
    program = online.cheapest(slots, segments)
    lengths = range(1, segments + 1) if slots <= 8 else range(1, segments + 1, 7)
    for n in lengths:
        best = n + binomial.evaluations(n, slots)
        found = n + evaluations(program.positions(n), n, slots)
        assert best <= found <= 1.11 * best
        if n < binomial.reach(slots, 3):
            assert found <= 1.05 * best + 2
        if slots >= 4:
            assert found <= 1.05 * best


@pytest.mark.slow
@pytest.mark.parametrize("slots", [2, 3, 4, 8, 16, 40])
def test_cheapest_stays_near_the_optimum_and_saves_seldom(slots):
    program = online.cheapest(slots)
    ends = np.geomspace(100 * slots, 2**31 - 2, 30).astype(int).tolist()
    worst = max(
        evaluations(program.positions(n), n, slots) / binomial.evaluations(n, slots) for n in ends
    )
    assert worst <= 1.08
    assert len(program.table.segment) < 7000


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(
    ("slots", "saves", "of_the_longest", "given_up"),
    [(2, 14, 6537, 0), (3, 34, 1145, 1), (4, 58, 360, 2), (8, 184, 746, 5), (16, 534, 1311, 10)],
)
def test_how_often_cheapest_saves(slots, saves, of_the_longest, given_up):
    """Up to 100 segments a slot, as docs/schedules.md says, and up to 2**31 segments."""
    assert len(online.cheapest(slots, 100 * slots).marks(100 * slots)) == saves
    table = online.cheapest(slots).table
    assert len(table.segment) - 2 == of_the_longest
    assert sum(slot != slots for slot in table.cleared) == given_up


def test_many_slots_are_filled_at_a_distance():
    """The last stretch, which has no free slot, costs about a hundredth of the whole."""
    *marks, _ = online.cheapest(100, 3000).marks(3000)
    assert all(mark.run >= isqrt(mark.segment) // 8 - 3 for mark in marks)
    assert any(mark.run == isqrt(mark.segment) // 8 - 3 == 3 for mark in marks)


@pytest.mark.every_case
@pytest.mark.parametrize(("slots", "spare"), [(4, 2), (6, 2), (9, 3), (16, 4), (40, 6)])
def test_thinning_with_spare_slots_is_near_the_optimum(slots, spare):
    program = online.thinning(slots, 100 * slots, spare=spare)
    for n in range(1, 100 * slots, 1 + slots // 5):
        held = program.positions(n)
        assert len(held) <= slots - spare
        best = n + binomial.evaluations(n, slots)
        assert n + evaluations(held, n, slots) <= 1.25 * best + 0.01
    assert len(program.table.segment) < 5 * slots
    assert program.table.cleared == (slots,) * len(program.table.segment)


def test_one_slot_runs_to_the_end():
    for place in PLACEMENTS:
        program = place(1)
        assert program.positions(10**6) == {0: 0}
        assert program.marks(10**6) == [online.Mark(0, 0, 0, 1, 2**31 - 1)]


def test_prices_are_the_optimum():
    price = Prices(9, 400)
    l, free = np.meshgrid(np.arange(401), np.arange(10))
    expected = [[binomial.advances(n, f) for n in range(401)] for f in range(10)]
    assert price(l, free).tolist() == expected
    long = Prices(2, 2**31)
    for f in range(3):
        assert long(2**31 - 1, f) == binomial.advances(2**31 - 1, f)


@placements
@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize("library", [np, jnp], ids=["numpy", "jax"])
def test_what_slots_hold_after_each_mark(place, slots, library):
    program = place(slots, 50)
    positions = library.full(slots, online.NEVER, np.int32)
    for mark in program.marks(50):
        positions = online.record(positions, mark, library)
        found = {s: n for s, n in enumerate(positions.tolist()) if n != online.NEVER}
        assert found == program.positions(mark.segment + 1)


def test_programs_print_and_are_kept():
    assert repr(online.cheapest(4, 400)) == "Placement(slots=4, segments=400, saves=58)"
    assert online.cheapest(4, 400) is online.cheapest(4, 400)
    assert hash(online.thinning(4)) == hash(online.thinning(4))


ERRORS = [
    (
        lambda: online.thinning(0),
        "online.thinning: `slots` must be an int >= 1. Count the initial",
        "0",
    ),
    (
        lambda: online.thinning(2, -1),
        "online.thinning: `segments` must be an int >= 0. Give a bound",
        "-1",
    ),
    (
        lambda: online.thinning(2, spare=-1),
        "online.thinning: `spare` must be an int >= 0. Pass 0 to fill",
        "-1",
    ),
    (
        lambda: online.thinning(2, spare=2),
        "loopkit.schedules.online.thinning: `spare` must be < `slots`, which is 2. Leave "
        "a slot for the initial state",
        "2",
    ),
    (
        lambda: online.cheapest(0),
        "online.cheapest: `slots` must be an int >= 1. Count the initial",
        "0",
    ),
    (
        lambda: online.cheapest(2, -1),
        "online.cheapest: `segments` must be an int >= 0. Give a bound",
        "-1",
    ),
    (
        lambda: online.cheapest(2, 10).positions(11),
        "loopkit.schedules.online.Placement.positions: `segments` must be <= 10, the bound of this "
        "placement. Make a placement for more segments",
        "11",
    ),
    (
        lambda: online.cheapest(2, 10).marks(-1),
        "online.Placement.marks: `segments` must be an int >= 0. Count the segments that the loop",
        "-1",
    ),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("call", "text", "got"), ERRORS)
def test_errors(call, text, got):
    with pytest.raises(ValueError) as error:
        call()
    assert text in str(error.value)
    assert str(error.value).endswith(f" Got: {got}.")
