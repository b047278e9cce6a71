"""Bars that show how far a loop is: each step once, forward and back, and nothing else changes."""

import re
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import loopkit
from kinds import KINDS, loop
from loopkit._progress import bars, open_bars, progress
from problems import CHECKPOINTS
from recorded_bars import Plain, Recorder
from turns import in_turn

N = 11
PLAN = loopkit.Plan(slots=2, segment=3, bound=N)
SETTINGS = {str(c): {"checkpoints": c} for c in (*CHECKPOINTS, 40)}
SETTINGS |= {"a plan": {"checkpoints": PLAN}, "bytes": {"memory": "1 kB"}}


def looped(kind, show, x, n=N, **how):
    most = n + 1 if kind in ("until", "while") else None
    return loop(kind, lambda i, y: jnp.sin(y) + i / 8, x, n, most=most, progress=show, **how)


def derivative(f, order):
    return f if not order else jax.grad(derivative(f, order - 1))


def jvp(f):
    return lambda x: jax.jvp(f, (x,), (1.0,))


TRANSFORMS = {
    "value": (lambda f: f, [N], []),
    "jit": (jax.jit, [N], []),
    "jvp": (jvp, [N], []),
    "jit of jvp": (lambda f: jax.jit(jvp(f)), [N], []),
    "grad": (jax.grad, [N], [N]),
    "jit of grad": (lambda f: jax.jit(jax.grad(f)), [N], [N]),
    "value and grad": (lambda f: jax.jit(jax.value_and_grad(f)), [N], [N]),
    "linearize": (lambda f: lambda x: jax.linearize(f, x)[1](1.0), [N], []),
    "remat": (lambda f: jax.grad(jax.checkpoint(f)), [N], [N]),
    "jit of remat": (lambda f: jax.jit(jax.value_and_grad(jax.checkpoint(f))), [N], [N]),
    "vmap": (lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x, x])), [N], []),
    "vmap of grad": (lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, x])), [N], [N]),
}


@pytest.mark.parametrize(("kind", "transform"), in_turn(KINDS, TRANSFORMS, of=4))
def test_each_step_counts_once(kind, transform):
    """Steps that are run again count for nothing."""
    recorder, (change, *ways) = Recorder(), TRANSFORMS[transform]
    shown = recorder.run(change(lambda x: looped(kind, recorder, x)), 0.3)
    assert recorder.ways() == tuple(ways)
    plain = change(lambda x: looped(kind, None, x))(0.3)
    jax.tree.map(np.testing.assert_array_equal, shown, plain)


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
    if how.get("checkpoints") == "all" and kind in ("fori", "scan"):  # else it is lax's scan
        np.testing.assert_allclose(shown, plain, rtol=1e-14)
    else:
        np.testing.assert_array_equal(shown, plain)


@pytest.mark.parametrize("order", [2, pytest.param(3, marks=pytest.mark.slow)])
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
    """That of a while loop is its bound, if it has one."""

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


@pytest.mark.parametrize(("kind", "unroll"), in_turn(KINDS, [2, 4, "auto"], of=3))
def test_unrolled(kind, unroll):
    recorder = Recorder()
    recorder.run(jax.grad(lambda x: looped(kind, recorder, x, unroll=unroll)), 0.3)
    assert recorder.ways() == ([N], [N])


def nested(show, x, inner="while", **how):
    body = lambda i, y: looped(inner, show, y, 3)
    return loop("scan", body, x, 4, progress=show, **how)


@pytest.mark.parametrize(("inner", "checkpoints"), in_turn(KINDS, CHECKPOINTS, of=4))
def test_loops_in_loops(inner, checkpoints):
    """The bar of an inner loop comes and goes with each step of the outer one."""
    recorder = Recorder()
    f = lambda show: lambda x: nested(show, x, inner, checkpoints=checkpoints)
    shown = recorder.run(jax.grad(f(recorder)), 0.3)
    assert tuple(map(sorted, recorder.ways())) == ([3] * 4 + [4], [3] * 4 + [4])
    np.testing.assert_allclose(shown, jax.grad(f(None))(0.3), rtol=1e-14)


def test_inner_loops_of_unrolled_steps():
    """A step that does not count shows nothing."""
    recorder = Recorder()
    body = lambda c: (c[0] + 1, looped("scan", recorder, c[1], 3))
    f = lambda x: loopkit.while_loop(lambda c: c[0] < 5, body, (0, x), unroll=4, max_steps=9)[1]
    recorder.run(jax.grad(f), 0.3)
    assert recorder.ways() == ([3] * 5, [3] * 5)


def test_inside_loops_of_lax():
    recorder = Recorder()
    step = lambda x, _: (looped("while", recorder, x), None)
    recorder.run(jax.jit(jax.grad(lambda x: lax.scan(step, x, None, 3)[0])), 0.3)
    assert recorder.ways() == ([N] * 3, [N] * 3)


