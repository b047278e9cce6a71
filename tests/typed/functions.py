"""Types of functions that loopkit changes, and of reports; the program also runs."""

from typing import assert_type

import jax
import jax.numpy as jnp
from jax import Array

import loopkit


def decay(x: Array, rate: float = 0.5, *, floor: float = 1.0) -> Array:
    return jax.lax.while_loop(lambda x: x > floor, lambda x: x * rate, x)


@loopkit.checkpointed
def bare(x: Array, rate: float) -> Array:
    return decay(x, rate)


@loopkit.checkpointed(max_steps=50, only=lambda site: site.outer is None or site.depth < 2)
def with_settings(x: Array, rate: float) -> Array:
    return decay(x, rate)


@loopkit.blocked
def doubled(x: Array, *, scale: float = 2.0) -> tuple[Array, Array]:
    return x * 2, x


@loopkit.blocked(block=2, in_axes=0)
def tripled(x: Array) -> Array:
    return x * 3


x, rows = jnp.array(10.0), jnp.ones((4, 2))
assert_type(loopkit.checkpointed(decay)(x, 0.5, floor=2.0), Array)
assert_type(loopkit.checkpointed(decay, checkpoints=4)(x), Array)
assert_type(bare(x, rate=0.5), Array)
assert_type(with_settings(x, 0.5), Array)
assert_type(doubled(rows), tuple[Array, Array])
assert_type(tripled(rows), Array)
loopkit.blocked(lambda x: x + 1, block=2)(rows).sum()

with loopkit.replace_lax_loops(checkpoints=8, memory=None):
    jax.grad(decay)(x)


def total(xs: Array) -> Array:
    return loopkit.scan(lambda y, x: (jnp.sin(y + x), None), 0.0, xs)[0]


explanation = loopkit.explain(total, rows[:, 0])
assert_type(explanation, loopkit.Explanation)
assert_type([loop.scan_bytes for loop in explanation.loops], list[int | None])
plan = loopkit.explain(total, jax.ShapeDtypeStruct((50,), float)).plan
assert_type(plan, loopkit.Plan)
assert_type((plan.slots, plan.bound, plan.evaluations()), tuple[int, int | None, tuple[int, int]])
assert_type(loopkit.in_place_report(total, rows[:, 0], grad=True), loopkit.InPlaceReport)
assert_type(loopkit.length_buckets([3, 4]), dict[int, list[int]])
