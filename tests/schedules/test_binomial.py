from math import comb

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopkit.schedules import binomial

from . import exact

UNITS, SLOTS = 300, 40


@pytest.fixture(scope="module")
def optimum():
    return exact.advances(UNITS + 1, SLOTS - 1)


def test_advances_and_evaluations_are_the_optimum(optimum):
    for free in range(SLOTS):
        formula = [binomial.advances(l, free) for l in range(UNITS + 2)]
        assert formula == optimum[free].tolist()
        gradient = [binomial.evaluations(n, free + 1) for n in range(UNITS + 1)]
        assert gradient == formula[1:]


def test_split_is_optimal(optimum):
    for free in range(1, SLOTS):
        for l in range(2, UNITS + 2):
            m = binomial.split(l, free)
            assert 1 <= m < l
            assert m + optimum[free - 1, l - m] + optimum[free, m] == optimum[free, l]
            if m > 1:  # and the smallest that is
                less = m - 1
                assert less + optimum[free - 1, l - less] + optimum[free, less] > optimum[free, l]
    assert [binomial.split(l, 0) for l in range(2, 9)] == list(range(1, 8))


@pytest.mark.slow
def test_the_formulas_of_the_module():
    for free in range(12):
        s = free + 1
        start = [1] + [binomial.reach(s, r - 2) + binomial.reach(s - 1, r) for r in range(2, 202)]
        for l in range(2, 200):
            points = [binomial.reach(s, r) for r in range(l)]
            assert binomial.advances(l, free) == sum(max(0, l - point) for point in points)
            assert binomial.split(l, free) == sum(
                min(max(0, l - start[r - 1]), binomial.reach(s - 1, r - 1)) for r in range(1, l)
            )


def test_published_reach():
    # Griewank & Walther: binomial(s + r, s) segments with s slots and r repetitions
    assert [binomial.reach(s, 3) for s in (1, 2, 3, 4, 5)] == [4, 10, 20, 35, 56]
    assert binomial.reach(8, 5) == 1287
    assert binomial.reach(10, 5) == 3003
    assert binomial.reach(0, 7) == binomial.reach(7, 0) == 1
    for s in range(1, 12):
        for r in range(1, 12):
            n = binomial.reach(s, r)
            assert binomial.repetition_number(n, s) == r
            assert binomial.repetition_number(n + 1, s) == r + 1
            # at the borders both slopes give one value
            assert binomial.advances(n, s - 1) == r * n - comb(s + r, r - 1)
            assert binomial.advances(n, s - 1) == (r + 1) * n - comb(s + r + 1, r)


def test_published_evaluations():
    # Griewank & Walther: r n - binomial(s + r, r - 1) advances for n segments with s slots
    for n, s, r in ((10, 3, 2), (56, 5, 3), (100, 5, 4), (1000, 10, 4), (10_000, 10, 7)):
        assert binomial.repetition_number(n, s) == r
        assert binomial.advances(n, s - 1) == r * n - comb(s + r, r - 1)
    assert binomial.advances(10, 2) == 15
    assert binomial.advances(100, 4) == 316


def test_a_million_units():
    n = 10**6
    for slots in (2, 3, 10, 100, 1000):
        free = slots - 1
        r = binomial.repetition_number(n, slots)
        assert comb(slots + r - 1, slots) < n <= comb(slots + r, slots)
        m = binomial.split(n, free)
        parts = binomial.advances(n - m, free - 1) + binomial.advances(m, free)
        assert m + parts == binomial.advances(n, free)
    assert binomial.advances(n, 0) == n * (n - 1) // 2
    assert binomial.advances(n, n - 1) == n - 1
    assert binomial.evaluations(n, n) == n
    assert binomial.split(10**18, 3) < 10**18


@given(l=st.integers(2, 10**12), free=st.integers(1, 200))
def test_split_divides_the_cost_at_any_length(l, free):
    m = binomial.split(l, free)
    parts = binomial.advances(l - m, free - 1) + binomial.advances(m, free)
    assert m + parts == binomial.advances(l, free)


def test_the_table_splits_as_the_function_does():
    table = binomial.SplitTable(*map(np.asarray, binomial.split_table(UNITS, SLOTS - 1)))
    assert table.starts.dtype == table.widths.dtype == np.int64
    l, free = np.meshgrid(np.arange(2, UNITS + 1), np.arange(SLOTS))
    split = binomial.split_from(table, l, free, np)
    assert split.tolist() == [
        [binomial.split(n, f) for n in range(2, UNITS + 1)] for f in range(SLOTS)
    ]
    assert binomial.split_from(table, 1, 3, np) == binomial.split_from(table, 0, 3, np) == 0
    assert binomial.split_table(UNITS, 0) == (((1,),), ((binomial.LARGEST_COUNT,),))  # nothing more


