"""Lanes that have stopped, and steps that are not taken, cannot put NaN or infinity anywhere.

The bodies here are fine for as long as their lane runs. One step further, a value or a derivative
is infinite, and zero times infinity is NaN.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from derivatives import assert_close
from problems import CHECKPOINTS
from trials.in_numpy import eagerly
from turns import in_turn


def root(step, n, x, w):
    return x + jnp.sqrt(n - step) * w * x


def reciprocal(step, n, x, w):
    return x * jnp.cos(w / (n - step))


def logarithm(step, n, x, w):
    return x + w * jnp.log(n - step) * jnp.sin(x)


def norm(step, n, x, w):
    return x + w * jnp.linalg.norm(jnp.stack([n - step, 0.0 * x]))


def power(step, n, x, w):
    return x * w ** (n - step) + (n - step) ** w / 8


BODIES = [root, reciprocal, logarithm, norm, power]
NS = np.asarray([2.0, 0.0, 4.0, 1.0])
XS = np.asarray([0.3, 0.7, -0.4, 0.9])


def loop(body, n, x, w, checkpoints=None, bound=None):
    """n steps of the body, which reads n - step > 0; n, x and w are all differentiated."""

    def advance(carry):
        step, x = carry
        return step + 1.0, body(step, n, x, w)

    carry = loopkit.while_loop(
        lambda carry: carry[0] < n, advance, (0.0, x), checkpoints=checkpoints, max_steps=bound
    )
    return carry[1]


def unrolled(body, n, x, w, steps):
    for step in range(steps):
        x = body(float(step), n, x, w)
    return jnp.asarray(x)


def transformed(f, transform):
    def at(n, x, w):
        args = jnp.stack([n, x, w])
        match transform:
            case "value":
                return f(args)
            case "jvp":
                return jax.jvp(f, (args,), (jnp.asarray([0.3, 1.0, -0.5]),))[1]
            case "linearize":
                return jax.linearize(f, args)[1](jnp.asarray([0.3, 1.0, -0.5]))
            case "grad":
                return jax.grad(f)(args)
            case "hessian":
                return jax.hessian(f)(args)
            case "reverse over forward":
                return jax.jacrev(jax.jacfwd(f))(args)
            case "reverse over reverse":
                return jax.jacrev(jax.grad(f))(args)

    return at


def one_by_one(body, transform, w):
    each = []
    for n, x in zip(NS, XS, strict=True):
        f = lambda args, n=n: unrolled(body, *args, int(n))
        with eagerly():
            each.append(np.asarray(transformed(f, transform)(n, x, w)))
    return np.stack(each)


def check_lanes(body, transform, checkpoints, bound=None):
    f = lambda args: loop(body, *args, checkpoints, bound)
    got = jax.jit(jax.vmap(transformed(f, transform), (0, 0, None)))(NS, XS, 0.8)
    assert_close(got, one_by_one(body, transform, 0.8))


EACH = ["value", "jvp", "linearize", "grad", "hessian"]


@pytest.mark.parametrize(("body", "transform"), in_turn(BODIES, EACH))
def test_lanes(body, transform):
    check_lanes(body, transform, None)


@pytest.mark.exhaustive
@pytest.mark.parametrize("transform", ["reverse over forward", "reverse over reverse"])
def test_lanes_in_other_orders(transform):
    check_lanes(root, transform, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("transform", "checkpoints"), in_turn(["grad", "hessian"], CHECKPOINTS))
def test_lanes_with_checkpoints(transform, checkpoints):
    check_lanes(root, transform, checkpoints, bound=6)


def test_lanes_that_count_in_integers():
    """The root is zero at the value that a stopped lane's counter would reach."""

    def f(n, x):
        def advance(c):
            return c[0] + 1, c[1] + jnp.sqrt(x * (n - c[0]).astype(float)) * jnp.sin(c[1])

        return loopkit.while_loop(
            lambda c: c[0] < n, advance, (0, x), checkpoints="all", max_steps=5
        )[1]

    def unrolled(n, x):
        y = x
        for i in range(n):
            y = y + jnp.sqrt(x * (n - i)) * jnp.sin(y)
        return y

    ns, xs = np.asarray([2, 4, 1]), np.asarray([0.3, 0.7, 0.9])
    wanted = [jax.grad(unrolled, 1)(int(n), x) for n, x in zip(ns, xs, strict=True)]
    assert_close(jax.jit(jax.vmap(jax.grad(f, 1)))(ns, xs), jnp.stack(wanted))


# ---------------------------------------------------------------- without lanes


FEW = ["value", "jvp", "grad", "hessian"]


