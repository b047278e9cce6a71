"""Reverse mode: vjp, grad, jacrev."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import loopkit
from derivatives import assert_close, direction, expected, reverse
from problems import CHECKPOINTS, PROBLEMS, Problem, named, tagged
from turns import in_turn

TURNS = in_turn(PROBLEMS, CHECKPOINTS, of=3)


@pytest.mark.parametrize(("problem", "checkpoints"), TURNS)
def test_vjp(problem: Problem, checkpoints):
    pulled = jax.jit(reverse(problem.flat_loop(checkpoints), 0))
    assert_close(pulled(problem.vector()), expected(problem.name, "r"))


@pytest.mark.slow
@pytest.mark.parametrize(("problem", "checkpoints"), in_turn(tagged("core"), CHECKPOINTS))
def test_vjp_without_jit(problem: Problem, checkpoints):
    x = problem.vector()
    y, pullback = jax.vjp(problem.flat_loop(checkpoints), x)
    assert_close(y, expected(problem.name, ""))
    w = direction(y, 0)
    assert_close(pullback(w)[0], expected(problem.name, "r"))
    assert_close(pullback(-2 * w)[0], -2 * expected(problem.name, "r"))


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_trees_of_arguments_and_results(checkpoints):
    """The cotangents of the same tree through loopkit and through Python, without flattening."""
    (problem,) = named("carry_of_trees")

    def grads(f):
        def loss(start, h):
            out = f(start, h)
            return jnp.sum(out["state"].position * 2) + jnp.sum(out["state"].velocity ** 2)

        return jax.value_and_grad(loss, argnums=(0, 1))(*problem.args)

    assert_close(grads(problem.loop(checkpoints)), grads(problem.reference()))


@pytest.mark.slow
@pytest.mark.parametrize("argnums", [0, 1, 2, (0, 2), (2, 1)], ids=str)
def test_argnums(argnums):
    (problem,) = named("while_vector")

    def grads(f):
        return jax.grad(lambda *args: jnp.sum(f(*args)), argnums)(*problem.args)

    assert_close(grads(problem.loop(3)), grads(problem.reference()))


@pytest.mark.slow
@pytest.mark.parametrize("problem", tagged("core"), ids=lambda problem: problem.name)
def test_jacrev(problem: Problem):
    x, reference = problem.vector(), problem.flat_reference()
    y, pullback = jax.vjp(reference, x)
    rows = [pullback(e)[0] for e in jnp.eye(y.size)]
    assert_close(jax.jit(jax.jacrev(problem.flat_loop()))(x), jnp.stack(rows))


def test_value_and_grad_with_aux():
    def loss(x):
        out, info = loopkit.while_loop(lambda x: x < 9, lambda x: x * x, x, return_info=True)
        return out, info

    (value, info), grad = jax.value_and_grad(loss, has_aux=True)(2.0)
    assert (value, grad) == (16.0, 32.0)
    assert info.steps == 2


@pytest.mark.parametrize("which", ["carry", "ys", "neither"])
def test_one_kind_of_cotangent(which):
    xs = jnp.asarray([0.3, -0.2, 0.5, 0.9])

    def grads(scan):
        def loss(h, xs, w):
            carry, ys = scan(lambda h, x: (jnp.sin(w * h + x), h * x), h, xs)
            return {"carry": carry, "ys": jnp.sum(ys**2), "neither": w * 3}[which]

        return jax.grad(loss, argnums=(0, 1, 2))(0.4, xs, 0.7)

    assert_close(grads(loopkit.scan), grads(lax.scan))


def test_a_leaf_that_is_returned_twice_and_read_twice():
    def looped(x):
        body = lambda c: (c[0] + c[1], c[0], c[0] * c[2])
        a, b, c = loopkit.while_loop(lambda c: c[0] < 2.0, body, (x, x, x))
        return a * b + b * c

    def unrolled(x):
        a = b = c = x
        for _ in range(3):
            a, b, c = a + b, a, a * c
        return a * b + b * c

    assert_close(jax.grad(looped)(0.5), jax.grad(unrolled)(0.5))


# ---------------------------------------------------------------- every length, every budget


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [None, 1, 2, 3, 4, 5, 7])
def test_every_number_of_steps(checkpoints):
    """One compiled gradient for each budget, run for every length from 0 to 40."""

    def loop(x, w, n):
        def body(carry):
            step, x = carry
            return step + 1, w * jnp.sin(x) + x * step / 40

        return loopkit.while_loop(lambda c: c[0] < n, body, (0, x), checkpoints=checkpoints)[1]

    def fixed(x, w, n):
        def body(step, x):
            return jnp.where(step < n, w * jnp.sin(x) + x * step / 40, x)

        return lax.scan(lambda x, step: (body(step, x), None), x, jnp.arange(40.0))[0]

    got = jax.jit(jax.value_and_grad(loop, argnums=(0, 1)))
    wanted = jax.jit(jax.vmap(jax.value_and_grad(fixed, argnums=(0, 1)), (None, None, 0)))
    values, (x_bars, w_bars) = wanted(0.7, 1.1, jnp.arange(41.0))
    for n in range(41):
        assert_close(got(0.7, 1.1, n), (values[n], (x_bars[n], w_bars[n])))


@pytest.mark.parametrize(
    ("length", "checkpoints"),
    [
        *[(1, 1), (2, 1), (5, 1), (5, 2), (9, 2), (9, 4), (10, 3), (12, 12), (13, 20), (17, 5)],
        *[(30, None), (31, 4), (64, "all"), (100, None)],
    ],
)
def test_every_length_of_scan(length, checkpoints):
    xs = jnp.cos(jnp.arange(length))

    def grads(scan, **kwargs):
        def loss(h, xs, w):
            h, ys = scan(lambda h, x: (jnp.sin(w * h + x), h * x), h, xs, **kwargs)
            return h + jnp.sum(ys)

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(0.4, xs, 0.7)

    assert_close(grads(loopkit.scan, checkpoints=checkpoints), grads(lax.scan))


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize("max_steps", [1, 4, 8])
def test_gradient_where_the_bound_ends_the_loop(max_steps, checkpoints):
    """Steps past the bound have no part in the gradient."""

    def loop(x):
        return loopkit.while_loop(
            lambda x: x < 1e9, lambda x: x * x, x, max_steps=max_steps, checkpoints=checkpoints
        )

    power = 2**max_steps
    assert_close(jax.grad(loop)(1.01), jnp.asarray(power * 1.01 ** (power - 1)))


def test_indexing_by_the_loop_variable():
    """The gradient of a gather by the counter lands in the rows that were read."""
    table = jnp.asarray([0.5, 1.5, 2.5, 3.5])

    def loop(table):
        return loopkit.fori_loop(1, 3, lambda i, x: x * table[i], 1.0, checkpoints=2)

    assert_close(jax.grad(loop)(table), jnp.asarray([0.0, 2.5, 1.5, 0.0]))


def test_overwriting_a_row():
    """Only the last write to a row counts."""

    def loop(x):
        def body(i, rows):
            return rows.at[i % 2].set(x * (i + 1.0))

        return jnp.sum(loopkit.fori_loop(0, 4, body, jnp.zeros(2), checkpoints=2))

    assert_close(jax.grad(loop)(3.0), jnp.asarray(7.0))
