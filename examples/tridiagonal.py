"""Many tridiagonal systems at once: the same two scans, over blocks that stay in the cache.

The Thomas algorithm eliminates forward and substitutes backward. For 100,000 systems of 100
unknowns, each step of a scan over all of them reads and writes arrays that no cache holds. Before
that, four large arrays are transposed so that the unknowns come first. Two changes make it fast:
`in_axes=1`, which scans the arrays where they lie, and `loopkit.blocked`, which solves some hundred
systems at a time.

The gradient of a linear solve is another linear solve, of the transposed system, in blocks as well:
`lax.custom_linear_solve` says so. If the loss is computed inside the blocks, as one number a
system, only the arrays and their gradients go through memory.

Run `python examples/tridiagonal.py`; it needs matplotlib, numba and scipy, and a minute. It draws
the times in tridiagonal.png.
"""

import argparse
import functools
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numba
import numpy as np
from jax import lax
from jaxtyping import Array, Float
from scipy.linalg import solve_banded
from tqdm import tqdm

import loopkit
from environment import kept_memory, restart_with

Systems = Float[Array, "systems unknowns"]


def eliminate(last, row):
    """Eliminate the previous unknown, which has the equation `x + c * next = d`."""
    last_c, last_d = last
    a, b, c, d = row
    scale = 1.0 / (b - a * last_c)
    new = c * scale, (d - a * last_d) * scale
    return new, new


def substitute(last, row):
    c, d = row
    x = d - c * last
    return x, x


def as_written(a: Systems, b: Systems, c: Systems, d: Systems) -> Systems:
    """Solve with jax.lax.scan as one writes it: bring the unknowns to the front, and back."""
    zeros = jnp.zeros_like(a[:, 0])
    _, (c, d) = lax.scan(eliminate, (zeros, zeros), (a.T, b.T, c.T, d.T))
    _, x = lax.scan(substitute, zeros, (c[::-1], d[::-1]))
    return x[::-1].T


def thomas(a: Systems, b: Systems, c: Systems, d: Systems) -> Systems:
    """Solve with loopkit.scan, over the unknowns where they lie."""
    zeros = jnp.zeros_like(a[:, 0])
    _, (c, d) = loopkit.scan(eliminate, (zeros, zeros), (a, b, c, d), in_axes=1, checkpoints="all")
    _, x = loopkit.scan(substitute, zeros, (c, d), reverse=True, out_axes=1, checkpoints="all")
    return x


def transposed(a: Systems, b: Systems, c: Systems, d: Systems) -> Systems:
    """Return the solution of the transposed systems: `a` above the diagonal, `c` below it."""

    def eliminate(last, row):
        last_inverse, last_c, last_d = last
        a, b, c, d = row
        inverse = 1.0 / (b - last_c * a * last_inverse)
        new_d = (d - last_c * last_d) * inverse
        return (inverse, c, new_d), (inverse, new_d)

    def substitute(above, row):
        inverse, a, d = row
        x = d - inverse * above
        return a * x, x

    z = jnp.zeros_like(a[:, 0])
    _, (p, d) = loopkit.scan(eliminate, (z, z, z), (a, b, c, d), in_axes=1, checkpoints="all")
    _, x = loopkit.scan(
        substitute, z, (p, a, d), reverse=True, in_axes=(0, 1, 0), out_axes=1, checkpoints="all"
    )
    return x


def solve(
    a: Systems, b: Systems, c: Systems, d: Systems, by: Callable = lambda solver: solver
) -> Systems:
    """`by(thomas)`, with derivatives that solve as well instead of going back through its scans.

    `by=loopkit.blocked` solves in blocks, forward and backward. The gradients of the matrices are
    products of two solutions, taken of all systems at once.
    """

    def times(x: Systems) -> Systems:
        d = b * x
        d = d.at[:, 1:].add(a[:, 1:] * x[:, :-1])
        return d.at[:, :-1].add(c[:, :-1] * x[:, 1:])

    return lax.custom_linear_solve(
        times, d, lambda _, d: by(thomas)(a, b, c, d), lambda _, d: by(transposed)(a, b, c, d)
    )


