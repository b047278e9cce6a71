"""Time against peak temporary memory: loopkit beside equinox, jax.lax and scans nested by hand.

    python benchmarks/frontier.py                              # all loops
    python benchmarks/frontier.py --loops mlp,gru --repeats 15
    python benchmarks/frontier.py --device gpu --markdown frontier.md --picture frontier.svg

For each setting of equinox, loopkit is given as `memory` what equinox needs, by the compiler's
account, beyond what no plan counts. Its time is then compared at equal or less memory.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import jax
import jax.numpy as jnp

import loopkit
import steps
from findings import Record, show_bytes, spread, table
from harness import describe_machine, interleave, measure, ratio, recorded, temp_bytes
from peer_scans import (
    checkpointed_scan,
    equinox,
    lax_scan,
    loopkit_scan,
    loopkit_until,
    nested_scans,
)
from report import Report

SETTINGS = 4, 8, 16, 32, 64, 128, "default", "all", "bounded"
KINDS = "loopkit.scan", "loopkit.scan, until"
LIMIT, WORST = 0.55, 0.9
TRIES = 4
COUNTERS = 64
"""Bytes that make no difference."""


# --- at the memory of equinox ------------------------------------------------------------------


def arguments(case):
    return case.params, case.init, case.xs, jnp.int32(case.length)


def compiled(run, case):
    return jax.jit(steps.gradient(run, case)).lower(*arguments(case)).compile()


def plan_of(run, case) -> int:
    """Return the predicted peak of the loop's plan."""

    def loop(params, init, xs):
        return run(lambda h, x: case.step(params, h, x), init, xs, case.length, case.length)

    return loopkit.explain(loop, case.params, case.init, case.xs).plan.peak_bytes


def beyond_plans(case) -> int:
    """Temporary bytes that no plan counts: workspace of a step, all rows of ys, their cotangents.

    A loop of one step is differentiated as the step is, and writes the parameters' cotangents
    where they are returned; in one of two, steps can be another's workspace. So the larger of both.
    """
    sizes = lambda tree: sum(v.size * v.dtype.itemsize for v in jax.tree.leaves(tree))
    short = lambda n: case._replace(length=n, xs=jax.tree.map(lambda x: x[:n], case.xs))
    one, two = short(1), short(2)
    x = jax.tree.map(lambda x: x[0], case.xs)
    row = sizes(jax.eval_shape(case.step, case.params, case.init, x)[1])
    of_one = temp_bytes(compiled(loopkit_scan(), one)) + sizes(case.params)
    of_two = temp_bytes(compiled(loopkit_scan(), two)) - plan_of(loopkit_scan(), two) - 2 * row
    return max(of_one, of_two) + 2 * (case.length - 1) * row


def predicted(report: Report, case) -> None:
    """Report the memory that plans are predicted to need, and that the compiler then needs."""
    base, rows = beyond_plans(case), []
    least = None
    try:
        compiled(loopkit_scan(memory=1), case)
    except ValueError as error:
        least = int(re.search(r"memory=(\d+)", str(error))[1])
    worst, over = 0.0, 0.0
    budgets = {f"memory={show_bytes(k * least)}": k * least for k in (2, 5, 20)}
    for name, memory in {"default": None, **budgets}.items():
        for kind, make in (("scan", loopkit_scan), ("until", loopkit_until)):
            run = make(memory=memory)
            needed = temp_bytes(compiled(run, case)) - base
            peak = plan_of(run, case)
            worst = max(worst, needed / peak)
            if memory is not None:
                over = max(over, (needed - 64_000) / memory)
            sizes = show_bytes(peak), show_bytes(max(needed, 0)), f"{needed / peak:.2f}"
            rows.append((f"{kind}, {name}", *sizes))
    report.write(table(("loopkit", "predicted peak", "of the compiler", "ratio"), rows) + "\n")
    report.target(f"memory over the predicted peak, {case.name}, most", worst, 1.15)
    report.target(f"memory less 64 kB over `memory`, {case.name}, most", over, 1.05)


