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
from turns import in_turn, later


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "transform"),
    [
        (root, "jvp"),
        (root, "reverse over reverse"),
        (reciprocal, "grad"),
        *(later(*case) for case in ((root, "grad"), (root, "hessian"))),
        later(reciprocal, "hessian"),
    ],
)
def test_derivative_of_vmap(body, transform):
    """The cotangent of the shared w is a sum over lanes, which one NaN would spoil."""
    parameters = jnp.concatenate([NS, XS, jnp.asarray([0.8])])

    def total(args):
        each = jax.vmap(lambda n, x: loop(body, n, x, args[-1], 2))(args[:4], args[4:8])
        return jnp.sum(jnp.sin(each))

    def reference(args):
        pairs = zip(NS, args[:4], args[4:8], strict=True)
        each = [unrolled(body, n, x, args[-1], int(steps)) for steps, n, x in pairs]
        return jnp.sum(jnp.sin(jnp.stack(each)))

    take = {
        "jvp": lambda f: lambda args: jax.jvp(f, (args,), (jnp.cos(args),))[1],
        "grad": jax.grad,
        "hessian": jax.hessian,
        "reverse over reverse": lambda f: jax.jacrev(jax.grad(f)),
    }[transform]
    assert_close(jax.jit(take(total))(parameters), take(reference)(parameters))


@pytest.mark.slow
def test_lanes_that_read_some_slices_in_common():
    """Lanes read some slices in common, and others of their own."""
    common = jnp.linspace(0.1, 0.5, 6)

    def f(x, own, stop):
        step = lambda x, rows: (x + 10 * jnp.sqrt(1.5 - x) * rows[0] * rows[1], None)
        stops = lambda x, _: x > stop
        return loopkit.scan(step, x, (own, common), until=stops, checkpoints="all")[0]

    args = (
        jnp.asarray([0.1, 0.6, 1.2]),
        jnp.ones((3, 6)) * jnp.arange(1.0, 7.0),
        jnp.asarray([0.9, 1, 1.2]),
    )
    gradient = jax.grad(f, (0, 1))
    each = [gradient(*lane) for lane in zip(*args, strict=True)]
    got = jax.jit(jax.vmap(gradient))(*args)
    assert_close(got, jax.tree.map(lambda *lanes: jnp.stack(lanes), *each))


ORDERS = ["first inside", "second inside"]


@pytest.mark.parametrize(
    ("sliced", "order", "transform"), in_turn([False, True], ORDERS, ["jvp", "grad", "hessian"])
)
def test_lanes_of_two_kinds(transform, order, sliced):
    """The predicate reads two constants, each of one vmap alone; half of the lanes take no step,
    at which the body is infinite.
    """

    def steps_left(a, b, step):
        return a - b - step

    def body(a, b, step, x, w, row):
        return x + row * w * jnp.sqrt(steps_left(a, b, step)) * jnp.sin(x)

    rows = jnp.asarray([0.5, 1.5, 0.25, 2.0])

    def f(a, b, x, w):
        if sliced:
            (_, x), _ = loopkit.scan(
                lambda c, row: ((c[0] + 1, body(a, b, c[0], c[1], w, row)), None),
                (0.0, x),
                rows,
                until=lambda c, _: steps_left(a, b, c[0]) <= 0,
                checkpoints=2,
            )
            return x
        return loopkit.while_loop(
            lambda c: steps_left(a, b, c[0]) > 0,
            lambda c: (c[0] + 1, body(a, b, c[0], c[1], w, 1.0)),
            (0.0, x),
            checkpoints=2,
        )[1]

    def reference(a, b, x, w):
        steps = int(steps_left(a, b, 0))
        for step in range(max(steps, 0)):
            x = body(a, b, float(step), x, w, rows[step] if sliced else 1.0)
        return jnp.asarray(x)

    take = {
        "jvp": lambda f: (
            lambda a, b, x, w: jax.jvp(lambda x, w: f(a, b, x, w), (x, w), (0.3, 1.0))[1]
        ),
        "grad": lambda f: lambda a, b, x, w: jnp.stack(jax.grad(f, (2, 3))(a, b, x, w)),
        "hessian": lambda f: lambda a, b, x, w: jax.hessian(lambda w: f(a, b, x, w))(w),
    }[transform]
    first, second = jnp.asarray([3.0, 0.0, 4.0]), jnp.asarray([0.0, 3.0, 5.0, 2.0])
    if sliced:  # it takes a step at least
        first, second = jnp.asarray([3.0, 5.0]), jnp.asarray([2.0, 1.0])
    got = take(f)
    axes = [(0, None, None, None), (None, 0, None, None)]
    for ins in axes if order == "first inside" else axes[::-1]:
        got = jax.vmap(got, ins)
    got = jax.jit(got)(first, second, 0.4, 0.8)
    if order == "first inside":
        got = jnp.swapaxes(got, 0, 1)
    with eagerly():
        wanted = [[take(reference)(a, b, 0.4, 0.8) for b in second] for a in first]
    assert_close(got, np.asarray(wanted))


@pytest.mark.slow
@pytest.mark.parametrize("transform", [jax.grad, jax.hessian])
def test_a_constant_of_the_inner_lanes_alone_that_keeps_them_from_any_step(transform):
    """The body is infinite at that constant, and no other lane of the same axis has another one."""

    def f(x, c):
        go = lambda s: (s[0] < 3) & (c > 0) & (s[1] < 5)  # lanes of x stop apart as well
        step = lambda s: (s[0] + 1, jnp.sin(s[1] / c * x))
        return loopkit.while_loop(go, step, (0, x), max_steps=4, checkpoints=2)[1]

    def unrolled(x, c):
        start = x
        for _ in range(3 if c > 0 else 0):
            x = jnp.sin(x / c * start)
        return x

    xs, cs = jnp.array([0.3, 0.7]), jnp.array([2.0, 0.0, 1.5])
    got = jax.vmap(jax.vmap(transform(f), (None, 0)), (0, None))(xs, cs)
    wanted = [[transform(unrolled)(x, c) for c in cs] for x in xs]
    assert_close(got, jnp.asarray(wanted))


@pytest.mark.parametrize("transform", ["value", "grad", "hessian"])
def test_lanes_that_would_overflow(transform):
    """The shortest lane grows so fast that the steps of the longest would take it to infinity."""

    def squared(limit, x):
        return loopkit.while_loop(lambda x: x < limit, lambda x: x * x, x, checkpoints=1)

    take = {"value": lambda f, _: f, "grad": jax.grad, "hessian": jax.hessian}[transform]
    limits, xs = jnp.asarray([1e3, 1e3, 2.0]), jnp.asarray([1e3 - 1, 1.0001, 3.0])
    got = jax.vmap(take(squared, 1))(limits, xs)
    powers = [2.0, 2.0**17, 1.0]
    wanted = {
        "value": [x**p for x, p in zip(xs, powers, strict=True)],
        "grad": [p * x ** (p - 1) for x, p in zip(xs, powers, strict=True)],
        "hessian": [p * (p - 1) * x ** (p - 2) for x, p in zip(xs, powers, strict=True)],
    }[transform]
    # A power of 2**17 makes as many times as much of a rounding of x.
    np.testing.assert_allclose(got, jnp.stack(wanted), rtol=1e-8)


# ---------------------------------------------------------------- without lanes


FEW = ["value", "jvp", "grad", "hessian"]


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
