"""Waits of the host for a GPU in a gradient, for predicates of loops of unknown length."""

import jax
import jax.numpy as jnp
import pytest

import loopkit

from .machines import compilers, gradient_of

# isort: split
from ahead_of_time import compiled
from thunks import work

__all__ = ["compilers"]

pytestmark = pytest.mark.accelerators


def waits(name):
    """In a gradient of 1000 steps."""
    return gradient_of("gpu", "layer", name).work.waits


LAYER = {
    "loopkit.scan": 0,
    'loopkit.scan, "all"': 0,
    "loopkit.scan, 8": 1_350,
    "loopkit.while_loop, max_steps": 1_090,
    "loopkit.while_loop": 1_150,
}
"""Steps of a while loop wait once each going forward, as in `lax`; the rest is for going back."""


@pytest.mark.parametrize("name", LAYER)
def test_waits(name):
    assert waits(name) <= LAYER[name]


@pytest.mark.parametrize(
    ("name", "peer"),
    [
        ("loopkit.scan, 8", "equinox scan, 8"),
        ("loopkit.while_loop, max_steps", "equinox while_loop, max_steps"),
        ("loopkit.while_loop", "equinox while_loop, max_steps"),
    ],
)
def test_waits_are_fewer_than_equinox_has(name, peer):
    assert waits(name) < waits(peer)


def test_a_step_of_unknown_length_waits_once():
    """The forward sweep waits once for each step, and once for the end."""
    for name in ("loopkit.while_loop, max_steps", "loopkit.while_loop"):
        found = gradient_of("gpu", "layer", name)
        forward = [
            loop.name
            for loop in found.executions.loops.values()
            if loop.trip_count is None and "transpose(" not in loop.source
        ]
        assert len(forward) == 1
        assert found.executions.rounds(forward[0], 1) == found.case.steps


@pytest.mark.parametrize(
    ("name", "most"), [("loopkit.scan", 25_000), ('loopkit.scan, "all"', 21_000)]
)
def test_rows_of_a_buffer_do_not_wait(name, most):
    done = gradient_of("gpu", "rows", name).work
    assert done.waits == 0
    assert done.kernels <= most


def large(x, **how):
    step = lambda x, _: (x + 1e-3 * jnp.sin(x), None)
    return jnp.sum(loopkit.scan(step, x, None, 1000, **how)[0] ** 2)


def test_a_budget_holds_on_a_gpu_without_a_wait_a_step():
    """Rows lie among carries: a compiler that copied all of these would take three times as much.

    Waits are those of the loops that are not of a known length.
    """
    x = jnp.ones((256, 256))
    gradient = jax.grad(lambda x: large(x, memory="16 MB"))
    program = compiled("gpu", gradient, x)
    assert program.device_bytes < 16.5e6
    assert work(program, program.counts(x)).waits <= 100


def test_few_carries_on_the_host_do_not_wait_once_a_step():
    """Segments are as long as the rows that there is room for on the device."""
    x, device, host = jnp.ones((256, 256)), 4_000_000, 8_000_000
    gradient = jax.grad(lambda x: large(x, memory={"device": device, "host": host}))
    program = compiled("gpu", gradient, x)
    assert program.device_bytes <= device + 2 * x.nbytes
    assert program.host_bytes > host / 2
    assert work(program, program.counts(x)).waits <= 500
