"""Bars that show how far a loop is: each step once, forward and back, and nothing else changes."""

import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import loopkit
from kinds import KINDS
from problems import CHECKPOINTS
from recorded_bars import Plain, Recorder
from shown_loops import ONES, TRANSFORMS, N, looped, nested, step, stops_at
from turns import in_turn, later

PLAN = loopkit.Plan(slots=2, segment=3, bound=N)
SETTINGS = {str(c): {"checkpoints": c} for c in (*CHECKPOINTS, 40)}
SETTINGS |= {"a plan": {"checkpoints": PLAN}, "bytes": {"memory": "1 kB"}}


def same_to_rounding(shown, plain):
    """Without a bar, the gradient in one number does not go back, or a scan is lax's."""
    np.testing.assert_allclose(shown, plain, rtol=1e-14)


def derivative(f, order):
    return f if not order else jax.grad(derivative(f, order - 1))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "transform"), in_turn(KINDS, TRANSFORMS, of=4))
def test_each_step_counts_once(kind, transform):
    """Steps that are run again count for nothing."""
    recorder, (change, *ways) = Recorder(), TRANSFORMS[transform]
    shown = recorder.run(change(lambda x: looped(kind, recorder, x)), 0.3)
    assert recorder.ways() == tuple(ways)
    plain = change(lambda x: looped(kind, None, x))(0.3)
    jax.tree.map(same_to_rounding, shown, plain)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "setting"), in_turn(KINDS, SETTINGS, of=4))
def test_whatever_is_kept(kind, setting):
    how = SETTINGS[setting]
    if kind == "until" and how.get("checkpoints") is PLAN:
        how = {"checkpoints": loopkit.Plan(slots=2, segment=3, bound=N + 1)}
    recorder = Recorder()
    shown = recorder.run(jax.grad(lambda x: looped(kind, recorder, x, **how)), 0.3)
    assert recorder.ways() == ([N], [N])
    assert recorder.totals == ([N + 1 if kind == "until" else N], [N])
    plain = jax.grad(lambda x: looped(kind, None, x, **how))(0.3)
    same_to_rounding(shown, plain)


@pytest.mark.slow
@pytest.mark.parametrize("order", [2, later(3)])
@pytest.mark.parametrize("kind", KINDS)
def test_second_order(kind, order):
    """Forward once; a way back for each derivative that goes back."""
    recorder = Recorder()
    shown = recorder.run(derivative(lambda x: looped(kind, recorder, x), order), 0.3)
    forward, backward = recorder.ways()
    assert forward == [N]
    assert len(backward) >= order
    assert set(backward) == {N}
    plain = derivative(lambda x: looped(kind, None, x), order)(0.3)
    np.testing.assert_allclose(shown, plain, rtol=1e-14)


@pytest.mark.exhaustive
@pytest.mark.parametrize("transform", [jax.hessian, jax.jacfwd, jax.jacrev])
def test_jacobians(transform):
    recorder = Recorder()
    x = jnp.asarray([0.3, 0.4])
    recorder.run(transform(lambda x: looped("while", recorder, x).sum()), x)
    forward, backward = recorder.ways()
    assert forward == [N]
    assert set(backward) == ({N} if transform is not jax.jacfwd else set())


def test_a_plain_object():
    shown = Plain()
    jax.grad(lambda x: looped("scan", shown, x))(0.3)
    first = shown.said.index("close")
    for said in (shown.said[: first + 1], shown.said[first + 1 :]):
        (start, *updates, end) = said
        assert start == ("start", N)
        assert sum(updates) == N
        assert end == "close"


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_no_steps(checkpoints):
    recorder = Recorder()
    f = lambda x: loopkit.while_loop(
        lambda x: x < 0, jnp.sin, x, max_steps=4, checkpoints=checkpoints, progress=recorder
    )
    recorder.run(jax.grad(f), 0.3)
    assert recorder.ways() == ([0], [0])
    assert recorder.totals == ([4], [0])
    recorder = Recorder()
    recorder.run(jax.grad(lambda x: looped("scan", recorder, x, 0)), 0.3)
    assert recorder.ways() == ([0], [0])


