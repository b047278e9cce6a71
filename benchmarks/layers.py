"""Budgets of loopkit compared with policies of jax.checkpoint, at equal memory.

    python benchmarks/layers.py                                # all loops
    python benchmarks/layers.py --loops transformer --repeats 15

| loop        | step                                                        | steps |
| ----------- | ----------------------------------------------------------- | ----- |
| transformer | a layer, 256 wide, 4 heads, 8 sequences of 128              | 12    |
| small       | the same, 64 wide, 32 sequences of 64, as in examples/      | 12    |
| long        | the same, 2 sequences of 512: attention scores are large    | 12    |
| gru         | a gated recurrent unit, batch 32, width 128                 | 2,000 |
| selective   | a selective state space: 256 channels, 16 states each       | 1,000 |
| runge-kutta | four stages of a network of 128 units, batch 64             | 200   |
| unet        | convolutions down and up again, 32 x 32, 16 channels        | 20    |

For each policy loopkit is given as `memory` what lax with that policy needs, by the compiler's
account, beyond what no plan counts. Sets of names are tried one and all.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name as named

import harness
import loopkit
from findings import Record, show_bytes, spread
from harness import describe_machine, measure, ratio, recorded, temp_bytes
from peer_scans import nested_scans
from report import Report

LIMIT = 1.03
"""The most time, relative to that of a policy at its memory."""
TRIES = 5
COUNTERS = 64
"""Bytes that make no difference."""


class Case(NamedTuple):
    """A loop to differentiate: `step(params, carry, x) -> (carry, y)`."""

    step: Callable
    params: Any
    init: Any
    xs: Any
    length: int
    names: tuple[str, ...]
    """The names of the values in a step that are marked."""


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    values = np.random.default_rng(seed).normal(size=shape) * scale
    return jnp.asarray(values, jnp.float32)


def centred(x):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def transformer(batch: int, length: int, layers: int = 12, width: int = 256, heads: int = 4):
    def step(_, h, p):
        q, k, v = (
            a.reshape(batch, length, heads, width // heads)
            for a in jnp.split(named(centred(h) @ p["qkv"], "qkv"), 3, -1)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.float32(np.sqrt(width // heads))
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)
        h = h + named(mixed.reshape(batch, length, width) @ p["out"], "attention")
        return h + named(jax.nn.gelu(centred(h) @ p["up"]) @ p["down"], "mlp"), None

    sizes = {"qkv": (width, 3 * width), "out": (width, width)}
    sizes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    xs = {
        k: normal(i, layers, *size, scale=size[0] ** -0.5)
        for i, (k, size) in enumerate(sizes.items())
    }
    init = normal(9, batch, length, width)
    return Case(step, jnp.zeros(()), init, xs, layers, ("qkv", "attention", "mlp"))


def gru(batch: int = 32, width: int = 128, length: int = 2000):
    def step(w, h, x):
        update = named(jax.nn.sigmoid(x + h @ w[0]), "update")
        reset = jax.nn.sigmoid(x - h @ w[1])
        proposed = named(jnp.tanh(x + (reset * h) @ w[2]), "proposed")
        h = update * h + (1 - update) * proposed
        return h, None

    w = normal(1, 3, width, width, scale=width**-0.5)
    xs = normal(2, length, batch, width)
    return Case(step, w, jnp.zeros((batch, width)), xs, length, ("update", "proposed"))


def selective(channels: int = 256, states: int = 16, batch: int = 4, length: int = 1000):
    def step(p, s, x):
        wide = named(jax.nn.softplus(x @ p["step"]), "step")
        decay = named(jnp.exp(-wide[..., None] * jnp.exp(p["rates"])), "decay")
        into, out = jnp.split(x @ p["mix"], 2, -1)
        s = decay * s + (wide * x)[..., None] * into[:, None, :]
        return s, (s * out[:, None, :]).sum(-1)

    p = {
        "step": normal(1, channels, channels, scale=channels**-0.5),
        "rates": normal(2, channels, states),
        "mix": normal(3, channels, 2 * states, scale=channels**-0.5),
    }
    xs = normal(4, length, batch, channels)
    return Case(step, p, jnp.zeros((batch, channels, states)), xs, length, ("step", "decay"))


def runge_kutta(width: int = 128, batch: int = 64, length: int = 200):
    def step(w, y, _):
        slope = lambda y: named(jnp.tanh(y @ w[0]) @ w[1], "slope")
        a = slope(y)
        b = slope(y + 0.05 * a)
        c = slope(y + 0.05 * b)
        d = slope(y + 0.1 * c)
        return y + (a + 2 * b + 2 * c + d) / 60, None

    w = normal(1, 2, width, width, scale=width**-0.5)
    return Case(step, w, normal(2, batch, width), None, length, ("slope",))


def unet(size: int = 32, channels: int = 16, batch: int = 4, length: int = 20):
    def convolved(x, w, stride=1):
        layout = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=layout)

    def step(w, x, _):
        top = named(jax.nn.silu(convolved(x, w["in"])), "top")
        low = named(jax.nn.silu(convolved(top, w["down"], 2)), "low")
        low = jax.nn.silu(convolved(low, w["mid"]))
        up = jnp.repeat(jnp.repeat(low, 2, 1), 2, 2)
        return x + 0.1 * convolved(jnp.concatenate([top, up], -1), w["out"]), None

    c = channels
    sizes = {"in": (c, c), "down": (c, 2 * c), "mid": (2 * c, 2 * c), "out": (3 * c, c)}
    w = {
        k: normal(i, 3, 3, *size, scale=(9 * size[0]) ** -0.5)
        for i, (k, size) in enumerate(sizes.items())
    }
    return Case(step, w, normal(8, batch, size, size, channels), None, length, ("top", "low"))


CASES: dict[str, Callable[[], Case]] = {
    "transformer": partial(transformer, 8, 128),
    "small": partial(transformer, 32, 64, width=64),
    "long": partial(transformer, 2, 512),
    "gru": gru,
    "selective": selective,
    "runge-kutta": runge_kutta,
    "unet": unet,
}


def loss(run: Callable, case: Case) -> Callable:
    """Return a number of what `run(step, init, xs, length) -> (carry, ys)` returns."""

    def of(params, init, xs):
        carry, ys = run(partial(case.step, params), init, xs, case.length)
        total = jnp.sum(carry**2)
        return total if ys is None else total + jnp.sum(ys**2)

    return of


def gradient(run: Callable, case: Case) -> Callable:
    """Return the gradient of `loss` in all inexact arguments."""
    return jax.grad(loss(run, case), (0, 1, 2) if case.xs is not None else (0, 1))


def arguments(case: Case) -> tuple:
    return case.params, case.init, case.xs


def by_policy(policy: Callable) -> Callable:
    def run(step, init, xs, length):
        wrapped = jax.checkpoint(step, policy=policy, prevent_cse=False)
        return lax.scan(wrapped, init, xs, length)

    return run


def ours(**options) -> Callable:
    return lambda step, init, xs, length: loopkit.scan(step, init, xs, length, **options)


def policies(case: Case) -> Iterator[tuple[str, Callable]]:
    made = jax.checkpoint_policies
    for name in ("nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable"):
        yield name, getattr(made, name)
    for count in range(1, len(case.names) + 1):
        for some in combinations(case.names, count):
            yield f"names: {', '.join(some)}", made.save_only_these_names(*some)
    yield "everything_saveable", made.everything_saveable


def needed(run: Callable, case: Case) -> int:
    """Temporary bytes of the gradient, by the compiler's account."""
    return temp_bytes(jax.jit(gradient(run, case)).lower(*arguments(case)).compile())


