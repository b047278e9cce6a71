"""Draws what was measured: the picture of the first page, and those of docs/benchmarks.md.

    python docs/pictures/measured.py

All figures are those of docs/benchmarks.json. `python benchmarks/page.py` draws as well, and makes
the tables and the text of the pages anew.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from findings import Record, Section, load
from style import BLUE, GREY, ORANGE, save

Sections = Mapping[str, Section]
COLOURS = {"jax.lax": GREY, "equinox": ORANGE, "loopkit": BLUE}
MARKERS = {"jax.lax": "|", "equinox": "s", "loopkit": "o"}
LOOPS = {
    "mlp": "1000 steps of a network, 64x64",
    "vector": "2000 steps of 10,000 numbers",
    "lorenz": "10,000 steps of three numbers",
}


def records(sections: Sections, section: str, program: str) -> dict[str, Record]:
    return {r.contender: r for r in sections[section].records if r.program == program}


# --- time against memory ---------------------------------------------------------------------

FIRST_PAGE = {
    "jax.lax": {"lax.scan": "scan", "lax.scan of jax.checkpoint": "checkpoint"},
    "equinox": {
        "equinox while_loop, 8": "8",
        "equinox while_loop, 32": "32",
        "equinox while_loop": "default",
        "equinox while_loop, N": "all",
    },
    "loopkit": {
        "loopkit.scan, 8": "8",
        "loopkit.scan, 32": "32",
        "loopkit.scan": "default",
        "loopkit.scan, all": "all",
    },
}
"""Contenders, and what they are called in the picture."""


def of_first_page(sections: Sections) -> Any:
    """For each loop and whose it is, points of label, seconds and bytes."""
    found = {}
    for loop in ("mlp", "vector"):
        rows: dict[str, Record] = {}
        for section in ("all", "budgets", "grad"):  # where one is in several, the last counts
            rows |= records(sections, f"engine/{section}", loop)
        found[loop] = {
            who: [(label, rows[r].seconds.mid, rows[r].temp_bytes) for r, label in names.items()]
            for who, names in FIRST_PAGE.items()
        }
    return found


def first_page(data: Any, ink: str) -> Any:
    """Time against memory of a gradient: the best place is below, on the left."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for ax, (loop, points) in zip(axes, data.items(), strict=True):
        for who, rows in points.items():
            xs, ys = [b / 1e6 for *_, b in rows], [s * 1e3 for _, s, _ in rows]
            line = "none" if who == "jax.lax" else "-"
            ax.plot(xs, ys, linestyle=line, marker="o", color=COLOURS[who], label=who)
            for x, y, (label, *_) in zip(xs, ys, rows, strict=True):
                below = who == "loopkit" or (who, label) == ("equinox", "all")
                place, side = (0, -13 if below else 7), "center"
                if (who, label) == ("equinox", "default"):  # beside the line, which is steep
                    place, side = (6, 3), "left"
                if label == "checkpoint":  # not across a line
                    place, side = ((7, -3), "left") if loop == "mlp" else ((8, 10), "center")
                text = {"xytext": place, "textcoords": "offset points", "ha": side}
                ax.annotate(label, (x, y), color=ink, fontsize=8, **text)
        ax.set(xscale="log", ylim=(0, None), title=LOOPS[loop])
        ax.margins(x=0.15)
        ax.set_ylim(0, ax.get_ylim()[1] * 1.08)
        ax.set_xlabel("memory of the gradient, MB")
    axes[0].set_ylabel("time of the gradient, ms")
    axes[0].legend(frameon=False, loc="lower left")
    return figure


# --- ratios, a row each ----------------------------------------------------------------------


def of_times(sections: Sections) -> Any:
    """Panels of rows of dots: whose, and the median with its quartiles."""
    questions = {
        "value": ("value", "equinox while_loop", "loopkit.while_loop, max_steps"),
        "forward mode": ("jvp", "equinox while_loop, bounded", "loopkit.while_loop, max_steps"),
        "gradient": ("grad", "equinox while_loop", "loopkit.while_loop, max_steps"),
        "gradient,\n32 checkpoints": (
            "budgets",
            "equinox while_loop, 32",
            "loopkit.while_loop, 32",
        ),
        "gradient,\n8 checkpoints": ("budgets", "equinox while_loop, 8", "loopkit.while_loop, 8"),
        "gradient,\nall steps kept": ("all", "equinox while_loop, N", "loopkit.while_loop, all"),
    }
    panels = {}
    for loop in ("mlp", "vector", "lorenz"):
        panels[LOOPS[loop].replace(", 64x64", "")] = rows = {}
        for what, (section, *names) in questions.items():
            found = records(sections, f"engine/{section}", loop)
            ratios = [found[name].ratio for name in names]
            rows[what] = [*zip(("equinox", "loopkit"), ratios, strict=True)]
    return panels


