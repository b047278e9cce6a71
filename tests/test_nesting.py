"""Loops in other control flow and in loops, and jax.checkpoint on either side."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import loopkit
from derivatives import assert_close
from problems import CHECKPOINTS
from tolerances import assert_near


def loop(x, w, checkpoints=2):
    """Three to five steps, as x requires."""

    def body(carry):
        step, x = carry
        return step + 1, x + w * jnp.cos(x)

    cond = lambda carry: (carry[1] < 1.2) & (carry[0] < 5)
    return loopkit.while_loop(cond, body, (0, x), checkpoints=checkpoints)[1]


def unrolled(x, w):
    """Compute the result by selection, so that it can stand wherever the loop can."""
    for _ in range(5):
        x = jnp.where(x < 1.2, x + w * jnp.cos(x), x)
    return x


def stopping_scan(x, w):
    body = lambda x, _: (x + w * jnp.cos(x), None)
    x, _ = loopkit.scan(body, x, length=5, until=lambda x, _: x >= 1.2, checkpoints=2)
    return x


XS = jnp.asarray([0.4, -0.2, 0.7])


def in_scan(loop):
    def f(x, w):
        x, ys = lax.scan(lambda x, y: (loop(x * y, w), x * y), x, XS)
        return x + jnp.sum(ys)

    return f


def in_scan_as_ys(loop):
    return lambda x, w: jnp.sum(lax.scan(lambda w, x: (w, loop(x, w)), w, XS + x)[1])


def in_map(loop):
    return lambda x, w: jnp.sum(lax.map(lambda y: loop(y, w), XS * x))


def in_cond(loop):
    other = lambda x, w: x * w
    return lambda x, w: lax.cond(x < 0.5, loop, other, x, w) * x


def in_switch(loop):
    branches = [lambda x, w: x * w, loop, lambda x, w: jnp.sin(x)]
    return lambda x, w: lax.switch(jnp.int32(x * 3), branches, x, w)


def in_jit(loop):
    return lambda x, w: jax.jit(lambda x: jax.jit(loop)(x, w) * x)(x)


def in_remat(loop):
    return lambda x, w: jnp.sin(jax.checkpoint(loop)(x, w)) * x


def in_remat_in_scan(loop):
    body = jax.checkpoint(lambda x, y, w: jnp.sin(loop(x * y, w)))
    return lambda x, w: lax.scan(lambda x, y: (body(x, y, w), None), x, XS)[0]


def in_vmap_in_scan(loop):
    def f(x, w):
        step = lambda xs, w: (jax.vmap(loop, (0, None))(xs, w) / 2, None)
        return jnp.sum(lax.scan(step, XS * x, jnp.stack([w, w / 2]))[0])

    return f


def twice(loop):
    return lambda x, w: loop(loop(x, w) / 3, loop(w, x))


CONTEXTS = [
    *[in_scan, in_scan_as_ys, in_map, in_cond, in_switch, in_jit],
    *[in_remat, in_remat_in_scan, in_vmap_in_scan, twice],
]


def derivatives(f):
    """Value, forward and reverse mode, and second order, as one program."""

    def both(x, w):
        _, pushed = jax.jvp(f, (x, w), (1.0, -0.7))
        value, grads = jax.value_and_grad(f, (0, 1))(x, w)
        curved = jax.jvp(jax.grad(f, (0, 1)), (x, w), (0.3, 1.0))[1]
        return {"value": value, "pushed": pushed, "grads": grads, "curved": curved}

    return jax.jit(both)


@pytest.mark.slow
@pytest.mark.parametrize("context", CONTEXTS, ids=lambda context: context.__name__)
def test_loop_inside(context):
    got = derivatives(context(loop))(0.4, 0.7)
    assert_close(got, derivatives(context(unrolled))(0.4, 0.7))


@pytest.mark.exhaustive
@pytest.mark.parametrize("context", [in_cond, in_remat_in_scan, in_vmap_in_scan])
def test_stopping_scan_inside(context):
    got = derivatives(context(stopping_scan))(0.4, 0.7)
    assert_close(got, derivatives(context(unrolled))(0.4, 0.7))


@pytest.mark.slow
@pytest.mark.parametrize("context", [in_scan, in_cond, in_remat], ids=lambda f: f.__name__)
def test_loop_inside_without_jit(context):
    got = jax.grad(context(loop), (0, 1))(0.4, 0.7)
    assert_close(got, jax.grad(context(unrolled), (0, 1))(0.4, 0.7))


@pytest.mark.exhaustive
@pytest.mark.parametrize("context", [in_scan, in_remat_in_scan], ids=lambda f: f.__name__)
def test_reverse_over_reverse_of_a_loop_inside(context):
    def curved(loop):
        f = context(loop)
        return jax.jit(jax.grad(lambda x, w: jnp.sin(jax.grad(f)(x, w)), (0, 1)))

    assert_close(curved(loop)(0.4, 0.7), curved(unrolled)(0.4, 0.7))


def test_inside_a_while_loop_of_lax():
    """A while loop of lax, which has no reverse mode, may hold a gradient of loopkit's loop."""

    def f(loop):
        def outer(x, w):
            body = lambda carry: (carry[0] + 1, loop(carry[1] / 2, w))
            return lax.while_loop(lambda carry: carry[0] < 3, body, (0, x))[1]

        return lambda x, w: (outer(x, w), jax.jvp(outer, (x, w), (1.0, -0.7))[1])

    assert_close(jax.jit(f(loop))(0.4, 0.7), jax.jit(f(unrolled))(0.4, 0.7))


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_three_deep(checkpoints):
    def nest(scan):
        def f(x, w):
            inner = lambda x, y: (jnp.sin(x * y + w), None)
            middle = lambda x, y: scan(inner, x, XS * y)
            outer = lambda x, y: scan(middle, x, XS + y)
            return scan(outer, x, XS)[0]

        return jax.jit(jax.value_and_grad(f, (0, 1)))(0.4, 0.7)

    assert_close(nest(ft.partial(loopkit.scan, checkpoints=checkpoints)), nest(lax.scan))


