"""Functions with derivative rules of their own in the body of a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.experimental import io_callback

import loopkit
from derivatives import assert_close
from loopkit import _jax
from problems import CHECKPOINTS


def steps(body, x, *, count=4, checkpoints=2, loop=None):
    """x <- body(x), `count` times."""
    return (loop or loopkit.while_loop)(
        lambda carry: carry[0] < count,
        lambda carry: (carry[0] + 1, body(carry[1])),
        (0, x),
        **({} if loop else {"checkpoints": checkpoints, "max_steps": 8}),
    )[1]


def unrolled(body, x, *, count=4):
    for _ in range(count):
        x = body(x)
    return x


# ---------------------------------------------------------------- custom_vjp


@jax.custom_vjp
def clipped(x, w):
    """A derivative that its value does not have: the cotangent is halved and bounded."""
    return jnp.sin(x) * w


def clipped_fwd(x, w):
    return clipped(x, w), (x, w)


def clipped_bwd(saved, out_bar):
    x, w = saved
    return jnp.clip(jnp.cos(x) * w * out_bar / 2, -0.4, 0.4), jnp.sin(x) * out_bar * 3


clipped.defvjp(clipped_fwd, clipped_bwd)


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_gradient_of_custom_vjp(checkpoints):
    f = lambda x, w: steps(lambda x: clipped(x, w) + x / 3, x, checkpoints=checkpoints)
    wanted = lambda x, w: unrolled(lambda x: clipped(x, w) + x / 3, x)
    got = jax.jit(jax.value_and_grad(f, (0, 1)))(0.7, 1.2)
    assert_close(got, jax.value_and_grad(wanted, (0, 1))(0.7, 1.2))


@pytest.mark.exhaustive
def test_custom_vjp_in_lanes():
    ns, xs = np.asarray([2, 0, 4]), jnp.asarray([0.7, 0.2, -0.5])
    f = lambda n, x, w: steps(lambda x: clipped(x, w) + x / 3, x, count=n)
    got = jax.vmap(jax.grad(f, (1, 2)), (0, 0, None))(ns, xs, 1.2)
    each = [
        jax.grad(lambda x, w, n=n: unrolled(lambda x: clipped(x, w) + x / 3, x, count=n), (0, 1))(
            x, 1.2
        )
        for n, x in zip(ns, xs, strict=True)
    ]
    assert_close(got, tuple(map(jnp.stack, zip(*each, strict=True))))
    total = jax.grad(lambda w: jnp.sum(jax.vmap(f, (0, 0, None))(ns, xs, w)))(1.2)
    assert_close(total, sum(w_bar for _, w_bar in each))


def test_custom_vjp_in_scan_with_until():
    def f(scan_or_not):
        return jax.grad(scan_or_not, (0, 1))(0.7, 1.2)

    def stopping(x, w):
        body = lambda x, _: (clipped(x, w) + x / 3, x)
        x, ys = loopkit.scan(body, x, length=6, until=lambda x, y: y < 1.0)
        return x + jnp.sum(ys)

    def one_step(x, w):
        return clipped(x, w) + x / 3 + x

    assert_close(f(stopping), f(one_step))


def test_custom_vjp_has_no_forward_mode():
    f = lambda x: steps(lambda x: clipped(x, 1.2), x)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(f, (0.7,), (1.0,))


@jax.custom_vjp
def doubled(x, w):
    """A rule that is linear in the cotangent, as that of a function should be."""
    return jnp.sin(x) * w


doubled.defvjp(
    lambda x, w: (doubled(x, w), (x, w)),
    lambda saved, out_bar: (
        2 * jnp.cos(saved[0]) * saved[1] * out_bar,
        jnp.sin(saved[0]) * out_bar,
    ),
)


def second_derivative(f):
    return jax.jit(jax.grad(lambda x, w: jnp.sin(jax.grad(f)(x, w)), (0, 1)))(0.4, 0.9)


def test_custom_vjp_is_differentiated_again():
    """Its rule is an ordinary function: reverse over reverse differentiates that."""
    f = lambda x, w: steps(lambda x: doubled(x, w) + x / 3, x)
    wanted = lambda x, w: unrolled(lambda x: doubled(x, w) + x / 3, x)
    assert_close(second_derivative(f), second_derivative(wanted))


def test_nondiff_arguments():
    def power(p, x):
        return x**p

    power = jax.custom_vjp(power, nondiff_argnums=(0,))
    power.defvjp(lambda p, x: (x**p, x), lambda p, x, out_bar: (10 * p * x * out_bar,))
    body = lambda x: power(2, x) / 3
    assert_close(
        jax.grad(lambda x: steps(body, x))(0.7), jax.grad(lambda x: unrolled(body, x))(0.7)
    )


def test_loop_inside_custom_vjp():
    """The primal holds a loop and the rule another, as in an implicit function."""

    def halvings(a, x):
        return loopkit.while_loop(lambda x: x * x > a, lambda x: x * 0.9, x)

    @jax.custom_vjp
    def root(a):
        newton = lambda c: ((c[0] + a / c[0]) / 2, c[0])
        far = lambda c: jnp.abs(c[0] - c[1]) > 1e-13 * c[0]
        return loopkit.while_loop(far, newton, (halvings(a, 10.0), jnp.inf))[0]

    root.defvjp(lambda a: (root(a), root(a)), lambda x, bar: (bar / (2 * x),))
    assert_close(jax.jit(jax.value_and_grad(root))(2.0), (2.0**0.5, 0.125**0.5), 1e-12)


# ---------------------------------------------------------------- custom_jvp


@jax.custom_jvp
def bent(x, w):
    return jnp.sin(x) * w


@bent.defjvp
def bent_jvp(primals, tangents):
    (x, w), (x_dot, w_dot) = primals, tangents
    return bent(x, w), jnp.cos(x) * w * x_dot / 2 + 3 * jnp.sin(x) * w_dot


@pytest.mark.exhaustive
@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_custom_jvp(checkpoints):
    f = lambda x, w: steps(lambda x: bent(x, w) + x / 3, x, checkpoints=checkpoints)
    wanted = lambda x, w: unrolled(lambda x: bent(x, w) + x / 3, x)

    def all_of(f):
        return jax.jvp(f, (0.7, 1.2), (1.0, -0.3)), jax.grad(f, (0, 1))(0.7, 1.2)

    assert_close(jax.jit(lambda: all_of(f))(), all_of(wanted))
    assert_close(jax.jit(jax.hessian(f))(0.7, 1.2), jax.hessian(wanted)(0.7, 1.2))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"checkpoints": "all"}, {"truncate": 2}, {"memory": "1 MB"}])
def test_custom_jvp_in_second_derivatives_of_scans(settings):
    """jax before 0.12 forgets the rule there, in a scan of its own."""
    xs = jnp.asarray([0.3, 0.8, -0.4])

    def over(loop):
        step = lambda w: lambda c, x: (bent(c, w) + bent(x * w, c) / 2, bent(w, c))
        return lambda w: jnp.sum(jnp.sin(jnp.concatenate([a.ravel() for a in loop(step(w), w)])))

    def wanted(step, c):
        ys = []
        for i, x in enumerate(xs):
            c = lax.stop_gradient(c) if i and i % settings.get("truncate", 3) == 0 else c
            c, y = step(c, x)
            ys.append(y)
        return c, jnp.stack(ys)

    f = over(lambda step, c: loopkit.scan(step, c, xs, **settings))
    within = over(lambda step, c: loopkit.checkpointed(lax.scan, checkpoints="all")(step, c, xs))
    for g in (f,) if "truncate" in settings else (f, within):
        for outer in (jax.grad, jax.jacfwd):
            assert_close(jax.jit(outer(jax.grad(g)))(1.2), outer(jax.grad(over(wanted)))(1.2))


@pytest.mark.exhaustive
def test_relu_and_other_library_rules():
    """jax.nn and jnp functions with custom derivatives at their kinks."""
    body = lambda x: jax.nn.relu(x) + jax.nn.softplus(-x) / 3 + jnp.sinc(x) + jax.nn.silu(x) / 2
    f, wanted = lambda x: steps(body, x), lambda x: unrolled(body, x)
    x = jnp.asarray([0.0, -0.4, 0.3])
    for take in (jax.jacfwd, jax.jacrev):
        assert_close(jax.jit(take(f))(x), take(wanted)(x))


# ---------------------------------------------------------------- solvers in the body


@pytest.mark.exhaustive
def test_custom_root_and_linear_solve():
    """An implicit step: each solves an equation by a loop of loopkit's own."""

    def newton(f, x):
        improve = lambda x: x - f(x) / jax.grad(f)(x)
        return loopkit.while_loop(lambda x: jnp.abs(f(x)) > 1e-14, improve, x, max_steps=50)

    def implicit_step(x, w):
        residual = lambda y: y - x + 0.1 * w * y**3
        return lax.custom_root(residual, x, newton, lambda g, y: y / g(1.0))

    f = lambda x, w: steps(lambda x: implicit_step(x, w), x)

    def wanted(x, w):
        def explicit(x):
            y = x
            for _ in range(8):
                y = y - (y - x + 0.1 * w * y**3) / (1 + 0.3 * w * y**2)
            return y

        return unrolled(explicit, x)

    got = jax.jit(jax.value_and_grad(f, (0, 1)))(0.7, 1.2)
    assert_close(got, jax.value_and_grad(wanted, (0, 1))(0.7, 1.2))
    assert_close(jax.jvp(f, (0.7, 1.2), (1.0, 0.5)), jax.jvp(wanted, (0.7, 1.2), (1.0, 0.5)))


