"""optimistix, optax, jaxopt, ott: solutions differentiated through the iterations to them."""

from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from .against_forward_mode import assert_agrees, import_or_skip, of_benchmarks

pytestmark = [pytest.mark.programs, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def by_lax():
    """An adjoint of optimistix that iterates in a while loop of lax."""
    optimistix = import_or_skip("optimistix")

    class ThroughIterations(optimistix.AbstractAdjoint):
        def apply(self, primal_fn, rewrite_fn, inputs, tags):
            def while_loop(cond_fun, body_fun, init_val, max_steps=None, **_):
                if max_steps is None:
                    return jax.lax.while_loop(cond_fun, body_fun, init_val)
                go = lambda c: (c[0] < max_steps) & cond_fun(c[1])
                step = lambda c: (c[0] + 1, body_fun(c[1]))
                return jax.lax.while_loop(go, step, (0, init_val))[1]

            return primal_fn((*inputs, while_loop))

    return ThroughIterations()


WEIGHTS = 0.8 * jnp.asarray([[0.6, -0.8, 0.0], [0.8, 0.6, 0.0], [0.0, 0.0, 1.0]])


def root(drive):
    optimistix = import_or_skip("optimistix")
    away = lambda y, drive: y - jnp.tanh(WEIGHTS @ y + drive)
    solver = optimistix.Newton(rtol=1e-3, atol=1e-3)  # stops early: what is left depends on the way
    found = optimistix.root_find(away, solver, jnp.zeros(3), drive, adjoint=by_lax(), max_steps=32)
    return jnp.sum(found.value**2)


def fixed_point(drive):
    optimistix = import_or_skip("optimistix")
    improved = lambda y, drive: jnp.tanh(WEIGHTS @ y + drive)
    solver = optimistix.FixedPointIteration(rtol=1e-4, atol=1e-4)
    how = {"adjoint": by_lax(), "max_steps": 256}
    return jnp.sum(optimistix.fixed_point(improved, solver, jnp.zeros(3), drive, **how).value ** 2)


def least_squares(drive):
    optimistix = import_or_skip("optimistix")
    times = jnp.linspace(0.0, 3.0, 20)
    seen = drive[0] * jnp.exp(-drive[1] * times) + drive[2] * jnp.sin(20 * times)
    away = lambda y, seen: y[0] * jnp.exp(-y[1] * times) - seen
    solver = optimistix.LevenbergMarquardt(rtol=1e-4, atol=1e-4)
    how = {"adjoint": by_lax(), "max_steps": 64}
    start = jnp.array([1.0, 0.1])
    return jnp.sum(optimistix.least_squares(away, solver, start, seen, **how).value ** 2)


def lbfgs(drive):
    import_or_skip("optax")
    fitted = of_benchmarks("library_solvers").fitted_by_lbfgs
    return fitted(jnp.array([0.3, 0.1, -0.2]), drive, steps=3, memory=2)


def descent(drive):
    jaxopt = import_or_skip("jaxopt")
    loss = lambda x, drive: jnp.sum((WEIGHTS @ x - drive) ** 2) + 0.1 * jnp.sum(x**4)
    how = {"maxiter": 100, "tol": 1e-5, "implicit_diff": False, "unroll": False, "jit": True}
    return jnp.sum(jaxopt.GradientDescent(loss, **how).run(jnp.zeros(3), drive).params ** 2)


def sinkhorn(drive):
    """Iterate by the loop without ott's rule around it, which would stay in force."""
    import_or_skip("ott")
    from ott.geometry import pointcloud
    from ott.math import fixed_point_loop
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import sinkhorn

    here = jnp.sin(jnp.arange(15.0)).reshape(5, 3) + drive
    there = jnp.cos(2.0 * jnp.arange(12.0)).reshape(4, 3)
    geometry = pointcloud.PointCloud(here, there, epsilon=0.5)
    solver = sinkhorn.Sinkhorn(implicit_diff=None, max_iterations=200, threshold=1e-4)
    plain = fixed_point_loop.fixpoint_iter
    with mock.patch.object(fixed_point_loop, "fixpoint_iter_backprop", plain):
        return solver(linear_problem.LinearProblem(geometry)).reg_ot_cost


DRIVE = jnp.array([1.1, 0.7, 0.2])
SOLVES = [root, fixed_point, least_squares, lbfgs, descent, sinkhorn]


@pytest.mark.parametrize("solve", SOLVES, ids=lambda solve: solve.__name__)
def test_derivatives(solve):
    assert_agrees(solve, DRIVE)
