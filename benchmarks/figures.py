"""Figures in the text of pages: a comment before a paragraph names the records that they are from.

    <!-- figures
    engine/grad | mlp | loopkit.scan | time, memory
    engine/compile | * | loopkit.scan & loopkit.while_loop, max_steps | least ratio, most ratio
    engine/early | targets | early stop, * | most ratio
    -
    -->
    A gradient takes 57 ms and 1.93 MB; compiled it is in 0.9 to 1.5 times ...

Section, program, contender and quantities, in the order of the figures. `*` stands for any, `&` is
between several, and then the least, the most or the (geometric) mean is taken. `-` passes over a
figure that was not measured. Where there are twice as many figures, as in a text that stands there
twice, they are asked for twice. A paragraph whose figures are none of the benchmarks' says so:
`<!-- figures: none, WHY -->`.
"""

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import cycle
from statistics import geometric_mean

from findings import Record, Section, show_bytes, show_seconds

FIGURE = re.compile(r"(?<![\w.])(?:\d[\d.]* (?:[num]?s|[kMG]?B)\b|\d+\.\d+)(?!\w|\.\d)")
NAMED = re.compile(r"(<!-- figures\n(.*?)-->\n)(.+?)(?=\n[ \t]*\n|\Z)", re.DOTALL)
NONE = re.compile(r"<!-- figures: none.*?-->\n.+?(?=\n[ \t]*\n|\Z)", re.DOTALL)
SPREADS = {"time": "seconds", "ratio": "ratio"}
NUMBERS = {"memory": "temp_bytes", "compile": "compile_seconds"}
OF_MANY = {"least": min, "most": max, "mean": geometric_mean}


def is_any(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in re.split(r"\s*&\s*", patterns))


def records(
    sections: Mapping[str, Section], section: str, program: str, contender: str
) -> Iterator[Record]:
    for name, found in sections.items():
        if is_any(name, section):
            every = found.records
            if program == "targets":
                every = [Record(program, t.what, ratio=t.got) for t in found.targets]
            for record in every:
                if is_any(record.program, program) and is_any(record.contender, contender):
                    yield record


def quantity(record: Record, name: str) -> float:
    """`time`, `ratio`, their quartiles as `ratio.low`, `memory`, `compile`, or a part or count."""
    name, _, quartile = name.partition(".")
    if name in SPREADS:
        return getattr(getattr(record, SPREADS[name]), quartile or "mid")
    if name in NUMBERS:
        return getattr(record, NUMBERS[name])
    return {**record.parts, **record.counts}[name]


def values(sections: Mapping[str, Section], text: str) -> list[float | None]:
    """Return the values that the lines of a comment ask for, in order."""
    found: list[float | None] = []
    for line in text.strip().splitlines():
        if line.strip() == "-":
            found.append(None)
            continue
        *where, quantities = re.split(r"\s*\|\s*", line.strip())
        matching = [*records(sections, *where)]
        if not matching:
            raise LookupError(f"nothing was measured that is called {line!r}")
        for wanted in re.split(r"\s*,\s*", quantities):
            of_many, _, name = wanted.rpartition(" ")
            if not of_many and len(matching) > 1:
                raise LookupError(f"the least, the most or the mean of {len(matching)}: {line!r}?")
            every = [quantity(record, name) for record in matching]
            found.append(OF_MANY[of_many](every) if of_many else every[0])
    return found


def written(figure: str, value: float | None) -> str:
    """`value` as `figure` is written."""
    if value is None:
        return figure
    number, _, unit = figure.partition(" ")
    if unit:
        return show_bytes(value) if unit.endswith("B") else show_seconds(value)
    return f"{value:.{len(number.partition('.')[2])}f}"


def refreshed(text: str, sections: Mapping[str, Section]) -> str:
    """Return a page with the figures that were measured."""

    def paragraph(match: re.Match[str]) -> str:
        comment, names, body = match.groups()
        wanted, there = values(sections, names), len(FIGURE.findall(body))
        if not there or there % len(wanted):
            raise LookupError(f"{len(wanted)} figures for {there} in {body!r}")
        of = cycle(wanted)
        return comment + FIGURE.sub(lambda figure: written(figure[0], next(of)), body)

    return NAMED.sub(paragraph, text)


def unnamed(text: str) -> list[str]:
    """Figures of a page that are in no such paragraph, nor in code, nor in a block that is made."""
    for left_out in (NAMED, NONE, re.compile(r"```.*?```", re.DOTALL), re.compile(r"`[^`]*`")):
        text = left_out.sub("", text)
    text = re.sub(r"<!-- measured: .*?<!-- /measured -->", "", text, flags=re.DOTALL)
    return FIGURE.findall(re.sub(r"(?:JAX|Python|Apache) \d[\d.]*", "", text))
