"""`in_place_report`: the copies that compiled loops make of what they carry.

They are found in the text of the compiled program: its instructions, those that loops repeat, and
their source lines.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax

from loopkit import _jax
from loopkit._arguments import validate
from loopkit._engine.leaves import spread
from loopkit._engine.loop import kept
from loopkit._engine.primitives import while_p
from loopkit._jaxprs import equations
from loopkit._reports.explain import spelled_out

_KINDS = {"i": "s", "u": "u", "f": "f", "c": "c"}


@dataclass(frozen=True)
class Copy:
    """An array that every step of a compiled loop copies."""

    type: str
    """The type as the compiler writes it, such as f32[500,7]."""
    bytes: int
    leaf: str
    """The leaves of a carry that have this type; empty if none has."""
    source: str
    """file:line, or "" if the compiler does not say."""
    instruction: str

    def __str__(self) -> str:
        of = f" of {self.leaf}" if self.leaf else ""
        at = f" at {self.source}" if self.source else ""
        return f"{self.type}, {self.bytes:,} bytes{of}{at} ({self.instruction})"


@dataclass(frozen=True)
class InPlaceReport:
    """The copies that the loops of a compiled program make in each step. It prints as a list."""

    copies: tuple[Copy, ...]
    loops: int
    """The number of loops in the compiled program."""
    min_bytes: int

    def __bool__(self) -> bool:
        """Return whether everything is in place."""
        return not self.copies

    def __str__(self) -> str:
        looked = f"{self.loops} compiled loop{'s' * (self.loops != 1)}"
        if not self.copies:
            return f"in place: {looked}, no copy of {self.min_bytes:,} bytes or more in a step"
        lines = [f"  {c}" for c in self.copies]
        return "\n".join([f"{len(lines)} in the steps of {looked}:", *lines])

    def __repr__(self) -> str:
        return str(self)

    def __len__(self) -> int:
        return len(self.copies)

    def __getitem__(self, place: int) -> Copy:
        return self.copies[place]


def in_place_report(
    fn: Callable[..., Any], *args: Any, grad: bool = False, min_bytes: int = 1024
) -> InPlaceReport:
    """Find the copies that the compiled loops of `fn(*args)` make in every step.

    `jax.jit` compiles `fn` for the default device, and nothing is run.

    **Arguments:**

    - `fn`, `args`: a function of trees of arrays, or of `jax.ShapeDtypeStruct`s if the values do
      not matter. Leaves that are neither arrays nor numbers, such as strings and functions, are
      static.
    - `grad`: look at the gradient with respect to all floating-point arguments instead.
    - `min_bytes`: copies of smaller arrays are left out.

    **Returns:**

    An `InPlaceReport`, which is true if there are no copies. It is a sequence of `Copy`s, and
    prints as a list: type, bytes, the carry leaves of that type, source line.

    **Raises:** `TypeError` and `ValueError` if an argument is of the wrong type or value.

    !!! example

        ```python
        import jax.numpy as jnp
        import loopkit

        def sums(xs):
            def step(i, ys):
                return ys.at[i].set(xs[i] + ys[i - 1])
            return loopkit.fori_loop(1, len(xs), step, xs, buffers=True)

        assert loopkit.in_place_report(sums, jnp.ones((1000, 3)))
        ```
    """
    name = "in_place_report"
    validate.check_callable(name, "fn", fn)
    grad = validate.check_flag(name, "grad", grad)
    min_bytes = validate.check_whole(name, "min_bytes", min_bytes, 0, "an int >= 0 (bytes)")
    leaves, tree = jax.tree.flatten(args)
    given = [hasattr(v, "dtype") or isinstance(v, numbers.Number) for v in leaves]
    of_arrays = lambda *arrays: fn(*tree.unflatten(spread(arrays, given, leaves)))
    arrays = kept(leaves, given)
    names = _leaf_names(spelled_out(jax.make_jaxpr(of_arrays)(*arrays)))
    lowered = jax.jit(of_arrays).lower(*arrays)
    if grad:
        dtype = lambda out: out.dtype if _jax.is_differentiable(out) else jax.dtypes.float0
        type_of = lambda out: jax.ShapeDtypeStruct(out.shape, dtype(out))
        cotangents = jax.tree.map(type_of, jax.eval_shape(of_arrays, *arrays))

        def gradient(arrays: Sequence[Any], cotangents: Sequence[Any]) -> Any:
            moving = [_jax.is_differentiable(jax.typeof(v)) for v in arrays]
            of = lambda *values: of_arrays(*spread(values, moving, arrays))
            return jax.vjp(of, *kept(arrays, moving))[1](cotangents)

        lowered = jax.jit(gradient).lower(arrays, cotangents)
    return _report(lowered.compile().as_text() or "", names, min_bytes)


def _leaf_names(jaxpr: _jax.Jaxpr) -> dict[str, dict[str, None]]:
    """Return the carry leaves of the loops in a jaxpr, each once, by their type."""
    names: dict[str, dict[str, None]] = {}
    for loop, leaf, aval in _carries(jaxpr):
        names.setdefault(_hlo_type(aval), {})[f"`{leaf}` of {loop}"] = None
    return names


def _carries(jaxpr: _jax.Jaxpr) -> Iterator[tuple[str, str, Any]]:
    for eqn in equations.all_equations(jaxpr):
        name, params = eqn.primitive.name, eqn.params
        if eqn.primitive is while_p:
            loop = params["loop"]
            for i, (leaf, aval) in enumerate(zip(loop.carry, loop.carry_types, strict=True)):
                yield f"loopkit.{loop.name}", leaf.name or f"carry leaf {i}", aval
        if name == "scan":
            # A carry leaf has one shape inside and outside; a y inside is one row of that outside.
            body = _jax.open_jaxpr(params["jaxpr"])
            for i, (inside, v) in enumerate(zip(body.outvars, eqn.outvars, strict=True)):
                if inside.aval.shape == v.aval.shape:
                    yield "lax.scan", f"carry leaf {i}", v.aval
        if name == "while":
            for i, v in enumerate(eqn.outvars):
                yield "lax.while_loop", f"carry leaf {i}", v.aval


def _hlo_type(aval: _jax.ShapedArray) -> str:
    dtype = aval.dtype
    kind = _KINDS.get(getattr(dtype, "kind", ""))
    name = f"{kind}{8 * dtype.itemsize}" if kind else str(dtype)
    name = {"bfloat16": "bf16", "bool": "pred"}.get(str(dtype), name)
    return f"{name}[{','.join(map(str, aval.shape))}]"


def _report(text: str, names: dict[str, dict[str, None]], min_bytes: int) -> InPlaceReport:
    program = CompiledModule.parse(text)
    copies = []
    for body in program.loop_bodies:
        for computation in program.runs(body):
            instructions = program.computations[computation]
            for i in instructions.values():
                if i.opcode in ("copy", "copy-start") and i.bytes >= min_bytes:
                    leaf = " or ".join(names.get(i.shape, ()))
                    source = _source(program, instructions, i)
                    copies.append(Copy(i.shape, i.bytes, leaf, source, i.name))
    return InPlaceReport(tuple(copies), len(program.loop_bodies), min_bytes)


def _source(
    program: CompiledModule, instructions: dict[str, Instruction], copy: Instruction
) -> str:
    """Return the user's line that a copy comes from: its own, or that of an operand or a use."""
    near = [copy, *(instructions[o] for o in copy.operands if o in instructions)]
    near += [i for i in instructions.values() if copy.name in i.operands]
    found = ([x for x in program.lines(i) if not x[0].startswith(_jax.PACKAGE)] for i in near)
    best = max(found, key=len)
    return "{}:{}".format(*best[0]) if best else ""


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
        """Yield (role, computation) for each computation that the instruction runs."""
        yield from _CALLED.findall(self.rest)
        for names in _BRANCHES.findall(self.rest):
            yield from (("branch", n) for n in _OPERAND.findall(names))

    def number(self, key: str) -> int | None:
        """Return the value of a numeric attribute, or None."""
        found = re.search(rf"\b{key}=(\d+)", self.rest)
        return None if found is None else int(found[1])


@dataclass
class CompiledModule:
    """The computations of a compiled program, and its tables of stack frames."""

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
        """Return the computations that a loop's body runs, itself first, except inner loops."""
        found, pending = [], [body]
        while pending:
            name = pending.pop(0)
            if name not in found and name in self.computations:
                found.append(name)
                inner = [i for i in self.computations[name].values() if i.opcode != "while"]
                pending += [called for i in inner for _, called in i.called()]
        return found

    def lines(self, instruction: Instruction) -> list[tuple[str, int]]:
        """Return the (file, line) pairs that an instruction comes from, innermost first."""
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
            # XLA writes the parent plus one: 1 says that an outermost frame has no parent.
            frame = int(numbers.get("parent_frame_id", 1)) - 1
        return out
