"""Programs of libraries that solve: diffrax, optimistix, optax, jaxopt, ott."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import loopkit
from library_program import Program, forward, reverse, through

# --- diffrax ---------------------------------------------------------------------------------


def lotka(t, y, rate):
    hares, lynxes = y[0], y[1]
    return jnp.stack([hares * (rate - 0.02 * lynxes), lynxes * (0.01 * hares - 0.4)])


def robertson(t, y, k):
    a, b, c = y[0], y[1], y[2]
    made, lost = -k * a + 1e4 * b * c, 3e7 * b * b
    return jnp.stack([made, -made - lost, lost])


def solved(adjoint: Any, rate: Any, terms: Any = lotka, error: float = 1e-8, **how: Any) -> Any:
    import diffrax

    settings = {
        "solver": diffrax.Tsit5(),
        "t0": 0.0,
        "t1": 140.0,
        "dt0": 0.1,
        "y0": jnp.array([10.0, 10.0]),
        "stepsize_controller": diffrax.PIDController(rtol=error, atol=error),
        "max_steps": 4096,
    }
    settings |= how
    return diffrax.diffeqsolve(diffrax.ODETerm(terms), args=rate, adjoint=adjoint, **settings)


def of_diffrax(loss: Callable, at: Any, *settings: dict, **more: Any) -> Program:
    """`loss(adjoint, rate)`, by diffrax's own checkpoints and by ours."""
    import diffrax

    own = reverse(lambda rate: loss(diffrax.RecursiveCheckpointAdjoint(), rate))
    ours = lambda rate: loss(diffrax.ForwardMode(), rate)
    return Program(own, through(ours, *settings), at, **more)


def takes(steps: list[int], ends: list[float], error: float) -> None:
    """Raises an error unless the solves up to these ends take just these numbers of steps."""
    import diffrax

    stats = lambda t1: solved(diffrax.ForwardMode(), 1.1, t1=t1, error=error).stats["num_steps"]
    found = [int(n) for n in jax.jit(jax.vmap(stats))(jnp.asarray(ends))]
    if found != steps:
        raise AssertionError(f"{found} steps, not {steps}")


ALL = {"checkpoints": "all"}


def points(count: int) -> Program:
    import diffrax

    at = diffrax.SaveAt(ts=jnp.linspace(0.0, 140.0, count))
    loss = lambda adjoint, rate: jnp.mean(solved(adjoint, rate, saveat=at).ys ** 2)
    return of_diffrax(loss, 1.1, ALL)


def adaptive(steps: int, t1: float, error: float, *settings: dict) -> Program:
    takes([steps], [t1], error)
    loss = lambda adjoint, rate: jnp.sum(solved(adjoint, rate, t1=t1, error=error).ys)
    return of_diffrax(loss, 1.1, ALL, *settings)


def stiff() -> Program:
    import diffrax

    how = {
        "terms": robertson,
        "solver": diffrax.Kvaerno5(),
        "t1": 1e5,
        "dt0": 1e-4,
        "y0": jnp.array([1.0, 0.0, 0.0]),
        "stepsize_controller": diffrax.PIDController(rtol=1e-8, atol=1e-10),
    }
    return of_diffrax(lambda adjoint, k: jnp.sum(solved(adjoint, k, **how).ys ** 2), 0.04, ALL)


def lanes(steps: list[int], ends: list[float], error: float) -> Program:
    takes(steps, ends, error)

    def loss(adjoint, rate):
        solve = lambda t1: solved(adjoint, rate, t1=t1, error=error).ys
        return jnp.sum(jax.vmap(solve)(jnp.geomspace(*ends, 64)))

    return of_diffrax(loss, 1.1, ALL, {"memory": "4 MB"})


def dense() -> Program:
    import diffrax

    def loss(adjoint, rate):
        found = solved(adjoint, rate, saveat=diffrax.SaveAt(dense=True), max_steps=2048)
        return jnp.sum(jax.vmap(found.evaluate)(jnp.linspace(0.0, 140.0, 100)) ** 2)

    return of_diffrax(loss, 1.1, ALL | {"max_steps": 2048})


# --- optimistix ------------------------------------------------------------------------------


def by_loopkit(**how: Any) -> Any:
    """Return an adjoint of optimistix that runs its iterations in a loop of loopkit."""
    import optimistix

    class Checkpointed(optimistix.AbstractAdjoint):
        def apply(self, primal_fn, rewrite_fn, inputs, tags):
            return primal_fn((*inputs, partial(loopkit.while_loop, **how)))

    return Checkpointed()


def of_optimistix(loss: Callable, at: Any, *others: Any) -> Program:
    """`loss(adjoint, x)`; `others` are adjoints of optimistix beside its own checkpoints."""
    import optimistix

    with_adjoint = lambda adjoint: jax.grad(lambda x: loss(adjoint, x))
    own = {"own": with_adjoint(optimistix.RecursiveCheckpointAdjoint())}
    own |= {f"own, {type(other).__name__}": with_adjoint(other) for other in others}
    ours = {"default": by_loopkit(), "checkpoints='all'": by_loopkit(checkpoints="all")}
    return Program(own, {name: with_adjoint(a) for name, a in ours.items()}, at)


