"""Rows of short axes on a TPU, which pads them: kept, and computed, as vectors."""

import jax
import jax.numpy as jnp
import pytest

import loopkit

from .machines import TARGETS, compiled, cycles, lowered

pytestmark = pytest.mark.accelerators

STEPS = 1999


def filled(x, w, step=lambda row, w: jnp.tanh(w * row), steps=STEPS):
    """Rows in a buffer, each made of the one before."""

    def body(carry, _):
        i, rows = carry
        return (i + 1, rows.at[i].set(step(rows[i - 1], w))), None

    rows = jnp.zeros((steps + 1, *x.shape), x.dtype).at[0].set(x)
    start = jnp.int32(1), rows
    how = {"buffers": lambda carry: carry[1], "checkpoints": "all"}
    return jnp.sum(loopkit.scan(body, start, None, steps, **how)[0][1] ** 2)


def gradient(target="tpu", shape=(10, 5), weights=(10, 5), **how):
    types = (jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, weights))
    return compiled(target, jax.grad(lambda x, w: filled(x, w, **how), (0, 1)), *types)


@pytest.mark.parametrize("shape", [(10, 5), (3, 3), (32, 8), (2, 5, 5)])
def test_elementwise_steps_stay_with_vectors(shape):
    found = gradient(shape=shape, weights=shape)
    sizes = ",".join(map(str, shape))
    assert f"f32[{STEPS},{sizes}]" not in found.text
    assert cycles(found.text, STEPS) <= 30e6


def test_memory_of_many_rows():
    """The padded stack takes a quarter; each row takes 512 bytes instead of 4,096."""
    steps = 99_999
    assert gradient(steps=steps).device_bytes <= 5 * 512 * (steps + 1)


def turned(row, w):
    return jnp.tanh(w * row) + 0.1 * jnp.roll(row, 1, 0)


def test_a_step_that_needs_its_axes():
    """It still takes fewer changes of shape than with a stack of rows as they are: 82 Mcycles."""
    assert cycles(gradient(step=turned).text, STEPS) <= 64e6


@pytest.mark.parametrize("target", TARGETS)
def test_programs_for_all_targets_have_rows_of_vectors(target):
    types = (jax.ShapeDtypeStruct((10, 5), jnp.float32) for _ in range(2))
    text = lowered(target, jax.grad(filled, (0, 1)), *types).as_text()
    assert f"tensor<{STEPS}x10x5xf32>" not in text
    assert f"tensor<{STEPS}x50xf32>" in text
