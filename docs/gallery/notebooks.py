"""A notebook of each example, made from its source: a cell for each of its parts.

The first cells of a notebook write the modules that a program imports from examples/, so that a
notebook can be taken anywhere. Programs that start processes, or themselves anew, are written out
and run as they are.
"""

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from entries import EXAMPLES, Entry

HEADING = re.compile(r"# --- (.*?) -+")
SHOWN = 'from IPython.display import Image\n\nImage("{name}.png")'


def notebook(entry: Entry, options: Sequence[str] = ()) -> nbformat.NotebookNode:
    """Run with these options of the program's."""
    _, docstring, source = entry.source.split('"""', 2)
    heading, _, text = docstring.partition("\n\n")
    cells = [new_markdown_cell(f"# {entry.title}\n\n{heading}\n\n{text.strip()}")]
    cells += written(entry.beside) if entry.beside else []
    make = as_program if entry.apart else as_cells
    cells += make(entry, source, list(options))
    cells.append(new_code_cell(SHOWN.format(name=entry.name)))
    for number, cell in enumerate(cells):
        cell.id = f"{entry.name}-{number}".replace("_", "-")  # the same each time it is made
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel})


def as_cells(entry: Entry, source: str, options: list[str]) -> list[nbformat.NotebookNode]:
    """Cut where two lines are empty."""
    cells = []
    if "__file__" in source:
        cells.append(new_code_cell(f"__file__ = {entry.program.name!r}  # a notebook has none"))
    for part in source.split("\n\n\n"):
        part = part.strip("\n")
        if heading := HEADING.match(part):
            cells.append(new_markdown_cell(f"## {heading[1].capitalize()}"))
            part = part[heading.end() :].strip("\n")
        if part.startswith("if __name__"):
            run = f"out = main({options!r})"
            part = textwrap.dedent(part.split("\n", 1)[1])
            part = re.sub(r"^main\(\)$", lambda _, run=run: run, part, flags=re.M)
        cells.append(new_code_cell(part))
    return cells


def as_program(entry: Entry, source: str, options: list[str]) -> list[nbformat.NotebookNode]:
    command = f"[sys.executable, {entry.program.name!r}, *{options!r}]"
    run = f"import subprocess\nimport sys\n\n_ = subprocess.run({command}, check=True)"
    return [*written([entry.program]), new_code_cell(run)]


def written(paths: Sequence[Path]) -> list[nbformat.NotebookNode]:
    """Cells that write files of examples/, closed until a reader opens them."""
    names = [path.relative_to(EXAMPLES) for path in paths]
    cells = [new_markdown_cell("Files of the example, written beside this notebook:")]
    folders = sorted({name.parent.as_posix() for name in names} - {"."})
    if folders:
        made = "\n".join(f"os.makedirs({folder!r}, exist_ok=True)" for folder in folders)
        cells.append(new_code_cell(f"import os\n\n{made}"))
    for path, name in zip(paths, names, strict=True):
        cell = new_code_cell(f"%%writefile {name.as_posix()}\n{path.read_text()}")
        cell.metadata["jupyter"] = {"source_hidden": True}
        cells.append(cell)
    return cells