@pytest.mark.slow
@pytest.mark.parametrize(("transform", "checkpoints"), in_turn(FEW, CHECKPOINTS))
def test_no_step_beyond_the_last(transform, checkpoints):
    """One lane: no step is evaluated that the loop does not take, up to the bound or otherwise."""
    f = lambda args: loop(root, *args, checkpoints, 8)
    got = jax.jit(transformed(f, transform))(3.0, 0.3, 0.8)
    wanted = transformed(lambda args: unrolled(root, *args, 3), transform)(3.0, 0.3, 0.8)
    assert_close(got, wanted)


@pytest.mark.parametrize(("checkpoints", "transform"), in_turn(CHECKPOINTS, FEW))
def test_scan_with_until(checkpoints, transform):
    """No row is evaluated past the stop, in one lane or several."""

    def stopping(n, x, w):
        def f(args):
            n, x, w = args

            def body(carry, _):
                step, x = carry
                return (step + 1.0, root(step, n, x, w)), x * jnp.sqrt(n - step)

            (_, x), ys = loopkit.scan(
                body,
                (0.0, x),
                length=6,
                until=lambda carry, _: carry[0] >= n,
                checkpoints=checkpoints,
            )
            return x + jnp.sum(ys)

        return transformed(f, transform)(n, x, w)

    def reference(n, x, w):
        def f(args):
            total, x = 0.0, args[1]
            for step in range(int(n)):
                total = total + x * jnp.sqrt(args[0] - step)
                x = root(float(step), args[0], x, args[2])
            return x + total

        return transformed(f, transform)(n, x, w)

    ns, xs = np.asarray([2.0, 1.0, 4.0]), XS[:3]
    got = jax.jit(jax.vmap(stopping, (0, 0, None)))(ns, xs, 0.8)
    assert_close(got, jnp.stack([reference(n, x, 0.8) for n, x in zip(ns, xs, strict=True)]))


# ---------------------------------------------------------------- what must not be hidden


@pytest.mark.slow
def test_nan_of_one_lane_stays_there():
    """A lane that is NaN in earnest says so, and the others do not."""
    xs = jnp.asarray([0.3, jnp.nan, -0.4, 0.9])
    grads = jax.vmap(jax.grad(lambda n, x: loop(root, n, x, 0.8, 2), 1))(jnp.ones(4) * 3, xs)
    assert jnp.isnan(grads).tolist() == [False, False, False, False]  # x enters linearly
    values = jax.vmap(lambda n, x: loop(root, n, x, 0.8, 2))(jnp.ones(4) * 3, xs)
    assert jnp.isnan(values).tolist() == [False, True, False, False]
    sines = jax.vmap(jax.grad(lambda x: loop(logarithm, 3.0, x, 0.8, 2)))(xs)
    assert jnp.isnan(sines).tolist() == [False, True, False, False]


def test_an_infinite_derivative_is_reported():
    def f(x):
        return loopkit.while_loop(
            lambda c: c[0] < 1, lambda c: (c[0] + 1, jnp.sqrt(c[1])), (0, x), checkpoints=1
        )[1]

    assert jnp.isinf(jax.grad(f)(0.0))


@pytest.mark.slow
def test_debug_nans():
    """No NaN is made on the way either, where jax looks for it."""
    with jax.debug_nans(True):
        check_lanes(root, "grad", 2)


@pytest.mark.slow
def test_inner_loops_of_stopped_lanes():
    """The inner loop's number of steps depends on the lane, whose outer loop has stopped."""

    def f(n, x, w, inner):
        def body(carry):
            step, x = carry
            return step + 1.0, inner(n - step, x, w)

        return body

    def inner_loop(m, x, w):
        return loop(root, m, x, w, 1)

    def value(args, n=None):
        body = f(args[0], args[1], args[2], inner_loop)
        return loopkit.while_loop(lambda c: c[0] < args[0], body, (0.0, args[1]), checkpoints=2)[1]

    def reference(args, n):
        carry = (0.0, args[1])
        for outer in range(n):
            inner = lambda m, x, w, steps=n - outer: unrolled(root, m, x, w, steps)
            carry = f(args[0], args[1], args[2], inner)(carry)
        return jnp.asarray(carry[1])

    ns, xs = np.asarray([2.0, 0.0, 3.0]), XS[:3]
    args = jnp.stack([ns, xs, jnp.full(3, 0.4)], axis=1)
    got = jax.jit(jax.vmap(jax.grad(value)))(args)
    wanted = [jax.grad(reference)(row, int(n)) for row, n in zip(args, ns, strict=True)]
    assert_close(got, jnp.stack(wanted))


def test_a_masked_scan_leaks():
    """The usual mask instead of a loop leaks NaNs: the bodies above do test something."""

    def masked(w):
        def step(x, step):
            new = root(step, NS[0], x, w)
            return jnp.where(step < NS[0], new, x), None

        return lax.scan(step, 0.3, jnp.arange(5.0))[0]

    assert jnp.isnan(jax.grad(masked)(0.8))
