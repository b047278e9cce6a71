"""Every Python block of README.md, docs/ and the public docstrings is executed.

The blocks of a page share one namespace and run in a fresh interpreter, in single precision, with
warnings as errors. Where a line reads `print(...)  # text`, what it prints has to be that text;
numbers may differ in the fourth digit.

    python tests/test_docs.py docs/derivatives.md       # run one page while writing it
"""

import ast
import inspect
import io
import math
import os
import re
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest

import loopkit
from public_names import FUNCTIONS, PUBLIC

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NUMBER = re.compile(r"[-+]?\d+\.?\d*(?:e[-+]?\d+)?")


class Block(NamedTuple):
    line: int  # of its first line in the page, counted from 1
    source: str


def python_blocks(page: Path) -> list[Block]:
    blocks, lines, start = [], [], None
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if start is None and line.strip() == "```python":
            start = number + 1
        elif start is not None and line.strip() == "```":
            blocks.append(Block(start, textwrap.dedent("\n".join(lines)) + "\n"))
            lines, start = [], None
        elif start is not None:
            lines.append(line)
    assert start is None, f"{page}: the block at line {start} is never closed"
    return blocks


class PromisedPrints(ast.NodeTransformer):
    """Turns `print(x)  # text` into `_print_as_promised(line, "text", x)`."""

    def __init__(self, block: Block):
        self.lines = block.source.splitlines()
        self.offset = block.line - 1

    def visit_Expr(self, statement: ast.Expr) -> ast.Expr:
        match statement.value:
            case ast.Call(func=ast.Name("print") as function, args=args):
                behind = self.lines[statement.end_lineno - 1].encode()
                comment = behind[statement.end_col_offset :].decode().strip()
                if comment:
                    function.id = "_print_as_promised"
                    line = statement.lineno + self.offset
                    args[:0] = ast.Constant(line), ast.Constant(comment.removeprefix("#").strip())
        return statement


def same_output(got: str, promised: str) -> bool:
    """Equal texts, but for white space and the last digits of numbers."""
    got, promised = (re.sub(r"\s*([\[\]])\s*|\s+", r" \1", text) for text in (got, promised))
    if NUMBER.split(got) != NUMBER.split(promised):
        return False
    pairs = zip(NUMBER.findall(got), NUMBER.findall(promised), strict=True)
    return all(math.isclose(float(a), float(b), rel_tol=1e-3, abs_tol=1e-6) for a, b in pairs)


def run_page(page: Path) -> None:
    def print_as_promised(line, promised, *args, **options):
        printed = io.StringIO()
        print(*args, **options, file=printed)
        got = printed.getvalue().strip()
        if not same_output(got, promised):
            raise AssertionError(f"{page}:{line}: printed {got!r}, the page says {promised!r}")

    warnings.simplefilter("error")
    namespace = {"__name__": "__main__", "_print_as_promised": print_as_promised}
    for block in python_blocks(page):
        module = PromisedPrints(block).visit(ast.parse(block.source))
        ast.increment_lineno(module, block.line - 1)  # tracebacks then name the page's line
        exec(compile(ast.fix_missing_locations(module), str(page), "exec"), namespace)


def run_in_fresh_interpreter(page: Path, directory: Path) -> None:
    paths = [str(Path(loopkit.__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    outcome = subprocess.run(
        [sys.executable, __file__, str(page)],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr


@pytest.mark.every_case
@pytest.mark.parametrize(
    "page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.name
)
def test_code_blocks_run(page, tmp_path):
    run_in_fresh_interpreter(page, tmp_path)


@pytest.mark.every_case
@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_examples_run(name, tmp_path):
    """Every function has one; a class need not."""
    page = tmp_path / f"{name}.md"
    page.write_text(inspect.getdoc(PUBLIC[name]))
    if python_blocks(page):
        run_in_fresh_interpreter(page, tmp_path)
    else:
        assert name not in FUNCTIONS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page):
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", prose):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: no file {target}"


def test_outputs_are_compared_up_to_the_last_digits():
    assert same_output("[0.35355338 2.0]\n", "[0.35355 2.]")
    assert not same_output("0.354\n", "0.355")
    assert not same_output("Array(2)", "2")


if __name__ == "__main__":
    run_page(Path(sys.argv[1]).resolve())
