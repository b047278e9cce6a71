"""Draws the pictures of the first page, of how it works and of checkpointing.

    python docs/pictures/draw.py

Each is drawn twice, for light pages and for dark ones.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from loopkit import Plan
from loopkit._plans.plan import Step
from loopkit.schedules import reversal
from loopkit.schedules.actions import Advance, Discard, Restore, Reverse, Save

HERE = Path(__file__).parent
BENCHMARKS = HERE.parent / "benchmarks.md"
LOOP = Plan(1, bound=60, exact=True, step=Step(carry_bytes=400, residual_bytes=400))
PLANS = {
    "four-checkpoints": replace(LOOP, slots=4),
    "four-and-five": replace(LOOP, slots=4, segment=5),
    "online": replace(LOOP, slots=8, exact=False),
}
INK = {"light": "#2b2f36", "dark": "#dfe3ea"}
BLUE, ORANGE, RED, GREY = "#3f7fdb", "#e08a1e", "#d6453d", "#8b919b"
"""Each is seen on white and on the dark of the pages."""
BYTES = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1}
LOOPS = {
    "mlp": "1000 steps of a network, 64x64",
    "vector": "2000 steps of 10,000 numbers",
}
CONTENDERS = {
    "jax.lax": (
        GREY,
        {"lax.scan": "scan", "lax.scan of jax.checkpoint": "checkpoint"},
    ),
    "equinox": (
        ORANGE,
        {
            "equinox while_loop, 8": "8",
            "equinox while_loop, 32": "32",
            "equinox while_loop": "default",
            "equinox while_loop, N": "all",
        },
    ),
    "loopkit": (
        BLUE,
        {
            "loopkit.scan, 8": "8",
            "loopkit.scan, 32": "32",
            "loopkit.scan": "default",
            "loopkit.scan, all": "all",
        },
    ),
}
"""Colour, and rows of the tables of docs/benchmarks.md with what they are called here."""


def quantity(text: str, units: dict[str, float]) -> float:
    number, unit = text.split()
    return float(number) * units[unit]


def measured(loop: str) -> dict[str, tuple[float, float]]:
    """Of each contender's gradient, seconds and bytes, from the tables of docs/benchmarks.md."""
    found: dict[str, tuple[float, float]] = {}
    for section in re.split(r"^## ", BENCHMARKS.read_text(), flags=re.M):
        if not section.startswith("Gradient, "):
            continue
        (table,) = (t for t in section.split("### ") if t.startswith(f"{loop},"))
        for row in re.findall(r"^\| (\S.*?) \|$", table, flags=re.M):
            name, time, _, memory, _ = re.split(r"\s*\|\s*", row)
            if name and "---" not in name:
                times = quantity(time, SECONDS), quantity(memory, BYTES)
                found.setdefault(name, times)
    return found


