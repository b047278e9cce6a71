"""Threads, interrupts, growth, odd input: the next call is right, and nothing piles up."""

import contextlib
import pickle
import resource
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from derivatives import assert_close
from loopkit import Plan
from loopkit import _programs as cache
from loopkit._foreign.replace import DIVERTED

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="measures or forks as on Linux")


def powers(x, n=4, **how):
    """x to the (2 to the n), by squaring."""
    goes_on, step = lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * c[1])
    return loopkit.while_loop(goes_on, step, (0, x), **how)[1]


SLOPE = 16 * 1.1**15


# ---------------------------------------------------------------- growth


@pytest.mark.slow
@LINUX
def test_fresh_functions_leave_nothing_behind(compilations):
    """3000 gradients outside jit, each of a lambda that was not there before."""

    def call(times):
        for k in range(times):
            loss = lambda x, k=k: loopkit.scan(lambda c, _: (c * x, None), x, None, 3)[0]
            assert_close(jax.grad(loss)(1.1), jnp.asarray(4 * 1.1**3))

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    call(500)
    compilations.clear()
    before, sizes = resident(), (len(cache._traced), len(cache._programs))
    call(2500)
    assert not compilations
    assert (len(cache._traced), len(cache._programs)) <= sizes
    assert resident() - before < 16e6  # three kilobytes a call would be half of that


@pytest.mark.exhaustive
@pytest.mark.parametrize(("transform", "count"), [("value", 100_000), ("gradient", 4_000)])
def test_very_many_leaves(transform, count):
    """Traced, not compiled. What linearises a call in JAX takes the square of their number."""
    leaves = [jax.ShapeDtypeStruct((), "float32")] * count
    body = lambda c: (c[0] + 1, [c[1][0] * 2, *c[1][1:]])
    loop = lambda xs: loopkit.while_loop(lambda c: c[0] < 3, body, (0, xs), max_steps=4)[1]
    f = loop if transform == "value" else jax.grad(lambda xs: loop(xs)[0])
    traced = jax.jit(f).trace(leaves)
    assert len(traced.out_info) == count
    assert loop_carries(traced.jaxpr) < 10  # the others never change: they are no carry


def loop_carries(jaxpr):
    loops = [e.params["loop"] for e in jaxpr.eqns if "loop" in e.params]
    assert loops
    return max(len(loop.carry_types) for loop in loops)


# ---------------------------------------------------------------- threads, and calls cut short


@pytest.mark.slow
def test_eight_threads():
    """Each with loops of its own, and all with one, at the same time."""
    barrier, wrong = threading.Barrier(8, timeout=120), []
    shared = lambda x: powers(x, checkpoints=2)

    def work(k):
        own = lambda x: loopkit.scan(lambda c, _: (c * x + k, None), x, None, 2)[0]
        want = lambda x: (x * x + k) * x + k
        barrier.wait()
        for f, g in [(own, want), (shared, lambda x: x**16)] * 2:
            for take in (jax.grad, lambda f: jax.jit(jax.grad(f)), jax.hessian):
                got, wanted = take(f)(1.1), take(g)(1.1)
                if not np.allclose(got, wanted, rtol=1e-12):
                    wrong.append((k, got, wanted))
        done.append(k)

    done = []
    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == list(range(8))
    assert not wrong


ERRORS = {"interrupt": KeyboardInterrupt(), "error": RuntimeError("of the body")}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("place", ["step", "rule"])
@pytest.mark.parametrize("around", ["loop", "checkpointed", "replace_lax_loops"])
def test_tracing_that_is_cut_short(around, place, error):
    """In a step, or in the rule for its derivative: the next call finds nothing half done."""
    armed = [place]

    def passes(here):
        if here in armed:
            raise ERRORS[error]

    @jax.custom_jvp
    def square(x):
        passes("step")
        return x * x

    @square.defjvp
    def square_jvp(primals, tangents):
        passes("rule")
        return square(*primals), 2 * primals[0] * tangents[0]

    def loop(x):
        loops = loopkit if around == "loop" else lax
        step = lambda c: (c[0] + 1, square(c[1]))
        return loops.while_loop(lambda c: c[0] < 4, step, (0, x))[1]

    f = loopkit.checkpointed(loop) if around == "checkpointed" else loop
    within = loopkit.replace_lax_loops if around == "replace_lax_loops" else contextlib.nullcontext

    def gradient():
        with within():
            return jax.grad(f)(1.1)

    with pytest.raises(type(ERRORS[error])):
        gradient()
    assert not any("bind" in vars(primitive) for primitive in DIVERTED)
    armed.clear()
    assert_close(gradient(), jnp.asarray(SLOPE))


# ---------------------------------------------------------------- numbers


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64"])
def test_counters_near_their_end(dtype):
    """They count up to the largest number there is, and the gradient knows where they were."""
    last = np.iinfo("int32").max if dtype != "uint32" else np.iinfo("uint32").max
    start = jnp.asarray(last - 5, dtype)

    def f(loops, x, **how):
        def step(c):
            i, x = c
            return i + jnp.ones((), dtype), jnp.sin(x) * (1 + (i - start).astype(float))

        return loops.while_loop(lambda c: c[0] < jnp.asarray(last, dtype), step, (start, x), **how)

    def by_hand(x):
        for i in range(5):
            x = jnp.sin(x) * (1.0 + i)
        return x

    for how in ({}, {"max_steps": 9, "checkpoints": "all"}, {"checkpoints": 1}):
        got = jax.jit(jax.value_and_grad(lambda x, how=how: f(loopkit, x, **how)[1]))(0.7)
        assert_close(got, jax.value_and_grad(by_hand)(0.7))
        assert f(loopkit, 0.7, **how)[0] == last


