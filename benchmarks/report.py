"""Reports of sections: text while they measure, and records to keep."""

from collections.abc import Sequence
from pathlib import Path

from findings import Record, Spread, Target, table_of, targets_table


class Report:
    """Prints as it goes, unless it is quiet; keeps the text, the records and the targets."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.lines: list[str] = []
        self.records: list[Record] = []
        self.targets: list[Target] = []
        self.notes: list[str] = []
        self.about: dict[str, str] = {}  # of the machine, beside what all sections say of it

    def write(self, text: str = "") -> None:
        if not self.quiet:
            print(text, flush=True)
        self.lines.append(text)

    def measured(self, records: Sequence[Record]) -> None:
        """Takes the rows of a table, and shows it."""
        self.records += records
        self.write(table_of(records) + "\n")

    def note(self, text: str) -> None:
        """Note something that a reader of the figures has to know."""
        self.write(f"- {text}")
        self.notes.append(text)

    def target(self, what: str, got: float | Spread, limit: float) -> None:
        """States that `got`, a ratio, should be at most `limit`."""
        target = Target(what, limit, got if isinstance(got, Spread) else Spread(got, got, got))
        verdict = "met" if target.is_met else "MISSED"
        self.write(f"- target: {what} at most {limit:.2f}: {target.got}, {verdict}")
        self.targets.append(target)

    def summary(self) -> None:
        self.write("\n## Summary\n")
        self.write(targets_table(self.targets))

    def save(self, path: Path | None) -> None:
        if path:
            path.write_text("\n".join(self.lines) + "\n")
