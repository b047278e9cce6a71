"""No NaN goes from one lane to another through what lanes share, or through what some have alone.

A lane that has stopped meets values there at which its body is infinite.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from derivatives import assert_close
from test_nan_safety import NS, XS, loop, reciprocal, root, unrolled
from trials.in_numpy import eagerly
from turns import in_turn, later


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


@pytest.mark.slow
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
