"""How often the host waits for a GPU in a gradient: for predicates of loops of unknown length."""

import jax
import jax.numpy as jnp
import pytest

import loopkit
from loopkit import Plan

from .test_compiled_loops import case, compiled, compilers, made, programs, unknown, work

__all__ = ["compilers"]

pytestmark = pytest.mark.accelerators


def figures(found):
    program = made("gpu", found)
    return work(program, program.counts(*found.arguments))


LAYER = {
    "loopkit.scan": 0,
    'loopkit.scan, "all"': 0,
    "loopkit.scan, 8": 1_350,
    "loopkit.while_loop, max_steps": 1_250,
    "loopkit.while_loop": 1_300,
}
"""Of 1000 steps. Those of a while loop wait once each in `lax`."""


@pytest.mark.parametrize("name", LAYER)
def test_waits(name):
    assert figures(case(programs.of_workload(programs.layer()), name)).waits <= LAYER[name]


def test_waits_are_fewer_than_equinox_has():
    cases = programs.of_workload(programs.layer())
    for how in ("while_loop, max_steps", "scan, 8"):
        ours, theirs = (figures(case(cases, f"{name}{how}")) for name in ("loopkit.", "equinox "))
        assert ours.waits < theirs.waits


@pytest.mark.parametrize(
    ("name", "most"), [("loopkit.scan", 25_000), ('loopkit.scan, "all"', 21_000)]
)
def test_rows_of_a_buffer_do_not_wait(name, most):
    done = figures(case(programs.of_rows((8, 128)), name))
    assert done.waits == 0
    assert done.kernels <= most


STEPS = 331
"""A prime: no segments are all of one length."""
W, X, XS = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 4), (4,), (STEPS, 4)))


def scanned(w, x, xs, **how):
    step = lambda c, x: (jnp.tanh(w @ c + x), c * x)
    carry, ys = loopkit.scan(step, x, xs, **how)
    return jnp.sum(carry) + jnp.sum(ys**2)


KNOWN = {
    "uneven segments": {"checkpoints": Plan(40, segment=10)},
    "uneven segments of residuals": {"checkpoints": Plan(40, segment=10, store="residuals")},
    "every carry": {"checkpoints": Plan(STEPS)},
    "in reverse": {"reverse": True},
    "truncated": {"truncate": 100},
    "unrolled": {"unroll": 3, "checkpoints": Plan(40, segment=10)},
}


@pytest.mark.parametrize("how", KNOWN)
def test_no_loop_of_known_length_waits(how):
    gradient = jax.grad(lambda *args: scanned(*args, **KNOWN[how]), argnums=(0, 1, 2))
    assert unknown(compiled("gpu", gradient, W, X, XS)) == []


@pytest.mark.parametrize("order", ["reverse over reverse", "forward over reverse"])
def test_no_second_derivative_waits(order):
    gradient = jax.grad(scanned, argnums=1)
    second = {
        "reverse over reverse": jax.grad(lambda *args: jnp.sum(gradient(*args) ** 2), argnums=1),
        "forward over reverse": lambda *args: jax.jvp(gradient, args, args)[1],
    }
    assert unknown(compiled("gpu", second[order], W, X, XS)) == []


def test_a_climb_has_one_loop_that_waits():
    """The forward sweep has none."""
    gradient = jax.grad(lambda *args: scanned(*args, checkpoints=8), argnums=(0, 1, 2))
    assert len(unknown(compiled("gpu", gradient, W, X, XS))) <= 2


def test_a_budget_holds_on_a_gpu():
    """Rows among carries would have the compiler copy all of these: not where they are large."""

    def loss(x):
        step = lambda x, _: (x + 1e-3 * jnp.sin(x), None)
        return jnp.sum(loopkit.scan(step, x, None, 1000, memory="16 MB")[0] ** 2)

    assert compiled("gpu", jax.grad(loss), jnp.ones((256, 256))).device_bytes < 16.5e6
