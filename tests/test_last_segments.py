"""Plans that store the residuals of the last segments, whose steps then run once."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

import loopkit
from derivatives import assert_close, orders
from loopkit import Plan
from loopkit._plans.plot import picture

W = jnp.cos(jnp.arange(9.0)).reshape(3, 3)
LENGTHS = {12: [(2, 4, 1), (1, 4, 2), (11, 1, 1), (5, 1, 7), (1, 6, 1)], 11: [(2, 4, 1), (1, 3, 3)]}
"""For each number of steps, plans: (slots, segment, keeps_last)."""
PLANS = [(length, *plan) for length, plans in LENGTHS.items() for plan in plans]
WAYS = [
    pytest.param(*PLANS[-1], "rr", jnp.exp),
    *(
        pytest.param(*plan, second, jnp.linalg.cholesky, marks=pytest.mark.slow)
        for plan in PLANS
        for second in ("rr", "fr", "rf")
    ),
]


def plan(slots, segment, last):
    return Plan(slots, segment=segment, store="residuals", keeps_last=last)


def step(w, mixing):
    def taken(carry, x):
        i, h, m = carry
        h = jnp.tanh(
            mixing(jnp.eye(3) + 0.1 * jnp.outer(h, h)) @ (w @ h) + x * jnp.cos(i.astype(float))
        )
        m = m.at[i % 4].multiply(1 + 0.1 * h[0])
        return (i + 1, h, m), (h.sum() * x, i * 2)

    return taken


def loss(scan, length, mixing=jnp.linalg.cholesky, **how):
    def f(w, xs):
        first = jnp.int32(3), jnp.ones(3) * 0.3, jnp.ones(4)
        (i, h, m), (ys, _) = scan(step(w, mixing), first, xs, **how)
        return (h**2).sum() + jnp.sin(ys).sum() + (m**3).sum() * i.astype(float)

    return f, (W, jnp.linspace(0.2, 1.1, length))


@pytest.mark.slow
@pytest.mark.parametrize(("length", "slots", "segment", "last", "second", "mixing"), WAYS)
def test_derivatives_of_first_and_second_order(length, slots, segment, last, second, mixing):
    wanted, at = loss(lax.scan, length, mixing)
    got, _ = loss(loopkit.scan, length, mixing, checkpoints=plan(slots, segment, last))
    x, tree = ravel_pytree(at)
    of = lambda f: jax.jit(lambda x: orders(lambda x: f(*tree(x))[None], x, second))(x)
    assert_close(of(got), of(wanted))


@pytest.mark.exhaustive
@pytest.mark.parametrize("unroll", [1, 2])
@pytest.mark.parametrize("jit", [False, True])
def test_lanes_of_vmap(unroll, jit):
    how = {"checkpoints": plan(2, 4, 1), "unroll": unroll}
    many = lambda xs: jnp.stack([xs, 2 * xs, xs**2])
    for axes in [(None, 0), (0, 0), (0, None)]:
        results = []
        for scan, options in [(lax.scan, {}), (loopkit.scan, how)]:
            f, (w, xs) = loss(scan, 12, **options)
            at = (w if axes[0] is None else many(w)), (xs if axes[1] is None else many(xs))
            both = lambda w, xs, f=f: (jax.grad(f, (0, 1))(w, xs), jax.jacrev(jax.grad(f))(w, xs))
            mapped = jax.vmap(both, axes)
            results.append((jax.jit(mapped) if jit else mapped)(*at))
        assert_close(*results)


def test_steps_of_the_last_segments_run_once():
    how = {"checkpoints": plan(2, 4, 1)}
    f = lambda x: loopkit.scan(lambda x, _: (jnp.exp(jnp.sin(x)), None), x, None, 12, **how)[0]
    explained = loopkit.explain(f, 0.5).plan
    assert explained.evaluations() == (12, 8)
    assert explained.stored == (
        "2 carries and the residuals of the last 4 steps, then the residuals of 4 steps at a time"
    )


@pytest.mark.parametrize("kind", ["scan", "while"])
def test_nested(kind):
    def f(x, loops, **how):
        def one(x, k):
            if kind == "scan":
                return loops.scan(lambda y, _: (jnp.sin(y * x), None), x + k, None, 3)[0], x * k
            go = lambda c: (c[0] < 3) & (c[1] < 5)
            body = lambda c: (c[0] + 1, c[1] * 1.2 * jnp.cos(x))
            return loopkit.while_loop(go, body, (0, x + k), max_steps=3)[1], x * k

        end, ys = loops.scan(one, x, jnp.linspace(0.1, 0.6, 7), **how)
        return end + (ys**2).sum()

    wanted = lambda x: f(x, lax)
    got = lambda x: f(x, loopkit, checkpoints=plan(2, 2, 2))
    both = lambda f: jax.jit(lambda x: (jax.grad(f)(x), jax.hessian(f)(x)))(0.4)
    assert_close(both(got), both(wanted))


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["150 kB", "250 kB", "400 kB", "600 kB"])
def test_a_budget_between_two_plans_is_used(memory):
    """More bytes keep more segments, and the compiler needs no more than they say."""
    x, xs = jnp.linspace(0, 1, 1000), jnp.linspace(0, 1, 100)

    def f(x, **how):
        def one(x, k):
            h = jnp.sin(x * k)
            return h * jnp.exp(jnp.cos(h[::-1])), None

        return loopkit.scan(one, x, xs, **how)[0].sum()

    of = lambda **how: jax.jit(jax.grad(lambda x: f(x, **how))).lower(x).compile()
    least = of(checkpoints=1).memory_analysis().temp_size_in_bytes
    count = int(memory.split()[0]) * 1000
    found = loopkit.explain(lambda x: f(x, memory=memory), x).plan
    assert found.peak_bytes > 0.7 * count or found.keeps_all
    assert of(memory=memory).memory_analysis().temp_size_in_bytes <= count + least
    assert_close(of(memory=memory)(x), of(checkpoints="all")(x))


def test_what_keeps_no_last_segments():
    f = lambda x, **how: loopkit.scan(lambda x, _: (jnp.sin(x), None), x, None, 12, **how)[0]
    on_the_host = Plan(2, segment=4, store="residuals", keeps_last=1, host=True)
    for bad in (Plan(2, segment=4, keeps_last=1), plan(1, 4, 1), on_the_host):
        with pytest.raises(
            ValueError, match=r"checkpoints` can be a plan that keeps the last segm"
        ):
            jax.grad(lambda x, bad=bad: f(x, checkpoints=bad))(0.5)
    until = {"max_steps": 12, "checkpoints": plan(2, 4, 1)}
    with pytest.raises(ValueError, match=r"Leave `keeps_last` out, or pass `memory` instead"):
        jax.grad(lambda x: loopkit.while_loop(lambda x: x < 3, lambda x: x * 2, x, **until))(0.5)
    with pytest.raises(ValueError, match=r"Plan: `keeps_last` must be an int >= 0 \(segments\)"):
        Plan(2, keeps_last=-1)


def test_a_picture_of_the_plan():
    drawn = picture(replace(plan(2, 4, 1), bound=11, exact=True), 11)
    ahead = [("forward", 0, 0, 4), ("forward", 4, 4, 8), ("forward", 8, 8, 11)]
    assert drawn.stretches[:3] == ahead
    assert drawn.stretches[3:5] == [("reversed", 11, 11, 8), ("replayed", 14, 4, 8)]
    assert [kind for kind, *_ in drawn.stretches[5:]] == ["reversed", "replayed", "reversed"]
    assert drawn.saves == [(0, 0), (4, 4)]
