"""Loops of loopkit against those of jax.lax and equinox: time, memory, compile time.

    python benchmarks/engine.py                         # everything: three minutes on two cores
    python benchmarks/engine.py --only grad,all --loops mlp
    python benchmarks/engine.py --device gpu --markdown results.md

Each section states a target for loopkit and prints whether it is met. A missed target is reported,
not an error: machines differ.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import equinox.internal as eqxi
import jax
import jax.numpy as jnp

import contenders as run
import loopkit
import workloads
from findings import Record, spread
from harness import compile_times, describe_machine, interleave, measure, ratio, recorded
from report import Report
from workloads import Run, Workload, arguments, grad_of, jvp_of, value_of

EARLY_STEPS = 10
EARLY_BOUND = 1_000_000
BUDGETS = 8, 32


# --- sections --------------------------------------------------------------------------------


def compare_value(report: Report, load: Workload, repeats: int) -> None:
    others = {
        "equinox while_loop": run.equinox_while_loop(),
        "equinox scan": run.equinox_scan(),
    }
    against_lax(report, "value", value_of, load, repeats, others, limit=1.05)


def compare_jvp(report: Report, load: Workload, repeats: int) -> None:
    others = {"equinox while_loop, bounded": run.equinox_while_loop("bounded")}
    against_lax(report, "jvp", jvp_of, load, repeats, others, limit=1.1)


def against_lax(
    report: Report,
    what: str,
    function_of: Callable[..., Callable],
    load: Workload,
    repeats: int,
    others: dict[str, Run],
    limit: float,
) -> None:
    """Compare each of loopkit's loops with lax's own, if lax has a loop that can do the same."""
    loops = {
        "lax.while_loop": run.lax_while_loop,
        "loopkit.while_loop": run.while_loop(bounded=False),
        "loopkit.while_loop, max_steps": run.while_loop(),
        "lax.scan": run.lax_scan,
        "loopkit.scan": run.scan(),
        **others,
    }
    functions = {name: function_of(loop, load, load.steps) for name, loop in loops.items()}
    results = measure(functions, arguments(load, load.steps), repeats)
    report.measured(recorded(load.name, results, "lax.while_loop"))
    for mine, peer in (
        ("loopkit.while_loop", "lax.while_loop"),
        ("loopkit.while_loop, max_steps", "lax.while_loop"),
        ("loopkit.scan", "lax.scan"),
    ):
        against = ratio(results[mine].seconds, results[peer].seconds)
        report.target(f"{what}, {load.name}: {mine} over {peer}", against, limit)


def compare_grad(report: Report, load: Workload, repeats: int) -> None:
    peer = "equinox while_loop"
    loops = {
        "lax.scan": run.lax_scan,
        "lax.scan of jax.checkpoint": run.checkpointed_scan,
        "nested scans": run.nested_scans,
        peer: run.equinox_while_loop(),
        "equinox while_loop, bounded": run.equinox_while_loop("bounded"),
        "loopkit.while_loop, max_steps": run.while_loop(),
        "loopkit.while_loop": run.while_loop(bounded=False),
        "loopkit.scan": run.scan(),
        "loopkit.fori_loop": run.fori_loop(),
    }
    functions = {name: grad_of(loop, load, load.steps) for name, loop in loops.items()}
    results = measure(functions, arguments(load, load.steps), repeats)
    report.measured(recorded(load.name, results, "lax.scan"))
    for mine in ("loopkit.while_loop, max_steps", "loopkit.scan"):
        against = ratio(results[mine].seconds, results[peer].seconds)
        report.target(f"grad, {load.name}: {mine} over {peer}", against, 0.85)


def compare_budgets(report: Report, load: Workload, repeats: int) -> None:
    loops = {"lax.scan": run.lax_scan}
    for c in BUDGETS:
        loops[f"equinox while_loop, {c}"] = run.equinox_while_loop(checkpoints=c)
        loops[f"loopkit.while_loop, {c}"] = run.while_loop(checkpoints=c)
        loops[f"loopkit.scan, {c}"] = run.scan(checkpoints=c)
    functions = {name: grad_of(loop, load, load.steps) for name, loop in loops.items()}
    results = measure(functions, arguments(load, load.steps), repeats)
    report.measured(recorded(load.name, results, "lax.scan"))
    for c in BUDGETS:
        mine, peer = f"loopkit.while_loop, {c}", f"equinox while_loop, {c}"
        against = ratio(results[mine].seconds, results[peer].seconds)
        report.target(f"grad, {load.name}: {mine} checkpoints, over equinox", against, 1.0)


def compare_all(report: Report, load: Workload, repeats: int) -> None:
    loops = {
        "lax.scan": run.lax_scan,
        "lax.scan of jax.checkpoint": run.checkpointed_scan,
        "equinox while_loop, N": run.equinox_while_loop(checkpoints="all"),
        "equinox scan, all": run.equinox_scan("all"),
        "loopkit.scan, all": run.scan("all"),
        "loopkit.fori_loop, all": run.fori_loop("all"),
        "loopkit.while_loop, all": run.while_loop("all"),
    }
    functions = {name: grad_of(loop, load, load.steps) for name, loop in loops.items()}
    results = measure(functions, arguments(load, load.steps), repeats)
    report.measured(recorded(load.name, results, "lax.scan"))
    peer = results["lax.scan"]
    for mine in ("loopkit.scan, all", "loopkit.fori_loop, all", "loopkit.while_loop, all"):
        what = f"all, {load.name}: {mine} over lax.scan"
        report.target(f"{what}, time", ratio(results[mine].seconds, peer.seconds), 1.05)
        if peer.temp_bytes and results[mine].temp_bytes is not None:
            report.target(f"{what}, memory", results[mine].temp_bytes / peer.temp_bytes, 1.05)


def compare_early_stop(report: Report, load: Workload, repeats: int) -> None:
    functions = {}
    for name, loop in (
        ("loopkit.while_loop", run.while_loop()),
        ("equinox while_loop", run.equinox_while_loop()),
    ):
        for bound in (EARLY_STEPS, EARLY_BOUND):
            functions[f"{name}, max_steps={bound}"] = grad_of(loop, load, bound)
    functions["loopkit.while_loop"] = grad_of(run.while_loop(bounded=False), load, EARLY_BOUND)
    tight, wide = (f"loopkit.while_loop, max_steps={bound}" for bound in (EARLY_STEPS, EARLY_BOUND))
    results = measure(functions, arguments(load, EARLY_STEPS), repeats)
    report.measured(recorded(load.name, results, tight))
    against = ratio(results[wide].seconds, results[tight].seconds)
    report.target(
        f"early stop, {load.name}: max_steps {EARLY_BOUND} over {EARLY_STEPS}", against, 1.3
    )


def compare_compile(report: Report, load: Workload, repeats: int) -> None:
    loops = {
        "lax.scan": run.lax_scan,
        "nested scans": run.nested_scans,
        "equinox while_loop": run.equinox_while_loop(),
        "loopkit.while_loop, max_steps": run.while_loop(),
        "loopkit.while_loop": run.while_loop(bounded=False),
        "loopkit.scan": run.scan(),
        "loopkit.scan, all": run.scan("all"),
    }
    functions = {name: grad_of(loop, load, load.steps) for name, loop in loops.items()}
    seconds = compile_times(functions, arguments(load, load.steps), max(3, repeats // 3))
    peer = seconds["lax.scan"]["total"]
    report.measured(
        [
            Record(
                load.name,
                name,
                seconds=spread(parts["total"]),
                ratio=ratio(parts["total"], peer),
                over="lax.scan",
                parts={part: median(s) for part, s in parts.items() if part != "total"},
            )
            for name, parts in seconds.items()
        ]
    )
    for mine in ("loopkit.while_loop, max_steps", "loopkit.while_loop", "loopkit.scan"):
        against = ratio(seconds[mine]["total"], peer)
        report.target(f"compile, {load.name}: {mine} over lax.scan", against, 1.5)


class Counts:
    """Counts of a call. It is an object, so that functions that count close over the same value."""

    traces = 0
    compilations = 0


def compare_second_call(report: Report, load: Workload, repeats: int) -> None:
    """Outside jit: does a call with the same functions and shapes trace or compile again?"""
    count = Counts()
    n = load.steps

    def body(s):
        count.traces += 1
        return s[0] + 1, load.body(load.params, s[1])

    def step(x, _):
        count.traces += 1
        return load.body(load.params, x), None

    def unfinished(s):
        return s[0] < n

    def on_duration(event: str, duration: float, **_) -> None:
        count.compilations += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(on_duration)

    loops = {
        "lax.while_loop": lambda x: jax.lax.while_loop(unfinished, body, (0, x))[1],
        "lax.scan": lambda x: jax.lax.scan(step, x, None, n)[0],
        "equinox while_loop": lambda x: eqxi.while_loop(
            unfinished, body, (0, x), max_steps=n, kind="checkpointed"
        )[1],
        "loopkit.while_loop": lambda x: loopkit.while_loop(unfinished, body, (0, x), max_steps=n)[
            1
        ],
        "loopkit.scan": lambda x: loopkit.scan(step, x, None, n)[0],
    }

    def loss(loop, x):
        return jnp.sum(loop(x) ** 2)

    calls = {f"{name}, value": functools.partial(loop, load.init) for name, loop in loops.items()}
    for name, loop in loops.items():
        if name != "lax.while_loop":
            gradient = jax.grad(functools.partial(loss, loop))
            calls[f"{name}, grad"] = functools.partial(gradient, load.init)

    counts = {}
    for name, call in calls.items():
        jax.block_until_ready(call())
        count.traces = count.compilations = 0
        jax.block_until_ready(call())
        counts[name] = (count.traces, count.compilations)
    seconds = interleave(calls, max(3, repeats // 3))
    report.measured(
        [
            Record(
                load.name,
                name,
                seconds=spread(seconds[name]),
                counts={"traces of the body": traced, "compilations": compiled},
            )
            for name, (traced, compiled) in counts.items()
        ]
    )
    for name, (traced, compiled) in counts.items():
        if name.startswith("loopkit"):
            what = f"second call, {load.name}: {name}"
            report.target(f"{what}, traces of the body", traced, 0)
            report.target(f"{what}, compilations", compiled, 0)


SECTIONS = {
    "value": ("Value only", compare_value),
    "jvp": ("Forward mode", compare_jvp),
    "grad": ("Gradient, default checkpoints", compare_grad),
    "budgets": ("Gradient, a given number of checkpoints", compare_budgets),
    "all": ("Gradient, residuals of every step kept", compare_all),
    "early": (f"Gradient of a loop that stops after {EARLY_STEPS} steps", compare_early_stop),
    "compile": ("Tracing and compiling a gradient", compare_compile),
    "second": ("Second call outside jit", compare_second_call),
}


# --- command line ----------------------------------------------------------------------------


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return chosen

    return parse


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        type=names([*SECTIONS]),
        default=[*SECTIONS],
        metavar="SECTION,...",
        help=", ".join(SECTIONS),
    )
    parser.add_argument(
        "--loops",
        type=names(workloads.NAMES),
        default=[*workloads.NAMES],
        metavar="LOOP,...",
        help=", ".join(workloads.NAMES),
    )
    parser.add_argument(
        "--repeats", type=int, default=9, help="rounds, each running every contender once"
    )
    parser.add_argument("--device", choices=("cpu", "gpu", "tpu"), help="default: what jax finds")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the report there as well"
    )
    options = parser.parse_args(argv)
    if options.device:
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(options.device, options.device))

    report = Report()
    report.write(describe_machine())
    for section in options.only:
        title, compare = SECTIONS[section]
        report.write(f"\n## {title}")
        for name in options.loops:
            load = workloads.make(name)
            report.write(f"\n### {load.name}, {load.steps} steps\n")
            compare(report, load, options.repeats)
    report.summary()
    report.save(options.markdown)


if __name__ == "__main__":
    main(sys.argv[1:])
