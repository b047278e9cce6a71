"""The choice of plans for several loops by one price of a byte."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopkit._plans.one_price import Chain, Choice, Moment, by_price

CHOICE = st.builds(Choice, st.integers(0, 50), st.integers(0, 50), st.integers(1, 99))
CHOICES = st.lists(CHOICE, min_size=1, max_size=6)


def options(some):
    return dict(enumerate(some))


def at_once(count):
    """A program whose loops are all held while one is reversed."""
    held = tuple((key, 1) for key in range(count))
    return [Moment("", 7, held, key) for key in range(count)]


def sizes(chosen):
    return sum(c.saved + c.working for c in chosen)


@pytest.mark.slow
@given(st.lists(CHOICES, min_size=1, max_size=3))
@settings(max_examples=150, deadline=None)
def test_no_combination_is_faster_and_smaller_at_any_price(some):
    states = list(by_price(at_once(len(some)), options(some)))
    for state in states:
        size = sizes(state.chosen.values())
        for combination in itertools.product(*some):
            time = sum(c.nanoseconds for c in combination)
            assert time >= state.nanoseconds or sizes(combination) > size
    times = [state.nanoseconds for state in states]
    assert times == sorted(times)


MOMENTS = st.lists(
    st.builds(
        Moment,
        st.just(""),
        st.integers(0, 60),
        st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), max_size=3).map(tuple),
        st.none() | st.integers(0, 2),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.slow
@given(MOMENTS, st.lists(CHOICES, min_size=3, max_size=3))
@settings(max_examples=150, deadline=None)
def test_more_bytes_are_never_slower_and_the_least_named_will_do(moments, some):
    choices, before = options(some), None
    chain = Chain(moments, choices)
    least = chain.least()
    for count in range(least.bytes - 2, least.bytes + 300, 7):
        found = chain.within(count)
        assert (found is None) == (count < least.bytes)
        if found is not None:
            assert max(m.bytes(found.chosen) for m in moments) == found.bytes <= count
            assert before is None or found.nanoseconds <= before
            before = found.nanoseconds


def test_what_one_loop_does_not_need_another_gets():
    small = [Choice(10, 0, 100.0), Choice(1, 0, 200.0)]
    large = [Choice(k, 0, 10**4 / k) for k in range(100, 0, -1)]
    moments = [Moment("", 0, ((0, 1), (1, 1)))]
    found = Chain(moments, {0: small, 1: large}).within(90)
    assert [c.saved for c in found.chosen.values()] == [10, 80]


def test_loops_that_do_not_live_at_the_same_time_do_not_share():
    some = [Choice(80, 0, 1.0), Choice(10, 0, 9.0)]
    moments = [Moment("", 0, ((0, 1),)), Moment("", 0, ((1, 1),))]
    found = Chain(moments, {0: some, 1: some}).within(80)
    assert [c.saved for c in found.chosen.values()] == [80, 80]
    assert found.bytes == 80


def test_the_host_has_a_budget_of_its_own():
    some = [Choice(0, 5, 1.0, 80), Choice(0, 5, 9.0, 10)]
    moments = at_once(2)
    chain = Chain(moments, {0: some, 1: some}, 30 / 100)
    found = chain.within(30, 100)
    assert (found.host, found.bytes, chain.least(by_host=True).host) == (90, 12, 20)
    assert chain.within(30, 19) is None