def planned(case: Case, memory: int) -> int:
    """Bytes that the plan within so many is predicted to need."""

    def run(params, init, xs):
        return ours(memory=memory)(partial(case.step, params), init, xs, case.length)

    return loopkit.explain(run, *arguments(case)).plan.peak_bytes


def within(case: Case, limit: int) -> tuple[Callable | None, int]:
    """loopkit with a `memory` for which the gradient needs `limit` bytes at most, if one is found.

    What the compiler needs beyond the plan is taken off, until it fits.
    """
    memory = limit
    for _ in range(TRIES):
        try:
            used = needed(ours(memory=memory), case)
        except ValueError:  # less than any plan needs
            break
        if used <= limit + COUNTERS:
            return ours(memory=memory), memory
        memory = max(1, min(memory, planned(case, memory)) - (used - limit))
    return None, memory


def compare(report: Report, repeats: int, name: str) -> dict[str, float]:
    """All policies of one loop, and loopkit at the memory of each."""
    case = CASES[name]()
    runs: dict[str, Callable] = {k: by_policy(p) for k, p in policies(case)}
    limits = {k: needed(run, case) for k, run in runs.items()}
    runs["nested scans"] = lambda step, init, xs, length: nested_scans(2)(
        step, init, xs, length, length
    )
    runs |= {"loopkit, default": ours(), 'loopkit, "all"': ours(checkpoints="all")}
    pairs = {}
    for policy, limit in limits.items():
        run, memory = within(case, limit)
        if run is None:
            report.write(f"no plan found within {show_bytes(limit)}, of {policy}\n")
            continue
        pairs[policy] = f"loopkit, memory={show_bytes(memory)}"
        runs[pairs[policy]] = run
    functions = {k: gradient(run, case) for k, run in runs.items()}
    results = measure(functions, arguments(case), repeats)
    report.measured(recorded(name, results, "nothing_saveable"))
    found = {p: ratio(results[mine].seconds, results[p].seconds) for p, mine in pairs.items()}
    title = f"{name}, loopkit"
    report.measured(
        [
            Record(
                title,
                f"with the memory of {policy}",
                seconds=spread(results[pairs[policy]].seconds),
                ratio=found[policy],
                over=policy,
                temp_bytes=results[pairs[policy]].temp_bytes,
            )
            for policy in found
        ]
    )
    worst = max(found, key=lambda k: found[k].mid)
    report.target(f"{name}, loopkit over a policy, worst ({worst})", found[worst].mid, LIMIT)
    return {k: v.mid for k, v in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--loops", default=",".join(CASES))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--processor", action="store_true", help="time of all cores together")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.processor:
        harness.clock = time.process_time
    report = Report()
    report.write(describe_machine() + "\n")
    for name in options.loops.split(","):
        report.write(f"## {name}\n")
        compare(report, options.repeats, name)
    report.summary()
    report.save(options.markdown)


if __name__ == "__main__":
    main()
