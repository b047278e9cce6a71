"""Gradients through loops of libraries: their own way, and `loopkit.checkpointed`.

    pip install '.[programs]' && python benchmarks/programs.py [--only diffrax,dynamax] [--list]

Each program is compiled and run the library's own way (its adjoint, or `jax.lax`; forward mode
where there is no gradient), and through `checkpointed` with one or more settings. Numbers have to
agree; then come time, temporary memory, and what tracing and compiling takes.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from statistics import geometric_mean

import jax
import jax.numpy as jnp

import harness
import library_models
import library_solvers
import loopkit
from findings import Spread
from harness import Measurement
from library_program import DEFAULT, OWN, Program
from report import Report

PROGRAMS = library_solvers.PROGRAMS | library_models.PROGRAMS
ALL = "checkpoints='all'"
PACKAGES = {"ott": "ott-jax", "mjx": "mujoco-mjx", "tfp": "tfp-nightly"}
"""The names of packages that differ from those of their modules."""


def warm_up() -> None:
    """Traces and compiles something small, both ways, so that the first program does not pay."""
    for loop in (jax.lax.scan, loopkit.checkpointed(jax.lax.scan)):
        loss = lambda x, loop=loop: loop(lambda x, _: (jnp.sin(x), x), x, None, 100)[0]
        jax.jit(jax.grad(loss)).lower(1.0).compile()


def library(program: str) -> str:
    return program.partition(":")[0]


def measured(made: Program, repeats: int) -> dict[str, Measurement]:
    """Nothing that one gradient has had traced is used for another."""
    functions = made.own | made.ours
    first = next(iter(functions.values()))
    jax.jit(first).trace(made.at)  # what is imported, or cached elsewhere, is so now
    return harness.measure(functions, (made.at,), repeats, rtol=made.tolerance, afresh=True)


def compare(
    report: Report, repeats: int, wanted: Mapping[str, Callable[[], Program]] = PROGRAMS
) -> None:
    """A table a program. Missing libraries are left out, and a failure does not stop the others."""
    found: dict[str, dict[str, Measurement]] = {}
    with jax.enable_x64(True):
        warm_up()
        for name, make in wanted.items():
            try:
                found[name] = measured(make(), repeats)
            except ImportError as missing:
                report.note(f"without {name}: {missing}")
            except Exception as error:  # of one of many libraries
                report.note(f"FAILED {name}: {type(error).__name__}: {str(error).splitlines()[0]}")
            else:
                report.write(f"### {name}\n")
                report.measured(harness.recorded(name, found[name], next(iter(found[name]))))
    libraries = sorted({PACKAGES.get(library(name), library(name)) for name in found})
    report.about["libraries"] = ", ".join(f"{name} {version(name)}" for name in libraries)
    targets(report, found)


# --- targets ---------------------------------------------------------------------------------


def most(ratios: Iterable[float]) -> Spread:
    ratios = list(ratios)
    return Spread(min(ratios), max(ratios), max(ratios))


def time_ratios(ours: Sequence[Measurement], own: Sequence[Measurement]) -> list[float]:
    return [harness.ratio(a.seconds, b.seconds).mid for a, b in zip(ours, own, strict=True)]


def memory_ratios(ours: Sequence[Measurement], own: Sequence[Measurement]) -> list[float]:
    return [(a.temp_bytes or 0) / (b.temp_bytes or 1) for a, b in zip(ours, own, strict=True)]


def targets(report: Report, found: Mapping[str, Mapping[str, Measurement]]) -> None:
    of = lambda *names: [r for name, r in found.items() if library(name) in names]
    if solves := of("diffrax"):
        own = [r[OWN] for r in solves]
        times, sizes = (f([r[DEFAULT] for r in solves], own) for f in (time_ratios, memory_ratios))
        what = "over its own checkpoints, default"
        report.target(f"diffrax: time {what}, every program", most(times), 0.9)
        mean = geometric_mean(times)
        report.target(f"diffrax: time {what}, geometric mean", Spread(mean, mean, mean), 0.65)
        report.target(f"diffrax: memory {what}, every program", most(sizes), 1.5)
        kept = [next(m for how, m in r.items() if how.startswith(ALL)) for r in solves]
        report.target('diffrax: time with "all"', most(time_ratios(kept, own)), 0.6)
    for names, what, at_most in (
        (("optimistix",), "its own checkpoints", 0.8),
        (("numpyro", "flax"), "lax.scan", 1.1),
        (("blackjax",), "forward mode", 2.0),
    ):
        if programs := of(*names):
            own = [next(iter(r.values())) for r in programs]
            times = most(time_ratios([r[DEFAULT] for r in programs], own))
            report.target(f"{', '.join(names)}: time over {what}, default", times, at_most)
    if markov := found.get("dynamax: HMM"):
        ratio = harness.ratio(markov[DEFAULT].seconds, markov[OWN].seconds)
        report.target("hidden Markov model: time over lax.scan, default", ratio, 1.1)
    if kalman := found.get("dynamax: Kalman"):
        budgets = [result for how, result in kalman.items() if how not in (OWN, DEFAULT)]
        pair = budgets, [kalman[OWN]] * len(budgets)
        what = "over lax.scan, every budget"
        report.target(f"Kalman filter: time {what}", most(time_ratios(*pair)), 1.35)
        what = "Kalman filter: time over that with the next smaller budget"
        report.target(what, most(time_ratios(budgets[1:], budgets[:-1])), 1.05)
    if torax := found.get("torax: 10 steps"):
        ratio = harness.ratio(torax[DEFAULT].seconds, torax[OWN].seconds)
        report.target("torax, 10 steps: time over its own gradient", ratio, 1.4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="programs whose names contain one of these")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--list", action="store_true", help="the names, and nothing else")
    parser.add_argument("--cpu", action="store_true", help="time of all cores, not of the clock")
    options = parser.parse_args()
    harness.use_one_thread()
    wanted = {n: p for n, p in PROGRAMS.items() if any(s in n for s in options.only.split(","))}
    if options.list:
        print(*wanted, sep="\n")
        return
    if options.cpu:
        harness.clock = time.process_time
    report = Report()
    report.write(harness.describe_machine() + "\n")
    compare(report, options.repeats, wanted)
    report.summary()
    if any(note.startswith("FAILED") for note in report.notes):
        sys.exit("\n".join(report.notes))


if __name__ == "__main__":
    main()
