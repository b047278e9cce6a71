"""Runs the benchmarks, and keeps what they find in one JSON: the figures of docs/benchmarks.md.

    python benchmarks/run.py --quick                  # a look, in less than three minutes
    python benchmarks/run.py                          # everything, into docs/benchmarks.json
    python benchmarks/run.py --only engine,buffers/rows

A section that has run replaces what the file had of it, and nothing else: what was cut short goes
on with `--only`. Then `python benchmarks/page.py` makes tables, pictures and figures in texts anew.

Run `programs/oldest` in an environment with the oldest supported JAX, and all else with the newest.
"""

import argparse
import datetime
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
from tqdm import tqdm

import beams
import budgets
import buffers
import cards
import costs
import engine
import frontier
import functions
import harness
import lanes
import layers
import programs
import progress
import second_order
import steps
import systems
import workloads
from findings import COMMITTED, Section, load, save
from report import Report

QUICK_REPEATS = 3
QUICK_LOOP = "lorenz"  # which runs in the least time
QUICK_PART = 1 / 3  # about so many of the contenders
ROUGH = "rough figures: few rounds of few loops"


class Part(NamedTuple):
    """A section that can be chosen: `run(report, repeats)`."""

    title: str
    run: Callable[[Report, int], None]
    quick: Callable[[Report, int], None] | None = None  # None: not for who is in a hurry
    keeps_memory: bool = False  # from call to call


def of_loops(compare: Callable, loops: Iterable[str]) -> Callable[[Report, int], None]:
    """Return a section of engine.py, one loop after another."""

    def run(report, repeats):
        for name in loops:
            compare(report, workloads.make(name), repeats)

    return run


def parts() -> Iterator[tuple[str, Part]]:
    for name, (title, compare) in engine.SECTIONS.items():
        every, one = of_loops(compare, workloads.NAMES), of_loops(compare, [QUICK_LOOP])
        yield f"engine/{name}", Part(title, every, one)

    for name in steps.NAMES:
        study = partial(frontier.study, name=name)
        quick = partial(study, settings=["default"]) if name == QUICK_LOOP else None
        yield f"frontier/{name}", Part(f"Time against memory, {name}", study, quick)
    yield "frontier/cost", Part("Cost of a step as loops grow", frontier.flat_cost)

    for name, (title, run) in costs.SECTIONS.items():
        quick = partial(run, names=["scalar", "eigh"]) if name == "prices" else None
        yield f"costs/{name}", Part(title, run, quick)

    quick = {
        "rows": partial(buffers.compare_rows, lengths=(1000, 8000)),
        "overwriting": buffers.compare_overwriting,
    }
    for name, (title, run) in buffers.SECTIONS.items():
        yield f"buffers/{name}", Part(title, run, quick.get(name), keeps_memory=True)

    bound, unbounded = beams.bound, beams.unbounded
    for name, title, run, quick in (
        ("bound", "A generous bound", bound, partial(bound, only="gru, decoding")),
        ("peers", "Beam search by other loops", partial(beams.peers, limit=200), None),
        (
            "unbounded",
            "Scans that grow",
            partial(unbounded, loops=workloads.NAMES),
            partial(unbounded, loops=[QUICK_LOOP]),
        ),
    ):
        yield f"decoding/{name}", Part(title, run, quick, keeps_memory=True)

    for name, title in lanes.SECTIONS.items():
        run = partial(lanes.compare, section=name, lanes=64 if "nested" in name else 256)
        quick = partial(run, what="log-normal") if name in ("value", "grad") else None
        yield f"lanes/{name}", Part(f"Lanes, {title}", run, quick)

    yield "progress/cost", Part("Progress", partial(progress.compare, steps=5_000))

    yield "programs/newest", Part("Loops of libraries", programs.compare)
    yield "programs/oldest", Part("Loops of libraries, oldest JAX", programs.compare)
    for name in layers.CASES:
        compare = partial(layers.compare, name=name)
        yield f"layers/{name}", Part(f"Policies and budgets at equal memory, {name}", compare)
    yield "functions/budget", Part(functions.TITLE, functions.compare)
    for name, title in budgets.SECTIONS.items():
        yield f"budgets/{name}", Part(title, partial(budgets.compare, section=name))
    yield "second/products", Part(second_order.TITLE, second_order.compare)
    for name, (title, run) in cards.SECTIONS.items():
        yield f"cards/{name}", Part(title, run)
    for name, title, keeps_memory in systems.SECTIONS:
        yield f"systems/{name}", Part(title, systems.compare, None, keeps_memory)