def test_a_fori_loop_beyond_31_bits():
    f = lambda x, a: loopkit.fori_loop(a, a + 3, lambda i, x: x * jnp.float64(i - a + 1), x)
    first = jnp.int64(2**31 - 2)
    assert_close(jax.jit(jax.value_and_grad(f))(0.5, first), (jnp.asarray(3.0), jnp.asarray(6.0)))


@pytest.mark.exhaustive
def test_predicates_of_nan():
    """A comparison with NaN is false: the loop takes no step, or stops."""
    f = lambda x: loopkit.while_loop(lambda x: x < 10.0, lambda x: x * x * x, x)
    into_nan = lambda x: jnp.where(x > 3.0, jnp.nan, x * x)
    g = lambda x: loopkit.while_loop(lambda x: x < 10.0, into_nan, x, checkpoints=1)
    for take in (jax.jit, lambda f: f):
        value, slope = take(jax.value_and_grad(f))(jnp.nan)
        assert jnp.isnan(value)
        assert slope == 1.0
        value, slope = take(jax.value_and_grad(g))(2.0)
        assert jnp.isnan(value)
        assert slope == 0.0
    values, slopes = jax.vmap(jax.value_and_grad(f))(jnp.array([jnp.nan, 2.0, 1.5]))
    assert jnp.isnan(values[0])
    assert_close((values[1:], slopes), (jnp.array([2.0**9, 1.5**9]), SLOPES))


SLOPES = jnp.array([1.0, 9 * 2.0**8, 9 * 1.5**8])


# ---------------------------------------------------------------- what surrounds a call


def nested(depth, x, w):
    """A while loop in a scan in a while loop, and so on, of two steps each."""
    if depth == 0:
        return jnp.sin(w * x)
    step = lambda x: nested(depth - 1, x, w)
    if depth % 2:
        return loopkit.scan(lambda x, _: (step(x), None), x, None, 2)[0]
    return loopkit.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, step(c[1])), (0, x))[1]


@pytest.mark.slow
def test_eight_loops_in_one_another():
    def by_hand(x, w):
        for _ in range(2**8):
            x = jnp.sin(w * x)
        return x

    looped = lambda x, w: nested(8, x, w)
    got = jax.jit(jax.value_and_grad(looped, (0, 1)))(0.7, 1.3)
    assert_close(got, jax.jit(jax.value_and_grad(by_hand, (0, 1)))(0.7, 1.3))


@pytest.mark.slow
def test_double_precision_switched_between_calls():
    f = lambda x: powers(x, checkpoints=2)
    for wide in (True, False, True, False):
        with jax.enable_x64(wide):
            for take in (jax.grad(f), jax.jit(jax.grad(f)), jax.grad(loopkit.checkpointed(f))):
                slope = take(1.1)
                assert slope.dtype == ("float64" if wide else "float32")
                np.testing.assert_allclose(slope, SLOPE, rtol=1e-12 if wide else 1e-5)


@pytest.mark.parametrize("around", [loopkit.checkpointed, lambda f: f], ids=["lax", "loopkit"])
def test_arrays_that_are_given_away(around):
    loops = lax if around is loopkit.checkpointed else loopkit
    f = around(lambda x: loops.fori_loop(0, 3, lambda _, x: x * 2, x))
    given = jax.jit(f, donate_argnums=0)
    for _ in range(2):
        x = jnp.arange(3.0)
        kept = x + 0
        assert_close(given(x), 8 * kept)
        assert x.is_deleted()
        for call in (f, given, jax.grad(lambda x: jnp.sum(f(x)))):
            with pytest.raises((RuntimeError, ValueError), match=r"deleted|donated"):
                call(x)
        assert_close(f(kept), 8 * kept)


@pytest.mark.slow
def test_arrays_on_several_devices():
    devices = jax.devices()[:3]
    f = lambda x: powers(x, checkpoints=2)
    for device in [*devices, *devices]:
        slope = jax.grad(f)(jax.device_put(jnp.float64(1.1), device))
        assert slope.devices() == {device}
        assert_close(slope, jnp.asarray(SLOPE))
    x, w = (jax.device_put(jnp.float64(1.1), device) for device in devices[:2])
    with pytest.raises(ValueError, match="incompatible devices"):
        loopkit.fori_loop(0, 3, lambda _, x: x * w, x)


FORKED = """
import os, sys, warnings
warnings.simplefilter("ignore")  # JAX warns of forks
import jax, loopkit
child = os.fork()
loop = lambda x: loopkit.while_loop(lambda x: x < 100.0, lambda x: x * x, x)
os.write(1, f"{jax.grad(loop)(3.0)}\\n".encode())  # as one piece
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
@LINUX
def test_a_fork_after_the_import():
    """Before JAX has started its threads, that is."""
    ran = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["17496.0", "17496.0"]  # 8 * 3**7


@loopkit.checkpointed
def decorated(x):
    return lax.fori_loop(0, 4, lambda _, x: x * x, x)


def test_pickles():
    """A plan by its fields; a function by its name, as any function is."""
    for plan in (
        Plan(3),
        Plan(3, 2, "residuals"),
        loopkit.explain(powers, 1.1, checkpoints=3).plan,
    ):
        assert pickle.loads(pickle.dumps(plan)) == plan
    again = pickle.loads(pickle.dumps(decorated))
    assert again is decorated
    assert_close(jax.grad(again)(1.1), jnp.asarray(SLOPE))
    with pytest.raises((pickle.PicklingError, AttributeError), match=r"lambda|local object"):
        pickle.dumps(loopkit.checkpointed(lambda x: x))
