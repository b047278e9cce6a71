"""Planning in a maze: the gradient of a fixed point says where the plan goes.

A walker wants out of a maze. Each step costs what the cell costs, and one step in five slips to the
side. The cost of the best plan from each cell, discounted, is the fixed point of value iteration
(Bellman, 1957): a loop that stops when nothing changes. Its gradient with respect to the costs,
which `jax.lax.while_loop` does not have, says how often the walker will visit each cell.

The gradient also solves a linear system, the adjoint of the fixed point. The program compares the
two. It also compares time and memory of the gradient with other loops, with the same generous bound
on the steps.

Run `python examples/fixed_point.py`; it needs matplotlib, and some seconds. It draws the costs to
go and the visits in fixed_point.png.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import loopkit
from comparison import compare

DISCOUNT, SLIP, TOLERANCE = 0.995, 0.1, 1e-9
BOUND, CHECKPOINTS = 5000, 64  # sweeps at most, and how many of them the gradient keeps
START = (1, 1)

Grid = Float[Array, "rows columns"]


class Maze(NamedTuple):
    walls: Bool[np.ndarray, "rows columns"]
    ways: Bool[np.ndarray, "rows columns"]  # where one has to go on: not a wall, not the goal
    to: Int[np.ndarray, "4 cells"]  # where a step up, right, down or left leads: walls throw back


def carve(size: int, rng: np.random.Generator) -> Maze:
    """Corridors carved at random, and some of the walls between them broken through."""
    walls = np.ones((2 * size + 1, 2 * size + 1), bool)
    walls[1, 1] = False
    path = [(1, 1)]
    while path:
        row, column = path[-1]
        ways = [(row + dr, column + dc) for dr, dc in ((0, 2), (0, -2), (2, 0), (-2, 0))]
        ways = [(r, c) for r, c in ways if 0 < r < 2 * size and 0 < c < 2 * size and walls[r, c]]
        if not ways:
            path.pop()
            continue
        r, c = ways[rng.integers(len(ways))]
        walls[r, c] = walls[(row + r) // 2, (column + c) // 2] = False
        path.append((r, c))
    walls[1:-1, 1:-1] &= rng.random(walls[1:-1, 1:-1].shape) > 0.08

    cells, to = np.arange(walls.size).reshape(walls.shape), []
    for axis, shift in ((0, 1), (1, -1), (0, -1), (1, 1)):
        there = np.roll(cells, shift, axis)
        to.append(np.where(walls.ravel()[there], cells, there).ravel())
    ways = ~walls
    ways[-2, -2] = False
    return Maze(walls, ways, np.stack(to))


def back_up(costs: Grid, values: Grid, maze: Maze) -> Grid:
    """Return the cost of each cell if its next step is the best of four, and `values` count from
    there."""
    after = values.ravel()[maze.to]
    slips = SLIP * (jnp.roll(after, 1, axis=0) + jnp.roll(after, -1, axis=0))
    best = jnp.min((1 - 2 * SLIP) * after + slips, axis=0).reshape(costs.shape)
    return jnp.where(maze.ways, costs + DISCOUNT * best, 0.0)


class Sweep(NamedTuple):
    """The carry of value iteration."""

    values: Grid
    change: Float[Array, ""]  # the largest of the last sweep
    sweeps: Int[Array, ""]


def costs_to_go(costs: Grid, maze: Maze, loop: Callable) -> Sweep:
    """Sweeps over all cells until none changes."""

    def sweep(last: Sweep) -> Sweep:
        values = back_up(costs, last.values, maze)
        change = jax.lax.stop_gradient(jnp.max(jnp.abs(values - last.values)))
        return Sweep(values, change, last.sweeps + 1)

    first = Sweep(jnp.zeros_like(costs), jnp.array(jnp.inf, costs.dtype), jnp.int32(0))
    return loop(lambda last: last.change > TOLERANCE, sweep, first)


def by_loopkit(going, step, first):
    return loopkit.while_loop(going, step, first, max_steps=BOUND, checkpoints=CHECKPOINTS)


def by_equinox(going, step, first):
    settings = {"max_steps": BOUND, "checkpoints": CHECKPOINTS}
    return eqxi.while_loop(going, step, first, kind="checkpointed", **settings)


def by_scan(going, step, first):
    """All of the bound, with what comes after the end thrown away."""

    def guarded(val, _):
        go = going(val)
        return jax.tree.map(lambda new, old: jnp.where(go, new, old), step(val), val), None

    return jax.lax.scan(guarded, first, None, length=BOUND)[0]


def visits_by_adjoint(costs: Grid, values: Grid, maze: Maze) -> Grid:
    """The implicit function theorem: visits = start + (d back_up / d values)^T visits."""
    of_values = jax.jacobian(lambda v: back_up(costs, v, maze))(values)
    matrix = np.asarray(of_values).reshape(costs.size, costs.size)
    begin = np.zeros(costs.shape)
    begin[START] = 1.0
    visits = np.linalg.solve(np.eye(costs.size) - matrix.T, begin.ravel())
    _, pull = jax.vjp(lambda c: back_up(c, values, maze), costs)
    return pull(jnp.asarray(visits.reshape(costs.shape), costs.dtype))[0]


def draw(path: Path, walls: Bool[np.ndarray, "rows columns"], values: Grid, visits: Grid) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    seen = np.ma.masked_array(visits, walls | (np.asarray(visits) < 1e-3))
    pictures = (
        ("costs to go", np.ma.masked_array(values, walls), {}),
        ("their gradient in the costs: visits", seen, {"norm": LogNorm(1e-3, 2.0)}),
    )
    for axis, (title, picture, options) in zip(axes, pictures, strict=True):
        axis.imshow(np.where(walls, 0.25, 0.95), cmap="gray", vmin=0, vmax=1)
        image = axis.imshow(picture, **options)
        figure.colorbar(image, shrink=0.8)
        axis.set(title=title, xticks=[], yticks=[])
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=20, help="corridors of the maze")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--plot", type=Path, default=Path("fixed_point.png"))
    args = parser.parse_args(argv)

    rng = np.random.default_rng(args.seed)
    maze = carve(args.size, rng)
    costs = jnp.asarray(rng.uniform(0.5, 1.5, maze.walls.shape))

    def slope_of(loop):
        def first_cost(costs):
            last = costs_to_go(costs, maze, loop)
            return last.values[START], last

        return jax.grad(first_cost, has_aux=True)

    visits, last = jax.jit(slope_of(by_loopkit))(costs)
    wanted = visits_by_adjoint(costs, last.values, maze)
    error = float(jnp.max(jnp.abs(visits - wanted)))
    print(f"a maze of {2 * args.size + 1} cells a side: {last.sweeps} sweeps of at most {BOUND}")
    print(f"costs from the start {last.values[START]:.3f}, in {jnp.sum(visits):.1f} visits")
    print(f"largest difference of the gradient from the adjoint system {error:.1e}\n")

    print("Gradient of the costs from the start in the costs of all cells")
    loops = {
        "loopkit.while_loop": by_loopkit,
        "equinox.internal.while_loop": by_equinox,
        "lax.scan of the bound": by_scan,
    }
    gradients = {name: slope_of(loop) for name, loop in loops.items()}
    costs_of = compare(gradients, costs, repeats=args.repeats)
    draw(args.plot, maze.walls, last.values, visits)
    print(f"\ndrawn in {args.plot}")
    return {"error": error, "sweeps": int(last.sweeps), "costs": costs_of}


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main()
