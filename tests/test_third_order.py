"""Third order, in all eight patterns of the two modes."""

import itertools as it

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from derivatives import assert_close, derivative, expected
from problems import named
from turns import in_turn

PATTERNS = ["".join(modes) for modes in it.product("fr", repeat=3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "pattern"), in_turn(named("while_scalar", "scan_until"), PATTERNS)
)
def test_third_order(problem, pattern):
    checkpoints = 2 if problem.name == "while_scalar" else None
    got = jax.jit(derivative(problem.flat_loop(checkpoints), pattern))
    assert_close(got(problem.vector()), expected(problem.name, pattern))


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["ffr", "rrr"])
@pytest.mark.parametrize("name", ["while_in_while", "leaves_change_places"])
def test_third_order_of_longer_carries(name, pattern):
    (problem,) = named(name)
    got = jax.jit(derivative(problem.flat_loop(2), pattern))
    assert_close(got(problem.vector()), expected(name, pattern))


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["rfr", "rrr"])
def test_third_order_without_jit(pattern):
    (problem,) = named("while_scalar")
    got = derivative(problem.flat_loop(3), pattern)
    assert_close(got(problem.vector()), expected(problem.name, pattern))


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [None, 2])
def test_fourth_order(checkpoints):
    (problem,) = named("while_scalar")
    got = jax.jit(derivative(problem.flat_loop(checkpoints), "rfrf"))
    assert_close(got(problem.vector()), expected(problem.name, "rfrf"))


def test_powers():
    """x -> x^8 in three squarings: every derivative is known."""
    f = lambda x: loopkit.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] ** 2), (0, x), checkpoints=1
    )[1]
    factor = 1.0
    for order in range(4):
        assert_close(jax.jit(f)(1.1), jnp.asarray(factor * 1.1 ** (8 - order)))
        f, factor = jax.grad(f), factor * (8 - order)


def test_lanes_with_a_residual_in_common():
    """The mask of a step is one for all lanes, and has no tangent in any direction."""

    def step(carry, _):
        even, x = carry
        return (~even, jnp.sin(x) + jnp.where(even, 0.1, x) * 0.5), None

    def unrolled(x):
        carry = jnp.bool_(False), x
        for _ in range(3):
            carry, _ = step(carry, None)
        return carry[1]

    def third(f):
        second = lambda x: jax.jvp(jax.grad(f), (x,), (x,))[1]
        return jax.vmap(lambda x: jax.jvp(second, (x,), (x,))[1])(jnp.asarray([0.3, 0.7]))

    loop = lambda x: loopkit.scan(step, (False, x), length=3)[0][1]
    assert_close(jax.jit(lambda: third(loop))(), third(unrolled))


@pytest.mark.slow
def test_lanes_of_loops_in_branches():
    """Branches share what they save. So the mask of one has the tangent of the other's carry."""
    rows = jnp.linspace(0.5, 1.2, 3)

    def masked(carry, row):
        even, x = carry
        return (~even, jnp.tanh(x) * row + jnp.where(even, 0.1, x) * 0.5), x

    def of(scan):
        first = lambda x, rows, w: scan(masked, (jnp.bool_(False), x), rows)[1] * w
        step = lambda w: lambda c, row: (jnp.sin(c) * jnp.exp(row) + c * w, c)
        second = lambda x, rows, w: scan(step(w), w * 2, rows) * x
        return lambda *at: jax.lax.cond(at[1][0] > 0.4, first, second, *at)

    def unrolled(step, carry, rows):
        for row in rows:
            carry, _ = step(carry, row)
        return carry

    def third(f):
        gradient = jax.grad(lambda *at: jnp.sum(f(*at) ** 2), (0, 1, 2))

        def along(x, v):
            second = lambda w: jax.jvp(gradient, (x, rows, w), (v, rows, weights))[1]
            return jax.jvp(second, (weights,), (v,))[1]

        return jax.vmap(along)(*jnp.asarray([[[0.3, -0.2], [0.4, 0.1]], [[1, 2], [3, 4.0]]]))

    weights = jnp.asarray([0.5, 0.7])
    loop = of(lambda *given: loopkit.scan(*given)[0])
    for got, wanted in zip(jax.jit(lambda: third(loop))(), third(of(unrolled)), strict=True):
        assert_close(got, wanted)


@pytest.mark.slow
def test_a_budget_for_the_derivative_of_a_derivative():
    """An inner loop of one step has fewer tangents than a loop that may take many."""
    weights = np.cos(np.arange(12.0)).reshape(3, 4)

    def f(x, count):
        steps, y = jnp.int32(4.99 * jnp.sin(jnp.float64(count)) ** 2), x.mean()

        def body(carry):
            total, v, i = carry

            def layer(h, w):
                jnp.float64(i / 4) + jnp.float64(i / 4) / 2.0  # not used
                return h + jnp.tanh(h @ w @ weights) @ weights.T, None

            h, _ = loopkit.scan(layer, jnp.full(3, y), v[None], 1)
            return total + jnp.sin(h).mean() + jnp.sin(y), jnp.sin(v) + v / 2.0, i + 1

        init = y, jnp.full((3, 3), y), 0
        return jnp.sin(loopkit.while_loop(lambda carry: carry[2] < steps, body, init)[0]) ** 2

    def reverse(g):
        def slope(x, count):
            y, pullback = jax.vjp(lambda x: g(x, count), x)
            return pullback(jnp.cos(jnp.arange(1.0 * y.size)).reshape(y.shape))[0]

        return slope

    x, count = jnp.linspace(-1.0, 0.5, 6), jnp.int32(1)
    second = reverse(reverse(f))
    within = jax.jit(loopkit.checkpointed(second, memory="50 kB"))
    assert_close(within(x, count), second(x, count))


@jax.custom_jvp
def surrogate(x, y):
    return x * jnp.cos(y)


surrogate.defjvps(
    lambda t, out, x, y: t * jnp.cos(y), lambda t, out, x, y: -3.0 * t * x * jnp.sin(y)
)


def of_surrogate(run):
    """Three steps with a rule that is not the derivative, by `run(step, init)`."""

    def step(x, c, k):
        return surrogate(x, c) + jnp.sin(c).mean() * jnp.cos(k) / 3.0

    def f(x):
        c = run(lambda c, k: step(x, c, k), x)
        return jnp.concatenate([jnp.sin(c), c[:1] ** 2])

    return f


def stopping(step, x):
    body = lambda s: (s[0] + 1.0, step(s[1], s[0]))
    return loopkit.while_loop(lambda s: s[0] < 3 * x[0] ** 0, body, (0.0, x), max_steps=5)[1]


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["rfr", "rff"])
@pytest.mark.parametrize(
    "run",
    [
        lambda step, x: loopkit.scan(lambda c, k: (step(c, k), None), x, jnp.arange(3.0))[0],
        stopping,
    ],
    ids=["scan", "while_loop"],
)
def test_a_rule_that_is_not_the_derivative(run, pattern):
    """Its second derivatives do not commute."""
    unrolled = lambda step, x: step(step(step(x, 0.0), 1.0), 2.0)
    x = jnp.array([0.6, 0.8, 0.3])
    got, want = (derivative(of_surrogate(r), pattern) for r in (run, unrolled))
    assert_close(jax.jit(got)(x), jax.jit(want)(x))
    lanes = jnp.stack([x, x + 0.1])
    assert_close(jax.jit(jax.vmap(got))(lanes), jax.jit(jax.vmap(want))(lanes))
