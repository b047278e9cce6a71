"""Memory is written before it is read: here it holds NaN until then."""

import jax
import jax.numpy as jnp
import pytest

import loopkit
from derivatives import assert_close, derivative, expected
from loopkit import Plan, _jax
from problems import PROBLEMS, Problem
from turns import in_turn

TURNS = in_turn(PROBLEMS, ["r", "rr"], ["all", None, 3], of=11)


@pytest.fixture(scope="module", autouse=True)
def poisoned():
    """Memory holds NaN, and the largest integers, until something is written to it.

    For all tests of this file: what was compiled otherwise is forgotten, which takes time.
    """

    def blank(aval, after=0, fill=0):
        if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            return _jax.zeros(aval)
        kind = aval.dtype
        worst = jnp.nan if jnp.issubdtype(kind, jnp.inexact) else True
        worst = jnp.iinfo(kind).max if jnp.issubdtype(kind, jnp.integer) else worst
        return _jax.vary_like(jnp.full(aval.shape, worst, kind), [aval])

    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_jax, "blank", blank)
        patch.setattr(_jax, "written", blank)
        yield
    jax.clear_caches()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("problem", "pattern", "checkpoints"), TURNS)
def test_what_is_not_written_is_not_read(problem: Problem, pattern, checkpoints):
    got = jax.jit(derivative(problem.flat_loop(checkpoints), pattern))(problem.vector())
    assert_close(got, expected(problem.name, pattern))


PUT_OFF = Plan(3, 4), Plan(12, 4), Plan(3, 4, "residuals"), Plan(12)
PUT_OFF += Plan(3, 4, host=True), Plan(12, 4, host=True)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PUT_OFF, ids=range(6))
def test_products_that_are_put_off_read_whole_segments(plan):
    """Seven of eleven steps, in segments of four."""
    w, h = jnp.eye(96) * 0.9 + 0.01, jnp.linspace(-1.0, 1.0, 4 * 96).reshape(4, 96)

    def loss(w, n, **options):
        step = lambda c: (c[0] + 1, jnp.tanh(c[1] @ w))
        return jnp.sum(loopkit.while_loop(lambda c: c[0] < n, step, (0, h), **options)[1] ** 2)

    def unrolled(w):
        end = h
        for _ in range(7):
            end = jnp.tanh(end @ w)
        return jnp.sum(end**2)

    found = jax.jit(jax.grad(lambda w, n: loss(w, n, max_steps=11, checkpoints=plan)))
    assert_close(found(w, 7), jax.grad(unrolled)(w))


@pytest.mark.parametrize("plan", [Plan(6, 5, "residuals", keeps_last=3), Plan(9, 5), "all"])
def test_products_that_are_put_off_beside_ys_that_nobody_reads(plan):
    w, h = jnp.eye(96) * 0.9 + 0.01, jnp.linspace(-1.0, 1.0, 4 * 96).reshape(4, 96)

    def loss(w, scan=jax.lax.scan, **options):
        step = lambda s, x: (jnp.tanh(s @ w), jnp.sum(s * x))
        return jnp.sum(scan(step, h, jnp.ones((43, 4, 1)), **options)[0] ** 2)

    found = jax.jit(jax.grad(lambda w: loss(w, loopkit.scan, checkpoints=plan)))(w)
    assert_close(found, jax.jit(jax.grad(loss))(w))


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["plain", "lanes", "second order"])
def test_lanes_that_stop_apart(transform):
    def loss(x, n, **options):
        step = lambda c: (c[0] + 1, jnp.sqrt(n - c[0]) * jnp.sin(c[1]))
        return loopkit.while_loop(lambda c: c[0] < n, step, (0.0, x), **options)[1] ** 2

    def found(**options):
        f = lambda x, n: loss(x, n, **options)
        if transform == "plain":
            return jax.jit(jax.grad(f))(0.7, 5.0)
        g = jax.grad(f) if transform == "lanes" else jax.grad(jax.grad(f))
        return jax.jit(jax.vmap(g))(jnp.array([0.3, 0.7, 1.1]), jnp.array([0.0, 5.0, 3.0]))

    assert_close(found(max_steps=20, checkpoints="all"), found(max_steps=5, checkpoints=2))
