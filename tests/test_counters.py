"""Carry leaves that follow from the number of the step: neither saved nor stored."""

import jax
import jax.numpy as jnp
import pytest

import loopkit
from derivatives import assert_close
from kinds import KINDS, loop
from loopkit import Plan, _jax
from loopkit._engine.derivative.reversal import reversal
from loopkit._engine.facts.bounds import find_counters
from loopkit._engine.loop import Active
from loopkit._engine.primitives import while_p
from loopkit._plans.costs import StepCosts
from loopkit._plans.planner import best_plan

XS = jnp.cos(jnp.arange(24.0)).reshape(12, 2)
PLANS = [None, "all", Plan(1), Plan(2, 3, "residuals"), Plan(3, 2, "carries")]


def step(i, j, x, xs):
    """The derivative reads both counters, as numbers and as indices."""
    x = jnp.sin(x * xs[j % 12]) + jnp.tanh(x / jnp.float64(1 + i * i))
    return i + 1, j - 3, x


def by_hand(xs, start, n):
    i, j, x = start, 40, xs[0]
    for _ in range(n):
        i, j, x = step(i, j, x, xs)
    return jnp.sum(x**2) * jnp.float64(i)


def looped(kind, plan):
    def f(xs, start=2, n=7):
        one, init = lambda _, carry: step(*carry, xs), (start, 40, xs[0])
        i, _, x = loop(kind, one, init, n, most=9, checkpoints=plan)
        return jnp.sum(x**2) * jnp.float64(i)

    return f


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind, plan):
    f = looped(kind, plan)
    assert_close(jax.jit(jax.value_and_grad(f))(XS), jax.value_and_grad(by_hand)(XS, 2, 7))


@pytest.mark.exhaustive
@pytest.mark.parametrize("plan", [None, "all", Plan(2, 3, "residuals")], ids=str)
def test_batches_and_second_derivatives(plan):
    """Counters that start apart, and lanes that stop apart."""
    starts, counts = jnp.asarray([2, 0, 5]), jnp.asarray([7, 0, 3])
    f = looped("while", plan)
    got = jax.jit(jax.vmap(jax.grad(f), (None, 0, 0)))(XS, starts, counts)
    each = [jax.grad(by_hand)(XS, s, int(n)) for s, n in zip(starts, counts, strict=True)]
    assert_close(got, jnp.stack(each))
    got = jax.jit(jax.vmap(jax.grad(looped("scan", plan)), (None, 0)))(XS, starts)
    assert_close(got, jnp.stack([jax.grad(by_hand)(XS, s, 7) for s in starts]))
    twice = lambda f: jax.jvp(jax.grad(f), (XS,), (jnp.sin(XS),))[1]
    assert_close(jax.jit(lambda: twice(f))(), twice(lambda xs: by_hand(xs, 2, 7)))


def the_loop(f, *args):
    (eqn,) = [e for e in jax.make_jaxpr(f)(*args).eqns if e.primitive is while_p]
    return eqn.params["loop"]


def counters(body, *init, batched=None):
    f = lambda *init: loopkit.scan(lambda c, _: (body(*c), None), init, None, 5)[0]
    f = f if batched is None else jax.vmap(f, batched)
    return find_counters(the_loop(f, *init))


def test_what_is_a_counter():
    one, x = jnp.int32(1), jnp.ones(())
    assert counters(lambda i, j, k: (i + 1, 2 + j, k - 3), one, one, one) == (1, 2, -3)
    assert counters(lambda i, j, k: (i * 2, i - j, j + k), one, one, one) == (None, None, None)
    assert counters(lambda i, x: (jnp.where(x > 0, i + 1, i), x + 1), one, x) == (None, None)
    assert counters(lambda i, x: (i - 1, x + 1), jnp.uint8(1), x) == (-1, None)
    ones = jnp.ones(3, jnp.int32)
    assert counters(lambda i, j: (i + 1, j + i), one, ones, batched=(None, 0))[0] == 1
    assert counters(lambda i, j: (i + 4, j + i), ones, one, batched=(0, None))[0] == 4
    assert counters(lambda i: (jnp.copy(i + 1),), one) == (1,)
    both = jnp.asarray([1, 2])
    assert counters(lambda i: (i + both,), jnp.zeros(2, int)) == (None,)


def test_numbers_wrap_around_as_in_the_loop():
    def f(x):
        body = lambda c, _: ((c[0] - 7, c[1] * jnp.sin(c[0].astype(float))), None)
        return loopkit.scan(body, (jnp.uint8(3), x), None, 60, checkpoints=3)[0][1]

    i, want = jnp.uint8(3), 1.0
    for _ in range(60):
        i, want = i - jnp.uint8(7), want * jnp.sin(i.astype(float))
    assert_close(jax.grad(f)(1.0), want)


@pytest.mark.slow
def test_nothing_is_kept_of_a_counter():
    def f(xs, plan):
        body = lambda c, _: ((c[0] + 1, c[1].at[c[0]].set(xs[c[0]] * c[0])), None)
        how = {"buffers": (False, True), "checkpoints": plan}
        return loopkit.scan(body, (0, jnp.zeros_like(xs)), None, 12, **how)[0][1]

    for plan in (None, 3, "all"):
        _, back = jax.vjp(lambda xs, plan=plan: f(xs, plan), XS)
        sizes = [v.size for v in jax.tree.leaves(back) if hasattr(v, "size")]
        assert all(size <= 1 for size in sizes if size != XS.size), plan


def test_what_replaying_reads_of_them_is_not_saved():
    found = the_loop(looped("while", None), XS)
    of_float = lambda types: tuple(map(_jax.is_differentiable, types))
    how = reversal(found, Active(of_float(found.const_types), of_float(found.carry_types), (), ()))
    assert sum(how.saved) == 3
    assert [str(t.dtype) for t in how.slot_types] == ["float64"]


def test_where_nothing_has_to_be_saved_no_step_is_run_to_reach_another():
    plan = best_plan(None, 1000, False, [StepCosts(0, 8)])
    assert plan.strategy == "every carry"
    assert plan.slot_bytes == plan.row_bytes == 0
    assert plan.evaluations() == (1000, 1000)
    assert best_plan(3, 1000, True, [StepCosts(0, 8)]).strategy == "every carry"
    assert best_plan(None, 1000, True, [StepCosts(0, 0)]).keeps_all
    factors = best_plan(None, 1000, True, [StepCosts(0, 8, factor_bytes=64)])
    assert factors.strategy == "every carry"
    assert factors.segment == 16