def of_same_memory(sections: Sections) -> Any:
    """loopkit given the memory that each setting of equinox needs."""
    panels: dict[str, Any] = {}
    for section in sections.values():
        for record in section.records:
            loop, _, what = record.program.partition(", ")
            if what == "loopkit.scan with the memory of equinox":
                panels.setdefault(loop, {})[record.contender] = [("loopkit", record.ratio)]
    settings = dict.fromkeys(setting for rows in panels.values() for setting in rows)
    return {loop: {s: rows.get(s, []) for s in settings} for loop, rows in panels.items()}


def of_buffers(sections: Sections) -> Any:
    panels = {}
    for section, batch in (("rows", 1), ("rows4", 4), ("rows32", 32)):
        title = "one alone" if batch == 1 else f"a batch of {batch}"
        panels[title] = rows = {}
        for record in sections[f"buffers/{section}"].records:
            who = {"equinox": "equinox", "loopkit.scan": "loopkit"}.get(record.contender)
            if who:
                label = record.program.removesuffix(f", batch of {batch}")
                rows.setdefault(label, []).append((who, record.ratio))
    return panels


def of_lanes(sections: Sections) -> Any:
    titles = {"value": "value", "grad": "gradient", "second": "second derivative"}
    panels = {}
    for section, title in titles.items():
        if f"lanes/{section}" not in sections:
            continue
        panels[title] = rows = {}
        for record in sections[f"lanes/{section}"].records:
            who = {"equinox": "equinox", "compact": "loopkit"}.get(record.contender)
            if who:
                rows.setdefault(record.program, []).append((who, record.ratio))
    return panels


def of_libraries(sections: Sections) -> Any:
    """checkpointed, with no setting, beside what each library does itself."""
    solve = {"diffrax", "optimistix", "jaxopt", "ott", "optax"}
    panels: dict[str, Any] = {"solvers": {}, "models": {}}
    for record in sections["programs/newest"].records:
        if record.contender == "default":
            panel = "solvers" if record.program.partition(":")[0] in solve else "models"
            label = record.program.replace(" of 94 to 1984 steps", "")
            panels[panel][label.replace(" of a scan", "")] = [("loopkit", record.ratio)]
    return panels