def within(make, case, limit: int, base: int):
    """Return the contender whose gradient needs at most `limit` bytes, or None; and its `memory`.

    What the rest of the program needs at other times leaves room for more than `limit - base`.
    """
    memory, best = max(limit - base, 1), None
    for _ in range(TRIES):
        try:
            needed = temp_bytes(compiled(make(memory=memory), case))
        except ValueError as error:  # less than any plan needs
            memory = int(re.search(r"memory=(\d+)", str(error))[1])
            continue
        if needed <= limit + COUNTERS and (best is None or memory > best):
            best = memory
        if -COUNTERS <= limit - needed <= 0.03 * memory:
            break
        # Too much: from what the plan is predicted to need, below which another one is found.
        start = memory if needed <= limit else min(memory, plan_of(make(memory=memory), case))
        memory = max(start + limit - needed, 1)
    if best is None:
        return None, memory
    # Where the compiler shares what a plan adds up, one more checkpoint may be for nothing.
    more = best + sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(case.init)) + 8
    if temp_bytes(compiled(make(memory=more), case)) <= limit + COUNTERS:
        best = more
    return make(memory=best), best


def compare(report: Report, case, repeats: int, settings=SETTINGS) -> dict:
    runs = {
        "lax.scan": lax_scan,
        "lax.scan of jax.checkpoint": checkpointed_scan,
        "nested scans, 2 levels": nested_scans(2),
        "nested scans, 3 levels": nested_scans(3),
        **{f"equinox, {s}": equinox(s) for s in settings},
        "loopkit.scan": loopkit_scan(),
        "loopkit.scan, until": loopkit_until(),
    }
    base = beyond_plans(case)
    limits = {s: temp_bytes(compiled(equinox(s), case)) for s in settings}
    names: dict = {}
    for setting, limit in limits.items():
        for kind, make in zip(KINDS, (loopkit_scan, loopkit_until), strict=True):
            run, memory = within(make, case, limit, base)
            names[kind, setting] = f"{kind}, memory={show_bytes(memory)}" if run else None
            if run:
                runs[names[kind, setting]] = run
    functions = {name: steps.gradient(run, case) for name, run in runs.items()}
    results = measure(functions, arguments(case), repeats)
    report.measured(recorded(case.name, results, "lax.scan"))
    found, rows = {}, []
    for (kind, setting), name in names.items():
        if name is None:
            report.write(f"{kind} has no plan for the memory of equinox, {setting}\n")
            continue
        peer, mine = results[f"equinox, {setting}"], results[name]
        against = ratio(mine.seconds, peer.seconds)
        found[kind, setting] = against.mid
        rows.append(
            Record(
                f"{case.name}, {kind} with the memory of equinox",
                str(setting),
                seconds=spread(mine.seconds),
                ratio=against,
                over=f"equinox, {setting}",
                temp_bytes=mine.temp_bytes,
            )
        )
    report.measured(rows)
    default, scan = results["loopkit.scan"], results["lax.scan"]
    return {
        "pairs": found,
        "length": case.length,
        "default": (ratio(default.seconds, scan.seconds).mid, default.temp_bytes / scan.temp_bytes),
        "results": results,
    }