def test_a_loop_that_stops_early():
    recorder = Recorder()
    step, until = lambda x, _: (x + 1, x), lambda x, _: x > 3
    f = lambda x: loopkit.scan(step, x, None, 100, until=until, progress=recorder)[0]
    recorder.run(jax.jit(jax.grad(f)), 0.5)
    assert recorder.ways() == ([3], [3])
    assert recorder.totals == ([100], [3])


def test_totals():
    """The total of a while loop is its bound, if it has one."""

    def total(upper, **how):
        recorder = Recorder()
        f = jax.jit(
            lambda n: loopkit.fori_loop(0, n, lambda i, x: x + i, 0, progress=recorder, **how)
        )
        recorder.run(f, upper)
        (bar,) = recorder.bars
        assert (bar.steps, bar.name, bar.backward) == (upper, "fori_loop", False)
        return bar.total

    assert total(5) is None
    assert total(5, max_steps=8) == 8
    recorder = Recorder()
    counted = lambda: loopkit.while_loop(lambda i: i < 100, lambda i: i + 1, 0, progress=recorder)
    recorder.run(counted)
    assert recorder.totals == ([100], [])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "unroll"), in_turn(KINDS, [2, 4, 8], of=3))
def test_unrolled(kind, unroll):
    recorder = Recorder()
    recorder.run(jax.grad(lambda x: looped(kind, recorder, x, unroll=unroll)), 0.3)
    assert recorder.ways() == ([N], [N])


@pytest.mark.slow
@pytest.mark.parametrize(("inner", "checkpoints"), in_turn(KINDS, CHECKPOINTS, of=4))
def test_loops_in_loops(inner, checkpoints):
    """The bar of an inner loop comes and goes with each step of the outer one."""
    recorder = Recorder()
    f = lambda show: lambda x: nested(show, x, inner, checkpoints=checkpoints)
    shown = recorder.run(jax.grad(f(recorder)), 0.3)
    assert tuple(map(sorted, recorder.ways())) == ([3] * 4 + [4], [3] * 4 + [4])
    np.testing.assert_allclose(shown, jax.grad(f(None))(0.3), rtol=1e-14)


@pytest.mark.slow
def test_inner_loops_of_unrolled_steps():
    """A step that does not count shows nothing."""
    recorder = Recorder()
    body = lambda c: (c[0] + 1, looped("scan", recorder, c[1], 3))
    f = lambda x: loopkit.while_loop(lambda c: c[0] < 5, body, (0, x), unroll=4, max_steps=9)[1]
    recorder.run(jax.grad(f), 0.3)
    assert recorder.ways() == ([3] * 5, [3] * 5)


@pytest.mark.slow
def test_inside_loops_of_lax():
    recorder = Recorder()
    step = lambda x, _: (looped("while", recorder, x), None)
    recorder.run(jax.jit(jax.grad(lambda x: lax.scan(step, x, None, 3)[0])), 0.3)
    assert recorder.ways() == ([N] * 3, [N] * 3)


@pytest.mark.slow
def test_inside_custom_derivatives():
    recorder = Recorder()

    @jax.custom_vjp
    def f(x):
        return looped("while", recorder, x)

    f.defvjp(lambda x: (f(x), x), lambda x, ct: (ct * looped("scan", recorder, x),))
    recorder.run(jax.grad(f), 0.3)
    assert recorder.ways() == ([N, N], [])


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [None, "wait", (2, 1)])
def test_lanes_have_one_bar(lanes):
    """It counts the steps of the longest lane, and says how many lanes are done."""
    recorder, x, n = Recorder(), jnp.asarray([0.1, 0.2, 0.3, 0.4]), jnp.asarray([2, 7, 0, 3])
    recorder.run(jax.jit(jax.vmap(lambda x, n: stops_at(recorder, x, n, lanes=lanes))), x, n)
    (bar,) = recorder.bars
    assert (bar.total, bar.steps) == (9, 7)
    assert bar.done == sorted(bar.done)
    assert bar.done[0] == (1, 4), "after the first step"
    assert bar.done[-1] == (4, 4)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_a_gradient_of_lanes(checkpoints):
    recorder, x, n = Recorder(), jnp.asarray([0.1, 0.2, 0.3]), jnp.asarray([2, 7, 0])
    f = lambda show: lambda x, n: stops_at(show, x, n, checkpoints=checkpoints)
    shown = recorder.run(jax.vmap(jax.grad(f(recorder))), x, n)
    assert recorder.ways() == ([7], [7])
    same_to_rounding(shown, jax.vmap(jax.grad(f(None)))(x, n))


