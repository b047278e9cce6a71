"""Records: the programs that ran, and how often each construct was in them, as a line of JSON a
piece.

    python -m trials.records FILE...    # in tests/: counts by construct and transformation

A piece is what one seed draws. A piece that stands in the record is not run again.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax

from trials.compare import Trial
from trials.transformations import DERIVATIVES

WRITE = re.compile(r"write\(b\d|sine_at\(b\d|\bb\d+\.at\[[^\]]*\]\.(?!get)")
OF_TEXT = {
    "one write to a buffer": lambda body: len(WRITE.findall(body)) == 1,
    "several writes to a buffer": lambda body: len(WRITE.findall(body)) > 1,
    "buffer of zeros": lambda body: re.search(r"^ *v\d+ = jnp\.zeros\(", body, re.MULTILINE),
}
"""Constructs that are found in the text of the whole program."""


class Piece:
    """The counts of one piece."""

    def __init__(self, implementation: str, seed: int, programs: int, longest: int | None):
        self.key = {"loops": implementation, "seed": seed, "programs": programs}
        self.key |= {"jax": jax.__version__, "longest": longest}
        self.outcomes: Counter[str] = Counter()
        self.constructs: Counter[str] = Counter()
        """In how many of the programs that were compared."""

    def took(self, trial: Trial, outcome: str) -> None:
        self.outcomes[outcome] += 1
        if outcome.startswith("left out"):
            return
        self.constructs.update(constructs_of(trial))

    def is_in(self, record: Path | None) -> bool:
        return any(self.key == {k: line.get(k) for k in self.key} for line in lines_of(record))

    def written_to(self, record: Path | None) -> None:
        if record is not None:
            line = self.key | {"outcomes": self.outcomes, "constructs": self.constructs}
            with record.open("a") as file:
                file.write(json.dumps(line) + "\n")


def constructs_of(trial: Trial) -> set[str]:
    """Return the constructs of a program and its transformations."""
    of_pattern = {f"letter: {letter}" for letter in trial.pattern}
    derivatives = "".join(letter for letter in trial.pattern if letter in DERIVATIVES)
    of_pattern |= {f"derivatives: {derivatives}"} if derivatives else set()
    orders = len(derivatives)
    of_pattern |= {name for name, holds in OF_TEXT.items() if holds(trial.program.body)}
    outside = {f"outside: {trial.outside}"} | ({"outside: optimized"} if trial.optimized else set())
    return {*trial.program.counts, *of_pattern, *outside, f"derivatives of order {orders}"}


def lines_of(record: Path | None) -> list[dict[str, Any]]:
    if record is None or not record.exists():
        return []
    return [json.loads(line) for line in record.read_text().splitlines()]


def summary(records: list[Path]) -> str:
    """Counts over all lines of some files, as tables of Markdown; by version, then of all."""
    lines = [line for record in records for line in lines_of(record)]
    who = lambda line: f"{line['loops']}, jax {line['jax']}"
    names = sorted(set(map(who, lines)))
    parts = {name: [line for line in lines if who(line) == name] for name in names}
    parts |= {"all": lines} if len(names) > 1 else {}
    return "\n\n".join(tables(name, own) for name, own in parts.items())


def tables(name: str, lines: list[dict[str, Any]]) -> str:
    outcomes, constructs = Counter[str](), Counter[str]()
    for line in lines:
        outcomes.update(line["outcomes"])
        constructs.update(line["constructs"])
    seeds = sorted(line["seed"] for line in lines)
    title = f"## {name}: {sum(outcomes.values())} programs, seeds {seeds[0]} to {seeds[-1]}"
    return "\n\n".join([title, table("outcome", outcomes), table("construct", constructs)])


def table(what: str, counts: Counter[str]) -> str:
    rows = [f"| {name} | {count:,} |" for name, count in sorted(counts.items())]
    return "\n".join([f"| {what} | programs |", "| --- | --- |", *rows])


if __name__ == "__main__":
    print(summary([Path(name) for name in sys.argv[1:]]))
