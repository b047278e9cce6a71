"""Loops of known length, as a compiler for a GPU sees them: no host waits for one.

Those of a group are one program, which compiles faster than each by itself.
"""

from functools import cache

import equinox
import jax
import jax.numpy as jnp
import pytest

import loopkit
from loopkit import Plan

from .machines import compilers

# isort: split
from ahead_of_time import compiled
from executions import loops, unknown

__all__ = ["compilers"]

pytestmark = pytest.mark.accelerators

STEPS = 331
"""More than the 128 rounds that a compiler runs a loop for, to see how often it goes round; and a
prime: no segments are all of one length."""
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


def gradient(f, **how):
    return jax.grad(lambda *args: f(*args, **how), argnums=(0, 1, 2))


def reverse_over_reverse(f):
    first = gradient(f)
    return gradient(lambda *args: sum(jnp.sum(x**2) for x in first(*args)))


def forward_over_reverse(f):
    return lambda *args: jax.jvp(gradient(f), args, args)[1]


KNOWN = [scanned, along, counted, rows, rows_from_the_end, overwritten, tensor_array, lanes, nested]
UNEVEN = Plan(40, segment=10)
OPTIONS = {
    "reverse": {"reverse": True},
    "truncated": {"truncate": 150},
    "unrolled": {"unroll": 4},
    "unrolled_segments": {"unroll": 3, "checkpoints": UNEVEN},
    "uneven_segments": {"checkpoints": UNEVEN},
    "uneven_segments_of_residuals": {"checkpoints": Plan(40, segment=10, store="residuals")},
    "every_carry": {"checkpoints": Plan(STEPS)},
}
GROUPS = {
    "default": {f.__name__: gradient(f) for f in KNOWN},
    "all": {f.__name__: gradient(f, checkpoints="all") for f in KNOWN},
    "options": {name: gradient(scanned, **how) for name, how in OPTIONS.items()},
    "second derivatives": {
        "scanned": reverse_over_reverse(scanned),
        "scanned_forward": forward_over_reverse(scanned),
        "rows": reverse_over_reverse(rows),
    },
}


@cache
def group(name):
    def every(*args):
        results = []
        for scope, function in GROUPS[name].items():
            with jax.named_scope(scope):
                results.append(function(*args))
        return results

    return compiled("gpu", every, W, X, XS)


@pytest.fixture
def silent(monkeypatch):
    """No errors at run time, since JAX compiles what raises them only where there is a GPU."""
    monkeypatch.setattr(equinox, "error_if", lambda values, *_: values)


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize(("name", "scope"), [(g, s) for g in GROUPS for s in GROUPS[g]])
def test_no_loop_of_known_length_waits(name, scope):
    found = [loop for loop in loops(group(name)).values() if f"/{scope}/" in loop.source]
    assert len(found) >= 2
    assert all(loop.trip_count is not None for loop in found)


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("name", GROUPS)
def test_nor_does_one_that_the_compiler_made(name):
    assert unknown(group(name)) == []


def test_a_climb_has_one_loop_that_waits():
    """The forward sweep has none."""
    program = compiled("gpu", gradient(scanned, checkpoints=8), W, X, XS)
    assert len(unknown(program)) <= 2
