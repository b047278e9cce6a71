"""The cost of `progress` and of `debug="finite"`: steps with and without them, in turn.

Steps of a layer take some 20 us, those of one number some 10 ns.

python benchmarks/progress.py
"""

import argparse
import functools as ft
import io
import time
from contextlib import redirect_stderr
from statistics import median

import jax
import jax.numpy as jnp

import harness
import loopkit
from findings import Record, spread
from report import Report

WIDTH = 256
ROWS = 24


class Nothing:
    def start(self, total): ...
    def update(self, steps): ...
    def close(self): ...


WAYS = {
    "off": {},
    "an object": {"progress": Nothing()},
    '"line"': {"progress": "line"},
    '"tqdm"': {"progress": "tqdm"},
    'debug="finite"': {"debug": "finite"},
}


def scan(w, x, steps, how):
    step = lambda x, _: (jnp.tanh(x @ w), None)
    return loopkit.scan(step, x, None, steps, **how)[0].sum()


def small_steps(w, x, steps, how):
    step = lambda x, _: (x + 1e-3 * jnp.sin(x), None)
    return loopkit.scan(step, 0.3 * x[0, 0], None, steps, **how)[0]


def while_loop(w, x, steps, how):
    body = lambda c: (c[0] + 1, jnp.tanh(c[1] @ w))
    goes_on = lambda c: c[0] < jnp.int32(steps) + c[1][0, 0].astype(int)
    return loopkit.while_loop(goes_on, body, (0, x), max_steps=steps, **how)[1].sum()


def compare(report: Report, repeats: int, steps: int) -> None:
    w = 0.05 * jax.random.normal(jax.random.key(0), (WIDTH, WIDTH))
    x = jnp.ones((ROWS, WIDTH))
    for loop in (scan, while_loop, small_steps):
        for mode, change in {"value": lambda f: f, "gradient": jax.grad}.items():
            calls = {}
            for name, how in WAYS.items():
                f = lambda x, loop=loop, how=how: loop(w, x, steps, how)
                calls[name] = ft.partial(jax.jit(change(f)), x)
            with redirect_stderr(io.StringIO()):
                seconds = harness.interleave(calls, repeats)
            off = seconds["off"]
            program = f"{loop.__name__.replace('_s', ' s')}, {mode}"
            report.write(f"\n{program}: {median(off) / steps * 1e6:.1f} us a step\n")
            report.measured(
                [
                    Record(program, name, spread(s), harness.ratio(s, off), "off")
                    for name, s in seconds.items()
                ]
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--cpu", action="store_true", help="the time of all cores, not the clock's")
    given = parser.parse_args()
    if given.cpu:
        harness.clock = time.process_time
    compare(Report(), given.repeats, given.steps)


if __name__ == "__main__":
    main()
