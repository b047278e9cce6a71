"""The Hessian of an adaptive solver: Newton's method finds two planets, and how certain they are.

Two heavy planets pull at their star and at each other. They were seen a few times, not quite where
they were. Which masses, places and velocities fit best? The misfit is the end of an adaptive
Runge-Kutta method, a loop of unknown length between one sight and the next. Its gradient says which
way is down, and its Hessian says how far. So each of Newton's steps doubles the right digits in the
end. The inverse of the Hessian is the covariance of the result: it says how certain each number is.

`jax.hessian` differentiates the gradient in forward mode, which these loops allow. The program
compares with diffrax, with those of its adjoints that have a second derivative; its default adjoint
has none.

Run `python examples/planets.py`; it needs diffrax, matplotlib and tqdm, and a minute or two. It
draws the planets, Newton's steps and the uncertainty in planets.png."""

import argparse
from functools import partial
from pathlib import Path
from typing import NamedTuple

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from tqdm import tqdm

import loopkit
from adaptive_ode import stepper
from comparison import compare

TOLERANCE, FIRST_STEP, MAX_STEPS = 1e-9, 1e-2, 1000  # steps from one sight to the next, at most
NOISE = 3e-3  # the error of a coordinate that is seen; the inner planet is at a distance of 1
NAMES = tuple(f"{what}{i}" for i in (1, 2) for what in ("mass", "x", "y", "u", "v"))
TRUTH = np.array([[0.02, 1.0, 0.0, 0.0, 1.05], [0.03, -1.7, 0.0, 0.0, -0.75]]).ravel()
SIZES = np.tile([0.1, 1.0, 1.0, 1.0, 1.0], 2)  # the spread of the unknowns in the first guess

Unknowns = Float[Array, "10"]  # in the order of NAMES
State = Float[Array, "8"]  # places and velocities of both


def field(masses: Float[Array, "2"], state: State) -> State:
    """Gravity, as seen from the star."""
    places, velocities = state.reshape(2, 2, 2)
    cubed = lambda way: jnp.sum(way**2, axis=-1, keepdims=True) ** 1.5
    apart = places[::-1] - places
    other = masses[::-1, None] * (apart / cubed(apart) - places[::-1] / cubed(places[::-1]))
    star = -(1 + masses[:, None]) * places / cubed(places)
    return jnp.concatenate([velocities.ravel(), (star + other).ravel()])


def start(unknowns: Unknowns) -> tuple[Float[Array, "2"], State]:
    planets = unknowns.reshape(2, 5)
    return planets[:, 0], jnp.concatenate([planets[:, 1:3].ravel(), planets[:, 3:].ravel()])


def by_loopkit(unknowns: Unknowns, sights: int, apart: float) -> Float[Array, "sights 4"]:
    """Return the places of the planets at each sight; sights are `apart` in time."""
    masses, state = start(unknowns)
    begin, step = stepper(partial(field, masses), apart, TOLERANCE, TOLERANCE)

    def to_next(carry: tuple, _: None) -> tuple[tuple, Array]:
        state, dt = carry
        last = loopkit.while_loop(
            lambda s: s.time < apart, step, begin(state, dt), max_steps=MAX_STEPS
        )
        return (last.state, jnp.maximum(last.dt, FIRST_STEP)), last.state[:4]

    return loopkit.scan(to_next, (state, jnp.array(FIRST_STEP)), length=sights)[1]


def by_diffrax(unknowns: Unknowns, sights: int, apart: float, adjoint) -> Float[Array, "sights 4"]:
    masses, state = start(unknowns)
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, masses: field(masses, y)),
        diffrax.Dopri5(),
        *(0.0, sights * apart, FIRST_STEP, state, masses),
        saveat=diffrax.SaveAt(ts=apart * (1 + np.arange(sights))),
        stepsize_controller=diffrax.PIDController(TOLERANCE, TOLERANCE),
        max_steps=sights * MAX_STEPS // 10,
        adjoint=adjoint,
    )
    return solution.ys[:, :4]


class Fit(NamedTuple):
    unknowns: Unknowns
    misfits: list[float]  # before each of Newton's steps
    slopes: list[float]  # the largest of the gradient then, each unknown in units of its curvature
    hessian: Float[Array, "10 10"]  # where the unknowns are found

    @property
    def covariance(self) -> Float[Array, "10 10"]:
        return jnp.linalg.inv(self.hessian)


def newton(misfit, unknowns: Unknowns, steps: int) -> Fit:
    """Steps of Newton's method, damped where the misfit would rise."""
    look = jax.jit(lambda u: (misfit(u), jax.grad(misfit)(u), jax.hessian(misfit)(u)))
    steepest = lambda g, h: float(jnp.max(jnp.abs(g) / jnp.sqrt(jnp.abs(jnp.diag(h)))))
    value, gradient, hessian = look(unknowns)
    misfits, slopes, damping = [float(value)], [steepest(gradient, hessian)], 0.0
    progress = tqdm(range(steps), desc="Newton's steps")
    for _ in progress:
        while True:
            scale = jnp.diag(jnp.abs(jnp.diag(hessian)))
            new = unknowns - jnp.linalg.solve(hessian + damping * scale, gradient)
            looked = look(new)
            if looked[0] <= value + 1e-9 * abs(value):
                break
            damping = max(4 * damping, 1e-3)
        damping = damping / 10 if damping > 1e-6 else 0.0
        unknowns, (value, gradient, hessian) = new, looked
        misfits.append(float(value))
        slopes.append(steepest(gradient, hessian))
        progress.set_postfix(misfit=f"{value:.6f}")
    return Fit(unknowns, misfits, slopes, hessian)


