"""The text of a program as it grows: lines, names, what is in scope where."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile

from trials.draws import FLOAT, NARROW, Draws, Type


@dataclass(frozen=True)
class Variable:
    name: str
    type: Type
    buffer: str = ""
    """"buffer" or "list" where it is one in a step; "new ..." before the loop."""
    origin: str = ""
    """The buffer that the step was given, for a buffer that was written to."""
    moving: bool = True
    """Whether it may depend on an argument that is differentiated: a constant has no derivative."""


def names_in(text: str) -> list[str]:
    return re.findall(r"\b[a-z]+\d+", text)


class Writer:
    """Text, and choices. Values of a scope stay visible in the functions inside it: closures."""

    def __init__(
        self, draws: Draws, allowed: frozenset[str], dtypes: tuple[str, ...], loop: Callable
    ):
        self.d = draws
        self.loop = loop
        """Writes a loop, of whatever kind: steps have loops in them, too."""
        self.allowed = allowed
        """The constructs that this program may have; half of them are left out for a whole
        program."""
        self.dtypes = dtypes
        """The dtypes of its floats."""
        self.tags: set[str] = set()
        """Facts that a transformation or an implementation has to know."""
        self.lines: list[str] = []
        self.variables: list[Variable] = []
        self.indent, self.names = 1, 0
        self.depth = 0
        """The number of loops around."""
        self.deep = self.may("deep nests", 25)
        """Whether loops are in loops as often as can be."""
        self.trips = 1
        """The most trips of the current step: it is unrolled so many times."""
        self.outside = 0
        """The number of names before the current step."""
        self.matrix: str | None = None
        """A large one, which the program makes before its loops."""
        self.limit: str | None = None
        """The limit of the counter of the loop around, if it has one."""
        self.counter: str | None = None
        """The counter of the loop around, if it is an integer."""
        self.lanes = False
        """Whether inside a vmap of the program's own."""
        self.effects = True
        """Whether what is written may have some: of what is rematerialised JAX allows none."""
        self.places: dict[tuple[str, bool], list[str]] = {}
        """The places at which rows of each buffer were read or written."""
        self.checked = False
        """Whether every row of a buffer that is read or written has to be one that it has."""

    def name(self, prefix: str = "v") -> str:
        self.names += 1
        return f"{prefix}{self.names}"

    def line(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    def let(
        self,
        text: str,
        kind: Type,
        buffer: str = "",
        prefix: str = "v",
        moving: bool | None = None,
    ) -> Variable:
        """`moving`: if it does not follow from what the text names."""
        if moving is None:
            named = names_in(text)
            moving = any(v.moving and v.name in named for v in self.variables)
        moving = moving and kind.inexact
        variable = Variable(self.name(prefix), kind, buffer, moving=moving)
        self.line(f"{variable.name} = {text}")
        self.variables.append(variable)
        return variable

    def add(self, name: str, kind: Type, buffer: str = "") -> Variable:
        self.variables.append(Variable(name, kind, buffer, moving=kind.inexact))
        return self.variables[-1]

    @contextlib.contextmanager
    def function(self, head: str) -> Iterator[None]:
        """`def head:`, with a scope of its own."""
        self.line(f"def {head}:")
        outer = self.variables
        self.variables = list(outer)
        self.indent += 1
        yield
        self.indent -= 1
        self.variables = outer

    def text_of(self, function: str) -> str:
        """Return the text that a function wrote."""
        first = next(i for i, line in enumerate(self.lines) if f"def {function}(" in line)
        margin = len(self.lines[first]) - len(self.lines[first].lstrip())
        inside = lambda line: len(line) - len(line.lstrip()) > margin
        return "\n".join([self.lines[first], *takewhile(inside, self.lines[first + 1 :])])

    def twin(self, function: str) -> str | None:
        """A copy of a function with one number of its text, or a table, another; None without."""
        text = self.text_of(function)
        places = list(re.finditer(r"TABLE\[:\d\]|(?<![\w.])\d\.[1-9]\b", text))
        if not places:
            return None
        tables = [place for place in places if place[0][0] == "T"]
        some = tables if tables and self.d.chance(50) else places
        name, place = self.name("body"), self.d.choice(some)
        old = place[0]
        new = f"TABLE[1:{int(old[7]) + 1}]" if old[0] == "T" else f"{float(old) + 0.25}"
        text = text[: place.start()] + new + text[place.end() :]
        self.lines += text.replace(f"def {function}(", f"def {name}(").splitlines()
        return name

    @contextlib.contextmanager
    def hiding(self) -> Iterator[None]:
        """Put names that are added meanwhile out of scope afterwards."""
        outer = self.variables
        self.variables = list(outer)
        yield
        self.variables = outer

    def having(self, test: Callable[[Variable], bool]) -> list[Variable]:
        """Variables, the latest first."""
        return [v for v in reversed(self.variables) if not v.buffer and test(v)]

    def unused(self, since: int) -> list[Variable]:
        """Floats of the function at hand, from some line on, that no later line has."""
        named = [name for line in self.lines[since:] for name in names_in(line)]
        made = (v for v in self.variables if v.type.kind == "float" and 0 not in v.type.shape)
        return [v for v in made if not v.buffer and named.count(v.name) == 1 and v.moving]

    def is_outside(self, variable: Variable) -> bool:
        """Whether it is of what stands around the loop at hand."""
        number = re.search(r"\d+$", variable.name)
        return self.outside > (int(number[0]) if number else 0)

    def buffers(self) -> list[Variable]:
        return [v for v in reversed(self.variables) if v.buffer]

    def pick(self, found: list[Variable]) -> Variable:
        """One of them, the latest more often, and what moves."""
        moving = [v for v in found if v.moving]
        if moving and not self.d.chance(15):
            found = moving
        if len(found) > 4 and not self.d.chance(40):
            found = found[:4]
        return self.d.choice(found)

    def may(self, construct: str, percent: int) -> bool:
        return construct in self.allowed and self.d.chance(percent)

    def some_float(self, shapes: tuple = ((), (3,), (2, 3), (3, 3), (2,))) -> Type:
        dtype = self.d.choice(self.dtypes)
        rough = dtype in NARROW or (len(self.dtypes) > 1 and self.d.chance(50))
        return replace(FLOAT, dtype=dtype, rough=rough).of(self.d.choice(shapes))
