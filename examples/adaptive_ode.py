"""An orbit in adaptive steps, and its exact gradient: a loop of unknown length.

A planet on an eccentric orbit falls past its sun quickly and climbs back slowly. A Runge-Kutta
method of order 5 with an error estimate of order 4 (Dormand and Prince, 1980) takes long steps far
out and short ones near the sun. If the error of a step is too large, the method takes it back and
tries a shorter one. Nobody knows beforehand how many steps that makes. `loopkit.while_loop`
differentiates the loop all the same, and a bound on the steps costs nothing.

The derivative of the planet's place with respect to the eccentricity is known in closed form. The
program compares it with the derivative of the loop, and with that of the same method in diffrax.

Run `python examples/adaptive_ode.py`; it needs diffrax and matplotlib, and some seconds. It draws
the orbit and its steps in adaptive_ode.png.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import loopkit
from comparison import compare

A = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
ERROR = (71 / 57600, 0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)

State = Float[Array, " n"]


class Solve(NamedTuple):
    """The carry: where the solution is, and how long a step to try."""

    time: Float[Array, ""]
    state: State
    slope: State  # the slope at `state`: the last stage of a step is the first of the next
    dt: Float[Array, ""]
    accepted: Bool[Array, ""]  # whether the last step was
    tries: Int[Array, ""]


def stepper(field: Callable[[State], State], end: float, rtol: float, atol: float):
    """Return a solution's initial state and the function that takes one step of it."""

    def start(state: State, dt: float) -> Solve:
        zero = jnp.zeros((), state.dtype)
        return Solve(zero, state, field(state), zero + dt, jnp.array(False), jnp.int32(0))

    def step(s: Solve) -> Solve:
        dt = jnp.minimum(s.dt, end - s.time)
        stages, state = [s.slope], s.state
        for row in A:
            state = s.state + dt * sum(a * k for a, k in zip(row, stages, strict=True))
            stages.append(field(state))
        error = dt * sum(e * k for e, k in zip(ERROR, stages, strict=True))
        scale = atol + rtol * jnp.maximum(jnp.abs(s.state), jnp.abs(state))
        # The choice of lengths is not part of the solution: the derivative takes steps as given.
        size = jax.lax.stop_gradient(jnp.sqrt(jnp.mean((error / scale) ** 2)))
        accepted = size < 1
        factor = jnp.clip(0.9 * size**-0.2, 0.2, 10.0)
        keep = lambda new, old: jnp.where(accepted, new, old)
        return Solve(
            time=keep(s.time + dt, s.time),
            state=keep(state, s.state),
            slope=keep(stages[-1], s.slope),
            dt=dt * jnp.where(accepted, jnp.maximum(factor, 1.0), jnp.minimum(factor, 1.0)),
            accepted=accepted,
            tries=s.tries + 1,
        )

    return start, step


# --- the orbit ------------------------------------------------------------------------------

MAX_STEPS = 100_000
FIRST_STEP = 1e-2


def gravity(state: State) -> State:
    place, velocity = state[:2], state[2:]
    return jnp.concatenate([velocity, -place / jnp.sum(place**2) ** 1.5])


def nearest(eccentricity) -> State:
    """Return the planet where it is nearest to the sun, on an orbit of semi-axis 1 and period 2
    pi."""
    speed = jnp.sqrt((1 + eccentricity) / (1 - eccentricity))
    return jnp.array([1 - eccentricity, 0, 0, speed])


