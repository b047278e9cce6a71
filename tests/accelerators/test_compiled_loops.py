"""Loops compiled for a GPU and a TPU, on a machine that has neither.

They come with `pip install '.[accelerators]'`; `pytest -m accelerators` runs this. Programs and
figures are those of `benchmarks/accelerators.py`, in single precision.
"""

from functools import partial

import jax
import pytest

import loopkit

from .machines import TARGETS, case, compilers, gradient_of, programs

# isort: split
import ahead_of_time
from ahead_of_time import compiled, planned_for
from executions import collectives

__all__ = ["compilers"]

pytestmark = pytest.mark.accelerators

# --- what is stored, copied and launched ----------------------------------------------------------


def test_all_residuals_cost_what_they_do_in_lax():
    """Kernels, waits and memory on a GPU are at most those of lax, and a few launches are more.

    Traced for a CPU, the loop defers products of weights there, but not where it is a GPU's.
    """
    ours, theirs = (
        gradient_of("gpu", "layer", name) for name in ('loopkit.scan, "all"', "lax.scan")
    )
    assert ours.work.kernels <= theirs.work.kernels
    assert ours.work.waits == theirs.work.waits == 0
    assert ours.work.launches <= theirs.work.launches + 3
    assert ours.program.device_bytes <= theirs.program.device_bytes


COPIES = {"lax, `.at[i].set` in the carry": 2, "loopkit.scan": 0, 'loopkit.scan, "all"': 0}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", COPIES)
def test_no_step_copies_a_buffer(target, name):
    """No step back copies a buffer; `lax` copies it twice in each."""
    found = gradient_of(target, "rows", name)
    assert found.executions.copies(found.case.large) == COPIES[name] * found.case.steps


def test_cycles_of_rows_of_short_axes():
    """A TPU would pad each row of 10x5 to one of 16x128."""
    assert gradient_of("tpu", "short rows", 'loopkit.scan, "all"').executions.cycles <= 36e6


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("host", ["1 GB", "8 GB"])
def test_checkpoints_are_on_the_host(target, host):
    memory = {"device": "256 MB", "host": host}
    loss, x = partial(programs.large_carry, memory=memory), programs.LARGE
    program = compiled(target, jax.grad(loss), x)
    with planned_for(target):
        plan = loopkit.explain(loss, x).plan
    assert program.device_bytes <= 256e6 + programs.bytes_of(x)
    assert plan.host_bytes >= 15 * programs.bytes_of(x)
    assert abs(program.host_bytes - plan.host_bytes) < programs.bytes_of(x)


# --- several devices ------------------------------------------------------------------------------


WAYS_OF_DEVICES = ["default", '"all"', "lax.scan"]
if jax.__version_info__ >= (0, 11):  # before, loops on several devices keep nothing on the host
    WAYS_OF_DEVICES.append("on the host")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("what", ["parts of a batch", "parts of a carry"])
@pytest.mark.parametrize("way", WAYS_OF_DEVICES)
def test_devices_exchange_a_sum_of_cotangents_and_nothing_else(target, what, way):
    """Once, at the end: what is kept of the steps stays where it is."""
    loop = {"default": "loopkit.scan", "lax.scan": way}.get(way, f"loopkit.scan, {way}")
    found = case("devices", f"{what}, {loop}")
    shardings = programs.shardings(found, ahead_of_time.devices(target))
    program = compiled(target, found.function, *found.arguments, shardings=shardings)
    # The compilers of JAX 0.10 take a sum over devices out of one loop, not out of two: it is made
    # once a segment, unless the engine has put it off.
    in_segments = jax.__version_info__ < (0, 11) and way == "default" and what != "parts of a batch"
    assert collectives(program) == {("all-reduce", in_segments): 1}