PARTS = dict(parts())


def chosen(text: str) -> list[str]:
    """Sections named whole, or by their program."""
    names = []
    for wanted in text.split(","):
        found = [name for name in PARTS if wanted in (name, name.partition("/")[0])]
        if not found:
            raise argparse.ArgumentTypeError(f"{wanted!r} is none of {', '.join(PARTS)}")
        names += found
    return names


class Bar:
    """A step for each section; in it contenders are parts, and rounds are parts of those.

    How many contenders there are is what the section had when it was run before.
    """

    def __init__(self, names: Sequence[str], sizes: Mapping[str, float]) -> None:
        form = "{percentage:3.0f}%|{bar:20}| {elapsed} {desc}"
        self.bar = tqdm(total=len(names), bar_format=form, dynamic_ncols=True, miniters=0)
        self.sizes, self.section, self.done = sizes, "", 0

    def watch(self, contender: str, does: str, part: float) -> None:
        """Follow `harness.watch`: show the contender that runs."""
        self.bar.set_description_str(f"{self.section}: {does} {contender}", refresh=False)
        left = self.done + 1 - self.bar.n
        self.bar.update(min(part / self.sizes.get(self.section, 10), 0.9 * left))

    def begin(self, section: str) -> None:
        self.section = section
        self.watch("", "", 0)

    def end(self) -> None:
        self.done += 1
        self.bar.update(self.done - self.bar.n)


def measured(name: str, repeats: int, quick: bool) -> Section:
    part, report = PARTS[name], Report(quiet=True)
    begun = time.perf_counter()
    with jax.enable_x64(False):  # libraries that an earlier section imported may have set it
        (part.quick if quick else part.run)(report, repeats)
    took = f"{time.perf_counter() - begun:.0f} s"
    notes = [ROUGH] * quick + ["CPU time"] * (harness.clock is time.process_time)
    return Section(
        title=part.title,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        machine={**harness.machine(), **report.about, "took": took},
        repeats=repeats,
        records=report.records,
        targets=report.targets,
        note="; ".join(notes + report.notes),
    )


def run(names: Sequence[str], into: Path, repeats: int, quick: bool) -> None:
    """Measures sections one after another; each is kept as soon as it is done."""
    part = QUICK_PART if quick else 1
    bar = Bar(names, {n: len(s.records) * part or 1 for n, s in load().items()})
    harness.watch = bar.watch
    for name in names:
        bar.begin(name)
        found = measured(name, repeats, quick)
        if found.records or found.targets:
            kept = {**load(into), name: found}
            save(into, {known: kept[known] for known in (*PARTS, *kept) if known in kept})
        else:
            tqdm.write(f"{name} is left out: {found.note}")
        bar.end()
    bar.bar.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", type=chosen, default=[*PARTS], metavar="SECTION,...", help=", ".join(PARTS)
    )
    parser.add_argument("--repeats", type=int, help="rounds: 9, or 3 with --quick")
    parser.add_argument("--quick", action="store_true", help="few rounds of few loops")
    parser.add_argument("--cpu", action="store_true", help="time of all cores, not of the clock")
    parser.add_argument("--into", type=Path, metavar="FILE", help=f"default: {COMMITTED}")
    given = parser.parse_args()
    if given.cpu:
        harness.clock = time.process_time
    rough = Path(tempfile.gettempdir()) / "loopkit-quick.json"
    into = given.into or (rough if given.quick else COMMITTED)
    names = [n for n in given.only if PARTS[n].quick or not given.quick]
    harness.use_one_thread()
    repeats = given.repeats or (QUICK_REPEATS if given.quick else 9)
    if repeats < 3:
        parser.error("quartiles need three rounds")
    # Those that keep memory come last, in a process that was started for it.
    first = [name for name in names if not PARTS[name].keeps_memory]
    if first:
        run(first, into, repeats, given.quick)
    if last := [name for name in names if PARTS[name].keeps_memory]:
        options = ["--quick"] * given.quick + ["--cpu"] * given.cpu
        options += ["--only", ",".join(last), "--into", str(into), "--repeats", str(repeats)]
        sys.argv[1:] = options
        harness.keep_memory()
        run(last, into, repeats, given.quick)
    print(f"{ROUGH}: {into}" if given.quick else into)


if __name__ == "__main__":
    main()
