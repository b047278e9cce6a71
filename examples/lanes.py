"""A thousand oscillators, each with steps of its own: lanes that do not wait for the slowest.

Van der Pol's oscillator is stiffer the larger its one parameter, and an explicit method then takes
more steps. Under `jax.vmap` all oscillators take as many steps as the stiffest. With
`lanes="compact"` those that have finished make room for the others: the same steps, and the same
numbers except for rounding. The program also solves them with diffrax, alone and inside
`loopkit.checkpointed`.

Run `python examples/lanes.py`; it needs diffrax and matplotlib, and two minutes, most of them to
compile. It draws the lanes over time in lanes.png.
"""

import argparse
from functools import partial
from pathlib import Path

import diffrax
import jax
import jax.numpy as jnp
import numpy as np

import loopkit
from adaptive_ode import stepper
from comparison import compare

END, TOLERANCE, FIRST_STEP, MAX_STEPS = 10.0, 1e-5, 0.05, 4096
START = jnp.array([2.0, 0.0])


def field(stiffness, state):
    return jnp.stack([state[1], stiffness * (1 - state[0] ** 2) * state[1] - state[0]])


def by_loopkit(stiffness, lanes="compact"):
    """Return the last state, and the steps taken."""
    start, step = stepper(partial(field, stiffness), END, TOLERANCE, TOLERANCE)
    last, info = loopkit.while_loop(
        lambda s: s.time < END,
        step,
        start(START, FIRST_STEP),
        max_steps=MAX_STEPS,
        return_info=True,
        lanes=lanes,
    )
    return last.state, info.steps


def by_diffrax(stiffness, adjoint):
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, args: field(args, y)),
        diffrax.Dopri5(),
        *(0.0, END, FIRST_STEP, START, stiffness),
        stepsize_controller=diffrax.PIDController(TOLERANCE, TOLERANCE),
        max_steps=MAX_STEPS,
        adjoint=adjoint,
    )
    return solution.ys[0], solution.stats["num_steps"]


def phases(longest: np.ndarray, widths: list[int]) -> list[tuple[int, int, int]]:
    """Return each phase's lanes, first and last step, for lanes of these lengths, the longest
    first."""
    ends = [int(longest[narrower]) for narrower in (*widths[1:], 0)]
    return list(zip(widths, [0, *ends[:-1]], ends, strict=True))


def draw(path: Path, longest: np.ndarray, found: list[tuple[int, int, int]]) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True, layout="constrained")
    for ax, title in zip(
        axes, ("all wait for the slowest", "lanes that have stopped make room"), strict=True
    ):
        ax.fill_betweenx(
            np.arange(1, len(longest) + 1), longest, color="tab:blue", label="steps taken"
        )
        ax.set(title=title, xlabel="step", yscale="log", ylim=(1, len(longest)))
    axes[0].axhspan(
        1, len(longest), color="lightgrey", zorder=0, label="steps that count for nothing"
    )
    for width, begun, end in found:
        axes[1].fill_between([begun, end], width, 1, color="lightgrey", zorder=0)
    axes[0].set_ylabel("lane, the longest first")
    axes[0].legend(loc="upper right")
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lanes", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plot", type=Path, default=Path("lanes.png"))
    args = parser.parse_args(argv)
    random = np.random.default_rng(0)
    stiffness = jnp.asarray(np.minimum(random.lognormal(0, 1.6, args.lanes), 65), jnp.float32)

    solvers = {
        "loopkit, wait": partial(by_loopkit, lanes="wait"),
        "loopkit": by_loopkit,
        "diffrax": partial(by_diffrax, adjoint=diffrax.RecursiveCheckpointAdjoint()),
        "diffrax in checkpointed": loopkit.checkpointed(
            partial(by_diffrax, adjoint=diffrax.ForwardMode()), lanes="compact"
        ),
    }
    found = {"states": {}, "steps": {}}
    for name, solve in solvers.items():
        print(f"solving by {name} ...", flush=True)
        found["states"][name], found["steps"][name] = jax.jit(jax.vmap(solve))(stiffness)
    steps = np.asarray(found["steps"]["loopkit"])
    print(f"\n{args.lanes} lanes: {steps.mean():.0f} steps in the mean, {steps.max()} the slowest,")
    longest = np.sort(steps)[::-1]
    explained = loopkit.explain(jax.vmap(by_loopkit), stiffness).loops
    in_phases = phases(longest, [loop.lanes[0] for loop in explained])
    taken = sum(width * (end - begun) for width, begun, end in in_phases)
    print(f"  {longest[0] * len(steps) / longest.sum():.1f} times as many; ", end="")
    print(f"in phases {taken / longest.sum():.1f} times as many as needed\n")

    print("Last states")
    places = lambda solve: lambda mu: jax.vmap(solve)(mu)[0]
    values = {name: places(solve) for name, solve in solvers.items()}
    found["value costs"] = compare(values, stiffness, repeats=args.repeats)

    print("\nGradient of all squared places in all parameters")
    total = lambda solve: lambda mu: jnp.sum(jax.vmap(solve)(mu)[0] ** 2)
    gradients = {name: jax.grad(total(solve)) for name, solve in solvers.items()}
    found["costs"] = compare(gradients, stiffness, repeats=args.repeats)
    draw(args.plot, longest, in_phases)
    print(f"\ndrawn in {args.plot}")
    return found


if __name__ == "__main__":
    main()