def test_a_rule_that_wants_both_tangents():
    """The rule has no tangent for one alone; the cotangents of both are not asked for one by
    one."""

    @jax.custom_jvp
    def product(a, b):
        return a * b

    def rule(primals, tangents):
        (a, b), (da, db) = primals, tangents
        if isinstance(da, SymbolicZero) or isinstance(db, SymbolicZero):
            return product(a, b), jnp.zeros_like(a)
        return product(a, b), da * b + a * db

    product.defjvp(rule, symbolic_zeros=True)
    f = lambda a, b: loopkit.fori_loop(0, 3, lambda _, x: jnp.sin(x) + product(a, b), 0.3)
    jaxpr = jax.make_jaxpr(jax.grad(f, (0, 1)))(0.7, 1.1)
    first, _ = _jax.dce(jaxpr, [True, False], [True, True])
    both = _jax.call_jaxpr(jaxpr)(0.7, 1.1)
    assert_close(_jax.call_jaxpr(first)(0.7, 1.1), both[:1])
    assert_close(both[0] * 0.7, both[1] * 1.1)


# ---------------------------------------------------------------- loops in rules


def squares(x, t, loop, limit=30.0):
    """x <- w x^2 + 1 and its tangent, and a row of each."""
    w = 2.0 + jnp.sin(limit)
    step = lambda c: (w * c[0] ** 2 + 1.0, w * 2 * c[0] * c[1])
    if loop == "while":
        return loopkit.while_loop(lambda c: c[0] < limit, step, (x, t))
    rows = jnp.arange(1.0, 4.0), t * jnp.arange(3.0)
    both = lambda c, row: (step((c[0] + row[0], c[1] + row[1])), (c[0] * row[0], c[1]))
    (x, t), ys = loopkit.scan(both, (x, t), rows)
    return x + jnp.sum(ys[0]), t + jnp.sum(ys[1])


