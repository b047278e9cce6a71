"""The entries of the gallery: gallery.toml, the program, its printed output and its picture."""

import ast
import re
import shlex
import sys
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import findings
from findings import show_bytes, show_seconds

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
COST = re.compile(r"^  (\S.*?)\s+([\d.]+ ms)\s+([\d.]+)\s+([\d.]+ MB|unknown)$", re.M)
"""A line of what examples/comparison.py prints."""


@dataclass(frozen=True)
class Entry:
    name: str  # of the program, without .py
    title: str
    shows: str
    takes: str
    picture: str  # in words
    quick: str
    guide: str = ""
    measured: str = ""
    reads: tuple[str, ...] = ()
    apart: bool = False
    coloured: bool = False

    @property
    def program(self) -> Path:
        return EXAMPLES / f"{self.name}.py"

    @property
    def drawn(self) -> Path:
        return HERE / f"{self.name}.webp"

    @property
    def printed(self) -> Path:
        return HERE / f"{self.name}.txt"

    @property
    def options(self) -> list[str]:
        """Those of `quick`, as a program has them."""
        return shlex.split(self.quick)

    @cached_property
    def source(self) -> str:
        return self.program.read_text()

    @cached_property
    def told(self) -> tuple[str, list[str]]:
        """The docstring: what it is, and the paragraphs before those that say how to run it."""
        docstring = ast.get_docstring(ast.parse(self.source))
        heading, *paragraphs = docstring.split("\n\n")
        run = next(i for i, text in enumerate(paragraphs) if text.startswith("Run `python "))
        return " ".join(heading.split()), paragraphs[:run]

    @cached_property
    def costs(self) -> list[tuple[str, str, str, str]]:
        """Return each contender's name, time, time relative to the first's, and memory."""
        if self.measured:
            section, _, program = self.measured.partition(": ")
            return [
                (
                    record.contender,
                    show_seconds(record.seconds.mid),
                    f"{record.ratio.mid:.2f}",
                    "unknown" if record.temp_bytes is None else show_bytes(record.temp_bytes),
                )
                for record in findings.load()[section].records
                if record.program == program
            ]
        return COST.findall(self.printed.read_text()) if self.printed.exists() else []

    @cached_property
    def beside(self) -> list[Path]:
        """The files of examples/ that it reads or imports, and what those import."""
        found = dict.fromkeys(EXAMPLES / name for name in self.reads)
        waiting = [path for path in (self.program, *found) if path.suffix == ".py"]
        while waiting:
            for path in imported(waiting.pop()):
                if path not in found:
                    found[path] = None
                    waiting.append(path)
        return sorted(found)


def imported(program: Path) -> list[Path]:
    """Files of examples/ that a file there imports, packages with their `__init__.py`."""
    names = []
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.ImportFrom):
            package = program.parent.name if node.level else ""  # one level deep
            module = ".".join(filter(None, (package, node.module)))
            names += [module, *(f"{module}.{name.name}" for name in node.names)]
        elif isinstance(node, ast.Import):
            names += [name.name for name in node.names]
    files = []
    for name in names:
        path = EXAMPLES / name.replace(".", "/")
        files += [path.with_suffix(".py"), path / "__init__.py", path.parent / "__init__.py"]
    return [path for path in files if path.exists()]


def entries() -> dict[str, Entry]:
    table = tomllib.loads(HERE.joinpath("gallery.toml").read_text())
    return {name: Entry(name, **said) for name, said in table.items()}


def readme_table() -> str:
    """Return the table of examples/README.md."""
    rows = [f"| [{e.name}.py]({e.name}.py) | {e.shows} | {e.takes} |" for e in entries().values()]
    return "\n".join(["| program | what it shows | takes |", "| --- | --- | --- |", *rows])