def with_numpy(a, b, c, d):
    b, d, x = b.copy(), d.copy(), np.empty_like(d)
    for i in range(1, a.shape[1]):
        w = a[:, i] / b[:, i - 1]
        b[:, i] -= w * c[:, i - 1]
        d[:, i] -= w * d[:, i - 1]
    x[:, -1] = d[:, -1] / b[:, -1]
    for i in range(a.shape[1] - 2, -1, -1):
        x[:, i] = (d[:, i] - c[:, i] * x[:, i + 1]) / b[:, i]
    return x


def with_scipy(a, b, c, d):
    """One call a system: SciPy has no batch of them."""
    x = np.empty_like(d)
    bands = np.zeros((3, a.shape[1]), a.dtype)
    for k in range(a.shape[0]):
        bands[0, 1:], bands[1], bands[2, :-1] = c[k, :-1], b[k], a[k, 1:]
        x[k] = solve_banded((1, 1), bands, d[k], check_finite=False)
    return x


def with_numba(parallel: bool) -> Callable:
    @numba.njit(parallel=parallel, fastmath=True)
    def solve(a, b, c, d):
        systems, n = a.shape
        x = np.empty_like(d)
        for k in numba.prange(systems):
            upper = np.empty(n, a.dtype)
            upper[0] = c[k, 0] / b[k, 0]
            x[k, 0] = d[k, 0] / b[k, 0]
            for i in range(1, n):
                scale = 1 / (b[k, i] - a[k, i] * upper[i - 1])
                upper[i] = c[k, i] * scale
                x[k, i] = (d[k, i] - a[k, i] * x[k, i - 1]) * scale
            for i in range(n - 2, -1, -1):
                x[k, i] -= upper[i] * x[k, i + 1]
        return x

    return solve


def with_lax_linalg(a, b, c, d):
    return lax.linalg.tridiagonal_solve(a, b, c, d[..., None])[..., 0]


def loss_of(solver: Callable) -> Callable:
    """One number a system."""
    return lambda *arrays: jnp.sum(solver(*arrays) ** 2, axis=1)


def gradient(f: Callable) -> Callable:
    """Return the gradient of the sum of squares, or of the losses."""

    def total(*args):
        out = f(*args)
        return jnp.sum(out if out.ndim == 1 else out**2)

    return jax.grad(total, argnums=(0, 1, 2, 3))


def drawn(systems: int, unknowns: int) -> list[np.ndarray]:
    """Systems whose diagonal is the largest, with the right-hand sides."""
    draws = np.random.default_rng(0)
    a, b, c, d = (draws.random((systems, unknowns), dtype=np.float32) for _ in range(4))
    b += 3
    a[:, 0] = c[:, -1] = 0
    return [a, b, c, d]


BEST, WRITTEN = "loopkit.scan, in_axes, blocked", "lax.scan, as first written"
BESIDE = "numba, parallel"  # times are relative to this one
ONCE = "SciPy solve_banded"  # it takes a second
FLOOR = "(four arrays of this size, scaled)"  # the arrays that any gradient reads and writes
Calls = dict[str, Callable[[], Any]]


