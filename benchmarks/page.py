"""Puts what docs/benchmarks.json has into the pages: tables, pictures, and figures in the text.

    python benchmarks/page.py

A block of a page between `<!-- measured: KIND WHAT -->` and `<!-- /measured -->` is made by the
function of that name below; for figures in sentences see figures.py.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import geometric_mean

import figures
from findings import (
    Record,
    Section,
    load,
    show_bytes,
    show_seconds,
    table,
    table_of,
    targets_table,
)

ROOT = Path(__file__).resolve().parents[1]
MADE = re.compile(r"(<!-- measured: (\w+) ?(.*?) -->\n).*?(<!-- /measured -->)", re.DOTALL)
Sections = Mapping[str, Section]


def pages() -> list[Path]:
    """Those that take something from what was measured."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [p for p in found if re.search(r"<!-- (measured: |figures\n)", p.read_text())]


# --- blocks ----------------------------------------------------------------------------------


def matching(sections: Sections, patterns: str) -> dict[str, Section]:
    return {
        name: section
        for name, section in sections.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns.split())
    }


def folded(summary: str, text: str) -> str:
    """Shown to those who open it."""
    return f"<details markdown>\n<summary>{summary}</summary>\n\n{text}\n\n</details>"


def tables(sections: Sections, patterns: str) -> str:
    blocks = []
    for section in matching(sections, patterns).values():
        programs: dict[str, list[Record]] = {}
        for record in section.records:
            programs.setdefault(record.program, []).append(record)
        text = "\n\n".join(f"**{name}**\n\n{table_of(rows)}" for name, rows in programs.items())
        blocks.append(folded(f"{section.title}: {', '.join(programs)}", text))
    return "\n\n".join(blocks)


def targets(sections: Sections, patterns: str) -> str:
    found = [t for s in matching(sections, patterns).values() for t in s.targets]
    missed = [t for t in found if not t.is_met]
    summary = f"{len(found)} targets, of which {len(missed) or 'none'} are missed"
    if len(missed) == 1:
        summary = f"{len(found)} targets, of which one is missed"
    rest = folded(summary, targets_table(found))
    return f"Missed:\n\n{targets_table(missed)}\n\n{rest}" if missed else rest


LONG = 200
"""The letters of a note that go into a table."""


def _hardware(about: Mapping[str, str]) -> str:
    """Return the processor and the memory of a machine, and its GPU if that was measured."""
    card = about.get("device", "").removeprefix("gpu, ") if "gpu" in about.get("device", "") else ""
    return ", ".join(filter(None, [card, about.get("processor"), about.get("memory")]))


def machines(sections: Sections, patterns: str) -> str:
    """Return a table of machines and dates, with one row for all sections that were measured
    alike."""
    alike: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for name, section in matching(sections, patterns).items():
        about, (program, _, part) = section.machine, name.partition("/")
        known = [what for what in ("python", "jax", "equinox") if what in about]
        how = (
            section.date,
            _hardware(about),
            ", ".join(f"{what} {about[what]}" for what in known),
            about.get("memory of arrays", ""),
            str(section.repeats or ""),
            section.note if len(section.note) <= LONG else "notes below",
        )
        alike.setdefault(how, {}).setdefault(program, []).append(part)
    header = ("sections", "date", "machine", "versions", "memory of arrays", "rounds", "")
    rows = [
        ("; ".join(f"{p}: {', '.join(parts)}".strip(": ") for p, parts in names.items()), *how)
        for how, names in alike.items()
    ]
    long = {n: s.note for n, s in matching(sections, patterns).items() if len(s.note) > LONG}
    lists = [
        folded(f"Notes of {name}", "\n".join(f"- {part}" for part in note.split("; ")))
        for name, note in long.items()
    ]
    return "\n\n".join([table(header, rows), *lists])


def pairs(sections: Sections, kind: str) -> str:
    """loopkit's time over equinox's in the same memory: a row a setting, a column a loop."""
    columns = {}
    for section in matching(sections, "frontier/*").values():
        for record in section.records:
            loop, _, what = record.program.partition(", ")
            if what == f"{kind} with the memory of equinox":
                columns.setdefault(loop, {})[record.contender] = record.ratio
    settings = dict.fromkeys(setting for column in columns.values() for setting in column)
    rows = [
        (setting, *(str(column.get(setting, "")) for column in columns.values()))
        for setting in settings
    ]
    means = [geometric_mean(r.mid for r in column.values()) for column in columns.values()]
    rows.append(("mean", *(f"{mean:.2f}" for mean in means)))
    return table(("equinox", *columns), rows)


def beside(sections: Sections, patterns: str) -> str:
    """Ratios of sections that measured the same contenders: a row a contender, a column each."""
    found = matching(sections, patterns)
    rows: dict[str, list[str]] = {}
    for section in found.values():
        for record in section.records:
            cell = "1.00" if record.contender == record.over else str(record.ratio)
            rows.setdefault(record.contender, []).append(cell)
    titles = [section.title.rpartition(", ")[2] for section in found.values()]
    return table(("", *titles), [(name, *cells) for name, cells in rows.items()])


BESIDES = {
    "diffrax": "`adjoint=ForwardMode()`",
    "optimistix": "an adjoint of one line, [below](#solvers)",
    "jaxopt": "`implicit_diff=False, unroll=False`",
    "ott": "see [rules](#when-the-librarys-own-is-better)",
    "flax: NNX RNN": "`nnx.split`, `nnx.merge`",
    "jaxley": "no `checkpoint_lengths`",
}
"""The change with which a library's program lets `checkpointed` see its loop."""


