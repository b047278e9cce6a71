"""A throw that bounces and hits: the gradient of a simulation with contact.

A ball is thrown, bounces off the floor, touches another on its way and hits a third. How far does
that one roll? Balls push each other apart where they overlap, rub, and spin. Contact is stiff, so
each step is implicit: Newton's method looks for the velocities with which all forces balance. It
takes one or two iterations while nothing happens, and more when something hits. That is a loop of
unknown length in each of 1,500 steps.

The gradient of the third ball's place with respect to the throw goes back through all of them,
every impact included. The program compares it with finite differences, and then follows it until
the ball is at its mark.

Run `python examples/contact.py`; it needs matplotlib and tqdm, and a minute. It draws the first
throw and the last in contact.png.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tqdm import tqdm

import loopkit
from comparison import compare

RADIUS, GRAVITY = 0.1, 9.81  # m, m/s^2; a ball weighs 1 kg
INERTIA = jnp.array([1.0, 1.0, RADIUS**2 / 2])  # against x, y and spin
STIFFNESS, LOSS = 1e5, 0.3  # N/m^2; s/m: the loss in an impact
FRICTION, SLIP, DRAG = 0.4, 0.05, 1e-3  # N/N; m/s, below which it fades; N m s, against rolling
DT, TOLERANCE, ITERATIONS = 2e-3, 1e-10, 30  # s; m/s; the most iterations of Newton's method
PARTS = (1.0, 0.5, 0.25, 0.1)  # the parts of a change that are tried
START, RESTING = (0.0, 0.6), ((1.5, 0.1), (2.1, 0.1))
FIRST, SECOND = jnp.triu_indices(1 + len(RESTING), k=1)  # all pairs of balls

Places = Float[Array, "balls 2"]
Velocities = Float[Array, "balls 3"]  # x, y and spin


class Balls(NamedTuple):
    places: Places
    velocities: Velocities


def push(depth: Array, closing: Array) -> Array:
    """Return the force between what overlaps: stronger while it closes in than while it parts."""
    return STIFFNESS * jnp.maximum(depth, 0.0) ** 2 * jnp.maximum(1 + LOSS * closing, 0.0)


def rub(force: Array, slip: Array) -> Array:
    return -FRICTION * force * jnp.tanh(slip / SLIP)


def forces(places: Places, velocities: Velocities) -> Velocities:
    """On each ball, and what turns it."""
    x, y, spin = velocities.T
    normal = push(RADIUS - places[:, 1], -y)
    along = rub(normal, x + RADIUS * spin)
    floor = jnp.stack([along, normal - GRAVITY, RADIUS * along - DRAG * spin], axis=1)

    apart = places[SECOND] - places[FIRST]
    distance = jnp.sqrt(jnp.sum(apart**2, axis=1))
    n = apart / distance[:, None]
    t = jnp.stack([-n[:, 1], n[:, 0]], axis=1)
    relative = (velocities[SECOND] - velocities[FIRST])[:, :2]
    normal = push(2 * RADIUS - distance, -jnp.sum(relative * n, axis=1))
    along = rub(normal, jnp.sum(relative * t, axis=1) - RADIUS * (spin[FIRST] + spin[SECOND]))
    force = normal[:, None] * n + along[:, None] * t
    turn = -RADIUS * along[:, None]
    on_first = jnp.concatenate([-force, turn], axis=1)
    on_second = jnp.concatenate([force, turn], axis=1)
    return floor.at[FIRST].add(on_first).at[SECOND].add(on_second)


class Newton(NamedTuple):
    """The carry of a step's iteration."""

    velocities: Velocities  # the velocities after the step, as far as they are known
    unbalanced: Float[Array, ""]  # m/s
    iterations: Int[Array, ""]


def step(balls: Balls, loop: Callable) -> tuple[Balls, Int[Array, ""]]:
    """The implicit midpoint rule. Returns also how many iterations it took."""

    def unbalanced(velocities: Velocities) -> Velocities:
        middle = (balls.velocities + velocities) / 2
        places = balls.places + DT / 2 * middle[:, :2]
        return velocities - balls.velocities - DT * forces(places, middle) / INERTIA

    def look(velocities: Velocities, iterations) -> Newton:
        most = jax.lax.stop_gradient(jnp.max(jnp.abs(unbalanced(velocities))))
        return Newton(velocities, most, iterations)

    def improve(last: Newton) -> Newton:
        size = last.velocities.size
        slope = jax.jacfwd(unbalanced)(last.velocities).reshape(size, size)
        change = jnp.linalg.solve(slope, unbalanced(last.velocities).ravel()).reshape(-1, 3)
        # Where the whole change would go too far, half of it, or a quarter.
        tried = [look(last.velocities - part * change, last.iterations + 1) for part in PARTS]
        best = jnp.argmin(jnp.stack([new.unbalanced for new in tried]))
        return jax.tree.map(lambda *news: jnp.stack(news)[best], *tried)

    found = loop(lambda last: last.unbalanced > TOLERANCE, improve, look(balls.velocities, 0))
    middle = (balls.velocities + found.velocities) / 2
    return Balls(balls.places + DT * middle[:, :2], found.velocities), found.iterations


class Loops(NamedTuple):
    """The loops of a simulation: one over steps, and one within each step."""

    scan: Callable
    while_loop: Callable


