"""`debug="finite"` raises no error where nothing goes wrong, and costs nothing where it is off."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from derivatives import assert_close, derivative, expected
from problems import CHECKPOINTS, PROBLEMS, named
from test_finite import KINDS, ON, XS, fails, root
from turns import in_turn


@pytest.mark.exhaustive
def test_what_was_not_finite_from_the_start():
    """It may stay so, and is found once it has become worse, or was finite in between."""
    least = lambda xs: loopkit.scan(lambda h, x: (jnp.minimum(h, x), h), jnp.inf, xs, **ON)
    assert_close(least(XS), loopkit.scan(lambda h, x: (jnp.minimum(h, x), h), jnp.inf, XS))
    text = "the value of `init`, and `ys` must stay finite[.] .*Got: nan in step 1"
    fails(
        text,
        lambda xs: loopkit.scan(lambda h, x: (h * x, h * x), jnp.inf, xs, **ON),
        jnp.array([1.0, 0.0]),
    )
    stays = lambda h: loopkit.scan(lambda h, x: (h * x, None), h, XS, **ON)[0]
    assert np.isnan(stays(jnp.nan))
    # A tangent, a cotangent.
    assert np.isnan(jax.jvp(stays, (1.0,), (jnp.nan,))[1])
    assert np.isnan(jax.grad(lambda h: stays(h) * jnp.nan)(1.0))


@pytest.mark.exhaustive
@pytest.mark.parametrize("init", [jnp.inf, jnp.nan])
def test_a_y_of_what_is_passed_on(init):
    """It is no worse than that, which is no output of the check itself."""
    passed = lambda c: loopkit.scan(lambda c, x: (c, c + x), c, XS, **ON)[1]
    for run in (passed, jax.jit(passed), jax.vmap(passed)):
        assert not np.isfinite(run(jnp.full((2,) * (run is not passed), init))).any()
    along = lambda c, t: jax.jvp(passed, (c,), (t,))[1]
    for run in (along, jax.jit(along)):
        assert not np.isfinite(run(1.0, init)).any()
    worse = lambda c: loopkit.scan(lambda c, x: (c, (c - 1) * jnp.inf), c, XS, **ON)[1]
    fails("`ys` must stay finite[.] .*Got: nan in step 0", worse, 1.0)


MODES = ["", "f", "r", "fr", "rr"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("problem", "checkpoints"), in_turn(PROBLEMS, CHECKPOINTS, of=15))
def test_no_false_alarm(problem, checkpoints):
    """Over the table of loops, in one of which a tangent that nobody reads is a NaN."""
    modes = ["", "r"] if problem.name == "dead_leaf" else MODES[:3]
    watched = problem.flat_loop(checkpoints, **ON)
    for pattern in modes:
        run = jax.jit(derivative(watched, pattern))
        assert_close(run(problem.vector()), expected(problem.name, pattern))


@pytest.mark.exhaustive
@pytest.mark.parametrize("problem", named("scan_until", "while_in_scan"), ids=lambda p: p.name)
def test_no_false_alarm_in_second_derivatives(problem):
    for pattern in MODES[3:]:
        run = jax.jit(derivative(problem.flat_loop(3, **ON), pattern))
        assert_close(run(problem.vector()), expected(problem.name, pattern))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_when_off(kind):
    """Programs and results are the same to the letter, and to the bit, before and after
    watching."""
    texts, values = [], []
    for how in ({}, ON, {"debug": None}):
        f = jax.jit(
            jax.value_and_grad(lambda h, how=how: KINDS[kind](root, XS + 1, h, **how).sum())
        )
        text = f.lower(jnp.ones(2)).as_text()
        texts.append(re.sub(r"loc\(.*\)", "", text))
        values.append(f(jnp.ones(2)))
    assert texts[0] == texts[2]
    assert ["callback" in text for text in texts] == [False, True, False]
    jax.tree.map(np.testing.assert_array_equal, values[0], values[2])


def test_a_watched_constant_is_stored_once():
    w, x = jnp.eye(64) / 2, jnp.ones((3, 64))

    def loss(x, how):
        step = lambda c: (c[0] + 1, jnp.tanh(c[1] @ w))
        return loopkit.while_loop(lambda c: c[0] < 30, step, (0, x), max_steps=40, **how)[1].sum()

    plain, watched = (loopkit.explain(jax.grad(loss), x, how)[0].plan.step for how in ({}, ON))
    assert watched.residual_bytes == plain.residual_bytes
