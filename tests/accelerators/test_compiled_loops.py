"""What the compilers for a GPU and a TPU make of loops, on a machine that has neither.

They come with `pip install '.[accelerators]'`; `pytest -m accelerators` runs this. Programs and
figures are those of `benchmarks/accelerators.py`, in single precision.
"""

import sys
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import loopkit

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import accelerator_programs as programs
import ahead_of_time
from ahead_of_time import TARGETS, compiled
from executions import Executions, collectives, unknown
from thunks import work

pytestmark = pytest.mark.accelerators

STEPS = 300
"""More than the 128 rounds that a compiler runs a loop for, to see how often it goes round."""


@cache
def reason() -> str:
    return ahead_of_time.why_not()


@pytest.fixture(autouse=True)
def compilers():
    if reason():
        pytest.skip(reason())
    with jax.enable_x64(False):
        yield


def case(cases, name):
    (found,) = (c for c in cases if c.name == name)
    return found


def made(target, found):
    return compiled(target, found.function, *found.arguments)


# --- loops of known length ----------------------------------------------------------------------

W, X, XS = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 4), (4,), (STEPS, 4)))


def scanned(w, x, xs, **how):
    """A carry, inputs and outputs."""
    step = lambda c, x: (jnp.tanh(w @ c + x), c * x)
    carry, ys = loopkit.scan(step, x, xs, **how)
    return jnp.sum(carry) + jnp.sum(ys**2)


def counted(w, x, xs, **how):
    return jnp.sum(loopkit.fori_loop(0, STEPS, lambda i, c: jnp.tanh(w @ c + xs[i]), x, **how))


def overwritten(w, x, xs, **how):
    def step(i, rows):
        return rows.at[i % 7].set(jnp.tanh(w @ rows[(i - 1) % 7] + xs[i]))

    start = jnp.ones((7, 4)) * x
    return jnp.sum(loopkit.fori_loop(0, STEPS, step, start, buffers=True, **how) ** 2)


def lanes(w, x, xs, **how):
    return jnp.sum(jax.vmap(lambda x: scanned(w, x, xs, **how))(jnp.stack([x, x, x])))


def nested(w, x, xs, **how):
    inner = lambda c, x: loopkit.fori_loop(0, STEPS, lambda i, c: jnp.tanh(w @ c + x), c, **how)
    return jnp.sum(loopkit.scan(lambda c, x: (inner(c, x), None), x, xs, **how)[0])


WAYS = {"default": {}, "all": {"checkpoints": "all"}}


def gradient(f, **how):
    return jax.grad(lambda *args: f(*args, **how), argnums=(0, 1, 2))


def assert_known(function):
    program = compiled("gpu", function, W, X, XS)
    assert "while(" in program.text
    assert unknown(program) == []


@pytest.mark.parametrize(
    ("f", "way"),
    [
        *((scanned, "all"), (counted, "all"), (lanes, "default"), (lanes, "all")),
        *((overwritten, "default"), (nested, "all")),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_loops_of_known_length_do_not_wait(f, way):
    assert_known(gradient(f, **WAYS[way]))


def test_an_unrolled_scan_does_not_wait():
    assert_known(gradient(scanned, unroll=4))


# --- what is stored, copied and launched ----------------------------------------------------------


def test_all_residuals_cost_what_they_do_in_lax():
    """Of a GPU, kernels, waits and memory."""
    cases = programs.of_workload(programs.layer())
    figures = []
    for name in ('loopkit.scan, "all"', "lax.scan"):
        program = made("gpu", case(cases, name))
        counts = program.counts(*case(cases, name).arguments)
        figures.append((work(program, counts), program.device_bytes))
    assert figures[0] == figures[1]


COPIES = {"lax, `.at[i].set` in the carry": 2, "loopkit.scan": 0, 'loopkit.scan, "all"': 0}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", COPIES)
def test_no_step_copies_a_buffer(target, name):
    """Where `lax` copies it twice in each step back."""
    found = case(programs.of_rows((8, 128)), name)
    program = made(target, found)
    executions = Executions(program, program.counts(*found.arguments))
    assert executions.copies(found.large) == COPIES[name] * found.steps


# --- several devices ------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("what", ["rows of a batch", "parts of a carry"])
@pytest.mark.parametrize("way", ["default", '"all"', "on the host", "lax.scan"])
def test_devices_exchange_a_sum_of_cotangents_and_nothing_else(target, what, way):
    """Once, at the end: what is kept of the steps stays where it is."""
    loop = {"default": "loopkit.scan", "lax.scan": way}.get(way, f"loopkit.scan, {way}")
    found = case(programs.of_devices(), f"{what}, {loop}")
    shardings = programs.shardings(found, ahead_of_time.devices(target))
    program = compiled(target, found.function, *found.arguments, shardings=shardings)
    # The compilers of JAX 0.10 take a sum over devices out of one loop, not out of two: it is made
    # once a segment, unless the engine has put it off.
    in_segments = jax.__version_info__ < (0, 11) and way == "default" and what != "rows of a batch"
    assert collectives(program) == {("all-reduce", in_segments): 1}
