"""Programs compiled for a GPU and a TPU on a machine that has neither."""

import re
import sys
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import accelerator_programs as programs
import ahead_of_time
import iterations
from ahead_of_time import TARGETS as TARGETS
from executions import Executions
from thunks import Work, work

__all__ = [
    *("TARGETS", "Compiled", "Gradient", "case", "compiled", "compilers", "computations"),
    *("counted", "cycles", "devices", "figures", "gradient_of", "lowered", "meanwhile", "programs"),
]


@lru_cache
def devices(target: str, count: int = 4) -> list[Any]:
    """Return devices of a target; the test is left out where there is no compiler for them."""
    if reason := ahead_of_time.why_not():
        pytest.skip(reason)
    return ahead_of_time.devices(target, count)


class Compiled(NamedTuple):
    text: str
    device_bytes: int
    """Temporary memory."""
    host_bytes: int


def figures(program: Any) -> Compiled:
    memory = program.memory_analysis()
    return Compiled(program.as_text(), memory.temp_size_in_bytes, memory.host_temp_size_in_bytes)


def lowered(target: str, function: Any, *types: Any) -> Any:
    """For one device."""
    place = SingleDeviceSharding(devices(target)[0])
    return jax.jit(function, in_shardings=place, out_shardings=place).lower(*types)


def compiled(target: str, function: Any, *types: Any) -> Compiled:
    return figures(lowered(target, function, *types).compile())


def counted(target: str, function: Any, *arguments: Any) -> tuple[ahead_of_time.Compiled, float]:
    """Return the compiled function, and how many numbers it multiplies in products of matrices."""
    devices(target)
    made = ahead_of_time.compiled(target, function, *arguments)
    return made, iterations.multiplications(made.module, made.counts(*arguments))


def computations(text: str) -> dict[str, list[str]]:
    """The lines of each computation of an optimised program."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        begins = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if begins:
            lines = found.setdefault(begins[1], [])
        lines.append(line)
    return found


def meanwhile(text: str, what: str = r" (while|fusion)\(") -> list[list[str]]:
    """Return what loops run between the begin and the end of each copy from the host, or to it."""
    found = []
    for name, lines in computations(text).items():
        if f"body=%{name}" not in text:
            continue
        for begun, line in enumerate(lines):
            start = re.match(r"\s*%?([\w.\-]+) = .*S\(5\).* [\w\-]+-start\(", line)
            if start:
                ends = (
                    i for i, at in enumerate(lines) if re.search(rf"-done\(.*%{start[1]}\b", at)
                )
                between = "\n".join(lines[begun + 1 : next(ends)])
                found.append(re.findall(what, between))
    return found


def cycles(text: str, trips: int) -> int:
    """A TPU's estimate, each of its loops, none in another, taken to run so often."""
    total = 0
    bodies = set(re.findall(r" while\(.*body=%?([\w.\-]+)", text))
    for name, lines in computations(text).items():
        each = sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', "\n".join(lines))))
        total += each * (trips if name in bodies else 1)
    return total


# --- the programs of the benchmark: in single precision, each compiled once


@pytest.fixture(autouse=True)
def compilers():
    """For a module that imports it."""
    if reason := _why_not():
        pytest.skip(reason)
    with jax.enable_x64(False):
        yield


_why_not = cache(ahead_of_time.why_not)
SECTIONS: dict[str, Callable[[], list]] = {
    "layer": lambda: programs.of_workload(programs.layer()),
    "rows": lambda: programs.of_rows((8, 128)),
    "short rows": lambda: programs.of_rows((10, 5)),
    "devices": programs.of_devices,
}


class Gradient(NamedTuple):
    """One of the benchmark's, and what a compiler made of it."""

    case: Any
    program: Any
    counts: np.ndarray

    @property
    def executions(self) -> Executions:
        return Executions(self.program, self.counts)

    @property
    def work(self) -> Work:
        return work(self.program, self.counts)


def case(section: str, name: str) -> Any:
    (found,) = (c for c in _cases(section) if c.name == name)
    return found


@cache
def _cases(section: str) -> list:
    return SECTIONS[section]()


@cache
def gradient_of(target: str, section: str, name: str) -> Gradient:
    found = case(section, name)
    program = ahead_of_time.compiled(target, found.function, *found.arguments)
    return Gradient(found, program, program.counts(*found.arguments))