def flat_cost(report: Report, repeats: int) -> None:
    """Seconds a step, default plan, as loops grow."""
    cases = {length: steps.make("decay", length) for length in (1_000, 10_000, 100_000)}
    programs = {length: compiled(loopkit_scan(), case) for length, case in cases.items()}
    total = max(cases)

    def as_many_steps(length: int) -> Any:
        """Runs of so many steps in all: the first one after another program is slower."""
        for _ in range(total // length):
            result = programs[length](*arguments(cases[length]))
        return result

    calls = {length: partial(as_many_steps, length) for length in cases}
    seconds = {k: [s / total for s in ss] for k, ss in interleave(calls, repeats).items()}
    costs = {length: median(s) for length, s in seconds.items()}
    report.measured(
        [
            Record(
                "a step of the decay",
                f"{length:,} steps",
                seconds=spread(seconds[length]),
                temp_bytes=temp_bytes(programs[length]),
            )
            for length in cases
        ]
    )
    report.target(
        "cost of a step, decay, longest over shortest",
        max(costs.values()) / min(costs.values()),
        1.3,
    )


def targets(report: Report, found: Mapping[str, dict]) -> None:
    """Set targets for what `compare` found for one loop or several: the worst place, and default
    plans."""
    for kind in KINDS:
        values = {
            (n, s): v for n, f in found.items() for (k, s), v in f["pairs"].items() if k == kind
        }
        worst = max(values, key=values.__getitem__)
        where = ", ".join(map(str, worst))
        report.target(f"{kind} over equinox at its memory, worst ({where})", values[worst], WORST)
        above = {k: round(v, 2) for k, v in values.items() if v > WORST}
        report.write(f"  above {WORST}: {above}")
    defaults = {name: f["default"] for name, f in found.items() if f["length"] >= 1000}
    if defaults:
        names = ", ".join(defaults)
        mean = geometric_mean(time for time, _ in defaults.values())
        report.target(f"default plan over lax.scan, {names}: time", mean, 1.0)
        most = max(memory for _, memory in defaults.values())
        report.target(f"default plan over lax.scan, {names}: memory", most, 0.1)


def means(report: Report, found: Mapping[str, dict]) -> None:
    for kind in KINDS:
        values = [v for f in found.values() for (k, _), v in f["pairs"].items() if k == kind]
        mean = geometric_mean(values)
        report.target(f"{kind} over equinox at its memory, {len(values)} pairs, mean", mean, LIMIT)


def study(report: Report, repeats: int, name: str, settings: Sequence = SETTINGS) -> None:
    """All of one loop."""
    case = steps.make(name)
    predicted(report, case)
    targets(report, {name: compare(report, case, repeats, settings)})


def draw(path: str, results: dict) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    count = len(results)
    figure, axes = plt.subplots(
        1, count, figsize=(4.2 * count, 4), layout="constrained", squeeze=False
    )
    styles = {"equinox": ("s", "tab:orange"), "loopkit": ("o", "tab:blue"), "": ("^", "0.5")}
    for ax, (name, measured) in zip(axes[0], results.items(), strict=True):
        base = median(measured["lax.scan"].seconds)
        for label, r in measured.items():
            kind = next(k for k in styles if label.startswith(k))
            marker, color = styles[kind]
            ax.loglog(r.temp_bytes, median(r.seconds) / base, marker, color=color, ms=5)
        ax.axhline(1, color="0.8", lw=0.8, zorder=0)
        ax.set(title=name, xlabel="temporary memory, bytes")
    axes[0][0].set_ylabel("time, relative to lax.scan")
    for kind, (marker, color) in styles.items():
        axes[0][0].plot([], [], marker, color=color, label=kind or "lax, nested scans")
    axes[0][0].legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--loops", default=",".join(steps.NAMES))
    parser.add_argument("--settings", default=",".join(map(str, SETTINGS)), help="of equinox")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--sizes", action="store_true", help="only compile, and compare bytes")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--picture", metavar="FILE")
    options = parser.parse_args()
    jax.config.update("jax_platforms", {"cpu": "cpu", "gpu": "cuda"}[options.device])
    settings = [s for s in SETTINGS if str(s) in options.settings.split(",")]
    report = Report()
    report.write(describe_machine() + "\n")
    found = {}
    for name in options.loops.split(","):
        case = steps.make(name)
        report.write(f"## {name}, {case.length} steps\n")
        predicted(report, case)
        if not options.sizes:
            found[name] = compare(report, case, options.repeats, settings)
    if found:
        report.write("## Cost of a step\n")
        flat_cost(report, options.repeats)
        report.write("\n## Targets\n")
        means(report, found)
        targets(report, found)
    report.summary()
    report.save(options.markdown)
    if options.picture:
        draw(options.picture, {name: f["results"] for name, f in found.items()})


if __name__ == "__main__":
    main()
