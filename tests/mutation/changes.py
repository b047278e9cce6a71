"""Changes: one operator, comparison, condition or number at a time.

Left out by rule, since no test can or need see it: annotations, assertions, how an f-string formats
a number, and the arguments and settings of `SILENT`.
"""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import NamedTuple

SILENT = {"strict", "maxsize", "frozen", "slots", "eq", "repr", "kw_only", "stacklevel"}
"""Keywords: of `zip`s of equal lengths, caches and records."""

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
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Change(NamedTuple):
    line: int
    column: int
    said: str
    lines: range
    """The lines of the statement, or of the part of it before its block."""
    in_function: bool
    """Its code runs when a function is called, not when the module is imported."""
    number: int

    @property
    def name(self) -> str:
        return f"{self.line}:{self.column}: {self.said}"


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that may take its place."""
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
    elif isinstance(node, ast.If) and isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
        new.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
        yield new


class Places(ast.NodeVisitor):
    """Every node that may be changed, with its statement, and whether it is in a function."""

    def __init__(self, tree: ast.AST):
        self.found: list[tuple[ast.AST, ast.stmt | None, bool]] = []
        self.statement: ast.stmt | None = None
        self.in_function = False
        self.visit(tree)

    def visit(self, node: ast.AST) -> None:
        before = self.statement
        if isinstance(node, ast.stmt):
            self.statement = node
        self.found.append((node, self.statement, self.in_function))
        super().visit(node)
        self.statement = before

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.Lambda) -> None:
        for outside in [*getattr(node, "decorator_list", []), *node.args.defaults]:
            self.visit(outside)
        for default in filter(None, node.args.kw_defaults):
            self.visit(default)
        before, self.in_function = self.in_function, True
        for inside in node.body if isinstance(node.body, list) else [node.body]:
            self.visit(inside)
        self.in_function = before

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit_FunctionDef(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FormattedValue(self, node: ast.FormattedValue) -> None:
        self.visit(node.value)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in SILENT:
            self.visit(node.value)


def _places(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.AST, ast.stmt, bool]]:
    for node, statement, in_function in Places(tree).found:
        for new in replacements(node):
            assert statement is not None
            yield node, new, statement, in_function


def _change(number: int, node: ast.AST, new: ast.AST, statement: ast.stmt, inside: bool) -> Change:
    block = getattr(statement, "body", None)
    end = block[0].lineno if block else statement.end_lineno + 1
    lines = range(statement.lineno, max(end, statement.lineno + 1))
    was, becomes = (ast.unparse(x).split("\n")[0] for x in (node, new))
    return Change(node.lineno, node.col_offset, f"{was}  ->  {becomes}", lines, inside, number)


def all_changes(path: Path) -> list[Change]:
    """Return all changes, in order of line and column."""
    places = enumerate(_places(ast.parse(path.read_text())))
    found = [_change(number, *place) for number, place in places]
    return sorted(found, key=lambda change: (change.line, change.column))


def changed(path: Path, change: Change | None) -> CodeType:
    """The module's code, each line where it was."""
    tree = ast.parse(path.read_text())
    if change is not None:
        place = next(itertools.islice(_places(tree), change.number, None))
        assert _change(change.number, *place) == change
        _put(tree, *place[:2])
    return compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)


def _put(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, field, new)
            elif isinstance(value, list) and any(item is old for item in value):
                setattr(parent, field, [new if item is old else item for item in value])
