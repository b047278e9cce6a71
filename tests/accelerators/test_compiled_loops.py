"""What the compilers for a GPU and a TPU make of loops, on a machine that has neither.

They come with `pip install '.[accelerators]'`; `pytest -m accelerators` runs this. Programs and
figures are those of `benchmarks/accelerators.py`, in single precision.
"""

import sys
from functools import cache, partial
from pathlib import Path

import equinox
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


def along(w, x, xs, **how):
    """Inputs and outputs along the second axis."""
    return scanned(w, x, xs.reshape(4, STEPS), in_axes=1, out_axes=1, **how)


def counted(w, x, xs, **how):
    return jnp.sum(loopkit.fori_loop(0, STEPS, lambda i, c: jnp.tanh(w @ c + xs[i]), x, **how))


def rows(w, x, xs, **how):
    """Each made of the one before."""

    def step(i, rows):
        return rows.at[i].set(jnp.tanh(w @ rows[i - 1] + xs[i]))

    start = jnp.zeros((STEPS, 4)).at[0].set(x)
    return jnp.sum(loopkit.fori_loop(1, STEPS, step, start, buffers=True, **how) ** 2)


def rows_from_the_end(w, x, xs, **how):
    def step(i, rows):
        i = STEPS - 2 - i
        return rows.at[i].set(jnp.tanh(w @ rows[i + 1] + xs[i]))

    start = jnp.zeros((STEPS, 4)).at[-1].set(x)
    return jnp.sum(loopkit.fori_loop(0, STEPS - 1, step, start, buffers=True, **how) ** 2)


def overwritten(w, x, xs, **how):
    def step(i, rows):
        return rows.at[i % 7].set(jnp.tanh(w @ rows[(i - 1) % 7] + xs[i]))

    start = jnp.ones((7, 4)) * x
    return jnp.sum(loopkit.fori_loop(0, STEPS, step, start, buffers=True, **how) ** 2)


def tensor_array(w, x, xs, **how):
    def step(i, carry):
        c, ys = carry
        c = jnp.tanh(w @ c + xs[i])
        return c, ys.write(i, c)

    init = (x, loopkit.TensorArray.empty(STEPS, x))
    return jnp.sum(loopkit.fori_loop(0, STEPS, step, init, **how)[1].stack() ** 2)


def lanes(w, x, xs, **how):
    return jnp.sum(jax.vmap(lambda x: scanned(w, x, xs, **how))(jnp.stack([x, x, x])))


def nested(w, x, xs, **how):
    inner = lambda c, x: loopkit.fori_loop(0, STEPS, lambda i, c: jnp.tanh(w @ c + x), c, **how)
    return jnp.sum(loopkit.scan(lambda c, x: (inner(c, x), None), x, xs, **how)[0])


KNOWN = [scanned, along, counted, rows, rows_from_the_end, overwritten, tensor_array, lanes, nested]
WAYS = {"default": {}, "all": {"checkpoints": "all"}}


def gradient(f, **how):
    return jax.grad(lambda *args: f(*args, **how), argnums=(0, 1, 2))


def second_derivative(f):
    first = gradient(f)
    return gradient(lambda *args: sum(jnp.sum(x**2) for x in first(*args)))


def assert_known(function):
    program = compiled("gpu", function, W, X, XS)
    assert "while(" in program.text
    assert unknown(program) == []


@pytest.fixture
def silent(monkeypatch):
    """No errors at run time, since JAX compiles what raises them only where there is a GPU."""
    monkeypatch.setattr(equinox, "error_if", lambda values, *_: values)


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("f", KNOWN, ids=lambda f: f.__name__)
def test_loops_of_known_length_do_not_wait(f, way):
    assert_known(gradient(f, **WAYS[way]))


@pytest.mark.parametrize(
    "how", [{"reverse": True}, {"truncate": 150}, {"unroll": 4}], ids=lambda how: next(iter(how))
)
def test_options_of_a_scan_do_not_wait(how):
    assert_known(gradient(scanned, **how))


@pytest.mark.parametrize("f", [scanned, rows], ids=lambda f: f.__name__)
def test_second_derivatives_do_not_wait(f):
    assert_known(second_derivative(f))


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


@cache
def waits(name):
    """Of the host of a GPU, in a gradient of 1000 steps."""
    found = case(programs.of_workload(programs.layer()), name)
    program = made("gpu", found)
    return work(program, program.counts(*found.arguments)).waits


@pytest.mark.parametrize(
    ("name", "peer", "most"),
    [
        ("loopkit.scan, 8", "equinox scan, 8", 1500),
        ("loopkit.while_loop, max_steps", "equinox while_loop, max_steps", 1600),
        ("loopkit.while_loop", "equinox while_loop, max_steps", 1600),
    ],
)
def test_a_gpu_waits_seldom(name, peer, most):
    assert waits(name) <= most
    assert waits(name) < waits(peer)


def test_kernels_of_a_buffer_that_grows_row_by_row():
    found = case(programs.of_rows((8, 128)), "loopkit.scan")
    program = made("gpu", found)
    assert work(program, program.counts(*found.arguments)).kernels <= 28_000


def test_cycles_of_rows_of_short_axes():
    """Of a TPU, which would fill up each row of 10x5 to one of 16x128."""
    found = case(programs.of_rows((10, 5)), 'loopkit.scan, "all"')
    program = made("tpu", found)
    most = 36e6 if jax.__version_info__ >= (0, 11) else 41e6  # whose compiler needs more for each
    assert Executions(program, program.counts(*found.arguments)).cycles <= most


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("host", ["1 GB", "8 GB"])
def test_checkpoints_are_on_the_host(target, host):
    memory = {"device": "256 MB", "host": host}
    loss, x = partial(programs.large_carry, memory=memory), programs.LARGE
    program = compiled(target, jax.grad(loss), x)
    plan = loopkit.plan(loss, x)
    assert program.device_bytes <= 256e6 + programs.bytes_of(x)
    assert plan.host_bytes > 256e6
    assert abs(program.host_bytes - plan.host_bytes) < programs.bytes_of(x)


# --- several devices ------------------------------------------------------------------------------


WAYS_OF_DEVICES = ["default", '"all"', "lax.scan"]
if jax.__version_info__ >= (0, 11):  # before, loops on several devices keep nothing on the host
    WAYS_OF_DEVICES.append("on the host")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("what", ["rows of a batch", "parts of a carry"])
@pytest.mark.parametrize("way", WAYS_OF_DEVICES)
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
