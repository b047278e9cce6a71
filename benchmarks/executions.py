"""Executions: how often each instruction of a compiled program runs, and what that adds up to.

The program says it"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from ahead_of_time import Compiled
from iterations import ATTRIBUTE

COLLECTIVES = (
    *("all-gather", "all-reduce", "all-to-all"),
    *("collective-broadcast", "collective-permute", "reduce-scatter"),
)
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_NUMBER = re.compile(rf'\b{ATTRIBUTE}="(\d+)"')
_NAME = re.compile(r'op_name="([^"]*)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_BRANCH = re.compile(r"\b(?:true|false)_computation=%([\w.\-]+)")


class Loop(NamedTuple):
    """A while loop of a compiled program."""

    name: str
    number: int | None
    """In the program as JAX handed it to the compiler; None of a loop that the compiler made."""
    trip_count: int | None
    """If the compiler knows it. A GPU that does not asks the device, and waits, in each round."""
    source: str
    """The part of the user's program that it comes from: a path of transformations and loops."""


class Execution(NamedTuple):
    """An instruction, how often it runs, and whether it stands in a loop."""

    instruction: Any
    times: int
    in_loop: bool


def loops(compiled: Compiled) -> dict[str, Loop]:
    """Those of a compiled program, by name."""
    instructions = (i for c in compiled.program.computations.values() for i in c.values())
    return {i.name: _loop(i) for i in instructions if i.opcode == "while"}


def unknown(compiled: Compiled) -> list[Loop]:
    """Return the loops for which a GPU waits in every round."""
    return [loop for loop in loops(compiled).values() if loop.trip_count is None]


def collectives(compiled: Compiled) -> Counter[tuple[str, bool]]:
    """Count each kind of exchange between devices, inside and outside loops."""
    bodies = compiled.program.loop_bodies
    inside = {name for body in bodies for name in compiled.program.runs(body)}
    return Counter(
        (kind, name in inside)
        for name, computation in compiled.program.computations.items()
        for i in computation.values()
        for kind in COLLECTIVES
        if i.opcode in (kind, f"{kind}-start")
    )