def root() -> Program:
    import optimistix

    weights = 0.9 * jax.random.orthogonal(jax.random.key(0), 40)

    def loss(adjoint, drive):
        solver = optimistix.Newton(rtol=1e-14, atol=1e-14)
        away = lambda y, drive: y - jnp.tanh(weights @ y + drive)
        start = jnp.zeros(40)
        found = optimistix.root_find(away, solver, start, drive, adjoint=adjoint, max_steps=64)
        return jnp.sum(found.value**2)

    return of_optimistix(loss, jnp.linspace(-1.0, 1.0, 40), optimistix.ImplicitAdjoint())


def fixed_point() -> Program:
    import optimistix

    weights = 0.9 * jax.random.orthogonal(jax.random.key(0), 40)

    def loss(adjoint, drive):
        solver = optimistix.FixedPointIteration(rtol=1e-14, atol=1e-14)
        improved = lambda y, drive: jnp.tanh(weights @ y + drive)
        start = jnp.zeros(40)
        solve = optimistix.fixed_point
        found = solve(improved, solver, start, drive, adjoint=adjoint, max_steps=1024)
        return jnp.sum(found.value**2)

    return of_optimistix(loss, jnp.linspace(-1.0, 1.0, 40), optimistix.ImplicitAdjoint())


def least_squares() -> Program:
    import optimistix

    times = jnp.linspace(0.0, 3.0, 100)

    def loss(adjoint, seen):
        solver = optimistix.LevenbergMarquardt(rtol=1e-10, atol=1e-10)
        away = lambda y, seen: y[0] * jnp.exp(-y[1] * times) + y[2] - seen
        start = jnp.array([1.0, 0.1, 0.0])
        solve = optimistix.least_squares
        found = solve(away, solver, start, seen, adjoint=adjoint, max_steps=256)
        return jnp.sum(found.value**2)

    return of_optimistix(loss, 2 * jnp.exp(-1.3 * times) + 0.1 * jnp.sin(20 * times))


# --- optax, jaxopt, ott ----------------------------------------------------------------------


def fitted_by_lbfgs(start, target, steps: int, memory: int):
    """Steps each of which searches along its direction, in a while loop."""
    import optax

    loss = lambda x: jnp.sum((x - target) ** 2) + 0.1 * jnp.sum(x**4)
    optimiser = optax.lbfgs(memory_size=memory)
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(carry, _):
        x, state = carry
        value, grad = value_and_grad(x, state=state)
        updates, state = optimiser.update(grad, state, x, value=value, grad=grad, value_fn=loss)
        return (optax.apply_updates(x, updates), state), None

    return jax.lax.scan(step, (start, optimiser.init(start)), length=steps)[0][0].sum()


def lbfgs_of_optax() -> Program:
    fitted = lambda target: fitted_by_lbfgs(jnp.full_like(target, 0.3), target, 4, 5)
    return Program(forward(fitted), through(fitted), jnp.linspace(1.0, 2.0, 20))


def descent_of_jaxopt() -> Program:
    import jaxopt

    design = jax.random.normal(jax.random.key(0), (50, 20)) / 50**0.5

    def fitted(seen, **how):
        loss = lambda x, seen: jnp.sum((design @ x - seen) ** 2) + 0.1 * jnp.sum(x**4)
        solver = jaxopt.GradientDescent(
            loss, maxiter=500, tol=1e-9, implicit_diff=False, jit=True, **how
        )
        return jnp.sum(solver.run(jnp.zeros(20), seen).params ** 2)

    own = reverse(partial(fitted, unroll=True))
    return Program(own, through(partial(fitted, unroll=False), ALL), jnp.linspace(-1.0, 1.0, 50))


def sinkhorn_of_ott() -> Program:
    from ott.geometry import pointcloud
    from ott.math import fixed_point_loop
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import sinkhorn

    there = jax.random.normal(jax.random.key(1), (64, 3))

    def cost(here):
        geometry = pointcloud.PointCloud(here, there, epsilon=0.05)
        solver = sinkhorn.Sinkhorn(implicit_diff=None, max_iterations=2000, threshold=1e-9)
        return solver(linear_problem.LinearProblem(geometry)).reg_ot_cost

    def cost_by_lax(here):
        """Without the rule of its own that ott puts around its loop, which would stay in force."""
        plain = fixed_point_loop.fixpoint_iter
        with mock.patch.object(fixed_point_loop, "fixpoint_iter_backprop", plain):
            return cost(here)

    here = 0.5 + jax.random.normal(jax.random.key(0), (64, 3))
    return Program(reverse(cost), through(cost_by_lax, ALL), here, loss=cost_by_lax)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "diffrax: Tsit5, 200 points": partial(points, 200),
    "diffrax: Tsit5, 5000 points": partial(points, 5000),
    "diffrax: Tsit5, 20000 points": partial(points, 20000),
    "diffrax: Tsit5, 1468 steps": partial(adaptive, 1468, 140.0, 1e-8),
    "diffrax: Tsit5, 540 steps": partial(adaptive, 540, 114.14, 1e-6, {"memory": "4 kB"}),
    "diffrax: Kvaerno5, stiff": stiff,
    "diffrax: 64 lanes of 94 to 1984 steps": partial(lanes, [94, 1984], [18.26355, 419.6167], 1e-6),
    "diffrax: dense": dense,
    "optimistix: root, Newton": root,
    "optimistix: fixed point": fixed_point,
    "optimistix: least squares": least_squares,
    "optax: LBFGS": lbfgs_of_optax,
    "jaxopt: gradient descent": descent_of_jaxopt,
    "ott: Sinkhorn": sinkhorn_of_ott,
}
