"""Trials of steps to an iteration: of which loops, of how many steps, and by which clock."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from loopkit import _jax
from loopkit._engine.trials import unrolling
from loopkit._engine.trials.unrolling import STEPS, Trial

from .small_loops import make_loop


def sines(length=10, work=1, **settings):
    def body(consts, carry, x):
        (y,) = carry
        for _ in range(work):
            y = jnp.sin(y)
        return [y * consts[0]], []

    return make_loop(body, [0.9], [jnp.ones((30, 100))], length=length, **settings)[0]


def test_what_can_be_tried(monkeypatch):
    assert unrolling._can_be_tried(sines())
    assert not unrolling._can_be_tried(sines(length=0))
    assert not unrolling._can_be_tried(sines(buffers=[0]))
    monkeypatch.setattr(_jax, "is_spread", lambda t: t.ndim == 2)
    assert not unrolling._can_be_tried(sines()), "one of its leaves is on several devices"


def test_what_is_too_large_is_not_tried(monkeypatch):
    rows = make_loop(lambda c, carry, x: ([carry[0] + x[0]], []), [], [0.5], [jnp.ones(100)])[0]
    assert unrolling._can_be_tried(rows)
    monkeypatch.setattr(unrolling, "LARGEST", 700)
    assert not unrolling._can_be_tried(rows)


def test_not_of_a_size_that_nobody_knows():
    (n,) = jax.export.symbolic_shape("n")
    types = [_jax.ShapedArray((), jnp.dtype("float64")), _jax.ShapedArray((n,), jnp.dtype(float))]
    body = _jax.trace_closed(lambda w, y: [jnp.sin(y) * w], types, "step")
    assert not unrolling._can_be_tried(sines().replace(body=body))


def test_steps_of_a_trial():
    length = unrolling._trial_length
    assert length(sines(5)) == 5
    assert length(sines(10**7, work=1000)) == 32, "each count has an iteration and more"
    scalar = make_loop(lambda consts, carry, x: ([carry[0] + 1.0], []), [], [0.5], length=10**7)[0]
    assert length(scalar) == STEPS
    assert 32 < length(sines(10**7, work=10)) < STEPS


def test_no_more_steps_to_an_iteration_than_there_are(monkeypatch):
    monkeypatch.setattr(unrolling, "measure", lambda loop, active, count: Trial(0.0, 1.0 / count))
    for steps, tried in ((1, "1"), (4, "1 2 4"), (5, "1 2 4"), (100, "1 2 4 8 16")):
        assert list(unrolling._try_all(sines(steps), None, steps)["seconds"]) == tried.split()


def test_seconds_are_between_two_times(monkeypatch):
    """Of a clock that moves by one whenever it is read."""
    clock = itertools.count(100.0)
    monkeypatch.setattr(unrolling, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert unrolling.measure(sines(4), None, 2) == Trial(1.0, 0.25)