def test_inside_custom_derivatives():
    recorder = Recorder()

    @jax.custom_vjp
    def f(x):
        return looped("while", recorder, x)

    f.defvjp(lambda x: (f(x), x), lambda x, ct: (ct * looped("scan", recorder, x),))
    recorder.run(jax.grad(f), 0.3)
    assert recorder.ways() == ([N, N], [])


def stops_at(show, x, n, **how):
    body = lambda c: (c[0] + 1, jnp.sin(c[1]))
    return loopkit.while_loop(lambda c: c[0] < n, body, (0, x), max_steps=9, progress=show, **how)[
        1
    ]


@pytest.mark.parametrize("lanes", [None, "wait", (2, 1)])
def test_lanes_have_one_bar(lanes):
    """It counts the steps of the longest lane, and says how many lanes are done."""
    recorder, x, n = Recorder(), jnp.asarray([0.1, 0.2, 0.3, 0.4]), jnp.asarray([2, 7, 0, 3])
    recorder.run(jax.jit(jax.vmap(lambda x, n: stops_at(recorder, x, n, lanes=lanes))), x, n)
    (bar,) = recorder.bars
    assert (bar.total, bar.steps) == (9, 7)
    assert bar.done == sorted(bar.done)
    assert bar.done[-1] == (4, 4)


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_a_gradient_of_lanes(checkpoints):
    recorder, x, n = Recorder(), jnp.asarray([0.1, 0.2, 0.3]), jnp.asarray([2, 7, 0])
    f = lambda show: lambda x, n: stops_at(show, x, n, checkpoints=checkpoints)
    shown = recorder.run(jax.vmap(jax.grad(f(recorder))), x, n)
    assert recorder.ways() == ([7], [7])
    np.testing.assert_array_equal(shown, jax.vmap(jax.grad(f(None)))(x, n))


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


def step(c, x):
    return jnp.sin(c) + x, c


ONES = jnp.ones(N)
STOPS = {"until": lambda _, y: y > 1.9}
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


@pytest.mark.parametrize("name", in_turn(OF_ONE_BAR))
def test_one_bar_for_a_call(name):
    """However many loops it is made of."""
    make, steps, total = OF_ONE_BAR[name]
    recorder = Recorder()
    shown = recorder.run(make(progress=recorder), 0.3)
    assert recorder.ways() == ([steps], [])
    assert recorder.totals == ([total], [])
    jax.tree.map(np.testing.assert_array_equal, shown, make()(0.3))


@pytest.mark.parametrize("name", in_turn(OF_ONE_BAR, of=3))
def test_the_way_back_of_several_loops(name):
    """One bar or several, which together count each step that is reversed."""
    make, steps, _ = OF_ONE_BAR[name]
    recorder, some = Recorder(), lambda out: sum(map(jnp.sum, jax.tree.leaves(out)))
    slope = lambda f: jax.grad(lambda x: some(f(x)))(0.3)
    shown = recorder.run(slope, make(progress=recorder))
    forward, backward = recorder.ways()
    assert forward == [steps]
    assert sum(backward) == (8 if name == "truncated" else steps)  # the last hang on nothing
    np.testing.assert_allclose(shown, slope(make()), rtol=1e-14)


@pytest.mark.parametrize("transform", ["grad", "jit of grad", "jvp"])
def test_a_literal_in_the_carry(transform):
    """Of a loop of one block: that none has stopped is a bool of Python."""
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


@pytest.mark.parametrize("name", [name for name in OF_ONE_BAR if not name.startswith("check")])
def test_several_loops_in_python(name):
    make, steps, total = OF_ONE_BAR[name]
    recorder = Recorder()
    with jax.disable_jit():
        recorder.run(make(progress=recorder), 0.3)
    if name != "ragged":  # the loops of which are compiled
        assert recorder.ways() == ([steps], [])
        assert recorder.totals == ([total], [])


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
    """And what shows something calls the host."""
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


def all_closed(recorder):
    """Where a program fails under jit, a thread finds that out."""
    until = time.monotonic() + 60
    while any(bar.closed != 1 for bar in recorder.bars) and time.monotonic() < until:
        time.sleep(0.01)
    return [bar.closed for bar in recorder.bars] == [1] * len(recorder.bars)


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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transform", FAILURES)
def test_a_loop_that_fails_has_its_bars_closed(transform):
    def body(i, x):
        def check(i):
            if i == 7:
                raise ValueError("mine")

        jax.debug.callback(check, i)
        return jnp.sin(x)

    recorder = Recorder()
    f = FAILURES[transform](lambda x: loopkit.fori_loop(0, N, body, x, progress=recorder))
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError):
            jax.block_until_ready(f(0.3))
    assert all_closed(recorder)
    assert len(recorder.bars) == 2
    if "jit" not in transform:
        assert not open_bars._open


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