def test_the_table_in_a_traced_loop():
    made = binomial.split_table(2**31 - 1, 7)
    table = binomial.SplitTable(*(jnp.asarray(rows, jnp.int32) for rows in made))

    @jax.jit
    def split(l, free):
        m = binomial.split_from(table, jnp.int32(l), free, jnp)
        assert m.dtype == jnp.int32
        return m

    for free in (0, 1, 2, 7):
        longest = 33_153 if free == 1 else 2_000_000
        for l in (2, 3, 10, 1000, 33_153, 2_000_000):
            m = int(split(l, free))
            assert m == binomial.split(l, free) if l <= longest else 1 <= m < l
    assert int(split(2**31 - 1, 0)) == 2**31 - 2
    lanes = jax.vmap(split)(jnp.array([100, 200, 300]), jnp.array([1, 3, 5]))
    assert lanes.tolist() == [binomial.split(l, f) for l, f in ((100, 1), (200, 3), (300, 5))]


def test_tables_fit_into_int32():
    table = binomial.split_table(10**6, 40, columns=64)
    largest = max(max(row) for row in (*table.starts, *table.widths))
    assert largest == np.iinfo(np.int32).max


def test_how_far_a_table_is_exact_by_default():
    table = binomial.SplitTable(*map(np.asarray, binomial.split_table(10**6, 1)))
    assert binomial.split_from(table, 33_153, 1, np) == binomial.split(33_153, 1)
    assert binomial.split_from(table, 33_154, 1, np) != binomial.split(33_154, 1)


def test_a_table_too_narrow_still_splits_well():
    narrow = binomial.SplitTable(*map(np.asarray, binomial.split_table(10**4, 3, columns=4)))
    assert narrow.starts.shape == (4, 4)

    def cost(l, free):
        total = 0
        stack = [(l, free)]
        while stack:
            l, free = stack.pop()
            if l > 1:
                if free == 0:
                    total += l * (l - 1) // 2
                    continue
                m = int(binomial.split_from(narrow, l, free, np))
                assert 1 <= m < l
                total += m
                stack += [(l - m, free - 1), (m, free)]
        return total

    for free in range(4):
        for l in (2, 5, 30, 200):
            best = binomial.advances(l, free)
            assert best <= cost(l, free)
            if l <= binomial.reach(free + 1, 4):
                assert cost(l, free) == best
            assert cost(l, free) <= 2.5 * best


ERRORS = [
    (lambda: binomial.reach(-1, 2), "binomial.reach: `slots` must be an int >= 0.", "-1"),
    (lambda: binomial.reach(1, -2), "binomial.reach: `repetitions` must be an int >= 0.", "-2"),
    (
        lambda: binomial.repetition_number(-1, 2),
        "binomial.repetition_number: `segments` must be an int >= 0. Count the segments to be",
        "-1",
    ),
    (
        lambda: binomial.repetition_number(1, 0),
        "`slots` must be an int >= 1. Count the initial",
        "0",
    ),
    (lambda: binomial.advances(-1, 0), "binomial.advances: `segments` must be an int >= 0.", "-1"),
    (
        lambda: binomial.advances(1, -1),
        "binomial.advances: `free` must be an int >= 0. Count the",
        "-1",
    ),
    (
        lambda: binomial.evaluations(-1, 1),
        "binomial.evaluations: `segments` must be an int >= 0.",
        "-1",
    ),
    (
        lambda: binomial.evaluations(1, 0),
        "loopkit.schedules.binomial.evaluations: `slots` must be an int >= 1. Count the initial "
        "state as one slot",
        "0",
    ),
    (
        lambda: binomial.split(1, 0),
        "binomial.split: `segments` must be an int >= 2. Replay a stretch of one",
        "1",
    ),
    (lambda: binomial.split(2, -1), "binomial.split: `free` must be an int >= 0.", "-1"),
    (
        lambda: binomial.split_table(0, 1),
        "binomial.split_table: `segments` must be an int >= 1.",
        "0",
    ),
    (
        lambda: binomial.split_table(1, -1),
        "binomial.split_table: `free` must be an int >= 0.",
        "-1",
    ),
    (
        lambda: binomial.split_table(1, 1, columns=0),
        "binomial.split_table: `columns` must be an int >= 1. Pass 256, say",
        "0",
    ),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("call", "text", "got"), ERRORS)
def test_errors(call, text, got):
    with pytest.raises(ValueError) as error:
        call()
    assert text in str(error.value)
    assert str(error.value).endswith(f" Got: {got}.")


def test_integers_only():
    with pytest.raises(TypeError) as error:
        binomial.advances(2.5, 1)
    assert str(error.value) == (
        "loopkit.schedules.binomial.advances: `segments` must be an int >= 0. Count the segments "
        "to be reversed. Got: 2.5 of type float."
    )
    assert binomial.advances(np.int32(10), np.int64(2)) == 15
