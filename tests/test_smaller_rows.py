"""Part of the residuals is stored, and the rest is run again: no number changes by it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from derivatives import assert_close, derivative, expected
from loopkit import Plan
from loopkit._engine.derivative import linearised
from problems import PROBLEMS, named
from turns import in_turn

PRICES = 1e-3, 0.3, 1e9
"""Nanoseconds a byte: from where nearly all is stored to where nearly all is run again."""
PLANS = {
    f"{kind}, price {price:g}": make(price)
    for price in PRICES
    for kind, make in {
        "every step": lambda p: Plan(0, keeps_all=True, price=p),
        "segments": lambda p: Plan(3, segment=3, store="residuals", price=p),
        "a schedule": lambda p: Plan(2, segment=2, store="residuals", price=p),
    }.items()
}
MAIN = named("while_scalar", "scan_until")


@pytest.mark.slow
@pytest.mark.parametrize(("problem", "plan"), in_turn(PROBLEMS, PLANS, of=9))
def test_gradients(problem, plan):
    got = jax.jit(derivative(problem.flat_loop(PLANS[plan]), "r"))
    assert_close(got(problem.vector()), expected(problem.name, "r"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "pattern", "plan"), in_turn(MAIN, ["fr", "rr", "rf"], PLANS, of=9)
)
def test_second_derivatives(problem, pattern, plan):
    got = jax.jit(derivative(problem.flat_loop(PLANS[plan]), pattern))
    assert_close(got(problem.vector()), expected(problem.name, pattern))


WIDTH, STEPS = 24, 7
WEIGHTS = jnp.asarray(np.random.default_rng(0).normal(size=(2, WIDTH, WIDTH)) / 5)
START = jnp.asarray(np.random.default_rng(1).normal(size=(5, WIDTH)))


def network(h, _):
    hidden = jax.nn.softmax(h @ WEIGHTS[0], axis=-1)
    return h + jnp.exp(-hidden) @ WEIGHTS[1], hidden.max()


def loss(step=network, loops=loopkit, **options):
    def f(h):
        h, peaks = loops.scan(step, h, None, STEPS, **options)
        return jnp.sum(h**2) + jnp.sum(peaks)

    return f


@pytest.fixture
def small_steps_count(monkeypatch):
    """Frontiers are made of small steps, too."""
    monkeypatch.setattr(linearised, "SMALLEST_ROW", 0)
    monkeypatch.setattr(linearised, "CHECKPOINT_BYTES", 0)


BUDGETS = 3_000, 6_000, 10_000, 15_000, 20_000, 10**6


@pytest.mark.slow
@pytest.mark.parametrize("memory", BUDGETS)
@pytest.mark.parametrize("lanes", [False, True])
def test_budgets(small_steps_count, memory, lanes):
    memory *= 1 + lanes  # which share it
    ours, theirs = loss(memory=memory), loss(loops=lax)
    wrap = (lambda f: jax.vmap(f)) if lanes else (lambda f: f)
    h = jnp.stack([START, 2 * START]) if lanes else START
    for transformed in (jax.grad, lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))):
        got, wanted = (wrap(transformed(f)) for f in (ours, theirs))
        assert_close(jax.jit(got)(h), jax.jit(wanted)(h))


def test_budgets_are_used(small_steps_count):
    """The more bytes, the more is kept of a step; and nothing is predicted to take longer."""
    plans = [loopkit.explain(loss(memory=memory), START).plan for memory in BUDGETS]
    assert all(plan.peak_bytes <= memory for plan, memory in zip(plans, BUDGETS, strict=True))
    times = [plan.nanoseconds(STEPS) for plan in plans]
    assert times == sorted(times, reverse=True)
    assert len({(plan.price, plan.slots, plan.segment) for plan in plans}) >= 4
    assert any(plan.price > 0 and plan.keeps_all for plan in plans)


def in_checkpoint(h, x):
    return jax.checkpoint(network)(h, x)


@pytest.mark.parametrize("memory", BUDGETS[1:])
def test_a_budget_sees_into_jax_checkpoint(small_steps_count, memory):
    hidden, plain = loss(in_checkpoint, memory=memory), loss(memory=memory)
    found = [loopkit.explain(f, START).plan for f in (hidden, plain)]
    if found[1].keeps_all:
        assert found[0] == found[1]
    assert_close(jax.jit(jax.grad(hidden))(START), jax.jit(jax.grad(loss(loops=lax)))(START))


def test_without_a_budget_jax_checkpoint_is_obeyed():
    def f(h):
        until = lambda h, _: h.sum() > 1e9
        return loopkit.scan(in_checkpoint, h, None, STEPS, until=until, checkpoints="all")[0]

    assert loopkit.explain(f, START).plan.step.residual_bytes <= START.nbytes


@pytest.mark.slow
def test_a_layer_is_run_again_in_the_memory_of_one():
    """Whether its residuals are made from its carry by a replay, or as it is reversed."""
    layers, width = 6, 16
    wide = jnp.cos(jnp.arange(64.0 * layers * width)).reshape(layers, width, 64) / 8
    x = jnp.sin(jnp.arange(64.0 * 64)).reshape(4, 64, width)

    def layer(x, w):
        q, k, v, _ = jnp.split(x @ w, 4, axis=-1)
        x = x + jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v
        return x + jax.nn.gelu(x @ w) @ w.T, None

    def beyond_the_plan(**options):
        f = lambda w: jnp.mean(loopkit.scan(layer, x, w, **options)[0] ** 2)
        compiled = jax.jit(jax.grad(f)).lower(wide).compile()
        plan = loopkit.explain(f, wide).plan
        return compiled.memory_analysis().temp_size_in_bytes - plan.peak_bytes

    replayed = beyond_the_plan(checkpoints=Plan(layers))
    assert beyond_the_plan(checkpoints=Plan(0, keeps_all=True, price=1e3)) <= replayed + x.nbytes


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf"), "1", True, None])
def test_a_price_that_is_none(price):
    with pytest.raises(ValueError, match=r"`price` must be a finite number >= 0 .nanoseconds"):
        Plan(1, price=price)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_what_runs_again_is_behind_a_barrier_on_a_cpu_alone(platform):
    """Compilers for accelerators would write out what they compute where it is read."""

    def layer(x, w):
        return jnp.tanh(jnp.exp(jnp.sin(x @ w))) @ w, None

    def loss(x, ws, **how):
        return loopkit.scan(layer, x, ws, **how)[0].sum()

    types = jax.ShapeDtypeStruct((64, 64), "float64"), jax.ShapeDtypeStruct((40, 64, 64), "float64")
    for how in ({"memory": "4 MB"}, {"checkpoints": 4}):
        gradient = jax.jit(jax.grad(lambda x, ws, how=how: loss(x, ws, **how)))
        text = gradient.trace(*types).lower(lowering_platforms=(platform,)).as_text()
        held = re.findall(r"optimization_barrier.*xf64", text)
        assert bool(held) == (platform == "cpu")


def filtered(scan, **options):
    """Return a loss over a particle filter, whose steps take long to draw and keep few bytes."""

    def f(drift):
        def step(carry, seen):
            x, key = carry
            key, noise, draw = jax.random.split(key, 3)
            x = drift * x + 0.3 * jax.random.normal(noise, x.shape)
            fit = -0.5 * (seen - x) ** 2
            chosen = jax.random.categorical(draw, lax.stop_gradient(fit), shape=x.shape)
            return (x[chosen], key), jnp.log(jnp.mean(jnp.exp(fit)))

        seen = jnp.sin(jnp.arange(600) / 50)
        return scan(step, (jnp.zeros(64), jax.random.key(0)), seen, **options)[1].sum()

    return f


@pytest.mark.slow
def test_what_took_long_is_kept_of_small_steps():
    whole = loopkit.explain(filtered(loopkit.scan, checkpoints="all"), 0.9).plan
    memory = 0.7 * whole.peak_bytes
    plan = loopkit.explain(filtered(loopkit.scan, memory=int(memory)), 0.9).plan
    assert plan.keeps_all
    assert plan.price > 0
    assert plan.peak_bytes <= memory
    found = (
        jax.jit(jax.grad(f))(0.9)
        for f in (filtered(lax.scan), filtered(loopkit.scan, memory=int(memory)))
    )
    assert_close(*found)