def exactly(eccentricity: float, time: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the planet's place and its derivative in the eccentricity, by Kepler's equation."""
    e, anomaly = eccentricity, time
    for _ in range(100):
        anomaly -= (anomaly - e * np.sin(anomaly) - time) / (1 - e * np.cos(anomaly))
    sin, cos, axis = np.sin(anomaly), np.cos(anomaly), np.sqrt(1 - e**2)
    turn = sin / (1 - e * cos)  # d anomaly / d e
    place = np.array([cos - e, axis * sin])
    return place, np.array([-sin * turn - 1, axis * cos * turn - e / axis * sin])


def by_loopkit(eccentricity, time: float, tolerance: float, max_steps: int = MAX_STEPS):
    start, step = stepper(gravity, time, tolerance, tolerance)
    first = start(nearest(eccentricity), FIRST_STEP)
    last, info = loopkit.while_loop(
        lambda s: s.time < time, step, first, max_steps=max_steps, return_info=True
    )
    return last.state[:2], info.steps


def by_diffrax(eccentricity, time: float, tolerance: float, max_steps: int = MAX_STEPS):
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, args: gravity(y)),
        diffrax.Dopri5(),
        0.0,
        time,
        FIRST_STEP,
        nearest(eccentricity),
        stepsize_controller=diffrax.PIDController(tolerance, tolerance),
        max_steps=max_steps,
    )
    return solution.ys[0, :2], solution.stats["num_steps"]


def all_steps(eccentricity: float, time: float, tolerance: float) -> Solve:
    """Return every try, for the picture: as many rows as there were."""
    start, step = stepper(gravity, time, tolerance, tolerance)
    first = start(nearest(eccentricity), FIRST_STEP)

    def attempt(s: Solve, _: None) -> tuple[Solve, Solve]:
        new = step(s)
        return new, new

    return loopkit.unbounded_scan(attempt, first, until=lambda s, _: s.time >= time)[1]


def draw(path: Path, steps: Solve, eccentricity: float) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    steps = jax.tree.map(np.asarray, steps)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    kept = steps.accepted
    once = kept & (steps.time <= 2 * np.pi)
    left.plot(*steps.state[once, :2].T, ".-", markersize=4, linewidth=0.5)
    left.plot(0, 0, "o", color="goldenrod")
    left.annotate("sun", (0, 0), (-0.05, 0.05), ha="right")
    left.set(title=f"one orbit, eccentricity {eccentricity}: a dot a step", aspect="equal")
    tried = np.diff(steps.time[kept], prepend=0.0)
    right.semilogy(steps.time[kept], tried, ".", markersize=3, label="step")
    again = np.flatnonzero(~kept[:-1])
    right.semilogy(steps.time[again], steps.dt[again], "x", markersize=4, label="tried again")
    right.set(xlabel="time", ylabel="length of a step", title=f"{kept.sum()} of {kept.size} kept")
    right.set_ylim(top=6 * np.max(tried))
    right.legend(loc="upper center", ncols=2)
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--eccentricity", type=float, default=0.9)
    parser.add_argument("--orbits", type=float, default=5.4)
    parser.add_argument("--tolerance", type=float, default=1e-9)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--plot", type=Path, default=Path("adaptive_ode.png"))
    args = parser.parse_args(argv)
    e, time, tolerance = args.eccentricity, 2 * np.pi * args.orbits, args.tolerance

    solvers = {"loopkit": by_loopkit, "diffrax": by_diffrax}
    place, slope = exactly(e, time)
    found = {}
    print(f"{args.orbits} orbits of eccentricity {e}, tolerance {tolerance:g}\n")
    print(f"  {'':11} {'steps':>6}  {'error of place':>14}  {'error of derivative':>19}")
    for name, solver in solvers.items():
        got, steps = jax.jit(lambda e, f=solver: f(e, time, tolerance))(e)
        # Each is one row of a Jacobian, backward through the solution.
        grad = jax.jit(jax.jacrev(lambda e, f=solver: f(e, time, tolerance)[0]))(e)
        errors = np.max(np.abs(got - place)), np.max(np.abs(grad - slope) / np.abs(slope))
        found[name] = {"steps": int(steps), "place": float(errors[0]), "slope": float(errors[1])}
        print(f"  {name:11} {int(steps):6} {errors[0]:15.1e} {errors[1]:20.1e}")

    print(f"\nGradient of a distance, with room for {MAX_STEPS:,} steps")
    distance = lambda f: lambda e: jnp.sum(f(e, time, tolerance)[0] ** 2)
    gradients = {name: jax.grad(distance(f)) for name, f in solvers.items()}
    found["costs"] = compare(gradients, e, repeats=args.repeats)
    draw(args.plot, all_steps(e, time, tolerance), e)
    print(f"\ndrawn in {args.plot}")
    return found


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main()
