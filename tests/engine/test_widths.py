"""To how many lanes loops narrow, and why lanes wait."""

import jax
import jax.export

from loopkit import _jax
from loopkit._engine.lanes import many_lanes
from loopkit._engine.lanes.many_lanes import (
    ENOUGH,
    LEAST,
    WORTH_NARROWING,
    _narrower,
    may_narrow,
    waiting,
    why_waiting,
    widths,
)

from .small_loops import make_loop


def doubling(**how):
    """A step of two equations."""
    step = lambda consts, carry, x: ([carry[0] + 1, carry[1] * 2], [])
    return make_loop(step, [], [0, 0.5], **how)[0]


def test_widths_of_so_many():
    """At last, half of them, if that is few and not too few."""
    assert _narrower(LEAST) == ()
    assert [_narrower(n) for n in (9, 18, 20, 24, 40)] == [(8,), (9,), (10,), (12,), (12,)]


def costing(monkeypatch, step, phase=0.0, equation=0.0, runs=1000):
    """Nanoseconds of a step of a lane, and of what is compiled."""
    monkeypatch.setattr(many_lanes, "nanoseconds", lambda _: step)
    monkeypatch.setattr(many_lanes, "COMPILE_NANOSECONDS", (phase, equation))
    monkeypatch.setattr(many_lanes, "RUNS", runs)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")


def test_few_lanes_wait_and_those_of_short_steps(monkeypatch):
    costing(monkeypatch, 1e6)
    assert (
        why_waiting(doubling(length=9), WORTH_NARROWING - 1) == f"are fewer than {WORTH_NARROWING}"
    )
    assert why_waiting(doubling(length=9), WORTH_NARROWING) == ""
    costing(monkeypatch, ENOUGH / WORTH_NARROWING)
    assert why_waiting(doubling(length=9), WORTH_NARROWING) == ""
    costing(monkeypatch, 9955 / WORTH_NARROWING)
    said = "take a step in 10.0 microseconds, of 10 or more"
    assert why_waiting(doubling(length=9), WORTH_NARROWING) == said


def test_lanes_wait_where_phases_gain_less_than_they_take_to_compile(monkeypatch):
    """The gain counts half the time of all steps of five runs, of 20 microseconds each.

    Of 64 lanes there are two phases, each of two equations.
    """
    assert len(_narrower(64)) == 2
    for length, steps in [(3, 3), (5000, 1000), (None, 1000)]:
        gained = 5 * steps * 20_000 / 2
        how = {} if length else {"cond": lambda _, carry: carry[1] < 9}
        for equation in (0, 1000):
            phase = gained / 2 - 2 * equation
            costing(monkeypatch, 20_000 / 64, phase, equation, runs=5)
            assert why_waiting(doubling(length=length, **how), 64) == ""
            costing(monkeypatch, 20_000 / 64, phase + 1, equation, runs=5)
            assert "gain less" in why_waiting(doubling(length=length, **how), 64)


def test_whether_others_may_join():
    of = lambda narrows, **how: doubling(length=9, lane_policy=narrows, **how)
    axis = _jax.axis(70)
    assert may_narrow(of("compact"), axis)
    assert not may_narrow(of("wait"), axis)
    with waiting(True):
        assert not may_narrow(of("compact"), axis)
    for over in [("devices", None), (None, ("devices",))]:  # of `spmd_axis_name`, or of a mesh
        assert not may_narrow(of("compact"), type(axis)(axis.name, axis.size, *over))


def test_lanes_of_a_size_that_is_not_known():
    (n,) = jax.export.symbolic_shape("n")
    assert not may_narrow(doubling(length=9, lane_policy="compact"), _jax.axis(n))


def test_lanes_whose_predicate_asks_for_more_than_a_flag():
    """Then it does not say which lanes write to buffers."""

    def loop(cond, cond_consts, flag):
        step = lambda consts, carry, x: ([carry[0] + 1, carry[0] < 9], [])
        how = {"cond": cond, "cond_consts": cond_consts, "lane_policy": "compact"}
        found, _ = make_loop(step, [], [0, True], **how)
        count, going = found.carry
        return found.replace(carry=(count, going._replace(flag=flag)))

    alone, more = lambda _, carry: carry[1], lambda n, carry: carry[1] & (carry[0] < n[0])
    assert may_narrow(loop(alone, [], flag=True), _jax.axis(70))
    assert may_narrow(loop(more, [5], flag=False), _jax.axis(70))
    assert not may_narrow(loop(more, [5], flag=True), _jax.axis(70))


def test_widths_that_are_asked_for():
    assert widths(doubling(length=9, lane_policy="wait"), 70) == ()
    assert widths(doubling(length=9, lane_policy="compact"), 70) == _narrower(70)
    assert widths(doubling(length=9, lane_policy=(40, 20)), 70) == (40, 20)
    assert widths(doubling(length=9, lane_policy=(40, 20)), 40) == (20,)