def contenders(systems: list[np.ndarray], block: int | None = None) -> tuple[Calls, Calls]:
    """Solutions, and gradients, which all have been compiled and agree."""
    arrays = tuple(map(jnp.asarray, systems))
    blocked = functools.partial(loopkit.blocked, block=block)
    in_blocks = functools.partial(solve, by=blocked)

    def compiled(f):
        fast = jax.jit(f)
        return lambda: jax.block_until_ready(fast(*arrays))

    serial, parallel = with_numba(False), with_numba(True)
    values = {
        WRITTEN: compiled(as_written),
        "loopkit.scan, in_axes": compiled(thomas),
        BEST: compiled(in_blocks),
        "lax.linalg.tridiagonal_solve": compiled(with_lax_linalg),
        "NumPy": lambda: with_numpy(*systems),
        "numba, one thread": lambda: serial(*systems),
        BESIDE: lambda: parallel(*systems),
        ONCE: lambda: with_scipy(*systems),
    }
    gradients = {
        "gradient, lax.scan as first written": compiled(gradient(as_written)),
        "gradient, lax.linalg.tridiagonal_solve": compiled(gradient(with_lax_linalg)),
        "gradient, blocked": compiled(gradient(in_blocks)),
        "gradient, loss in blocks, of the scans": compiled(gradient(blocked(loss_of(thomas)))),
        "gradient, loss in blocks": compiled(gradient(blocked(loss_of(solve)))),
        FLOOR: compiled(lambda *arrays: [1.5 * x for x in arrays]),
    }
    for calls, wanted in ((values, "numba, one thread"), (gradients, next(iter(gradients)))):
        reference = calls[wanted]()
        for name, run in tqdm(calls.items(), desc="compiling", leave=False):
            if name in (ONCE, FLOOR):
                run()
                continue
            apart = jax.tree.map(lambda x, y: np.max(np.abs(np.asarray(x) - y)), run(), reference)
            if not max(jax.tree.leaves(apart)) < 1e-4:
                raise AssertionError(f"{name} is off by {max(jax.tree.leaves(apart)):.1e}")
    return values, gradients


def timed(calls: Calls, repeats: int, once: str | None = None) -> dict[str, list[float]]:
    """Seconds, the calls of a round in turn; of one that takes too long, in the first alone."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in tqdm(range(repeats), desc="timing", leave=False):
        for name, run in calls.items():
            if repeat and name == once:
                continue
            run()  # so that an earlier program does not give its memory back during the measurement
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def settings() -> dict[str, str]:
    """Settings of the environment, for all that is compared here alike."""
    if jax.__version_info__ >= (0, 12):
        return kept_memory()
    # One kernel for a whole loop that works in little memory, as newer versions have it.
    small = "xla_cpu_small_while_loop_byte_threshold=100000000"
    return {**kept_memory(), "XLA_FLAGS": f"--xla_backend_extra_options={small}"}


def draw(path: Path, seconds: dict[str, dict[str, list[float]]]) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 3.2), layout="constrained")
    for axis, (title, taken) in zip(axes, seconds.items(), strict=True):
        names = [name.removeprefix("gradient, ") for name in taken]
        times = [1e3 * median(times) for times in taken.values()]
        colours = ["C0" if "block" in name or "loopkit" in name else "C7" for name in names]
        bars = axis.barh(names, times, color=colours)
        axis.bar_label(bars, fmt="%.0f", padding=3)
        axis.invert_yaxis()
        axis.set(title=title, xlabel="ms", xscale="log")
        axis.margins(x=0.12)
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--systems", type=int, default=100_000)
    parser.add_argument("--unknowns", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--block", type=int, help="systems to a block; chosen if left out")
    parser.add_argument("--as-it-is", action="store_true", help="leave the environment as it is")
    parser.add_argument("--plot", type=Path, default=Path("tridiagonal.png"))
    options = parser.parse_args(argv)
    if not options.as_it_is:
        restart_with(settings())

    systems = drawn(options.systems, options.unknowns)
    values, gradients = contenders(systems, options.block)
    seconds = timed(values | gradients, options.repeats, once=ONCE)

    def ratio(name: str, other: str) -> str:
        pairs = zip(seconds[name], seconds[other], strict=False)
        return f"{median(x / y for x, y in pairs):.2f}"

    print(f"\n{options.systems} systems of {options.unknowns}")
    for name, times in seconds.items():
        against = ratio(name, BESIDE)
        print(f"{name:38} {1e3 * median(times):9.1f} ms   {against:>7} of {BESIDE}")
    print(f"\nblocked over lax.scan as first written: {ratio(BEST, WRITTEN)}")
    for name in [*gradients][2:]:
        print(f"{name}, over the value: {ratio(name, BEST)}")
    of = lambda names: {name: seconds[name] for name in names}
    draw(options.plot, {"solutions": of(values), "their gradients": of(gradients)})
    print(f"\ndrawn in {options.plot}")


if __name__ == "__main__":
    main()
