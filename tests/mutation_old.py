"""Which changes of a file do its tests not see?

    python tests/mutation.py loopkit/schedules/binomial.py tests/schedules/test_binomial.py

Each mutant is the file with one operator, comparison or number changed. It is imported in a process
of its own, and the tests are run until one fails; those that survive are printed. A mutant that
takes longer than `LONGEST` counts as seen. `--every 5 --from 2`: each fifth, from the third on;
`--lines 62 98`: those of these lines; `--seconds 90`: as many as fit, from all over the file.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib.machinery
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax  # noqa: F401  # here, so that no mutant has to
import pytest

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 120
"""Seconds."""

SWAPPED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in its place."""
    new = copy.copy(node)
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in SWAPPED:
        new.op = SWAPPED[type(node.op)]()
        yield new
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        new.ops = [SWAPPED[type(node.ops[0])](), *node.ops[1:]]
        yield new
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        new.value = node.value + 1
        yield new
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        new.value = not node.value
        yield new
    elif isinstance(node, ast.Name) and node.id in NAMES:
        new.id = NAMES[node.id]
        yield new
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        new.body, new.orelse = node.orelse, node.body
        yield new


class At(ast.NodeTransformer):
    """The tree with one node replaced."""

    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


def mutants(source: str) -> Iterator[tuple[int, str, str]]:
    """Line, what it becomes, and the whole text."""
    count = sum(1 for _ in _places(ast.parse(source)))
    for number in range(count):
        tree = ast.parse(source)
        node, new = list(_places(tree))[number]
        said = f"{ast.unparse(node)}  ->  {ast.unparse(new)}"
        yield node.lineno, said, ast.unparse(ast.fix_missing_locations(At(node, new).visit(tree)))


def _places(tree: ast.AST) -> list[tuple[ast.AST, ast.AST]]:
    found = [(node, new) for node in ast.walk(tree) for new in changes(node)]
    return sorted(found, key=lambda pair: (pair[0].lineno, pair[0].col_offset))


class Mutated(importlib.machinery.SourceFileLoader):
    text = ""

    def get_code(self, fullname: str):
        return compile(self.text, self.path, "exec")


def run(path: Path, text: str, tests: list[str]) -> int:
    """The exit status of the tests, with the file's text replaced."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    loader = Mutated(name, str(path))
    loader.text = text

    class Finder:
        @staticmethod
        def find_spec(fullname: str, *_):
            if fullname == name:
                return importlib.util.spec_from_file_location(name, path, loader=loader)
            return None

    sys.meta_path.insert(0, Finder)
    quiet = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
    return int(pytest.main([*quiet, *tests]))


def seen(path: Path, text: str, tests: list[str]) -> bool:
    child = os.fork()
    if child == 0:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
            status = 1
            with contextlib.suppress(BaseException):
                status = run(path, text, tests)
            os._exit(status)
    until = time.monotonic() + LONGEST
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return True
        time.sleep(0.05)
    return os.waitstatus_to_exitcode(done[1]) != 0


def spread(of: list) -> list:
    """In an order of which each beginning is from all over: by the bits of the place, reversed."""
    bits = len(of).bit_length()
    return [of[at] for at in sorted(range(len(of)), key=lambda n: f"{n:0{bits}b}"[::-1])]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--every", default=1, type=int)
    parser.add_argument("--from", default=0, type=int, dest="first")
    parser.add_argument("--lines", nargs="*", type=int)
    parser.add_argument("--seconds", default=float("inf"), type=float)
    given = parser.parse_args()
    os.chdir(ROOT)
    path = given.file.resolve()
    source = path.read_text()
    assert not seen(path, source, given.tests), "the tests fail as the file is"
    chosen = list(mutants(source))[given.first :: given.every]
    if given.lines:
        chosen = [mutant for mutant in chosen if mutant[0] in given.lines]
    until = time.monotonic() + given.seconds
    tried = survived = 0
    for line, said, text in spread(chosen):
        if time.monotonic() > until:
            break
        tried += 1
        if not seen(path, text, given.tests):
            survived += 1
            print(f"{given.file}:{line}: {said}", flush=True)
    print(f"{given.file}: {tried - survived} of {tried} seen, of {len(chosen)}", flush=True)


if __name__ == "__main__":
    main()