def guarded(going, body, first):
    """Run as many iterations as there may be, and discard what comes after the end."""

    def kept(val, _):
        go = going(val)
        return jax.tree.map(lambda new, old: jnp.where(go, new, old), body(val), val), None

    return jax.lax.scan(kept, first, None, length=ITERATIONS)[0]


BY_LOOPKIT = Loops(loopkit.scan, partial(loopkit.while_loop, max_steps=ITERATIONS))
LOOPS = {
    "loopkit": BY_LOOPKIT,
    "equinox": Loops(
        partial(eqxi.scan, kind="checkpointed"),
        partial(eqxi.while_loop, kind="checkpointed", max_steps=ITERATIONS),
    ),
    f"lax.scan, {ITERATIONS} iterations": Loops(jax.lax.scan, guarded),
}


def thrown(throw: Float[Array, "3"], steps: int, loops: Loops) -> tuple[Balls, tuple]:
    """Return the balls in the end; and, of each step, where they were and how many iterations it
    took."""
    places = jnp.array([START, *RESTING])
    velocities = jnp.zeros((len(places), 3)).at[0].set(throw)

    def one(balls: Balls, _: None):
        balls, iterations = step(balls, loops.while_loop)
        return balls, (balls.places, iterations)

    return loops.scan(one, Balls(places, velocities), None, length=steps)


def draw(path: Path, flights: dict[str, tuple], mark: float) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, 1, figsize=(9, 6.6), layout="constrained")
    colours = ("C3", "C0", "C2")
    for axis, (title, (places, _)) in zip(axes, flights.items(), strict=False):
        shown = range(0, len(places), round(0.09 / DT))
        for at, row in enumerate(shown):
            for place, colour in zip(places[row], colours, strict=True):
                strength = 0.15 + 0.85 * ((at + 1) / len(shown)) ** 2
                axis.add_patch(plt.Circle(place, RADIUS, color=colour, alpha=strength, lw=0))
        for ball, colour in enumerate(colours):
            axis.plot(*places[:, ball].T, color=colour, linewidth=0.8)
        axis.axhline(0, color="gray")
        axis.plot([mark, mark], [0, 0.5], color="gray", linestyle="--")
        axis.annotate("mark", (mark, 0.5), (4, -8), textcoords="offset points", color="gray")
        axis.set(title=title, aspect="equal", xlim=(-0.2, 4.4), ylim=(-0.05, 0.8))
        axis.set(xlabel="m", ylabel="m")
    iterations = flights[title][1]
    axes[2].fill_between(DT * np.arange(len(iterations)), iterations, step="post")
    axes[2].set(
        xlabel="s, of the last throw", ylabel="iterations of a step", xlim=(0, None), ylim=(0, None)
    )
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500, help=f"of {DT} s")
    parser.add_argument("--mark", type=float, default=3.9, help="where the last ball is to be, m")
    parser.add_argument("--throw", type=float, nargs=3, default=(3.2, -1.0, 0.0), help="m/s, rad/s")
    parser.add_argument("--descents", type=int, default=20, help="throws at most")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plot", type=Path, default=Path("contact.png"))
    args = parser.parse_args(argv)

    def place(throw, loops=BY_LOOPKIT):
        """Return the last place of the last ball, its way, and the number of iterations."""
        balls, way = thrown(throw, args.steps, loops)
        return balls.places[-1, 0], way

    slope = jax.jit(jax.value_and_grad(place, has_aux=True))
    throw = jnp.array(args.throw)
    (_, first), gradient = slope(throw)
    value = jax.jit(lambda throw: place(throw)[0])
    nudges = 1e-6 * jnp.eye(3)
    differences = jnp.array([(value(throw + d) - value(throw - d)) / 2e-6 for d in nudges])
    apart = float(jnp.max(jnp.abs(gradient - differences)) / jnp.max(jnp.abs(gradient)))
    iterations = np.asarray(first[1])
    print(
        f"{args.steps} steps, {iterations.sum()} iterations, {iterations.max()} at most in a step"
    )
    print("slope of the last ball's place in the throw's x, y and spin:")
    print(f"  {np.array2string(np.asarray(gradient), precision=5)}, by finite differences")
    print(f"  {np.array2string(np.asarray(differences), precision=5)}, {apart:.0e} apart")

    misses = []
    progress = tqdm(range(args.descents), desc="throws")
    for _ in progress:
        (x, last), gradient = slope(throw)
        misses.append(float(x) - args.mark)
        progress.set_postfix(miss=f"{misses[-1]:+.4f} m")
        if abs(misses[-1]) < 1e-4:
            break
        change = misses[-1] * gradient / jnp.sum(gradient**2)  # Newton's, along the gradient
        throw = throw - change * jnp.minimum(1.0, 0.2 / jnp.linalg.norm(change))
    print(f"\nthe mark is at {args.mark} m; missed by {misses[0]:+.3f} m with the first throw,")
    print(f"  by {misses[-1]:+.5f} m with throw {len(misses)}\n")

    print("Gradient of the last ball's place in the throw")
    gradients = {
        name: jax.grad(lambda throw, loops=loops: place(throw, loops)[0])
        for name, loops in LOOPS.items()
    }
    costs = compare(gradients, throw, repeats=args.repeats)
    draw(args.plot, {"the first throw": first, "the last": last}, args.mark)
    print(f"\ndrawn in {args.plot}")
    return {"apart": apart, "iterations": iterations, "misses": misses, "costs": costs}


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main()