def test_on_several_devices():
    """One bar, of the first device."""
    mesh, recorder = Mesh(np.asarray(jax.devices()[:4]), ("d",)), Recorder()
    one = lambda x, n: stops_at(recorder, x[0], n[0])[None]
    spread = jax.shard_map(one, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P("d"))
    x, n = jnp.asarray([0.1, 0.2, 0.3, 0.4]), jnp.asarray([2, 7, 0, 3])
    recorder.run(jax.jit(jax.grad(lambda x: spread(x, n).sum())), x)
    assert recorder.ways() == ([2], [2])
    recorder = Recorder()
    sharding = jax.sharding.NamedSharding(mesh, P("d"))
    recorder.run(jax.jit(lambda x: looped("while", recorder, x)), jax.device_put(x, sharding))
    assert recorder.ways() == ([N], [])


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_callbacks_of_the_body_are_made_once(checkpoints):
    seen, recorder = [], Recorder()

    def body(i, x):
        jax.debug.callback(lambda i: seen.append(int(i)), i)
        return jnp.sin(x)

    f = lambda x: loopkit.fori_loop(0, N, body, x, checkpoints=checkpoints, progress=recorder)
    recorder.run(jax.jit(jax.grad(f)), 0.3)
    jax.effects_barrier()
    assert sorted(seen) == list(range(N))
    assert recorder.ways() == ([N], [N])


@pytest.mark.parametrize(
    ("kind", "transform"),
    in_turn(KINDS, ["value", "jvp", "grad", "vmap of grad", "remat"], of=4),
)
def test_nothing_is_there_when_it_is_off(kind, transform):
    """Only a loop that shows its progress calls the host."""
    change = TRANSFORMS[transform][0]
    text = lambda show: jax.jit(change(lambda x: looped(kind, show, x))).lower(0.3).as_text()
    assert "callback" not in text(None)
    assert "callback" in text(Plain())


@pytest.mark.parametrize("transform", ["value", "vmap"])
def test_a_scan_that_shows_nothing_is_that_of_lax(transform):
    """To the letter, whether or not the same scan has been shown before."""
    change = TRANSFORMS[transform][0]

    def text(scan, **how):
        f = jax.jit(change(lambda x: scan(step, x, ONES, **how)))
        return re.sub(r"module @\w+", "", f.lower(jnp.ones(())).as_text())

    assert text(loopkit.scan) == text(lax.scan)
    assert text(loopkit.scan, progress=Plain()) != text(lax.scan)
    assert text(loopkit.scan) == text(lax.scan)


def test_a_loop_that_nobody_uses_is_not_shown():
    recorder = Recorder()
    recorder.run(jax.jit(lambda x: (looped("while", recorder, x), x)[1]), 0.3)
    assert recorder.bars == []


def test_the_very_same_object_is_compiled_once():
    traced, recorder = [], Recorder()

    def f(x):
        traced.append(1)
        return jnp.sin(x)

    run = lambda show: loopkit.fori_loop(0, N, lambda _, x: f(x), 0.3, progress=show)
    before = [recorder.run(run, recorder) for _ in range(3)]
    assert before[0] == before[2]
    assert recorder.ways() == ([N] * 3, [])


def test_two_threads_have_their_own_bars():
    recorders = [Recorder(), Recorder()]
    both = threading.Barrier(2, timeout=60)
    shown = {}

    def run(number):
        def body(i, x):
            jax.debug.callback(lambda i: both.wait() if i == 5 else None, i)
            return jnp.sin(x)

        f = jax.jit(lambda x: loopkit.fori_loop(0, N, body, x, progress=recorders[number]))
        shown[number] = jax.block_until_ready(f(0.3))

    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for recorder in recorders:
        assert recorder.ways() == ([N], [])
        assert recorder.bars[0].closed == 1


def test_one_program_in_two_threads():
    recorder = Recorder()
    f = jax.jit(lambda x: looped("while", recorder, x, 2000))
    threads = [threading.Thread(target=lambda: jax.block_until_ready(f(0.3))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.ways() == ([2000] * 4, [])
