"""Lines of the package that run."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import defaultdict
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import NamedTuple

MONITOR = sys.monitoring
TOOL = MONITOR.COVERAGE_ID


class Line(NamedTuple):
    file: str
    number: int


@contextlib.contextmanager
def noted(folder: str) -> Iterator[set[Line]]:
    """A set that gets every line of the folder's files that runs."""
    found: set[Line] = set()

    def see(code: CodeType, number: int):
        if code.co_filename.startswith(folder):
            found.add(Line(code.co_filename[len(folder) + 1 :], number))
        return MONITOR.DISABLE

    MONITOR.use_tool_id(TOOL, "mutation")
    MONITOR.register_callback(TOOL, MONITOR.events.LINE, see)
    MONITOR.set_events(TOOL, MONITOR.events.LINE)
    MONITOR.restart_events()
    try:
        yield found
    finally:
        MONITOR.set_events(TOOL, 0)
        MONITOR.free_tool_id(TOOL)


def place(code: CodeType) -> tuple:
    """Return the same key for code that is compiled again; `==` does not hold where lines were
    noted."""
    return code.co_filename, code.co_qualname, tuple(code.co_positions())


def functions_of(folder: str) -> dict[tuple, list[FunctionType]]:
    """All that exist, by the place of their code."""
    found = defaultdict(list)
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__code__.co_filename.startswith(folder):
            found[place(thing.__code__)].append(thing)
    return found


def pairs(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Yield the pairs of codes inside two codes that differ, the outermost first."""
    if old != new:
        yield old, new
        inside = [[c for c in code.co_consts if isinstance(c, CodeType)] for code in (old, new)]
        if len(inside[0]) != len(inside[1]):
            return  # of code that is never reached, the compiler makes none
        for a, b in zip(*inside, strict=True):
            yield from pairs(a, b)
