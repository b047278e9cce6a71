"""Beam search under a generous bound, and scans that grow: loopkit against its alternatives.

    python benchmarks/decoding.py

Three sections. `bound`: the same words, decoded with room for 24 tokens and for 2000, and the
gradient of their risk, by a recurrent network and by a transformer, which attends to what it wrote.
`peers`: that search run by other loops. `unbounded`: `unbounded_scan` of 10,000 steps against one
compiled `lax.scan` of just that length.
"""

import argparse
import time
from collections.abc import Sequence
from functools import partial
from statistics import median

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import harness
import loopkit
import workloads
from beam_searches import (
    BEAM,
    WORDS,
    attending,
    by_equinox,
    by_python,
    by_scan,
    search_of,
    slope_of,
    transformer,
    with_loop,
    words,
)
from findings import Record, show_seconds, spread
from harness import (
    describe_machine,
    interleave,
    keep_memory,
    measure,
    ratio,
    recorded,
    temp_bytes,
)
from report import Report

LASTS = (6, 20)  # tokens of the longest word among short ones, among long ones


def summed(search):
    return lambda *args: jnp.sum(search(*args)[0])


def bound(report: Report, repeats: int, only: str = "") -> None:
    """Room for 24 tokens and for 2000; `only` begins the titles that are wanted."""
    gru, attends = words(20), transformer()
    arrays, static = eqx.partition(attends, eqx.is_array)

    def of_arrays(max_length):
        return lambda arrays: attending(max_length)(*eqx.combine(arrays, static))

    def slope(max_length):
        loss = summed(of_arrays(max_length))

        def run(arrays):
            floats, others = eqx.partition(arrays, eqx.is_inexact_array)
            return jax.grad(lambda floats: loss(eqx.combine(floats, others)))(floats)

        return run

    for title, make, arguments, target in (
        ("gru, decoding", search_of, gru, 1.2),
        ("gru, gradient", lambda n: slope_of(search_of(n)), gru, 1.5),
        ("transformer, decoding", of_arrays, (arrays,), 1.2),
        ("transformer, gradient", slope, (arrays,), 1.5),
    ):
        if not title.startswith(only):
            continue
        results = measure({"24": make(24), "2000": make(2000)}, arguments, repeats)
        report.write(f"\n{title}, by max_length, words of at most 20 tokens\n")
        report.measured(recorded(title, results, "24"))
        against = ratio(results["2000"].seconds, results["24"].seconds)
        report.target(f"{title}: room for 2000 tokens over room for 24", against, target)


def peers(report: Report, repeats: int, limit: int) -> None:
    """The table of docs/decoding.md."""
    compiled = {
        "loopkit.while_loop": loopkit.while_loop,
        "lax.scan, fixed length": by_scan,
        "equinox.internal.while_loop": by_equinox,
    }
    searches = {name: with_loop(loop, search_of(limit)) for name, loop in compiled.items()}
    python = by_python(limit)
    report.write(f"\n{WORDS} words, beam of {BEAM}, max_length={limit}\n")
    for last in LASTS:
        arguments = words(last)
        for differentiated in (False, True):
            of = slope_of if differentiated else lambda f: f
            calls = {name: compile_(of(f), arguments) for name, f in searches.items()}
            memory = {name: temp_bytes(call) for name, call in calls.items()}
            calls["Python, jitted steps"] = of(python)
            if differentiated:
                memory["Python, jitted steps"] = held_bytes(python, arguments)
            check_agree(calls, arguments)
            timed = {name: partial(call, *arguments) for name, call in calls.items()}
            seconds = interleave(timed, repeats)
            ours = "loopkit.while_loop"
            title = f"{'gradient' if differentiated else 'decoding'}, {last} tokens"
            report.write(f"\n### {title}\n")
            report.measured(
                [
                    Record(
                        title,
                        name,
                        seconds=spread(samples),
                        ratio=ratio(samples, seconds[ours]),
                        over=ours,
                        temp_bytes=memory.get(name),
                    )
                    for name, samples in seconds.items()
                ]
            )


