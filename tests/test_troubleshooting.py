"""The errors of docs/troubleshooting.md are those of the source."""

import ast
import functools
import re
from pathlib import Path

import jax._src.core
import jax._src.interpreters.ad
import jax._src.lax.control_flow.loops as lax_loops
import pytest

import loopkit

PAGE = Path(__file__).resolve().parent.parent / "docs/troubleshooting.md"
SOURCES = [
    *Path(loopkit.__file__).parent.rglob("*.py"),
    *(Path(module.__file__) for module in (lax_loops, jax._src.core, jax._src.interpreters.ad)),
]
HEADINGS = [h for h in re.findall(r"^## (.*)$", PAGE.read_text(), re.M) if "`" in h]


def constants(path):
    """The texts in a file; those that stand beside each other are one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@functools.cache
def texts():
    return "\n".join(text for path in SOURCES for text in constants(path))


@pytest.mark.every_case
@pytest.mark.parametrize("heading", HEADINGS)
def test_what_a_heading_quotes_is_said(heading):
    for said in re.findall(r"`([^`]+)`", heading):
        assert said in texts()