@pytest.mark.parametrize("loop", ["while", pytest.param("scan", marks=pytest.mark.slow)])
def test_a_rule_that_loops_over_primals_and_tangents(loop):
    """Values that depend on primals alone are known where the tangents are not."""

    @jax.custom_jvp
    def f(x):
        return squares(x, 0.0, loop)[0]

    f.defjvp(lambda primals, tangents: squares(*primals, *tangents, loop))
    value, slope = squares(1.5, 1.0, loop)
    for g in (f, jax.jit(f), jax.checkpoint(f)):
        out, linear = jax.linearize(g, 1.5)
        assert_close((out, linear(2.0)), (value, 2.0 * slope))
        assert_close(jax.value_and_grad(g)(1.5), (value, slope))
    # The primal loop is not run again with each tangent.
    text = str(jax.make_jaxpr(lambda x: jax.linearize(f, x)[0])(1.5))
    assert text.count("loopkit_while") == 1


def test_a_rule_whose_steps_hang_on_the_tangent():
    """None of its loop is known before."""

    def rule(primals, tangents):
        body = lambda c: (c[0] * 2, c[1] + c[2], c[2])
        t, x, _ = loopkit.while_loop(lambda c: c[0] < 9.0, body, (*tangents, *primals, 1.0))
        return f(*primals), t * x

    @jax.custom_jvp
    def f(x):
        return x * x

    f.defjvp(rule)
    for g in (f, jax.jit(f), jax.checkpoint(f)):
        assert_close(jax.linearize(g, 1.5)[1](1.0), jax.jvp(f, (1.5,), (1.0,))[1])


def test_a_rule_whose_steps_ask_the_host_runs_them_once():
    calls = []
    told = lambda x: io_callback(lambda x: (calls.append(1), x)[1], jax.typeof(x), x)

    def rule(primals, tangents):
        body = lambda _, c: (told(c[0]) * 0.5, c[1] * 0.5)
        return f(*primals), loopkit.fori_loop(0, 3, body, (*primals, *tangents))[1]

    @jax.custom_jvp
    def f(x):
        return x * 0.125

    f.defjvp(rule)
    out, linear = jax.linearize(f, jnp.asarray(1.5))
    assert_close((out, linear(1.0)), (1.5 * 0.125, jnp.asarray(0.125)))
    jax.effects_barrier()
    assert len(calls) == 3


@pytest.mark.parametrize("x", [0.3, jnp.array([0.3, 0.4])], ids=["a number", "a vector"])
def test_a_rule_that_makes_arrays(x):
    triple = jax.custom_jvp(lambda x: 3.0 * x)
    triple.defjvp(lambda x, t: (triple(*x), jnp.prod(jnp.array(np.ones(3))) * 3.0 * t[0]))
    loss = lambda scan: lambda x: scan(lambda c, _: (jnp.sin(triple(c)), None), x, None, 3)[0].sum()
    assert_close(jax.grad(loss(loopkit.scan))(x), jax.grad(loss(lax.scan))(x))