class Executions:
    """The executions of a run in which the numbered loops and branches ran `counts` times."""

    def __init__(self, compiled: Compiled, counts: Sequence[int]):
        self.program, self.text = compiled.program, compiled.text
        self.loops, self.counts = loops(compiled), counts

    @cached_property
    def all(self) -> list[Execution]:
        """Every instruction that runs, those inside fusions left out."""
        entry = re.search(r"^ENTRY %?([\w.\-]+)", self.text, re.MULTILINE)
        assert entry, "a program has an entry"
        return [*self._of(entry[1], 1, False)]

    @property
    def cycles(self) -> int:
        """Return the cycles of a run, as a TPU's compiler estimates them.

        It notes an estimate at each instruction that it has scheduled. Of slices written in place,
        and of going round a loop, it has none: to compare programs by, not to tell the time.
        """
        found = ((_CYCLES.search(e.instruction.rest), e.times) for e in self.all)
        return sum(int(cycles[1]) * times for cycles, times in found if cycles)

    def copies(self, least: int) -> int:
        """Count how often the body of a loop copies an array of at least `least` bytes."""
        return sum(
            e.times for e in self.all if e.in_loop and self._copies_of(e.instruction) >= least
        )

    def _copies_of(self, instruction: Any) -> int:
        """Return the bytes of an array that is copied."""
        if instruction.opcode == "fusion":
            computation = self.program.computations[dict(instruction.called())["calls"]]
            instruction = next(i for i in computation.values() if i.root)
        if instruction.opcode == "copy-start":
            first = instruction.type.strip("(").split("}")[0] + "}"  # of what it returns: the copy
            return dataclasses.replace(instruction, type=first).bytes
        return instruction.bytes if instruction.opcode == "copy" else 0

    def _of(self, computation: str, times: int, in_loop: bool) -> Iterator[Execution]:
        for i in self.program.computations[computation].values():
            yield Execution(i, times, in_loop)
            called = dict(i.called())
            if i.opcode == "while":
                rounds = self.rounds(i.name, times)
                yield from self._of(called["body"], rounds, True)
                yield from self._of(called["condition"], rounds + times, True)
            elif i.opcode == "conditional":
                for branch, runs in self.branch_runs(i.name).items():
                    yield from self._of(branch, runs, in_loop)
            elif i.opcode == "call":
                yield from self._of(called["to_apply"], times, in_loop)

    def find(self, name: str) -> Any:
        return next(c[name] for c in self.program.computations.values() if name in c)

    def rounds(self, name: str, entered: int) -> int:
        """Return how often the body of a loop runs, if the loop was entered `entered` times."""
        loop = self.loops[name]
        alike = sum(other.number == loop.number for other in self.loops.values())
        counted = None if loop.number is None or alike > 1 else int(self.counts[loop.number])
        trips = loop.trip_count
        if trips is None and loop.number is None:
            trips = self._limit(name)
        if trips is None and counted is None:
            raise ValueError(f"{loop} was not counted, or cannot be told from others")
        if trips is None:
            return counted
        if counted not in (None, entered * trips):
            raise ValueError(f"{loop}, entered {entered} times, went round {counted} times")
        return entered * trips

    def _limit(self, name: str) -> int | None:
        """Return the limit of a loop of the compiler's own that counts up from 0 to a constant."""
        called = next(
            dict(c[name].called()) for c in self.program.computations.values() if name in c
        )
        condition = self.program.computations[called["condition"]]
        compare = next(i for i in condition.values() if i.root)
        limit = condition.get(compare.operands[-1])
        if "direction=LT" not in compare.rest or limit is None or limit.opcode != "constant":
            return None
        return int(limit.rest.split(")")[0])

    def branch_runs(self, name: str) -> dict[str, int]:
        """Return how often each branch of a conditional runs, by the name of its computation."""
        instruction = self.find(name)
        number = _number(instruction)
        if number is None:
            raise ValueError(f"the compiler made {name}: which branch is taken was not counted")
        branches = [branch for role, branch in instruction.called() if role == "branch"]
        places = [*range(len(branches))]
        if not branches:  # one of two by a predicate, which a compiler made of their index
            branches = _BRANCH.findall(instruction.rest)
            places = self._places(instruction, branches)
        return {b: int(self.counts[number + n]) for b, n in zip(branches, places, strict=True)}

    def _places(self, conditional: Any, branches: Sequence[str]) -> list[int]:
        """Find the branch of JAX's for each of two compiled ones: JAX names what is in them."""
        path = re.escape(_source(conditional))
        known: dict[str, int] = {}
        for branch in branches:
            inside = (
                i for c in self.program.runs(branch) for i in self.program.computations[c].values()
            )
            found = {n for i in inside for n in re.findall(rf"{path}/branch_(\d+)_fun", i.rest)}
            if len(found) == 1:
                known[branch] = int(found.pop())
        missing = [branch for branch in branches if branch not in known]
        if len(missing) == 1:
            (known[missing[0]],) = {*range(len(branches))} - {*known.values()}
        if {*known.values()} != {*range(len(branches))}:
            raise ValueError(f"the branches of {conditional.name} cannot be told apart")
        return [known[branch] for branch in branches]


def _loop(instruction: Any) -> Loop:
    count = _TRIP_COUNT.search(instruction.rest)
    trips = int(count[1]) if count else None
    return Loop(instruction.name, _number(instruction), trips, _source(instruction))


def _number(instruction: Any) -> int | None:
    found = _NUMBER.search(instruction.rest)
    return int(found[1]) if found else None


def _source(instruction: Any) -> str:
    found = _NAME.search(instruction.rest)
    return found[1] if found else ""