def draw(path: Path, fit: Fit, seen: np.ndarray, apart: float) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    fine, after = 10, 2  # moments from sight to sight; times as long as the planets were watched
    sights = len(seen)
    way = partial(by_loopkit, sights=after * sights * fine, apart=apart / fine)
    found, true = np.asarray(way(fit.unknowns)), np.asarray(way(jnp.asarray(TRUTH)))
    moves = np.asarray(jax.jit(jax.jacfwd(way))(fit.unknowns))
    spread = np.einsum("tci,ij,tcj->tc", moves, np.asarray(fit.covariance), moves)
    time = apart / fine * (1 + np.arange(len(found)))

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.7), layout="constrained")
    for planet, colour in enumerate(("C0", "C1")):
        at = slice(2 * planet, 2 * planet + 2)
        axes[0].plot(*found[: sights * fine, at].T, color=colour, linewidth=0.7)
        axes[0].plot(*seen[:, at].T, "o", color=colour, markersize=4)
        sure = np.sqrt(spread[:, at].sum(1))
        off = np.sqrt(((found - true)[:, at] ** 2).sum(1))
        label = ("inner", "outer")[planet]
        axes[2].semilogy(time, sure, color=colour, label=f"{label}: expected")
        axes[2].semilogy(time, off, color=colour, linewidth=0.6, linestyle="--", label="true")
    axes[0].plot(0, 0, "o", color="goldenrod", markersize=10)
    axes[0].set(title="seen, and found", aspect="equal")
    axes[1].semilogy(fit.slopes, "o-")
    axes[1].set(title="Newton's method", xlabel="step", ylabel="largest slope")
    axes[2].axvspan(0, sights * apart, color="gray", alpha=0.15)
    axes[2].set(title="error of the places", xlabel="time; watched where it is grey")
    axes[2].legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sights", type=int, default=15)
    parser.add_argument("--apart", type=float, default=1.0, help="time between them; a year is 6.3")
    parser.add_argument("--guess", type=float, default=0.01, help="how wrong the first guess is")
    parser.add_argument("--steps", type=int, default=10, help="of Newton's method")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plot", type=Path, default=Path("planets.png"))
    args = parser.parse_args(argv)

    rng, when = np.random.default_rng(args.seed), (args.sights, args.apart)
    places = np.asarray(jax.jit(lambda u: by_loopkit(u, *when))(TRUTH))
    seen = places + NOISE * rng.normal(size=places.shape)

    def misfit_of(solve):
        """Half the squares of what is off, in units of the noise."""
        return lambda u: jnp.sum((solve(u, *when) - seen) ** 2) / (2 * NOISE**2)

    misfit = misfit_of(by_loopkit)
    guess = jnp.asarray(TRUTH + args.guess * SIZES * rng.normal(size=TRUTH.shape))
    fit = newton(misfit, guess, args.steps)
    print(f"\n{args.sights} sights of two planets, each {args.apart} after the last\n")
    print(f"  {'step':>4} {'misfit':>12} {'largest slope':>14}")
    for number, row in enumerate(zip(fit.misfits, fit.slopes, strict=True)):
        print(f"  {number:4} {row[0]:12.4f} {row[1]:14.1e}")
    sigmas = np.sqrt(np.diag(fit.covariance))
    print(f"\n  {'':6} {'true':>8} {'found':>9}   {'+-':7} {'off by, in sigmas':>17}")
    for name, true, found, sigma in zip(NAMES, TRUTH, fit.unknowns, sigmas, strict=True):
        print(f"  {name:6} {true:8.4f} {found:9.5f}   {sigma:.5f} {(found - true) / sigma:17.2f}")

    nudges = 1e-5 * jnp.eye(TRUTH.size)
    slope = jax.jit(jax.grad(misfit))
    wanted = jnp.stack([(slope(fit.unknowns + d) - slope(fit.unknowns - d)) / 2e-5 for d in nudges])
    off = float(jnp.max(jnp.abs(fit.hessian - wanted)) / jnp.max(jnp.abs(wanted)))
    print(
        f"\nthe Hessian is {off:.0e} from differences of gradients, relative to its largest number"
    )

    print("\nHessian of the misfit in all ten unknowns; compiling ...", flush=True)
    forward, direct = (
        misfit_of(partial(by_diffrax, adjoint=adjoint))
        for adjoint in (diffrax.ForwardMode(), diffrax.DirectAdjoint())
    )
    hessians = {
        "loopkit, forward over reverse": jax.hessian(misfit),
        "diffrax, forward over forward": jax.jacfwd(jax.jacfwd(forward)),
        "diffrax, DirectAdjoint": jax.hessian(direct),
    }
    costs = compare(hessians, fit.unknowns, repeats=args.repeats)
    draw(args.plot, fit, seen, args.apart)
    print(f"\ndrawn in {args.plot}")
    return {"slopes": fit.slopes, "sigmas": sigmas, "off": off, "costs": costs}


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main()
