"""Bars are closed: of loops that fail, of objects that fail, of what is asked for too late."""

import jax
import jax.numpy as jnp
import pytest

import loopkit
from loopkit._progress import open_bars
from recorded_bars import Recorder
from shown_loops import ONES, STOPS, N, nested, step


class Failing(Recorder):
    """Fails in the second update of a bar."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def start(self, total, *, name, backward):
        bar = super().start(total, name=name, backward=backward)
        note = bar.update

        def update(steps):
            note(steps)
            if len(bar.updates) == 2:
                raise self.error

        bar.update = update
        return bar


FAILURES = {
    "value": lambda f: f,
    "jit": jax.jit,
    "grad": jax.grad,
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=["error", "stop"])
@pytest.mark.parametrize("transform", FAILURES)
def test_an_object_that_fails_has_its_bars_closed(transform, error):
    recorder = Failing(error)
    with pytest.raises((jax.errors.JaxRuntimeError, KeyboardInterrupt)):
        jax.block_until_ready(FAILURES[transform](lambda x: nested(recorder, x))(0.3))
    assert recorder.bars
    assert [bar.closed for bar in recorder.bars] == [1] * len(recorder.bars)
    assert not open_bars._open


def body(i, x):
    """Step 7 fails."""

    def check(i):
        if i == 7:
            raise ValueError("mine")

    jax.debug.callback(check, i)
    return jnp.sin(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transform", FAILURES)
def test_a_loop_that_fails_has_its_bars_closed(transform):
    recorder = Recorder()
    f = FAILURES[transform](lambda x: loopkit.fori_loop(0, N, body, x, progress=recorder))
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError):
            jax.block_until_ready(f(0.3))
    closed = [bar.closed for bar in recorder.bars]
    assert closed == [1, "jit" not in transform]
    other = Recorder()  # under jit, the next bar of the thread closes what a program left open
    other.run(jax.jit(lambda x: nested(other, x)), 0.3)
    assert [bar.closed for bar in recorder.bars] == [1, 1]


def test_a_step_that_fails_in_python():
    def body(i, x):
        return 1 / (i - 3)

    recorder = Recorder()
    with jax.disable_jit(), pytest.raises(ZeroDivisionError):
        loopkit.fori_loop(0, N, lambda i, x: body(int(i), x), 0.3, progress=recorder)
    assert [bar.closed for bar in recorder.bars] == [1]


def test_what_is_asked_for_too_late_is_not_left_open():
    recorder = Recorder()
    f = lambda x: loopkit.unbounded_scan(step, x, ONES, **STOPS, progress=recorder)
    with pytest.raises(TypeError, match="between segments"):
        jax.jit(f)(0.3)
    assert [bar.closed for bar in recorder.bars] == [1]