def first_page(ink: str) -> Any:
    """Time against memory of a gradient: the best place is below, on the left."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for ax, (loop, title) in zip(axes, LOOPS.items(), strict=True):
        points = measured(loop)
        for name, (colour, rows) in CONTENDERS.items():
            xs = [points[row][1] / 1e6 for row in rows]
            ys = [points[row][0] * 1e3 for row in rows]
            line = "none" if name == "jax.lax" else "-"
            ax.plot(xs, ys, linestyle=line, marker="o", color=colour, label=name)
            for x, y, label in zip(xs, ys, rows.values(), strict=True):
                below = name == "loopkit" or (name, label) == ("equinox", "all")
                place, side = (0, -13 if below else 7), "center"
                if label == "checkpoint":  # not across a line
                    place, side = ((7, -3), "left") if loop == "mlp" else ((0, 7), "right")
                text = {"xytext": place, "textcoords": "offset points", "ha": side}
                ax.annotate(label, (x, y), color=ink, fontsize=8, **text)
        ax.set(xscale="log", ylim=(0, None), title=title)
        ax.margins(x=0.15)
        ax.set_ylim(0, ax.get_ylim()[1] * 1.08)
        ax.set_xlabel("memory of the gradient, MB")
    axes[0].set_ylabel("time of the gradient, ms")
    axes[0].legend(frameon=False, loc="lower left")
    return figure


def at_work(ink: str, units: int = 12, slots: int = 3) -> Any:
    """A schedule, a row for each time that it goes back to what it has kept."""
    figure, ax = plt.subplots(figsize=(9, 5), layout="constrained")
    row, held, swept = 0, {}, False

    def arrow(colour: str, start: float, stop: float) -> None:
        style = {"arrowstyle": "-|>", "color": colour, "linewidth": 2, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", (stop, row), (start, row), arrowprops=style)

    def kept(slot: int) -> None:
        unit, since = held.pop(slot)
        ax.plot([unit, unit], [since, row], color=GREY, linewidth=5, alpha=0.45, zorder=0)

    for action in reversal.gradient(units, slots):
        match action:
            case Save(unit, slot):
                held[slot] = unit, row
                ax.plot(unit, row, "o", color=ink, markersize=7)
            case Advance(start, stop):
                arrow(ORANGE if swept else BLUE, start, stop)
            case Restore(unit, _):
                swept, row = True, row + 1
                ax.plot(unit, row, "o", color=ink, markersize=7, markerfacecolor="none")
            case Reverse(unit):
                arrow(RED, unit + 1, unit)
            case Discard(slot):
                kept(slot)
    for colour, label in ((BLUE, "run"), (ORANGE, "run again"), (RED, "reversed")):
        ax.plot([], [], color=colour, label=label, linewidth=2)
    ax.plot([], [], "o", color=ink, label="kept")
    ax.plot([], [], "o", color=ink, markerfacecolor="none", label="taken up again")
    ax.plot([], [], color=GREY, alpha=0.45, linewidth=5, label="a slot in use")
    ax.set(xlabel="step", ylabel="later", xticks=range(units + 1), yticks=[])
    ax.invert_yaxis()
    ax.legend(frameon=False, loc="lower right")
    return figure


def moments(units: int = 12, slots: int = 3) -> dict[str, Any]:
    """The schedule of `at_work`, for the slider below it (docs/javascripts/schedule.js)."""
    told: list[dict[str, Any]] = []
    held: dict[int, int] = {}
    swept, left = False, units

    def moment(does: str, at: range, says: str) -> None:
        kept = sorted(held.values())
        told.append({"does": does, "at": list(at), "kept": kept, "reversed": left, "says": says})

    for action in reversal.gradient(units, slots):
        match action:
            case Save(unit, slot):
                held[slot] = unit
                moment("", range(0), f"the state before step {unit} is kept")
            case Advance(start, stop):
                steps = f"step {start}" if stop == start + 1 else f"steps {start} to {stop - 1}"
                run = "run again, to make a state" if swept else "run"
                moment("again" if swept else "run", range(start, stop), f"{steps} {run}")
            case Restore(unit, _):
                swept = True
                moment("", range(0), f"the state before step {unit} is taken up again")
            case Reverse(unit):
                left = unit
                moment("back", range(unit, unit + 1), f"step {unit} is reversed")
            case Discard(slot):
                unit = held.pop(slot)
                moment("", range(0), f"the state before step {unit} is given up")
    return {"units": units, "moments": told}


def schedule(plan: Plan, ink: str) -> Any:
    """As `Plan.plot` draws it, with ink that is seen."""
    figure = plan.plot()
    above, below = figure.axes
    for line in (*above.lines, *below.lines):
        if line.get_color() in ("black", "k"):
            line.set_color(ink)
    for filled in below.collections:
        filled.set(facecolor=GREY, edgecolor=GREY, alpha=0.4)
    above.legend(frameon=False)
    return figure


def pictures(ink: str) -> Iterator[tuple[str, Any]]:
    yield "first-page", first_page(ink)
    yield "at-work", at_work(ink)
    for name, plan in PLANS.items():
        yield name, schedule(plan, ink)


def main() -> None:
    HERE.joinpath("at-work.json").write_text(json.dumps(moments()) + "\n")
    for scheme, ink in INK.items():
        colours = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
        settings = dict.fromkeys(colours, ink) | {"svg.hashsalt": "loopkit", "font.size": 10}
        settings |= {"axes.spines.top": False, "axes.spines.right": False}
        with plt.rc_context(settings):
            for name, figure in pictures(ink):
                path = HERE / f"{name}-{scheme}.svg"
                figure.savefig(path, metadata={"Date": None}, transparent=True)
                plt.close(figure)


if __name__ == "__main__":
    main()
