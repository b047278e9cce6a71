"""Products of a Hessian and a vector, forward mode over reverse mode: time, and time to compile.

    python benchmarks/second_order.py [--repeats 9]

| program      | what it is                                                       | over        |
| ------------ | ---------------------------------------------------------------- | ----------- |
| rnn          | `tanh(h @ w + x)`, batch 16, width 64, 200 steps                 | `lax.scan`  |
| slstm        | a cell with exponential gates, batch 8, width 32, 200 steps      | `lax.scan`  |
| hmm          | the forward algorithm, 16 states, 300 steps                      | `lax.scan`  |
| ctc          | `ctc_loss` of optax: 4 sequences of 200 frames                   | as it is    |
| gmres        | `gmres` of JAX: 40 unknowns, restarted after 10 steps            | as it is    |
| scan in scan | 8 steps of a layer in each of 40 steps, in code that stays       | as it is    |
| hmc          | 10 moves of HMC of tensorflow_probability                        | as it is    |

`hmc` has no reverse mode of its own, so it is compared with forward mode twice.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

import loopkit
from findings import spread
from harness import compile_times, describe_machine, measure, ratio, recorded
from layers import normal
from report import Report

TIME, COMPILING, BY_HAND = 1.3, 1.6, 1.5
"""The most of a product by lax; and of that of the better order, where lax has no reverse mode."""


class Program(NamedTuple):
    theirs: Callable[..., Any]
    ours: Callable[..., Any]
    at: Any
    along: Any
    own: str = "lax"
    limit: float = TIME


def product(loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda at, along: jax.jvp(jax.grad(loss), (at,), (along,))[1]


def in_forward_mode(loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda at, along: jax.jvp(jax.jacfwd(loss), (at,), (along,))[1]


def of_scans(loss: Callable[..., Any], at: Any, along: Any) -> Program:
    """Return a program that is given the scan to use."""
    return Program(
        product(partial(loss, lax.scan)), product(partial(loss, loopkit.scan)), at, along
    )


def as_it_is(loss: Callable[..., Any], at: Any, along: Any) -> Program:
    return Program(product(loss), product(loopkit.checkpointed(loss)), at, along)


def rnn(scan: Callable[..., Any], w: jax.Array) -> jax.Array:
    xs = normal(1, 200, 16, 64)
    return jnp.sum(scan(lambda h, x: (jnp.tanh(h @ w + x), None), jnp.zeros((16, 64)), xs)[0] ** 2)


def slstm(scan: Callable[..., Any], w: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Return the loss of a cell with exponential gates, in range by a running maximum."""

    def step(carry, x):
        h, c, n, top = carry
        i, f, z, o = jnp.split(h @ w[0] + x @ w[1], 4, -1)
        now = jnp.maximum(f + top, i)
        enters, stays = jnp.exp(i - now), jnp.exp(f + top - now)
        c, n = stays * c + enters * jnp.tanh(z), stays * n + enters
        h = jax.nn.sigmoid(o) * c / jnp.maximum(n, 1.0)
        return (h, c, n, now), h.sum()

    empty = jnp.zeros((8, 32))
    return jnp.sum(scan(step, (empty,) * 4, normal(2, 200, 8, 32))[1] ** 2)


def hmm(scan: Callable[..., Any], transitions: jax.Array) -> jax.Array:
    logits = jax.nn.log_softmax(transitions, -1)
    step = lambda a, seen: (jax.nn.logsumexp(a[:, None] + logits, 0) + seen, None)
    return jax.nn.logsumexp(scan(step, jnp.zeros(16), normal(3, 300, 16))[0])


def ctc(logits: jax.Array) -> jax.Array:
    labels = jax.random.randint(jax.random.key(0), (4, 30), 1, 20)
    return optax.ctc_loss(logits, jnp.zeros((4, 200)), labels, jnp.zeros((4, 30))).sum()


def gmres(b: jax.Array) -> jax.Array:
    matrix = 3.0 * jnp.eye(40) + 0.2 * jnp.sin(0.3 * jnp.arange(1600.0).reshape(40, 40))
    solve = partial(jax.scipy.sparse.linalg.gmres, restart=10, maxiter=5)
    return jnp.sum(solve(lambda v: matrix @ v, b, solve_method="incremental")[0] ** 2)


def scan_in_scan(w: jax.Array) -> jax.Array:
    def outer(h, x):
        return lax.scan(lambda h, _: (jnp.tanh(h @ w) + x, None), h, None, 8)[0], None

    return jnp.sum(lax.scan(outer, jnp.ones((8, 32)), normal(4, 40, 8, 32))[0] ** 2)


def hmc(step_size: jax.Array) -> jax.Array:
    from tensorflow_probability.substrates.jax import mcmc

    target = lambda x: -0.5 * jnp.sum(x**2) + jnp.sum(jnp.sin(x))
    kernel = mcmc.HamiltonianMonteCarlo(target, step_size, num_leapfrog_steps=5)
    chain = {"num_results": 10, "current_state": jnp.array([1.0, -0.5]), "kernel": kernel}
    return mcmc.sample_chain(**chain, seed=jax.random.key(1), trace_fn=None).sum()


def of_hmc() -> Program:
    import tensorflow_probability  # noqa: F401  # to leave the program out where it is missing

    ours = product(loopkit.checkpointed(hmc))
    at, along = jnp.float32(0.3), jnp.float32(1.0)
    return Program(in_forward_mode(hmc), ours, at, along, "forward mode twice", BY_HAND)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "rnn": lambda: of_scans(rnn, normal(0, 64, 64, scale=1 / 8), normal(5, 64, 64)),
    "slstm": lambda: of_scans(
        slstm,
        (normal(0, 32, 128, scale=1 / 6), normal(6, 32, 128, scale=1 / 6)),
        (normal(7, 32, 128), normal(8, 32, 128)),
    ),
    "hmm": lambda: of_scans(hmm, normal(0, 16, 16), normal(5, 16, 16)),
    "ctc": lambda: as_it_is(ctc, normal(0, 4, 200, 20), normal(5, 4, 200, 20)),
    "gmres": lambda: as_it_is(gmres, normal(0, 40), normal(5, 40)),
    "scan in scan": lambda: as_it_is(
        scan_in_scan, normal(0, 32, 32, scale=1 / 8), normal(5, 32, 32)
    ),
    "hmc": of_hmc,
}
TITLE = "Hessian-vector products"


def compare(report: Report, repeats: int) -> None:
    for name, make in PROGRAMS.items():
        try:
            program = make()
        except ImportError as missing:
            report.note(f"{name} is left out: {missing}")
            continue
        functions = {program.own: program.theirs, "loopkit": program.ours}
        given = program.at, program.along
        results = measure(functions, given, repeats, afresh=True)
        times = compile_times(functions, given, max(3, repeats // 2))
        results = {
            who: r._replace(compile_seconds=spread(times[who]["total"]).mid)
            for who, r in results.items()
        }
        report.measured(recorded(name, results, program.own))
        over = ratio(results["loopkit"].seconds, results[program.own].seconds)
        report.target(f"{name}: time over {program.own}", over, program.limit)
        over = ratio(times["loopkit"]["total"], times[program.own]["total"])
        report.target(f"{name}: time to compile", over, COMPILING)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    begun, report = time.perf_counter(), Report()
    report.write(f"# {TITLE}\n\n{describe_machine()}\n")
    compare(report, given.repeats)
    report.summary()
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