# ---------------------------------------------------------------- jax.checkpoint


POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("kept"),
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("place", ["around", "inside"])
def test_policies(place, policy):
    matrix = jnp.asarray([[0.4, -0.3], [0.2, 0.5]])
    wrap = ft.partial(jax.checkpoint, policy=POLICIES[policy])
    outer, inner = (wrap, lambda f: f) if place == "around" else (lambda f: f, wrap)

    def grads(loop):
        def f(x, matrix):
            body = lambda x: jnp.sin(checkpoint_name(matrix @ x, "kept")) + x
            step = lambda carry: (carry[0] + 1, inner(body)(carry[1]))
            return jnp.sum(jnp.sin(loop(lambda c: c[0] < 4, step, (0, x))[1]))

        return jax.jit(jax.value_and_grad(outer(f), (0, 1)))(jnp.asarray([0.3, 0.9]), matrix)

    def unrolled(cond, body, carry):
        for _ in range(4):
            carry = body(carry)
        return carry

    looped = ft.partial(loopkit.while_loop, checkpoints=2)
    assert_close(grads(looped), grads(unrolled))


def test_remat_keeps_nothing_of_the_loop():
    """Inside jax.checkpoint the loop's own checkpoints are not saved either."""

    def saved(f):
        shapes = jax.eval_shape(lambda x: jax.vjp(f, x)[1], jnp.ones(100))
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    f = lambda x: jnp.sum(loop_of_vectors(x))

    def loop_of_vectors(x):
        step = lambda carry: (carry[0] + 1, jnp.sin(carry[1]))
        return loopkit.while_loop(lambda c: c[0] < 9, step, (0, x), checkpoints=4)[1]

    assert saved(jax.checkpoint(f)) <= 110
    assert saved(f) >= 200


@pytest.mark.exhaustive
@pytest.mark.parametrize("inner", ["fori_loop", "while_loop", "checkpoint"])
def test_the_result_of_an_inner_loop_that_nobody_asks_for(inner):
    """A result that nobody asks for is left out, although the residuals of both are stored."""

    def step(p, a, b):
        once = lambda c: (jnp.sin(c[0]) * p, c[1] * c[0])
        counted = lambda c: loopkit.fori_loop(0, 2, lambda _, c: once(c), c)
        if inner != "while_loop":
            return (jax.checkpoint(counted) if inner == "checkpoint" else counted)((a, b))
        body = lambda c: (c[0] + 1, once(c[1]))
        return loopkit.while_loop(lambda c: c[0] < 2, body, (0, (a, b)), max_steps=2)[1]

    def f(p, x):
        body = lambda c, _: (step(p, *c), c[0] * p)
        how = {"until": lambda c, _: c[0] > 9, "checkpoints": "all"}
        (a, _), ys = loopkit.scan(body, (x, x), length=3, **how)
        return a + jnp.sum(ys)

    def unrolled(p, x):
        total = 0.0
        for _ in range(3):
            total, x = total + x * p, jnp.sin(jnp.sin(x) * p) * p
        return x + total

    gradients = jax.value_and_grad(f, (0, 1)), jax.value_and_grad(unrolled, (0, 1))
    along = [jax.jvp(g, (0.4, 0.7), (1.0, 0.3)) for g in gradients]
    assert_close(*along)


@pytest.mark.exhaustive
@pytest.mark.parametrize("nest", ["loop", "gradient"])
def test_second_derivatives_of_rules_in_nests_outside_jit(nest):
    def f(loops, w, x):
        step = lambda c, _: (c * w + jax.nn.relu(c), c)
        run = lambda c: loops.scan(step, c, None, 3)[0]
        slope = lambda c: c - 0.1 * jax.grad(run)(c)
        return loops.scan(lambda c, _: ((run if nest == "loop" else slope)(c), None), x, None, 2)[0]

    def derivatives(loops):
        at = lambda w, x: f(loops, w, x)
        mixed = jax.grad(lambda x: jax.grad(at)(0.7, x))(0.3)
        return mixed, *jax.tree.leaves(jax.hessian(at, (0, 1))(0.7, 0.3))

    assert_near(derivatives(loopkit), derivatives(lax))
