"""Thunks: the work of a GPU in one run of a program: kernels launched, and waits of the host.

Read from the thunk sequence, the tree that the compiled program executes: a loop holds what its
rounds launch, a graph what is launched together.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ahead_of_time import Compiled
from executions import Executions

_LINE = re.compile(r"^( *)(\d+): k(\w+)")
_PART = re.compile(r"^( *)(condition|body|\w*branch\w*):$")
_HOLDERS = {
    "While",
    "Conditional",
    "Sequential",
    "CommandBuffer",
    "AsyncStart",
    "DynamicSliceFusion",
}
_SILENT = {"AsyncDone", "WaitForStreams", "CopyDone"}
"""Kinds of thunks that launch nothing themselves."""


@dataclass
class Thunk:
    """A line of the sequence, and those below it, by the part of it that they belong to."""

    kind: str
    number: int
    indent: int
    parts: dict[str, list["Thunk"]] = field(default_factory=dict)


class Work(NamedTuple):
    """The work of a GPU in one run."""

    kernels: int
    """Kernels and copies."""
    launches: int
    """Launches of kernels and copies; a CUDA graph counts as one."""
    waits: int
    """Waits of the host, for a loop's predicate or for the choice of a branch."""


def parse(text: str) -> list[Thunk]:
    """Return the outermost thunks of a sequence."""
    root = Thunk("Root", 0, -1)
    holders, part = [root], {-1: ""}  # what is open, and the part of it that is being read
    for line in text.splitlines():
        if found := _PART.match(line):
            indent, name = len(found[1]), found[2]
            if name != "condition":  # which is not indented, and directly follows its loop
                while holders[-1].indent > indent - 2:
                    holders.pop()
            part[holders[-1].indent] = name
        elif found := _LINE.match(line):
            thunk = Thunk(found[3], int(found[2]), len(found[1]))
            while holders[-1].indent >= thunk.indent:
                holders.pop()
            holder = holders[-1]
            holder.parts.setdefault(part[holder.indent], []).append(thunk)
            holders.append(thunk)
            part[thunk.indent] = ""
    return root.parts.get("", [])


def work(compiled: Compiled, counts: Sequence[int]) -> Work:
    """Return the work of a run in which the numbered loops and branches ran `counts` times."""
    return _total(parse(compiled.thunks), 1, compiled, Executions(compiled, counts))


def kernels_by_pass(compiled: Compiled, counts: Sequence[int]) -> tuple[int, int]:
    """Kernels in loops of the forward pass, and in those of the backward pass."""
    executions = Executions(compiled, counts)
    forward = backward = 0
    for thunk in parse(compiled.thunks):
        if thunk.kind == "While":
            kernels = _total([thunk], 1, compiled, executions).kernels
            source = executions.loops[compiled.thunk_names[thunk.number]].source
            if "transpose(" in source:
                backward += kernels
            else:
                forward += kernels
    return forward, backward


def _total(thunks: Sequence[Thunk], times: int, compiled: Compiled, executions: Executions) -> Work:
    parts = [_of(thunk, times, compiled, executions) for thunk in thunks]
    return Work(*map(sum, zip(*parts, strict=True))) if parts else Work(0, 0, 0)


def _of(thunk: Thunk, times: int, compiled: Compiled, executions: Executions) -> Work:
    if thunk.kind not in _HOLDERS:
        count = 0 if thunk.kind in _SILENT else times
        return Work(count, count, 0)
    runs = _runs(thunk, times, compiled, executions)
    inside = [
        _total(thunk.parts.get(part, []), n, compiled, executions) for part, n in runs.items()
    ]
    kernels, launches, waits = map(sum, zip(*inside, strict=True))
    if thunk.kind == "CommandBuffer":  # a graph: its questions are answered on the device
        return Work(kernels, times, 0)
    asked = times if thunk.kind == "Conditional" else runs.get("condition", 0)
    return Work(kernels, launches, waits + asked)


def _runs(thunk: Thunk, times: int, compiled: Compiled, executions: Executions) -> dict[str, int]:
    """Count how often each part of a thunk runs; the predicate of a loop of known trip count never
    does."""
    if thunk.kind == "While":
        name = compiled.thunk_names[thunk.number]
        rounds = executions.rounds(name, times)
        if executions.loops[name].trip_count is not None:
            return {"body": rounds}
        return {"body": rounds, "condition": rounds + times}
    if thunk.kind == "Conditional":
        branches = executions.branch_runs(compiled.thunk_names[thunk.number])
        return {part: branches[_computation(thunk, part, compiled)] for part in thunk.parts}
    return dict.fromkeys(thunk.parts, times)


def _computation(conditional: Thunk, part: str, compiled: Compiled) -> str:
    """Return the computation of a branch, by what is in it: the sequence calls the true one
    false."""
    names = {compiled.thunk_names.get(thunk.number) for thunk in conditional.parts[part]}
    return next(
        name for name, inside in compiled.program.computations.items() if names & inside.keys()
    )
