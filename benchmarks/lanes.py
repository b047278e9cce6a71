"""Lanes of different lengths under jax.vmap: they wait for the slowest, or make room.

    python benchmarks/lanes.py [--lanes 256] [--repeats 9] [--only value,grad] [--what uniform,...]

A lane multiplies a vector of 64 by a matrix, as often as its number says; in the sections of nested
loops, in each of 50 steps, as often as the number of lane and step says. Ratios are over lax's own
loops in values, else over "wait", which is what lax does; the bound is how many times longer the
slowest lane is than the mean.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import loopkit
from harness import describe_machine, measure, recorded
from report import Report

MOST = 1024  # steps, without which equinox has no gradient
WEIGHTS = jax.random.normal(jax.random.key(0), (64, 64)) / 8


def lengths(count: int) -> dict[str, np.ndarray]:
    """Steps of each lane."""
    random = np.random.default_rng(0)
    return {
        "log-normal": np.ceil(random.lognormal(3, 1.2, count)).astype(int),
        "one in twenty long": np.where(random.random(count) < 0.05, 400, 20),
        "geometric": random.geometric(1 / 40, count),
        "uniform": random.integers(1, 200, count),
        "all the same": np.full(count, 60),
    }


def goes_on(carry):
    return carry[0] > 0


def contenders(value: bool) -> dict:
    """Return a loop of each kind: from the steps, the vector and the matrix to the vector."""

    def loop(run):
        def one(n, x, w):
            return run(goes_on, lambda c: (c[0] - 1, jnp.tanh(c[1] @ w)), (n, x))[1]

        return one

    how = lambda lanes: lambda *of: loopkit.while_loop(*of, max_steps=MOST, lanes=lanes)
    found = {"wait": loop(how("wait")), "compact": loop(how("compact"))}
    if value:
        return {"lax": loop(lax.while_loop), **found}
    eqx = lambda *of: eqxi.while_loop(*of, kind="checkpointed", max_steps=MOST)
    return {**found, "equinox": loop(eqx)}


def programs(section: str) -> dict:
    """Functions of the steps of all lanes, their vectors and the matrix."""

    def program(name, one):
        every = jax.vmap(one, (0, 0, None))
        loss = lambda x, w, n: jnp.sum(jnp.sin(every(n, x, w)))
        gradient = jax.grad(loss, (0, 1))
        match section:
            case "value":
                return every
            case "grad":
                return lambda n, x, w: gradient(x, w, n)
            case "each":
                alone = lambda x, w, n: jnp.sum(jnp.sin(one(n, x, w)))
                return jax.vmap(lambda n, x, w: jax.value_and_grad(alone)(x, w, n), (0, 0, None))
            case "second":
                at = lambda n: lambda x, w: gradient(x, w, n)
                return lambda n, x, w: jax.jvp(at(n), (x, w), (x, w))[1]

    found = {name: program(name, one) for name, one in contenders(section == "value").items()}
    if section == "second":
        found.pop("equinox")  # which has no forward mode
    return found


def nested(section: str) -> dict:
    """Return a loop that ends when its lane says so in each step of a scan, and their gradient."""

    def program(run, lanes):
        def one(n, x, w):
            inner = lambda c: (c[0] - 1, jnp.tanh(c[1] @ w))
            step = lambda x, n: (run(goes_on, inner, (n, x))[1], None)
            if lanes is None:
                return lax.scan(step, x, n)[0]
            return loopkit.scan(step, x, n, lanes=lanes)[0]

        every = jax.vmap(one, (0, 0, None))
        gradient = jax.grad(lambda x, w, n: jnp.sum(jnp.sin(every(n, x, w))), (0, 1))
        return every if section == "nested" else lambda n, x, w: gradient(x, w, n)

    ours = {lanes: program(loopkit.while_loop, lanes) for lanes in ("wait", "flatten")}
    return {"lax": program(lax.while_loop, None), **ours} if section == "nested" else ours


SECTIONS = {
    "value": "the loops alone",
    "grad": "gradient of the sum over lanes, in vectors and matrix",
    "each": "value and gradient of each lane",
    "second": "the derivative of the gradient in one direction",
    "nested": "a loop in each step of a scan",
    "nested-grad": "the gradient of that, in vectors and matrix",
}


def compare(report: Report, repeats: int, section: str, lanes: int, what: str = "") -> None:
    """All contenders of a section; `what` names some of the lengths."""
    for name, n in lengths(lanes).items():
        if what and name not in what.split(","):
            continue
        x = jax.random.normal(jax.random.key(1), (lanes, 64))
        found, kind = programs, "slowest over mean"
        if section.startswith("nested"):
            found, kind = nested, "slowest of each step over slowest of all"
            n = np.random.default_rng(1).permuted(np.tile(n, (50, 1)), axis=1).T
        arguments = jnp.asarray(n, jnp.int32), x, WEIGHTS
        results = measure(found(section), arguments, repeats)
        most = n.max(0).sum() / n.sum(1).max() if n.ndim > 1 else n.max() / n.mean()
        report.write(f"### {name}\n")
        first, *others = recorded(name, results, next(iter(results)))
        report.measured([replace(first, counts={kind: float(most)}), *others])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lanes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--what", default="")
    given = parser.parse_args()
    report = Report()
    report.write(describe_machine())
    for section in given.only.split(","):
        report.write(f"\n## {section}: {SECTIONS[section]}\n")
        compare(report, given.repeats, section, given.lanes, given.what)


if __name__ == "__main__":
    main()
