"""Runs of steps, after each of which a loop with a bar counts them: how long they are."""

import jax
import jax.numpy as jnp
import pytest

import loopkit
from derivatives import assert_close
from loopkit import _jax
from loopkit._engine import progress
from loopkit._progress import open_bars
from recorded_bars import Recorder

from .small_loops import make_loop


def run_length(length, work=1, on_gpu=False):
    def body(consts, carry, x):
        (y,) = carry
        for _ in range(work):
            y = jnp.sin(y)
        return [y], []

    loop, _ = make_loop(body, [], [jnp.ones((30, 100))], length=length)
    with _jax.host_waits(on_gpu):
        return progress.run_length(loop)


def test_their_length():
    assert [run_length(n) for n in (1, 50, 150, 250, 1000)] == [1, 1, 1, 2, 10]
    assert run_length(10**6) == run_length(10**7) < 10**4, "a run takes so long at most"
    assert run_length(10**6, work=1000) == 1
    assert run_length(10**6, on_gpu=True) == 10**4, "its steps are taken in one loop"


def test_the_host_is_told_when_enough_steps_are_taken(monkeypatch):
    told = []
    updated = lambda number, steps, *_: told.append(steps) or 400
    monkeypatch.setattr(open_bars, "updated", updated)
    step = lambda x, _: (jnp.sin(x), None)
    jax.jit(lambda x: loopkit.scan(step, x, None, 1000, progress=Recorder())[0])(0.5)
    assert told == [10, 400, 400, 190]


@pytest.mark.slow
def test_steps_beyond_the_last_whole_run():
    """On a GPU, where all others have the same length, and a prime number of steps."""

    def f(x, **how):
        return loopkit.scan(lambda x, _: (jnp.sin(x) * 1.2, None), x, None, 251, **how)[0]

    bars = Recorder()
    with _jax.host_waits(True):
        got = jax.jit(jax.value_and_grad(lambda x: f(x, progress=bars, checkpoints="all")))(0.5)
    assert_close(got, jax.value_and_grad(f)(0.5))
    assert [bar.steps for bar in bars.bars] == [251, 251]


def test_large_results_do_not_wait_for_the_bar():
    """They would be copied."""

    def waits(size):
        step = lambda x, _: (jnp.sin(x), None)
        f = lambda x: loopkit.scan(step, x, None, 10, progress=Recorder())[0]
        text = jax.jit(f).lower(jnp.ones(size)).as_text()
        return any("select" in line and f"<{size}x" in line for line in text.splitlines())

    assert waits(5)
    assert not waits(progress.WAITING_BYTES)
