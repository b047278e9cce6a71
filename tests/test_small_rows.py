"""Rows that are written and read a few steps at a time, because a step is not one kernel.

Each step here has arrays of 128 bytes among its residuals, xs and ys, so 512 steps are the most
whose rows one thread works on. Steps scatter: XLA for CPUs makes no kernel of a loop of them.
"""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

import loopkit
from derivatives import assert_close, orders
from loopkit import Plan
from loopkit._jaxprs.kernels import ONE_THREAD
from recorded_bars import Recorder

PLACES = jnp.array([5, 0, 11, 7])
SETTINGS = {
    "every residual": "all",
    "most segments": Plan(1, segment=100, store="residuals", keeps_last=6),
    "carries of segments": Plan(7, segment=100, store="residuals"),
    "carries": Plan(7, segment=100),
    "a policy": jax.checkpoint_policies.everything_saveable,
}


def step(w):
    def taken(carry, x):
        i, h = carry
        h = h.at[PLACES].add(jnp.sin(w[:4] * h[PLACES] + x[:4]))
        h = 0.9 * jnp.cos(w * h) + 0.1 * x
        return (i + 1, h), (h[i % 16] * x, i)

    return taken


def loss(scan, length, **how):
    def f(w, xs):
        (i, h), (ys, numbers) = scan(step(w), (jnp.int32(0), jnp.ones(16)), xs, **how)
        return (h**2).sum() + jnp.sin(ys.mean(1) @ numbers.astype(float) / length) * i.astype(float)

    return f, (jnp.linspace(0.5, 1.5, 16), jnp.linspace(0.1, 0.3, 16 * length).reshape(length, 16))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [660, 641])  # 641 has no divisor
@pytest.mark.parametrize("checkpoints", SETTINGS.values(), ids=SETTINGS)
def test_gradients(checkpoints, length, reverse):
    wanted, at = loss(lax.scan, length, reverse=reverse)
    got, _ = loss(loopkit.scan, length, reverse=reverse, checkpoints=checkpoints)
    assert_close(*(jax.jit(jax.value_and_grad(f, (0, 1)))(*at) for f in (got, wanted)))


@pytest.mark.slow
@pytest.mark.parametrize("second", ["rr", "fr", pytest.param("rf", marks=pytest.mark.slow)])
def test_second_order(second):
    wanted, at = loss(lax.scan, 520)
    got, _ = loss(loopkit.scan, 520, checkpoints="all")
    x, tree = ravel_pytree(at[0])
    of = lambda f: jax.jit(lambda x: orders(lambda x: f(tree(x), at[1])[None], x, second))(x)
    assert_close(of(got), of(wanted))


@pytest.mark.slow
def test_lanes_of_vmap():
    results = []
    for scan, how in [(lax.scan, {}), (loopkit.scan, {"checkpoints": "all"})]:
        f, (w, xs) = loss(scan, 530, **how)
        lanes = jax.jit(jax.vmap(jax.grad(f, (0, 1)), (0, None)))
        results.append(lanes(jnp.stack([w, 0.9 * w]), xs))  # of 2 * w they would be chaotic
    assert_close(*results)


@pytest.mark.slow
def test_a_bar_counts_every_step():
    bars = Recorder()
    f, at = loss(loopkit.scan, 600, checkpoints="all", progress=bars)
    jax.block_until_ready(jax.jit(jax.grad(f))(*at))
    jax.effects_barrier()
    assert [bar.steps for bar in bars.bars] == [600, 600]


def arrays_in_loops_that_scatter(f, *args) -> list[int]:
    """The numbers that each array has in the state of such a loop, without what an outer loop
    has."""
    text = jax.jit(f).lower(*args).compile().as_text()
    found = re.finditer(
        r"^(?:ENTRY )?(%[\w.-]+) \((.*?)\) -> .*?^}", text, re.MULTILINE | re.DOTALL
    )
    programs = {match[1]: (match[2], match[0]) for match in found}
    sizes = []
    for body in re.findall(r" while\(.*?body=(%[\w.-]+)", text):
        state, steps = programs[body]
        fused = [programs[name][1] for name in re.findall(r"calls=(%[\w.-]+)", steps)]
        if any(" scatter(" in part for part in (steps, *fused)):
            shapes = re.findall(r"\[([\d,]+)\]", state)
            sizes += [math.prod(map(int, shape.split(","))) for shape in shapes]
    return sizes


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", SETTINGS.values(), ids=SETTINGS)
def test_no_loop_of_steps_has_a_large_array(checkpoints):
    f, at = loss(loopkit.scan, 660, checkpoints=checkpoints)
    theirs, _ = loss(lax.scan, 660)
    ours, others = (arrays_in_loops_that_scatter(jax.grad(g, (0, 1)), *at) for g in (f, theirs))
    assert 8 * max(ours) <= ONE_THREAD < 8 * max(others)


@pytest.mark.parametrize("part", [0.2, 0.5, 1.0])
def test_more_memory_is_never_predicted_to_take_longer(part):
    f, at = loss(loopkit.scan, 660)
    whole = loopkit.explain(jax.grad(f), *at).loops[0].plan.step.residual_bytes * 660
    times = []
    for memory in (part * whole, 1.5 * part * whole):
        f, at = loss(loopkit.scan, 660, memory=int(memory))
        times.append(loopkit.explain(jax.grad(f), *at).loops[0].plan.nanoseconds(660))
    assert times[1] <= times[0]


@pytest.mark.parametrize("places", [jnp.array([3]), jnp.array([3, 1])])
@pytest.mark.parametrize("way", ["read", "write"])
def test_one_place_makes_a_kernel_and_several_do_not(places, way):
    def taken(h, x):
        h = jnp.sin(h[places]) * x + h.sum() if way == "read" else h.at[places].add(x)
        return jnp.cos(h).sum() * jnp.ones(16), x

    f = lambda xs: loopkit.scan(taken, jnp.ones(16), xs)[0].sum()
    step = loopkit.explain(jax.grad(f), jnp.ones(99)).loops[0].plan.step
    assert (step.pooled == 0) == (len(places) == 1)
