"""Bars in compiled loops: the numbers they carry, calls of the host, its answers, and what
waits."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from loopkit import _jax
from loopkit._engine import progress
from loopkit._engine.lanes.many_lanes import OneLane
from loopkit._engine.loop import Operands
from loopkit._engine.primitives import while_p
from loopkit._engine.progress import WAITING_BYTES, Closing, Opening, StepMeter, Update
from loopkit._jaxprs.cost import nanoseconds
from loopkit._progress import open_bars
from loopkit._progress.progress import check_progress
from recorded_bars import Recorder

from .small_loops import make_loop

SHOWN = check_progress("scan", Recorder())


def add(work=lambda y: y, **settings):
    body = lambda consts, carry, x: ([work(carry[0]) + 1.0], [])
    return make_loop(body, [], [0.5], progress=SHOWN, **settings)[0]


def around(inner):
    """A loop whose step runs another, and whose predicate runs none."""
    body = lambda consts, carry, x: (while_p.bind(*carry, loop=inner), [])
    return make_loop(body, [], [0.5], cond=lambda _, carry: carry[0] < 9)[0]


def within(loop):
    (inner,) = (eqn.params["loop"] for eqn in loop.body.eqns if "loop" in eqn.params)
    return inner


# ---------------------------------------------------------------- which loops show something


def test_what_shows_something():
    silent, shown = add(length=9).replace(progress=None), add(length=9)
    loops = silent, shown, around(silent), around(shown), around(around(shown))
    assert [loop.shows for loop in loops] == [False, True, False, True, True]
    assert [loop.shows_within for loop in loops] == [False, False, False, True, True]
    assert [loop.shows_forward for loop in loops] == [False, True, False, False, False]
    both = around(shown).replace(progress=SHOWN)
    assert (both.shows, both.shows_within) == (True, True)


def test_what_shows_no_more():
    """Steps that are taken again are not shown; they may be as they are reversed."""
    shown = add(length=9)
    silent = shown.replace(progress=None)
    assert silent.unshown() is silent
    assert silent.without_debug_effects() is silent
    assert shown.unshown() is shown.unshown()
    for loop, of in ((shown, lambda loop: loop), (around(shown), within)):
        assert of(loop.unshown()).progress is None
        assert of(loop.unshown(False)).progress == SHOWN.backward_only
        assert of(loop.without_debug_effects()).progress == SHOWN.backward_only
    assert around(shown).unshown().progress is None


def test_lanes_that_show_no_more():
    """They are lanes of what shows no more."""
    flags = Operands([], [], [True], [])
    lane = OneLane(add(length=9), 3, flags).many.unshown().lane
    assert (lane.loop.progress, lane.count, lane.flags) == (None, 3, flags)


# ---------------------------------------------------------------- what the host is told


def test_opening():
    """In the user's steps, of which a step of the loop may be several, or none."""
    opened = lambda total, **of: Opening(replace(SHOWN, **of), False, 0)(None, 0, total, 0)
    for weight, total, wanted in ((1, 5, 5), (3, 5, 15), (1, 0, 0), (1, -1, None), (0, 5, None)):
        number, due = opened(total, weight=weight)
        bar = open_bars._open.pop(number)
        assert bar.shown.total == wanted
        assert due == (1 if weight else open_bars.NOT_YET), "the first is shown at once"


def test_other_devices_have_no_bar():
    answer = Opening(SHOWN, False, 0)(None, 1, 5, 0)
    assert answer == (open_bars.SILENT, open_bars.NOT_YET)
    assert not open_bars._open


def test_updates(monkeypatch):
    """The host counts the user's steps, the loop its own."""
    for weight, due, wanted in ((1, 7, 7), (3, 10, 3), (3, 2, 1), (0, 7, 7), (1, 0, 1)):
        said = []
        host = lambda *given, said=said, due=due: said.append(given) or due
        monkeypatch.setattr(open_bars, "updated", host)
        update = Update(replace(SHOWN, weight=weight), False, 4)
        assert update(None, 0, 9, 5, 2) == (wanted,)
        assert said == [(9, 5 * weight, 2, 4)]


def test_closing():
    number, _ = Opening(replace(SHOWN, weight=3), True, 0)(None, 0, 5, 0)
    bar = open_bars._open[number].shown
    answer = Closing(replace(SHOWN, weight=3), True, 0)(None, 0, number, 4, 9)
    assert (answer, bar.steps, bar.closed) == ((0,), 12, 1)


