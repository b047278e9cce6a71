"""`unroll`: steps to an iteration."""

import jax
import jax.numpy as jnp
import pytest

import loopkit
from derivatives import assert_close, derivative
from loopkit import Plan
from problems import named

KEEPS_ALL = Plan(0, keeps_all=True, store="residuals")


@pytest.mark.exhaustive
def test_more_steps_to_an_iteration_than_there_are():
    """All steps of a segment are one iteration."""
    x = jnp.ones((32, 64))

    def products(unroll):
        step = lambda x, _: (jnp.tanh(x @ jnp.eye(64)), None)
        f = lambda x: loopkit.scan(step, x, length=8, unroll=unroll, checkpoints=Plan(2, 4))[0]
        slope = jax.grad(lambda x: f(x).sum())
        return jax.jit(slope).lower(x).as_text().count("dot_general"), slope(x)

    (few, wanted), (many, _), *larger = map(products, (1, 4, 5, 8, True))
    assert many > 2 * few
    for count, got in larger:
        assert count >= many
        assert_close(got, wanted)


def test_blocks_of_a_truncated_scan_are_unrolled_and_they_alone():
    """However many there are, the program is no longer."""

    def lengths(length, truncate):
        stop = lambda c, _: c > 9.0
        f = lambda x: loopkit.scan(
            lambda c, x: (jnp.sin(c) * x, None),
            x,
            x * jnp.ones(length),
            truncate=truncate,
            until=stop,
            unroll=True,
        )[0]
        return len(jax.jit(jax.grad(f)).lower(1.0).as_text())

    assert lengths(24, 2) < 1.1 * lengths(6, 2)
    assert lengths(24, 4) > 1.1 * lengths(24, 2)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [Plan(100), Plan(4, segment=4), KEEPS_ALL])
@pytest.mark.parametrize("name", ["while_scalar", "scan_until", "scan_xs_ys"])
def test_derivatives_with_every_way_of_storing(name, checkpoints):
    (problem,) = named(name)
    x = problem.vector()
    got = derivative(problem.flat_loop(checkpoints, max_steps=100, unroll=3), "r")
    lanes = jnp.stack([x, 1.15 * x])
    each = [derivative(problem.flat_reference(row), "r")(row) for row in lanes]
    assert_close(jax.jit(got)(x), each[0])
    assert_close(jax.jit(jax.vmap(got))(lanes), jnp.stack(each))


def test_what_is_no_unroll():
    for unroll in ("auto", "fast", 1.5):
        with pytest.raises(
            TypeError, match=r"scan: `unroll` must be an int >= 0 .* bool[.] .*Got:"
        ):
            loopkit.scan(lambda x, _: (x, None), 1.0, length=3, unroll=unroll)
