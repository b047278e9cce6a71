"""Every loop as it is lowered for a GPU, with few loops of unknown length: the same numbers."""

import jax
import jax.export
import jax.numpy as jnp
import pytest

import loopkit
from derivatives import assert_close, derivative, direction, expected
from loopkit import Plan, _jax
from problems import CHECKPOINTS, PROBLEMS, Problem
from turns import in_turn

PLANS = [*CHECKPOINTS, 4, Plan(2, segment=3), Plan(100, segment=3, store="residuals")]


@pytest.mark.parametrize(("problem", "checkpoints"), in_turn(PROBLEMS, PLANS, of=5))
def test_gradients(problem: Problem, checkpoints):
    with _jax.host_waits(True):
        got = jax.jit(derivative(problem.flat_loop(checkpoints), "r"))(problem.vector())
    assert_close(got, expected(problem.name, "r"))


@pytest.mark.parametrize(("problem", "pattern"), in_turn(PROBLEMS, ["rr", "fr", "rf"], of=7))
def test_second_derivatives(problem: Problem, pattern):
    with _jax.host_waits(True):
        got = jax.jit(derivative(problem.flat_loop(4), pattern))(problem.vector())
    assert_close(got, expected(problem.name, pattern))


def chaotic(x, length, checkpoints):
    step = lambda x, _: (3.7 * x * (1 - x), x)
    x, ys = loopkit.scan(step, x, length=length, checkpoints=checkpoints)
    return x + jnp.sum(ys**2)


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize(("length", "checkpoints"), [(9, 3), (20, 8), (23, 1), (100, 2), (100, 8)])
def test_what_is_saved_elsewhere(length, checkpoints, there):
    """A gradient whose two sweeps run on devices of two kinds."""
    x = jnp.linspace(0.3, 0.6, 3)
    wanted = jax.vjp(lambda x: chaotic(x, length, "all"), x)[1](direction(x, 0))
    with _jax.host_waits(there):
        pullback = jax.vjp(lambda x: chaotic(x, length, checkpoints), x)[1]
    with _jax.host_waits(not there):
        assert_close(pullback(direction(x, 0)), wanted, 1e-9)


@pytest.mark.parametrize("steps", [0, 1, 2, 11, 12])
def test_steps_that_are_counted(steps):
    """None; fewer than a segment; all segments whole."""

    def loss(x, checkpoints):
        step = lambda c: (c[0] + 1, jnp.sin(c[1] * 1.5))
        how = {"max_steps": 40, "checkpoints": checkpoints}
        return jnp.sum(loopkit.while_loop(lambda c: c[0] < steps, step, (0, x), **how)[1])

    x = jnp.linspace(0.3, 0.6, 3)
    wanted = jax.grad(loss)(x, "all")
    for plan in (Plan(10, segment=4), Plan(40), Plan(2, segment=4), Plan(3)):
        with _jax.host_waits(True):
            assert_close(jax.jit(jax.grad(loss), static_argnums=1)(x, plan), wanted)


def test_a_program_for_both():
    """Each platform has its own way in it."""
    x = jnp.linspace(0.3, 0.6, 3)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(chaotic(x, 50, 4))))
    alone = jax.export.export(gradient, platforms=["cpu"])(x)
    both = jax.export.export(gradient, platforms=["cpu", "cuda"])(x)
    assert both.mlir_module().count("stablehlo.while") > 2 * alone.mlir_module().count(
        "stablehlo.while"
    )
    assert_close(both.call(x), alone.call(x))