def dots(over: str) -> Callable[[Any, str], Any]:
    """Draws panels of rows of dots with the reach of their quartiles; `over` is at 1."""

    def draw(data: Any, ink: str) -> Any:
        most = max(map(len, data.values()))
        size = (9, 1.3 + 0.42 * most)
        figure, axes = plt.subplots(1, len(data), figsize=size, layout="constrained", sharex=True)
        for number, (ax, (title, rows)) in enumerate(zip(axes, data.items(), strict=True)):
            ax.axvline(1, color=GREY, linewidth=2, label=over, zorder=0)
            for place, found in enumerate(rows.values()):
                for nth, (who, (low, mid, high)) in enumerate(found):
                    y = place + 0.24 * (nth - (len(found) - 1) / 2)
                    colour = COLOURS[who]
                    ax.plot([low, high], [y, y], color=colour, linewidth=3, alpha=0.5)
                    ax.plot(mid, y, MARKERS[who], color=colour, markersize=6, label=who)
            ax.set(xscale="log", title=title)
            ax.title.set_fontsize(10)
            same = number and rows.keys() == data[next(iter(data))].keys()
            ax.set_yticks(range(len(rows)), [] if same else rows)
            ax.set_ylim(len(rows) - 0.5, -0.5)
        ticks(axes[0])
        axes[len(axes) // 2].set_xlabel(f"time over that of {over}", fontsize=9)
        legend_below(figure)
        return figure

    return draw


def legend_below(figure: Any) -> None:
    """One for all panels; what several have is named once."""
    found = {}
    for ax in figure.axes:
        found |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    figure.legend(found.values(), found, frameon=False, loc="outside lower center", ncols=4)


def ticks(ax: Any) -> None:
    """Few numbers, written out."""
    low, high = ax.get_xlim()
    ax.set_xlim(min(low, 0.7), max(high, 1.4))
    low, high = ax.get_xlim()
    every = [0.01, 0.1, 1, 10] if high > 30 * low else [0.1, 0.2, 0.5, 1, 2, 5, 10]
    ax.set_xticks([tick for tick in every if low <= tick <= high])
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter("")


# --- what one loop takes ---------------------------------------------------------------------


def of_early(sections: Sections) -> Any:
    """Seconds and bytes of a gradient through ten steps, of at most ten or a million."""
    found = {}
    for loop in ("mlp", "vector", "lorenz"):
        rows = records(sections, "engine/early", loop)
        found[loop] = {
            who: [
                (bound, record.seconds.mid, record.temp_bytes)
                for bound in (10, 1_000_000)
                for record in (rows[f"{name}, max_steps={bound}"],)
            ]
            for who, name in (("equinox", "equinox while_loop"), ("loopkit", "loopkit.while_loop"))
        }
    return found


def early(data: Any, ink: str) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    labels = []
    for ax, which, scale, title in (
        (axes[0], 1, 1e-3, "time, ms"),
        (axes[1], 2, 1e6, "memory, MB"),
    ):
        for place, (loop, found) in enumerate(data.items()):
            for who, rows in found.items():
                y = place + (0.14 if who == "loopkit" else -0.14)
                few, many = (row[which] / scale for row in rows)
                ax.plot([few, many], [y, y], color=COLOURS[who], linewidth=2)
                ax.plot(few, y, MARKERS[who], color=COLOURS[who], markerfacecolor="none")
                ax.plot(many, y, MARKERS[who], color=COLOURS[who], label=who)
            labels.append(LOOPS[loop].split(" of ", 1)[1].replace(", 64x64", ""))
        ax.set(xscale="log", xlabel=title)
        ax.margins(y=0.2)
        ax.invert_yaxis()
        ax.xaxis.set_major_formatter("{x:g}")
    axes[0].set_yticks(range(len(data)), labels[: len(data)])
    axes[1].set_yticks(range(len(data)), [""] * len(data))
    axes[0].plot([], [], "o", color=GREY, markerfacecolor="none", label="at most 10 steps")
    axes[0].plot([], [], "o", color=GREY, label="at most 1,000,000")
    legend_below(figure)
    return figure


def of_compiling(sections: Sections) -> Any:
    names = "lax.scan", "nested scans", "equinox while_loop", "loopkit.while_loop, max_steps"
    return {
        loop: {
            name: [found[name].parts[part] for part in ("trace", "lower", "compile")]
            for name in (*names, "loopkit.while_loop", "loopkit.scan")
        }
        for loop in ("mlp", "vector", "lorenz")
        for found in (records(sections, "engine/compile", loop),)
    }


def compiling(data: Any, ink: str) -> Any:
    figure, axes = plt.subplots(1, 3, figsize=(9, 3), layout="constrained", sharey=True)
    for ax, (loop, rows) in zip(axes, data.items(), strict=True):
        for place, (name, parts) in enumerate(rows.items()):
            who = "jax.lax" if name.startswith(("lax", "nested")) else name[:7]
            start = 0.0
            for part, alpha in zip(parts, (0.35, 0.65, 1), strict=True):
                ax.barh(place, part * 1e3, left=start, color=COLOURS[who], alpha=alpha, height=0.7)
                start += part * 1e3
        ax.set(title=LOOPS[loop].replace(", 64x64", ""), xlabel="ms")
        ax.title.set_fontsize(10)
    axes[0].set_yticks(range(len(rows)), rows)
    axes[0].invert_yaxis()
    for label, alpha in (("trace", 0.35), ("lower", 0.65), ("compile", 1)):
        axes[2].barh(0, 0, color=GREY, alpha=alpha, label=label)
    legend_below(figure)
    return figure


# --- all -------------------------------------------------------------------------------------

PICTURES: dict[str, tuple[Callable[[Sections], Any], Callable[[Any, str], Any]]] = {
    "first-page": (of_first_page, first_page),
    "times": (of_times, dots("jax.lax")),
    "same-memory": (of_same_memory, dots("equinox")),
    "early": (of_early, early),
    "compiling": (of_compiling, compiling),
    "buffers": (of_buffers, dots("lax.scan")),
    "lanes": (of_lanes, dots("waiting")),
    "libraries": (of_libraries, dots("the library's own way")),
}
"""For each picture, the function that takes its data from the sections, and the one that draws
it."""


def digest(data: Any) -> str:
    """Return a digest of the figures, which the file of a picture holds."""
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]


def pictures(ink: str) -> Iterator[tuple[str, Any, dict]]:
    sections = load()
    for name, (of, draw) in PICTURES.items():
        data = of(sections)
        yield name, draw(data, ink), {"Description": f"docs/benchmarks.json: {digest(data)}"}


def main() -> None:
    save(pictures)


if __name__ == "__main__":
    main()
