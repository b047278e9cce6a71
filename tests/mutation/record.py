"""Records of outcomes, a line a change."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from mutation.changes import all_changes

PACKAGE = Path(__file__).resolve().parents[2] / "loopkit"
RESULTS = ["seen", "survived", "late", "unreached"]
"""The last: no test reaches its line."""


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def results(folder: Path) -> dict[tuple[str, str], dict]:
    """The last of each file and change."""
    file = folder / "results.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    rows = map(json.loads, lines)
    return {(row["file"], row["change"]): row for row in rows}


def add(folder: Path, row: dict) -> None:
    with (folder / "results.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def tell(folder: Path, paths: list[Path]) -> None:
    found, missed = results(folder), []
    print("| file | changes | tried |", " | ".join(RESULTS), "|")
    print("| --- " * (len(RESULTS) + 3) + "|")
    for path in paths:
        changes = all_changes(path)
        rows = [row for c in changes if (row := found.get((name_of(path), c.name)))]
        counts = Counter(row["result"] for row in rows)
        if changes:
            numbers = [len(changes), len(rows), *(counts[result] for result in RESULTS)]
            print(f"| `{name_of(path)}` |", " | ".join(map(str, numbers)), "|")
        missed += [row for row in rows if row["result"] != "seen"]
    print()
    for row in missed:
        tests = f"{row['ran']} of {row['of']} tests"
        print(f"{row['file']}:{row['change']}  ({row['result']}, {tests})")