WRONG = {
    "a word": ("bar", ValueError, '"tqdm", "rich", "line" or an object with start.*got \'bar\''),
    "a number": (3, TypeError, "an object with start.*got 3 of type int"),
    "a flag": (True, TypeError, "got True of type bool. Give it the three methods"),
    "a class": (Plain, TypeError, "Pass an instance of the class"),
    "two methods": (type("Two", (), {"start": len, "close": len})(), TypeError, "of type Two"),
}
CALLS = {
    "scan": lambda p: loopkit.scan(step, 0.3, ONES, progress=p),
    "while_loop": lambda p: loopkit.while_loop(lambda x: x < 3, lambda x: x + 1, 0, progress=p),
    "fori_loop": lambda p: loopkit.fori_loop(0, 3, lambda _, x: x, 0.3, progress=p),
    "unbounded_scan": lambda p: loopkit.unbounded_scan(step, 0.3, ONES, **STOPS, progress=p),
    "ragged_scan": lambda p: loopkit.ragged_scan(step, 0.3, [ONES], progress=p),
    "blocked": lambda p: loopkit.blocked(jnp.sin, progress=p),
    "checkpointed": lambda p: loopkit.checkpointed(jnp.sin, progress=p),
    "replace_lax_loops": lambda p: loopkit.replace_lax_loops(progress=p).__enter__(),
}


@pytest.mark.parametrize(("function", "value"), in_turn(CALLS, WRONG, of=3))
def test_wrong_arguments(function, value):
    given, error, text = WRONG[value]
    if value == "a class" and function == "unbounded_scan":
        given = Recorder
    with pytest.raises(error, match=f"loopkit.{function}: `progress` must be .*{text}"):
        CALLS[function](given)


@pytest.mark.parametrize("word", ["tqdm", "rich"])
def test_a_package_that_is_missing(monkeypatch, word):
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda _: None)
    text = f'`progress` can be "{word}" only where the package .* Run `pip install {word}`'
    with pytest.raises(ImportError, match=text):
        CALLS["scan"](word)


def test_not_with_a_symbolic_length():
    (n,) = jax.export.symbolic_shape("n")
    f = jax.jit(lambda xs: loopkit.scan(step, 0.3, xs, progress="line"))
    with pytest.raises(ValueError, match=r"`length` must be known for what lax\.scan lacks"):
        jax.export.export(f)(jax.ShapeDtypeStruct((n,), jnp.float64))


def test_packages_are_imported_when_they_are_asked_for():
    code = "import loopkit, sys; assert not {'tqdm', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_line(capsys, kind):
    """Where there is no terminal, one at the end of each bar."""
    jax.block_until_ready(jax.grad(lambda x: looped(kind, "line", x, 1234))(0.3))
    first, second = capsys.readouterr().err.splitlines()
    name = {"fori": "fori_loop", "while": "while_loop"}.get(kind, "scan")
    most = "1,235" if kind == "until" else "1,234"
    assert first.startswith(f"{name}: 1,234 of {most} steps, ")
    assert second.startswith(f"{name}, backward: 1,234 of 1,234 steps, ")


class Terminal:
    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self): ...


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(bars, "OFTEN", -1.0)


@pytest.mark.usefixtures("often")
def test_a_line_in_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    x, n = jnp.asarray([0.1, 0.2]), jnp.asarray([2, 7])
    jax.block_until_ready(jax.jit(jax.vmap(lambda x, n: stops_at("line", x, n)))(x, n))
    *_, last = terminal.text.split("\r")
    assert terminal.text.count("\n") == 1
    assert last.startswith("while_loop: 7 of 9 steps, 2 of 2 lanes done, ")


def test_tqdm(capsys):
    jax.block_until_ready(jax.grad(lambda x: nested("tqdm", x))(0.3))
    text = capsys.readouterr().err
    for line in ("scan: 100%", "4/4", "scan, backward: 100%"):
        assert line in text
    jax.vmap(lambda x, n: stops_at("tqdm", x, n))(jnp.ones(2), jnp.asarray([2, 7]))
    assert "2 of 2 lanes done" in capsys.readouterr().err


def test_tqdm_in_a_notebook(monkeypatch):
    """It is shown as often as in a terminal, and the outermost bar stays."""
    from tqdm import auto, std

    made = []

    class OfNotebooks(std.tqdm):
        def __init__(self, *args, **how):
            made.append((how["leave"], how["mininterval"]))
            super().__init__(*args, file=Terminal(), **how)

    OfNotebooks.__module__ = "tqdm.notebook"
    monkeypatch.setattr(auto, "tqdm", type("tqdm", (OfNotebooks,), {"__module__": "tqdm.auto"}))
    jax.block_until_ready(nested("tqdm", 0.3))
    assert made == [(True, bars.OFTEN), *[(False, bars.OFTEN)] * 4]


def test_rich(capsys):
    jax.block_until_ready(jax.grad(lambda x: nested("rich", x))(0.3))
    text = capsys.readouterr().out
    assert "scan " in text
    assert "scan, backward" in text
    assert text.count("100%") == 2
    jax.vmap(lambda x, n: stops_at("rich", x, n))(jnp.ones(2), jnp.asarray([2, 7]))
    assert "2 of 2 lanes done" in capsys.readouterr().out