def test_it_is_told_once_enough_steps_are_taken(monkeypatch):
    told = []
    monkeypatch.setattr(open_bars, "updated", lambda *given: told.append(given) or 9)
    after = jax.jit(lambda bar, count: progress.after(add(length=99), bar, count))
    after_3 = lambda steps: after(StepMeter(*map(jnp.int32, (4, steps, 3))), jnp.int32(1))
    assert list(map(int, after_3(1))) == [4, 2, 3]
    assert told == []
    assert list(map(int, after_3(2))) == [4, 0, 9]
    assert list(map(int, after_3(6))) == [4, 0, 9]
    assert told == [(4, 3, 0, 0), (4, 7, 0, 0)]


@pytest.mark.parametrize("waits", [True, False])
def test_a_host_that_waits_is_told_each_time(waits):
    with _jax.host_waits(waits):
        after = lambda *bar: progress.after(add(length=99), StepMeter(*bar), 1)
        jaxpr = jax.make_jaxpr(after)(*map(jnp.int32, (4, 1, 3)))
    assert ("cond" in {eqn.primitive.name for eqn in jaxpr.eqns}) is not waits


# ---------------------------------------------------------------- what waits for it


def test_small_results_wait_until_the_bar_is_closed():
    """Not those that would be missed, nor what has no numbers: such are the results themselves."""
    results = {
        "a number": jnp.float32(0.5),
        "one": jnp.ones((1, 1)),
        "as large as may be": jnp.ones(WAITING_BYTES, jnp.int8),
        "too large": jnp.ones(WAITING_BYTES + 1, jnp.int8),
        "none": jnp.ones((2, 0)),
        "a key": jax.random.key(0),
    }
    bar = StepMeter(*map(jnp.int32, (4, 1, 3)))
    closed = lambda *values: progress.closed(add(length=99), bar, values)
    jaxpr = jax.make_jaxpr(closed)(*results.values()).jaxpr
    same = {name for name, v in zip(results, jaxpr.outvars, strict=True) if v in jaxpr.invars}
    assert same == {"too large", "none", "a key"}


def test_what_waits_is_as_it_was(monkeypatch):
    monkeypatch.setattr(open_bars, "updated", lambda *_: 1)
    bar = StepMeter(*map(jnp.int32, (4, 1, 3)))
    closed = jax.jit(lambda *values: progress.closed(add(length=99), bar, values))
    assert list(map(float, closed(0.5, jnp.float32(1), jnp.int32(7)))) == [0.5, 1.0, 7.0]


# ---------------------------------------------------------------- runs of steps


def test_runs_of_a_loop_of_known_length():
    """A hundred of them, if it has as many steps."""
    lengths = [progress.run_length(add(length=n)) for n in (5, 199, 200, 100_000)]
    assert lengths == [1, 1, 2, 1000]
    assert progress.run_length(add(cond=lambda _, carry: carry[0] < 9)) == progress.RUN_STEPS


def test_runs_of_long_steps_are_short():
    heavy = lambda y, times: jax.lax.scan(lambda y, _: (jnp.sin(y), None), y, length=times)[0]
    some = add(lambda y: heavy(y, 1000), length=10**6)
    assert progress.run_length(some) == int(2e6 / nanoseconds(some.body)) > 1
    assert progress.run_length(add(lambda y: heavy(y, 10**7), length=10**6)) == 1
    assert progress.run_length(add(length=10**9)) == 2_000_000, "none is below a nanosecond"


@pytest.mark.parametrize("waits", [True, False])
def test_runs_of_steps_of_which_nobody_knows_how_long_they_take(waits):
    """A step may hold a loop that stops by itself. A host that waits is called seldom."""
    inner = lambda y: jax.lax.while_loop(lambda y: y < 1, lambda y: y + 1.0, y)
    bounded = {"cond": lambda _, carry: carry[0] < 9, "length": 1000}
    with _jax.host_waits(waits):
        assert progress.run_length(add(inner, length=1000)) == (10 if waits else 1)
        assert progress.run_length(add(inner, **bounded)) == (10 if waits else 1)
        assert progress.run_length(add(**bounded)) == 10
