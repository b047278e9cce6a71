"""Findings of benchmarks: figures of contenders and targets, kept in one JSON, shown as tables.

Needs no JAX, so that pages and pictures can be made where none is.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

COMMITTED = Path(__file__).resolve().parents[1] / "docs/benchmarks.json"
DIGITS = 6  # significant ones that are kept


class Spread(NamedTuple):
    """A median and its quartiles.

    Of what is counted, three times the same; of several runs, the least, and twice the largest.
    """

    low: float
    mid: float
    high: float

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.mid:.2f}"
        if self.mid == self.high:
            return f"{self.low:.2f} to {self.high:.2f}"
        return f"{self.mid:.2f} ({self.low:.2f} to {self.high:.2f})"


def spread(samples: Iterable[float]) -> Spread:
    return Spread(*quantiles(samples, n=4))


@dataclass(frozen=True)
class Record:
    """The measurements of one contender on one program."""

    program: str
    contender: str
    seconds: Spread | None = None  # of one call
    ratio: Spread | None = None  # of the seconds, round by round, over those of `over`
    over: str | None = None
    temp_bytes: int | None = None  # by the compiler's account
    compile_seconds: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)  # seconds of what `seconds` adds up
    counts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """A ratio that should be at most so large."""

    what: str
    at_most: float
    got: Spread

    @property
    def is_met(self) -> bool:
        return self.got.mid <= self.at_most


@dataclass(frozen=True)
class Section:
    """The findings of one section, with place and date."""

    title: str
    date: str
    machine: Mapping[str, str]
    repeats: int
    records: Sequence[Record] = ()
    targets: Sequence[Target] = ()
    note: str = ""


# --- JSON ------------------------------------------------------------------------------------


def _shortened(value: Any) -> Any:
    """Without what is empty, and numbers with as many digits as are of use."""
    if isinstance(value, Mapping):
        kept = {key: _shortened(v) for key, v in value.items()}
        return {key: v for key, v in kept.items() if v not in (None, {}, [], "")}
    if isinstance(value, (list, tuple)):
        return [_shortened(v) for v in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def save(path: Path, sections: Mapping[str, Section]) -> None:
    """Records and targets are lines of their own, so that a comparison of two files is legible."""
    lines = []
    for name, section in sections.items():
        found = _shortened(asdict(section))
        head = {k: v for k, v in found.items() if k not in ("records", "targets")}
        parts = [json.dumps(head)[1:-1]]
        for key in ("records", "targets"):
            rows = ",\n  ".join(json.dumps(row) for row in found.get(key, ()))
            parts.append(f'"{key}": [\n  {rows}\n ]' if rows else f'"{key}": []')
        lines.append(f" {json.dumps(name)}: {{\n " + ",\n ".join(parts) + "\n }")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def load(path: Path = COMMITTED) -> dict[str, Section]:
    """Return the sections of a file by name; none where there is no file."""
    if not path.exists():
        return {}

    def record(row: Mapping[str, Any]) -> Record:
        spreads = {k: Spread(*row[k]) for k in ("seconds", "ratio") if k in row}
        return Record(**{**row, **spreads})

    def section(found: Mapping[str, Any]) -> Section:
        targets = [Target(t["what"], t["at_most"], Spread(*t["got"])) for t in found["targets"]]
        return Section(**{**found, "records": [*map(record, found["records"])], "targets": targets})

    return {name: section(found) for name, found in json.loads(path.read_text()).items()}


# --- tables ----------------------------------------------------------------------------------


def show_seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def show_bytes(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a markdown table with padded columns: readable in a terminal too."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(row):
        return "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"

    rule = "| " + " | ".join("-" * w for w in widths) + " |"
    return "\n".join([line(header), rule, *map(line, rows)])


def table_of(records: Sequence[Record]) -> str:
    """Return a table with a line for each record, and a column for each kind of figure."""
    parts = [*dict.fromkeys(name for r in records for name in r.parts)]
    counts = [*dict.fromkeys(name for r in records for name in r.counts)]
    overs = {r.over for r in records} - {None}
    alone = overs.pop() if len(overs) == 1 else None

    def relative(r: Record) -> str:
        if r.ratio is None:
            return ""
        if r.contender == r.over:
            return "1.00"
        return str(r.ratio) if alone else f"{r.ratio} of {r.over}"

    columns = {name: lambda r, n=name: show_seconds(r.parts[n]) for name in parts}
    for name in counts:
        columns[name] = lambda r, n=name: f"{r.counts[n]:.4g}" if n in r.counts else ""
    if any(r.seconds for r in records):
        columns["total" if parts else "time"] = lambda r: r.seconds and show_seconds(r.seconds.mid)
    if any(r.ratio for r in records):
        columns[f"relative to {alone}" if alone else "relative"] = relative
    if any(r.temp_bytes is not None for r in records):
        columns["temporary memory"] = lambda r: (
            r.temp_bytes is not None and show_bytes(r.temp_bytes)
        )
    if any(r.compile_seconds is not None for r in records):
        columns["to compile"] = lambda r: r.compile_seconds and show_seconds(r.compile_seconds)
    rows = [(r.contender, *(cell(r) or "" for cell in columns.values())) for r in records]
    return table(("", *columns), rows)


def targets_table(targets: Sequence[Target]) -> str:
    rows = [
        (t.what, f"{t.at_most:.2f}", str(t.got), "met" if t.is_met else "MISSED") for t in targets
    ]
    return table(("target", "at most", "measured", ""), rows)
