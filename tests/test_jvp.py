"""Forward mode: jvp, linearize, jacfwd."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from derivatives import assert_close, direction, expected, forward
from loopkit import _jax
from problems import CHECKPOINTS, PROBLEMS, Problem, named, tagged
from turns import in_turn


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_jvp(problem: Problem):
    pushed = jax.jit(forward(problem.flat_loop(), 0))
    assert_close(pushed(problem.vector()), expected(problem.name, "f"))


@pytest.mark.parametrize("problem", tagged("core"), ids=lambda problem: problem.name)
def test_jvp_without_jit(problem: Problem):
    pushed = forward(problem.flat_loop(3), 0)
    assert_close(pushed(problem.vector()), expected(problem.name, "f"))


@pytest.mark.parametrize("problem", in_turn(PROBLEMS))
def test_linearize(problem: Problem):
    """`jax.vjp` linearizes each of them before it transposes: see test_vjp."""
    x = problem.vector()
    y, pushforward = jax.linearize(problem.flat_loop(3), x)
    assert_close(y, expected(problem.name, ""))
    v = direction(x, 0)
    assert_close(pushforward(v), expected(problem.name, "f"))
    assert_close(pushforward(-2 * v), -2 * expected(problem.name, "f"))


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_linearize_in_jit(checkpoints):
    (problem,) = named("scan_until")
    f, x = problem.flat_loop(checkpoints), problem.vector()
    pushed = jax.jit(lambda x, v: jax.linearize(f, x)[1](v))
    assert_close(pushed(x, direction(x, 0)), expected(problem.name, "f"))


@pytest.mark.slow
@pytest.mark.parametrize("problem", tagged("core"), ids=lambda problem: problem.name)
def test_jacfwd(problem: Problem):
    x, reference = problem.vector(), problem.flat_reference()
    columns = [jax.jvp(reference, (x,), (e,))[1] for e in jnp.eye(x.size)]
    assert_close(jax.jit(jax.jacfwd(problem.flat_loop()))(x), jnp.stack(columns, axis=1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("perturbed", [(0,), (1,), (2,), (0, 2)])
def test_jvp_of_some_arguments(perturbed):
    (problem,) = named("while_vector")

    def some(f):
        def of_some(*some_args):
            args = list(problem.args)
            for place, arg in zip(perturbed, some_args, strict=True):
                args[place] = arg
            return f(*args)

        primals = tuple(problem.args[place] for place in perturbed)
        tangents = tuple(direction(primal, 1) for primal in primals)
        return jax.jvp(of_some, primals, tangents)

    assert_close(some(problem.loop()), some(problem.reference()))


def test_jvp_of_integers_is_float0():
    def loop(step, x):
        return loopkit.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, 2 * c[1]), (step, x))

    zero = np.zeros((), jax.dtypes.float0)
    (step, x), (step_dot, x_dot) = jax.jvp(loop, (1, 3.0), (zero, 1.0))
    assert (step, x, x_dot) == (4, 24.0, 8.0)
    assert step_dot.dtype == jax.dtypes.float0


def test_outputs_that_no_tangent_reaches():
    """A tangent of zeros, and none computed: the function that makes it has no derivative rule."""

    @jax.custom_jvp
    def opaque(x):
        return jnp.cos(x)

    @opaque.defjvp
    def opaque_jvp(primals, tangents):
        raise AssertionError("differentiated")

    def body(carry):
        x, y = carry
        return jnp.sin(x), opaque(y)

    def loop(x, y):
        return loopkit.while_loop(lambda c: c[0] > 0.7, body, (x, y))

    out, out_dot = jax.jvp(lambda x: loop(x, 0.5), (1.2,), (1.0,))
    assert out_dot[1] == 0.0
    wanted = jax.jvp(lambda x: jnp.sin(jnp.sin(jnp.sin(jnp.sin(x)))), (1.2,), (1.0,))
    assert_close((out[0], out_dot[0]), jax.tree.map(jnp.asarray, wanted))


@pytest.mark.parametrize("way", ["jvp", "linearize"])
def test_tangents_that_nobody_uses(way):
    """Neither they nor what they come from is asked for: what is left is the loop."""

    def f(x):
        return loopkit.scan(lambda c, row: (jnp.sin(c) + row, c * row), x, jnp.arange(3.0))

    def both(x, t):
        if way == "jvp":
            return jax.jvp(f, (x,), (jnp.cos(t),))
        out, linear = jax.linearize(f, x)
        return out, linear(jnp.cos(t))

    jaxpr = jax.make_jaxpr(both)(0.3, 1.0)
    small, used = _jax.dce(jaxpr, [True, True, False, False], [False, False])
    assert used == [True, False]
    assert [e.primitive.name for e in small.eqns if "loopkit" in e.primitive.name] == [
        "loopkit_while"
    ]
    assert_close(_jax.call_jaxpr(small)(0.3), list(f(0.3)))


@pytest.mark.parametrize("way", ["jvp", "linearize"])
def test_tangents_of_which_one_is_used(way):
    """Only the tangent that is used is asked for."""

    def f(x, y):
        return loopkit.fori_loop(0, 3, lambda _, c: (jnp.sin(c[0]), jnp.cos(c[1])), (x, y))

    def tangents(x, y, *moves):
        if way == "jvp":
            return jax.jvp(f, (x, y), moves)[1]
        return jax.linearize(f, x, y)[1](*moves)

    args = 0.3, 0.7, 1.0, 2.0
    keep = [True, True, False, False]
    small, used = _jax.dce(jax.make_jaxpr(tangents)(*args), [True, False], keep)
    assert used == [True, True, True, False]
    assert_close(_jax.call_jaxpr(small)(*args[:3])[0], tangents(*args)[0])
