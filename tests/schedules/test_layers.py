import ast
import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

from loopkit import schedules

NAMES = [module.name for module in pkgutil.iter_modules(schedules.__path__)]
BELOW = {
    "_checks": set(),
    "_cheapest": set(),
    "binomial": {"_checks"},
    "online": {"_checks", "_cheapest"},
    "reversal": {"_checks", "binomial", "online"},
}


def test_every_module_has_its_place():
    assert set(NAMES) == set(BELOW)


@pytest.mark.every_case
@pytest.mark.parametrize("name", NAMES)
def test_integers_only(name):
    """A schedule knows nothing of JAX, and imports run downward."""
    source = Path(schedules.__path__[0], f"{name}.py").read_text()
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    ours = {module for module in imported if module.startswith("loopkit.")}
    parts = {module.removeprefix("loopkit.schedules.").split(".")[0] for module in ours}
    assert parts <= BELOW[name]
    others = {module.split(".")[0] for module in imported - ours}
    assert others <= {
        "__future__",
        "bisect",
        "collections",
        "dataclasses",
        "functools",
        "math",
        "numpy",
        "operator",
        "typing",
    }


@pytest.mark.every_case
@pytest.mark.parametrize("name", NAMES)
def test_examples(name):
    results = doctest.testmod(importlib.import_module(f"loopkit.schedules.{name}"))
    assert results.failed == 0