def libraries(sections: Sections, names: str) -> str:
    """Gradients through loops of libraries beside their own.

    Further sections, measured with another JAX, give the time alone.
    """
    first, *others = (_beside_their_own(sections[name].records) for name in names.split())
    keys = dict.fromkeys(key for found in (first, *others) for key in found)
    rows, last = [], ""
    for program, setting in keys:
        library = program.partition(":")[0]
        besides = BESIDES.get(program) or BESIDES.get(library) or "nothing"
        key, none = (program, setting), ("does not run", "", "")
        begin = (program, besides) if program != last else ("", "")
        times = [found.get(key, none)[0] for found in others]
        rows.append((*begin, setting, *first.get(key, none), *times))
        last = program
    header = ("program", "written with", "setting", "time", "memory", "to trace and compile")
    versions = [sections[name].machine["jax"] for name in names.split()[1:]]
    return table((*header, *(f"time, JAX {version}" for version in versions)), rows)


def _beside_their_own(records: Sequence[Record]) -> dict[tuple[str, str], tuple[str, str, str]]:
    """Time, memory, and what it takes to compile, by program and setting."""
    rows, own = {}, None
    for record in records:
        if record.contender == record.over:
            own = record
            continue
        ours = "default" if record.contender == "default" else f"`{record.contender}`"
        if record.contender.startswith("own, "):
            ours = f"its own, `{record.contender.removeprefix('own, ')}`"
        memory = " → ".join(show_bytes(r.temp_bytes) for r in (own, record))
        compiling = " → ".join(f"{r.compile_seconds:.1f} s" for r in (own, record))
        rows[record.program, ours] = str(record.ratio), memory, compiling
    return rows


def versions(sections: Sections, patterns: str) -> str:
    """Return a sentence for each section that names its machine and its versions."""
    sentences = []
    for section in matching(sections, patterns).values():
        about = section.machine
        where = f"{_hardware(about)}, {section.date}"
        with_ = ", ".join([f"JAX {about['jax']}", *filter(None, [about.get("libraries")])])
        sentences.append(f"Measured on {where}, with {with_}; {section.repeats} rounds.")
    return " ".join(sentences)


PEERS = {
    "gradient of 1000 steps of a network": ("grad", "mlp", "", "#gradient-default-checkpoints"),
    "gradient of 2000 steps of 10,000 numbers": (
        "grad",
        "vector",
        "",
        "#gradient-default-checkpoints",
    ),
    "the same with 8 checkpoints": (
        "budgets",
        "vector",
        ", 8",
        "#gradient-a-given-number-of-checkpoints",
    ),
    "gradient of 10,000 steps of three numbers": (
        "grad",
        "lorenz",
        "",
        "#gradient-default-checkpoints",
    ),
    "gradient of 10 steps of at most 1,000,000": (
        "early",
        "mlp",
        ", max_steps=1000000",
        "#gradient-of-a-loop-that-stops-after-10-steps",
    ),
    "tracing and compiling the first gradient": (
        "compile",
        "mlp",
        "",
        "#tracing-and-compiling-a-gradient",
    ),
}
"""The rows that the first pages compare: a section of the engine, a loop, a setting, a heading."""


def peers(sections: Sections, page: str) -> str:
    rows = []
    for what, (section, loop, setting, anchor) in PEERS.items():
        found = {r.contender: r for r in sections[f"engine/{section}"].records if r.program == loop}
        ours = f"loopkit.while_loop{setting or ', max_steps'}"
        names = "lax.scan", "lax.scan of jax.checkpoint", f"equinox while_loop{setting}", ours
        cells = []
        for name in names:
            record = None if setting and name.startswith("lax") else found.get(name)
            cell = show_seconds(record.seconds.mid) if record else ""
            if record and record.temp_bytes is not None:
                cell += f", {show_bytes(record.temp_bytes)}"
            cells.append(cell)
        rows.append((what, *cells, f"[{loop}]({page}{anchor})"))
    return table(
        ("", "`lax.scan`", "`lax.scan` of `jax.checkpoint`", "equinox", "loopkit", ""), rows
    )


KEEPS = {
    "lax.scan": ("grad", "lax.scan"),
    "lax.scan of jax.checkpoint": ("grad", "lax.scan of jax.checkpoint"),
    'loopkit.scan, checkpoints="all"': ("all", "loopkit.scan, all"),
    "loopkit.scan": ("grad", "loopkit.scan"),
    "loopkit.scan, checkpoints=32": ("budgets", "loopkit.scan, 32"),
    "loopkit.scan, checkpoints=8": ("budgets", "loopkit.scan, 8"),
}
"""The settings that docs/choosing.md compares: a section of the engine, and a contender."""


def keeps(sections: Sections, loop: str) -> str:
    """Return a table of one loop's gradient with several settings, from three sections."""
    found = []
    for what, (section, contender) in KEEPS.items():
        records = sections[f"engine/{section}"].records
        (record,) = (r for r in records if (r.program, r.contender) == (loop, contender))
        over = what if record.over == contender else record.over
        found.append(replace(record, contender=what, over=over))
    return table_of(found)


KINDS = {
    f.__name__: f
    for f in (tables, targets, machines, pairs, beside, libraries, versions, peers, keeps)
}


# --- pages -----------------------------------------------------------------------------------


def made(text: str, sections: Sections) -> str:
    """Return a page with new blocks and figures."""

    def block(match: re.Match[str]) -> str:
        begin, kind, what, end = match.groups()
        return f"{begin}\n{KINDS[kind](sections, what)}\n\n{end}"

    return figures.refreshed(MADE.sub(block, text), sections)


def main(argv: Sequence[str]) -> None:
    sections = load()
    for page in pages():
        page.write_text(made(page.read_text(), sections))
    sys.path.insert(0, str(ROOT / "docs/pictures"))
    import measured

    measured.main()


if __name__ == "__main__":
    main(sys.argv[1:])