def compile_(function, arguments):
    return jax.jit(function).lower(*arguments).compile()


def check_agree(calls, arguments) -> None:
    first, *others = (jax.tree.leaves(call(*arguments)) for call in calls.values())
    for other in others:
        for want, got in zip(first, other, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * np.max(np.abs(want)))


def held_bytes(search, arguments) -> int:
    """Return the bytes that the backward pass of a Python loop holds: arrays other than arguments,
    each once."""
    *floats, last_steps = arguments
    _, pull = jax.vjp(lambda *floats: search(*floats, last_steps)[0], *floats)
    known = {id(x) for x in jax.tree.leaves(arguments)}
    held = {id(x): x.nbytes for x in jax.tree.leaves(pull) if id(x) not in known}
    return sum(held.values())


def growing(report: Report, name: str, repeats: int, steps: int) -> None:
    """The loop of a workload grown, and with its length known."""
    load = workloads.make(name)
    start = jnp.int32(0)

    # The very same functions at every call: made anew, they would be traced anew. So the parameters
    # are carried, and not closed over.
    def step(carry, _):
        params, x, count = carry
        return (params, load.body(params, x), count + 1), jnp.sum(x)

    def until(carry, _):
        return carry[2] >= steps

    def grown(params, init):
        return loopkit.unbounded_scan(step, (params, init, start), until=until)[1]

    @jax.jit
    def known(params, init):
        return lax.scan(lambda x, _: (load.body(params, x), jnp.sum(x)), init, None, steps)[1]

    def gradient(f):
        return jax.grad(lambda params, init: jnp.sum(f(params, init)), argnums=(0, 1))

    jitted, alike = "jitted lax.scan", "jax.grad of the jitted lax.scan"
    values = {"unbounded_scan": grown, jitted: known}
    gradients = {
        "unbounded_scan": gradient(grown),
        jitted: jax.jit(gradient(known)),
        alike: gradient(known),
    }
    for kind, functions in ("value", values), ("gradient", gradients):
        calls = {k: partial(f, load.params, load.init) for k, f in functions.items()}
        check_agree(calls, ())
        seconds = interleave(calls, repeats)
        ours, title = seconds["unbounded_scan"], f"{name}, {kind}"
        report.write(f"\n### {title}\n")
        report.measured(
            [
                Record(title, k, spread(s), ratio(s, seconds[jitted]), jitted)
                for k, s in seconds.items()
            ]
        )
        over = median(ours) - median(seconds[jitted])
        report.write(f"more than the jitted one: {show_seconds(over) if over > 0 else 'none'}\n")
        peer = alike if kind == "gradient" else jitted
        report.target(f"{title}: unbounded_scan over {peer}", ratio(ours, seconds[peer]), 1.3)


def unbounded(report: Report, repeats: int, loops: Sequence[str], steps: int = 10_000) -> None:
    report.write(f"\n{steps} steps, outside jit, after compilation")
    for name in loops:
        growing(report, name, repeats, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="bound,peers,unbounded")
    parser.add_argument("--loops", default=",".join(workloads.NAMES), help="of unbounded_scan")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--limit", type=int, default=200, help="max_length of the peers")
    parser.add_argument("--cpu", action="store_true", help="time of all cores, not of the clock")
    parser.add_argument("--as-it-is", action="store_true", help="leave the environment as it is")
    args = parser.parse_args()
    if not args.as_it_is:
        keep_memory()
    if args.cpu:
        harness.clock = time.process_time
    only = args.only.split(",")
    report = Report()
    report.write(describe_machine())
    if "bound" in only:
        bound(report, args.repeats)
    if "peers" in only:
        peers(report, args.repeats, args.limit)
    if "unbounded" in only:
        unbounded(report, args.repeats, args.loops.split(","))
    report.summary()


if __name__ == "__main__":
    main()
