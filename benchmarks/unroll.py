"""A Python loop, a scan, or a scan unrolled? Time to compile and time to run, together.

    python benchmarks/unroll.py                           # forward
    python benchmarks/unroll.py --gradient --markdown unroll.md

Nested loops, as in reinforcement learning: `act` repeats an update 5 times, and each update scans a
rollout of 2 steps. `act` is compiled once and then called 1, 100, 1000 and 10,000 times. The middle
loop is written in each of the ways compared. Times are of everything: tracing, compiling, running.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp
from jax import lax

import loopkit
from findings import show_seconds, table
from harness import describe_machine, interleave

REPEATS = 1, 100, 1_000, 10_000
STEPS = 2
WIDTH, BATCH = 64, 32


def rollout(params, state):
    """Two steps of a small network."""

    def step(x, _):
        for w, b in params:
            x = jnp.tanh(x @ w + b)
        return x, jnp.sum(x**2)

    state, rewards = lax.scan(step, state, None, STEPS)
    return state, jnp.sum(rewards)


def python_loop(update, state, count):
    for _ in range(count):
        state = update(state)
    return state


def scanned(scan, **options):
    def run(update, state, count):
        return scan(lambda s, _: (update(s), None), state, None, count, **options)[0]

    return run


WAYS = {
    "Python loop": python_loop,
    "lax.scan": scanned(lax.scan),
    "lax.scan, unroll=True": scanned(lax.scan, unroll=True),
    "loopkit.scan": scanned(loopkit.scan),
    "loopkit.scan, unroll=2": scanned(loopkit.scan, unroll=2),
    "loopkit.scan, unroll=True": scanned(loopkit.scan, unroll=True),
}


def act(run: Callable, count: int, gradient: bool) -> Callable:
    def total(params, state):
        def update(carry):
            x, reward = carry
            x, more = rollout(params, x)
            return x, reward + more

        _, reward = run(update, (state, jnp.float32(0)), count)
        return reward

    return jax.grad(total) if gradient else total


def compare(count: int, gradient: bool, rounds: int) -> str:
    keys = jax.random.split(jax.random.key(0), 4)
    params = [(jax.random.normal(k, (WIDTH, WIDTH)) / 8, jnp.zeros(WIDTH)) for k in keys[:3]]
    state = jax.random.normal(keys[3], (BATCH, WIDTH))
    compiled, to_compile = {}, {}
    for name, run in WAYS.items():
        function = jax.jit(act(run, count, gradient))
        seconds = []
        for _ in range(3):
            jax.clear_caches()
            begin = time.perf_counter()
            compiled[name] = function.lower(params, state).compile()
            seconds.append(time.perf_counter() - begin)
        to_compile[name] = median(seconds)
    seconds = interleave({n: (lambda c=c: c(params, state)) for n, c in compiled.items()}, rounds)
    rows = []
    for name in WAYS:
        a_call = median(seconds[name])
        totals = [show_seconds(to_compile[name] + n * a_call) for n in REPEATS]
        rows.append((name, show_seconds(to_compile[name]), show_seconds(a_call), *totals))
    header = ("middle loop", "to compile", "a call", *(f"{n:,} calls" for n in REPEATS))
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--counts", default="5,50", help="steps of the middle loop")
    parser.add_argument("--gradient", action="store_true", help="of the sum of rewards")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--markdown", metavar="FILE")
    options = parser.parse_args()
    text = [describe_machine()]
    for count in map(int, options.counts.split(",")):
        what = "gradient" if options.gradient else "value"
        text.append(f"## {count} updates a call, {what}")
        text.append(compare(count, options.gradient, options.rounds))
        print("\n\n".join(text[-2:]), flush=True)
    if options.markdown:
        Path(options.markdown).write_text("\n\n".join(text) + "\n")


if __name__ == "__main__":
    main()
