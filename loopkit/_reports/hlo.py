"""A compiled program as text: its instructions, those that loops repeat, and their source lines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\([^=]*?\)|\S+) ([\w\-]+)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"\b(body|condition|calls|to_apply)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_OPERAND = re.compile(r"%([\w.\-]+)")
_BYTES = {"pred": 1, "bf16": 2, "c64": 8, "c128": 16}


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    type: str
    """The type, such as f32[500,7]."""
    opcode: str
    operands: tuple[str, ...]
    rest: str
    root: bool

    @property
    def bytes(self) -> int:
        """The bytes of an array; 0 for a tuple."""
        found = re.fullmatch(r"(\w+)\[([\d,]*)\](\{.*\})?", self.type)
        if found is None:
            return 0
        kind, shape, _ = found.groups()
        width = _BYTES.get(kind) or int(re.sub(r"\D.*", "", kind.lstrip("sufb")) or 8) // 8
        return math.prod(map(int, filter(None, shape.split(","))), start=max(width, 1))

    @property
    def shape(self) -> str:
        """The type without its layout."""
        return self.type.split("{")[0]

    def called(self) -> Iterator[tuple[str, str]]:
        """Return (role, computation) for each computation that it runs."""
        yield from _CALLED.findall(self.rest)
        for names in _BRANCHES.findall(self.rest):
            yield from (("branch", n) for n in _OPERAND.findall(names))

    def number(self, key: str) -> int | None:
        """Return the number that an attribute has."""
        found = re.search(rf"\b{key}=(\d+)", self.rest)
        return None if found is None else int(found[1])

    @property
    def index(self) -> int | None:
        """The index of a get-tuple-element."""
        return self.number("index")


@dataclass
class CompiledModule:
    """The computations of a compiled program, and the stack frames they name."""

    computations: dict[str, dict[str, Instruction]] = field(default_factory=dict)
    tables: dict[str, dict[int, str]] = field(default_factory=dict)

    @staticmethod
    def parse(text: str) -> CompiledModule:
        program, here, table = CompiledModule(), None, None
        for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
            if found := _COMPUTATION.match(line):
                here, table = program.computations.setdefault(found[2], {}), None
            elif re.fullmatch(r"\w+", line):
                table = program.tables.setdefault(line, {})
            elif table is not None and re.match(r"\d+ ", line):
                number, value = line.split(" ", 1)
                table[int(number)] = value
            elif here is not None and (found := _INSTRUCTION.match(line)):
                root, name, kind, opcode, rest = found.groups()
                operands = tuple(_OPERAND.findall(rest.split(")", 1)[0]))
                here[name] = Instruction(name, kind, opcode, operands, rest, bool(root))
        return program

    @cached_property
    def loop_bodies(self) -> list[str]:
        """Return the bodies of loops, each once."""
        instructions = (i for c in self.computations.values() for i in c.values())
        called = (run for i in instructions if i.opcode == "while" for run in i.called())
        return list(dict.fromkeys(name for role, name in called if role == "body"))

    def runs(self, body: str) -> list[str]:
        """Return the computations that a loop's body runs, itself first, without those of inner
        loops."""
        found, pending = [], [body]
        while pending:
            name = pending.pop(0)
            if name not in found and name in self.computations:
                found.append(name)
                inner = [i for i in self.computations[name].values() if i.opcode != "while"]
                pending += [called for i in inner for _, called in i.called()]
        return found

    def lines(self, instruction: Instruction) -> list[tuple[str, int]]:
        """Return the (file, line) pairs that an instruction is from, innermost first."""
        source = re.search(r'source_file="([^"]*)"(?: source_line=(\d+))?', instruction.rest)
        if source:
            return [(source[1], int(source[2] or 0))]
        out: list[tuple[str, int]] = []
        frames, frame = self.tables.get("StackFrames", {}), instruction.number("stack_frame_id")
        while frame is not None and frame in frames and len(out) < 100:
            numbers = dict(re.findall(r"(\w+)=(\d+)", frames[frame]))
            place = self.tables.get("FileLocations", {}).get(int(numbers["file_location_id"]), "")
            where = dict(re.findall(r"(\w+)=(\d+)", place))
            name = self.tables.get("FileNames", {}).get(int(where.get("file_name_id", 0)), "")
            if name:
                out.append((name.strip('"'), int(where.get("line", 0))))
            # Written as one more than it is: the parent of an outermost frame, which is 0, as 1.
            frame = int(numbers.get("parent_frame_id", 1)) - 1
        return out
