"""Steps in runs, after each of which a bar is told: each step once, and in which runs."""

import jax
import jax.numpy as jnp
import pytest

from loopkit import _jax
from loopkit._engine import progress, steps
from loopkit._progress.progress import check_progress
from recorded_bars import Recorder

from .small_loops import assert_same, run
from .test_steps import few, mixed, traced_for


@pytest.fixture
def runs_of_four(monkeypatch):
    monkeypatch.setattr(progress, "run_length", lambda loop: 4)


def runs_of(times, known=True):
    """Count the runs of each of these numbers of steps; all steps are taken, in order."""
    body = lambda i, s: ((s[0] * 31 + i.astype(int)) % 10007, *s[1:])
    after = lambda s, count: (s[0], s[1] + count, s[2] + 1)
    zeros = (jnp.int64(0), jnp.int32(0), jnp.int32(0))
    loop, _ = mixed(unroll=3)
    of = jax.jit(lambda n: steps.in_runs(loop, n, body, zeros, after, bar=()), static_argnums=0)
    of = of if known else jax.jit(of.__wrapped__)
    found = []
    for n in times:
        value, total, runs = of(n if known else jnp.int32(n))
        wanted = 0
        for i in range(n):
            wanted = (wanted * 31 + i) % 10007
        assert (value, total) == (wanted, n)
        found.append(int(runs))
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("runs_of_four")
@pytest.mark.parametrize("waits", [True, False])
def test_runs_of_a_known_number_of_steps(waits):
    """Runs have the same length where they are at most four times as long."""
    wanted = {0: 0, 3: 1, 4: 1, 8: 2, 10: 2, 11: 1, 16: 4, 17: 5, 23: 6}
    with _jax.host_waits(waits):
        assert runs_of(wanted) == list(wanted.values())


@pytest.mark.usefixtures("runs_of_four")
@pytest.mark.parametrize("waits", [True, False])
def test_runs_of_steps_that_are_counted_as_it_runs(waits):
    """If the host waits, the last run exists even if it is empty."""
    wanted = [1, 1, 2, 2, 3, 3] if waits else [0, 1, 1, 2, 2, 3]
    with _jax.host_waits(waits):
        assert runs_of([0, 1, 4, 5, 8, 11], known=False) == wanted


def test_without_a_bar_there_is_one_run():
    loop, _ = mixed()
    of = lambda n, **how: traced_for(
        lambda times, body, s: steps.in_runs(loop, times, body, s, None, None, **how), n
    )
    assert of(9) == of(None) == (1, 1)
    assert of(None, part=2) == (2, 3)


@pytest.mark.usefixtures("runs_of_four")
def test_runs_of_one_length_are_compiled_for_it():
    """Three steps to an iteration, and one more, without a loop around either."""
    loop, _ = mixed(unroll=3)
    of = lambda n: traced_for(
        lambda times, body, s: steps.in_runs(loop, times, body, s, lambda s, _: s, ()), n
    )
    assert of(12) == (4, 1)
    assert of(17) == of(None) == (4, 3)


@pytest.mark.slow
@pytest.mark.usefixtures("runs_of_four")
@pytest.mark.parametrize("unroll", [1, 3])
def test_a_bar_is_told_of_each_run(unroll, monkeypatch):
    """So many steps as were taken."""
    told = []
    after = lambda loop, bar, count, **how: jax.debug.callback(told.append, count) or bar
    monkeypatch.setattr(progress, "after", after)
    shown = check_progress("scan", Recorder())
    for loop, operands, runs in (
        (*mixed(unroll=unroll, length=5, progress=shown), [5]),
        (*few(9.0, unroll=unroll, progress=shown), [4, 1] if unroll == 1 else [5]),
        (*few(-9.0, unroll=unroll, progress=shown), []),
    ):
        found = jax.jit(lambda operands, loop=loop: steps.evaluate(loop, operands))(operands)
        assert_same(found, run(loop, operands))
        jax.effects_barrier()
        assert list(map(int, told)) == runs
        told.clear()
