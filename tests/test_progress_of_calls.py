"""Loops of one call share a bar: under jit, outside, back, replaced, in Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from kinds import KINDS
from recorded_bars import Recorder
from shown_loops import ONES, STOPS, TRANSFORMS, N, looped, step
from turns import in_turn

OF_ONE_BAR = {
    "truncated": (lambda **p: lambda x: loopkit.scan(step, x, ONES, truncate=4, **p), N, N),
    "truncated, and stops": (
        lambda **p: lambda x: loopkit.scan(step, x, ONES, truncate=2, **STOPS, **p),
        3,
        N,
    ),
    "every": (
        lambda **p: lambda x: loopkit.scan(step, x, ONES, every=2, reduce="sum", **p),
        N,
        N,
    ),
    "rows along another axis": (
        lambda **p: lambda x: loopkit.scan(step, x * ONES[:1], ONES[None], in_axes=1, **p),
        N,
        N,
    ),
    "unbounded": (
        lambda **p: (
            lambda x: loopkit.unbounded_scan(
                lambda c, _: step(c, 1.0), x, segment=1, growth=1, checkpoints=1, **STOPS, **p
            )
        ),
        3,
        None,
    ),
    "unbounded, in one": (
        lambda **p: lambda x: loopkit.unbounded_scan(step, x, ONES, **STOPS, **p),
        3,
        N,
    ),
    "ragged": (
        lambda **p: (
            lambda x: loopkit.ragged_scan(
                step, x, [ONES[:3], ONES, ONES[:2], ONES[:9]], batch=2, growth=2.0, **p
            )
        ),
        14,
        14,
    ),
    "blocked": (lambda **p: lambda x: loopkit.blocked(jnp.sin, block=2, **p)(x * ONES), 6, 6),
    "blocked, evenly": (
        lambda **p: lambda x: loopkit.blocked(jnp.sin, block=2, **p)(x * ONES[:4]),
        2,
        2,
    ),
    "checkpointed": (
        lambda **p: loopkit.checkpointed(lambda x: lax.scan(step, x, ONES), **p),
        N,
        N,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", in_turn(OF_ONE_BAR))
def test_one_bar_for_a_call(name):
    """However many loops it is made of."""
    make, steps, total = OF_ONE_BAR[name]
    recorder = Recorder()
    shown = recorder.run(make(progress=recorder), 0.3)
    assert recorder.ways() == ([steps], [])
    assert recorder.totals == ([total], [])
    jax.tree.map(np.testing.assert_array_equal, shown, make()(0.3))


@pytest.mark.slow
@pytest.mark.parametrize("name", in_turn(OF_ONE_BAR, of=3))
def test_the_way_back_of_several_loops(name):
    """One bar or several, which together count each step that is reversed."""
    make, steps, _ = OF_ONE_BAR[name]
    recorder, some = Recorder(), lambda out: sum(map(jnp.sum, jax.tree.leaves(out)))
    slope = lambda f: jax.grad(lambda x: some(f(x)))(0.3)
    shown = recorder.run(slope, make(progress=recorder))
    forward, backward = recorder.ways()
    assert forward == [steps]
    assert sum(backward) == (8 if name == "truncated" else steps)  # nothing depends on the last
    np.testing.assert_allclose(shown, slope(make()), rtol=1e-14)


@pytest.mark.exhaustive
@pytest.mark.parametrize("transform", ["grad", "jit of grad", "jvp"])
def test_a_literal_in_the_carry(transform):
    """The carry of a loop of one block holds a bool of Python: none has stopped."""
    make = lambda **p: lambda x: loopkit.scan(step, x, x * ONES[:8], truncate=4, **p)[0]
    over, recorder = TRANSFORMS[transform][0], Recorder()
    shown = recorder.run(over(make(progress=recorder)), 0.3)
    assert sum(recorder.ways()[0]) == 8
    jax.tree.map(np.testing.assert_array_equal, shown, over(make())(0.3))


@pytest.mark.parametrize("name", [name for name in OF_ONE_BAR if not name.startswith("unb")])
def test_several_loops_under_jit(name):
    make, steps, _ = OF_ONE_BAR[name]
    recorder = Recorder()
    recorder.run(jax.jit(make(progress=recorder)), 0.3)
    forward, _ = recorder.ways()
    assert sum(forward) == steps
    assert len(forward) == (2 if name == "ragged" else 1)


def test_replaced_loops():
    recorder = Recorder()
    with loopkit.replace_lax_loops(progress=recorder):
        recorder.run(jax.grad(lambda x: lax.fori_loop(0, 5, lambda _, x: jnp.sin(x), x)), 0.3)
    assert recorder.ways(lambda bar: (bar.name, bar.steps)) == ([("scan", 5)], [("scan", 5)])


@pytest.mark.slow
def test_replaced_scans_that_store_every_step():
    """They are lax's own, if nobody wants to see them."""
    recorder, f = Recorder(), lambda x: lax.scan(step, x, ONES)[0]
    slope = jax.grad(loopkit.checkpointed(f, checkpoints="all", progress=recorder))
    np.testing.assert_allclose(recorder.run(slope, 0.3), jax.grad(f)(0.3), rtol=1e-14)
    assert recorder.ways() == ([N], [N])


@pytest.mark.parametrize("kind", KINDS)
def test_in_python(kind):
    recorder = Recorder()
    with jax.disable_jit():
        recorder.run(lambda: looped(kind, recorder, 0.3))
    assert recorder.ways() == ([N], [])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OF_ONE_BAR if not name.startswith("check")])
def test_several_loops_in_python(name):
    make, steps, total = OF_ONE_BAR[name]
    recorder = Recorder()
    with jax.disable_jit():
        recorder.run(make(progress=recorder), 0.3)
    if name != "ragged":  # the loops of which are compiled
        assert recorder.ways() == ([steps], [])
        assert recorder.totals == ([total], [])
