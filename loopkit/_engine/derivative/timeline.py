"""Find what lives at each moment while the gradient of a function is computed.

The gradient runs the equations of the function, and then reverses those of its linear part, the
last one first. A value lives until its last reader. A residual lives until the first equation of
the linear part that reads it is reversed. Residuals of a step that follow from others by cheap
equations take no memory: a loop computes them where they are read. Between loops, the compiler
decides which residuals to keep (`compiled_memory.py`). What loops save is not among the values
here: it depends on their plans.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from loopkit import _jax
from loopkit._engine.derivative.reversal import asked, reversal
from loopkit._engine.loop import Active, Loop
from loopkit._engine.primitives import dual_p, forward_p, pushforward_p, while_p
from loopkit._jaxprs import equations
from loopkit._jaxprs.accelerators import Accelerator
from loopkit._jaxprs.compiled_memory import (
    ELEMENTWISE,
    added_bytes,
    handed_on,
    index_bytes,
    kept_by_compiler,
    takes_over,
    term_bytes,
)
from loopkit._jaxprs.cost import equation_nanoseconds
from loopkit._jaxprs.min_cut import Residuals
from loopkit._plans.budget import Part
from loopkit._plans.one_price import Moment, State
from loopkit._plans.plan import Plan


class Met(NamedTuple):
    """A loop that an equation runs or reverses."""

    key: Hashable
    loop: Loop
    active: Active
    primitive: Any
    times: int
    what: str
    """The loop, in words."""


def met_in(eqn: _jax.Equation, times: int = 1, primal: bool = False) -> Iterator[Met]:
    """Yield the outermost loops in an equation that are differentiated.

    With `primal`, yield those that may be differentiated, with None for what is active.
    """
    loop = eqn.params.get("loop")
    if loop is not None:
        if eqn.primitive in ((while_p,) if primal else (dual_p, forward_p, pushforward_p)):
            layout: Any = eqn.params.get("layout", eqn.params.get("active"))
            yield Met(key_of(loop), loop, layout, eqn.primitive, times, described(eqn))
        return
    if eqn.primitive.name == "scan":
        times *= _jax.volume([eqn.params["length"]])
    if eqn.primitive.name == "shard_map":  # what all devices save is one array
        mesh = eqn.params["mesh"]
        times *= _jax.volume([mesh.shape[axis] for axis in eqn.params["newly_manual_axes"]])
    for inside in equations.jaxprs_in(eqn):
        for each in _jax.open_jaxpr(inside).eqns:
            yield from met_in(each, times, primal)


def key_of(loop: Loop) -> Hashable:
    """Return the number of a loop that shares the budget, or the loop itself."""
    part = loop.checkpoints
    return part.number if isinstance(part, Part) and part.number else loop


def saved_bytes(plan: Plan) -> int:
    """Return the bytes that the forward sweep of a loop saves on the device."""
    logged = 0 if plan.keeps_all else (plan.bound or 0) * plan.step.log_bytes
    buffers = 0 if plan.keeps_all else plan.step.buffer_bytes
    return plan.slot_bytes - (plan.host_bytes if plan.host else 0) + logged + buffers


@dataclass(frozen=True)
class Timeline:
    """The moments of a gradient, and the loops in it."""

    moments: Sequence[Moment]
    loops: Mapping[Hashable, Met]
    of_gradient: bool = True
    """Whether these are the moments of the gradient in all inputs, which may not exist."""
    again: float = 0.0
    """The nanoseconds of what runs again under `jax.checkpoint`."""

    def holders(self, state: State) -> list[tuple[str, int]]:
        """Return what holds memory at the peak, in words, and how many bytes each holds."""
        peak, chosen = state.peak, state.chosen
        found = [(f"values that are read later, in {peak.what}", peak.values)]
        for key, times in peak.held:
            found.append((f"what {self.loops[key].what} saves", times * chosen[key].saved))
        if peak.reversed is not None:
            what = self.loops[peak.reversed].what
            found.append((f"going back through {what}", chosen[peak.reversed].working))
        return found


class Outside(NamedTuple):
    """The place of a part in its program: which values are the program's, and which are kept."""

    operands: int
    """How many of its first operands are arguments of the program."""
    moving: int
    """How many of these have a tangent."""
    results: bool
    """Whether its results are those of the program."""
    stored: Sequence[_jax.Var]
    """The variables kept until it is reversed, from which the residuals follow."""


def timeline(residuals: Residuals, linear: _jax.Jaxpr, outside: Outside | None = None) -> Timeline:
    """Return the timeline of a function (results, residuals) and its linear part.

    The function is a part of a program or, without `outside`, a step of a loop.
    """
    step = Outside(0, 0, False, residuals.least.stored)
    walk = _Walk(residuals, linear, outside or step, outside is None)
    return Timeline(walk.moments, walk.loops, again=walk.again)


def all_at_once(loops: Sequence[Met]) -> Timeline:
    """Return the timeline of loops that all save their values before any of them is reversed."""
    held = tuple((met.key, met.times) for met in loops)
    moments = [Moment(met.what, 0, held, met.key) for met in loops] or [Moment("nothing", 0)]
    return Timeline(moments, {met.key: met for met in loops}, of_gradient=False)


@dataclass
class _Walk:
    """A walk through a function (results, residuals), and back through its linear part."""

    residuals: Residuals
    linear: _jax.Jaxpr
    outside: Outside
    is_step: bool
    again: float = 0.0
    moments: list[Moment] = field(default_factory=list)
    loops: dict[Hashable, Met] = field(default_factory=dict)
    _changes: dict[int, int] = field(default_factory=dict)
    """The change in live bytes at each time. Equation k reads at 2 k, and writes at 2 k + 1."""
    _held: dict[int, list] = field(default_factory=dict)
    _moving: set = field(default_factory=set)
    """The variables of the linear part that follow from tangents."""

    def __post_init__(self) -> None:
        self.ahead = list(self.residuals.step.eqns)
        self.back = list(_jax.open_jaxpr(self.linear).eqns)
        self._going_forward()
        self._going_back()
        reversed_at = self._loops()
        eqns, values = [*self.ahead, *reversed(self.back)], 0
        if self.is_step or self.outside.results:
            values = index_bytes(self.ahead, self.residuals.device)
        for k, eqn in enumerate(eqns):
            values += self._changes.get(2 * k, 0) + self._changes.get(2 * k + 1, 0)
            inside = 0
            if k >= len(self.ahead) and equations.is_remat(eqn):
                inside, time = _run_again(eqn, self._moving, self.residuals.device)
                self.again += time
            held = tuple(self._held.get(k, ()))
            for met in reversed_at.get(k, [None]):
                key = None if met is None else met.key
                self.moments.append(Moment(described(eqn), values + inside, held, key))
        self.moments = self.moments or [Moment("nothing", 0)]

    def _lives(self, size: int, birth: int, death: int) -> None:
        """Count bytes from one time to another, both included."""
        self._changes[birth] = self._changes.get(birth, 0) + size
        self._changes[death + 1] = self._changes.get(death + 1, 0) - size

    def _when_reversed(self, number: int) -> int:
        return len(self.ahead) + len(self.back) - 1 - number

    def _going_forward(self) -> None:
        step, last = self.residuals.step, {}
        same: dict[Any, Any] = {}
        for k, eqn in enumerate(self.ahead):
            same |= {v: equations.renamed(u, same) for v, u in handed_on(eqn)}
            if eqn.primitive.name == "optimization_barrier":
                continue
            for v in equations.variables(eqn):
                last[same.get(v, v)] = 2 * k + (not takes_over(eqn))
        last |= {same.get(v, v): time for v, time in self._until(step).items()}
        returned = step.outvars[: self.residuals.results] if self.outside.results else ()
        given = set(_jax.variables(returned))
        # A loop's plan counts its carry in the forward pass.
        since = 2 * len(self.ahead) if self.is_step else 0
        for v in step.invars[self.outside.operands :]:
            if v in last and last[v] >= since:
                self._lives(_size(v), 0, last[v])
        for k, eqn in enumerate(self.ahead):
            for v in eqn.outvars:
                if v in last and v not in given and v not in same:  # others take no memory here
                    self._lives(_size(v), 2 * k + 1, max(2 * k + 1, last[v]))

    def _until(self, step: _jax.OpenJaxpr) -> dict:
        """Return the time of the last read of each stored variable in the backward pass."""
        first: dict[Any, int] = {}
        for j, eqn in enumerate(self.back):
            for v in equations.variables(eqn):
                first.setdefault(v, j)
        stored = set(self.outside.stored)
        sources: dict[Any, frozenset] = {v: frozenset((v,)) for v in stored}
        for eqn in step.eqns:
            found = [sources[v] for v in equations.variables(eqn) if v in sources]
            for v in eqn.outvars:
                if v not in sources:
                    sources[v] = frozenset().union(*found)
        until: dict[Any, int] = {}
        inputs = _jax.open_jaxpr(self.linear).invars
        for v, inside in zip(step.outvars[self.residuals.results :], inputs, strict=False):
            if isinstance(v, _jax.Literal) or inside not in first:
                continue
            time = 2 * self._when_reversed(first[inside]) + 1
            for s in sources.get(v, ()):
                until[s] = max(until.get(s, 0), time)
        return until

    def _going_back(self) -> None:
        linear, count = _jax.open_jaxpr(self.linear), len(self.residuals.jaxpr.out_avals)
        moving = linear.invars[count - self.residuals.results :]
        self._moving.update(_depending(self.back, moving))
        readers: dict[Any, list[int]] = {}
        for j, eqn in enumerate(self.back):
            for v in set(equations.variables(eqn)):
                readers.setdefault(v, []).append(j)
        begin, end = 2 * len(self.ahead), 2 * (len(self.ahead) + len(self.back))
        terms = term_bytes(self.back)
        arguments, handed = set(moving[: self.outside.moving]), set()
        for j, eqn in enumerate(self.back):
            pairs = [(v, u) for v, u in handed_on(eqn) if u in arguments]
            arguments.update(v for v, _ in pairs)
            handed.update((u, j) for _, u in pairs)
        time = lambda j: 2 * self._when_reversed(j) + 1
        for v in moving[self.outside.moving :]:
            if found := readers.get(v):
                self._lives(_size(v), time(found[-1]), end)
        for v in arguments:
            found = [j for j in readers.get(v, ()) if (v, j) not in handed]
            # The compiler may keep all cotangents of an argument before it sums them.
            for j in found[1:]:
                self._lives(added_bytes(v, self.back[j], terms), time(j), time(found[0]))
        outs = set(_jax.variables(linear.outvars))
        for j, eqn in enumerate(self.back):
            death = 2 * self._when_reversed(j) + (not takes_over(eqn))
            for v in eqn.outvars:
                if v in outs and not self.outside.results:
                    self._lives(_size(v), begin, max(begin, death))
                elif v in readers and v not in outs and v not in arguments:
                    birth = 2 * self._when_reversed(readers[v][-1]) + 1
                    # A kernel that reads a sum may add up its terms itself.
                    added = terms[v] if eqn.primitive.name in ELEMENTWISE else _size(v)
                    self._lives(min(_size(v), added), birth, max(birth, death))

    def _loops(self) -> dict[int, list]:
        """Record the loops and what they save; return those that each equation reverses."""
        waiting: dict[Hashable, list] = {}
        for k, eqn in enumerate(self.ahead):
            for met in met_in(eqn):
                self.loops.setdefault(met.key, met)
                waiting.setdefault(met.key, []).append((k, met))
        found: dict[int, list] = {}
        for j, eqn in enumerate(self.back):
            k = self._when_reversed(j)
            for met in met_in(eqn):
                self.loops.setdefault(met.key, met)
                found.setdefault(k, []).append(met)
                if met.primitive is dual_p:  # under `jax.checkpoint`, it runs here
                    self._held.setdefault(k, []).append((met.key, met.times))
                elif some := waiting.get(met.key):
                    first, forward = some.pop(0)
                    self._saves(first, forward, k)
        return found

    def _saves(self, first: int, met: Met, last: int) -> None:
        """Count what a loop saves as held, not as values, from equation `first` to `last`."""
        with asked():
            plan = reversal(met.loop, met.active).plan
        self._lives(-met.times * saved_bytes(plan), 2 * first + 1, 2 * last + 1)
        for k in range(first, last + 1):
            self._held.setdefault(k, []).append((met.key, met.times))


def _run_again(eqn: _jax.Equation, moving: set, device: Accelerator | None) -> tuple[int, float]:
    """Return the most bytes that live while code under `jax.checkpoint` is reversed, and its time.

    The time is that of what runs again. Under `jax_remat3`, the code may only make residuals, which
    the outer walk counts.
    """
    inside = _jax.open_jaxpr(equations.inlined(_jax.close_jaxpr(equations.jaxprs_in(eqn)[0])))
    if moving.isdisjoint(equations.variables(eqn)):
        return 0, sum(equation_nanoseconds(e, device) for e in inside.eqns)
    pairs = list(zip(inside.invars, eqn.invars, strict=True))
    tangents = [v for v, o in pairs if not isinstance(o, _jax.Literal) and o in moving]
    moved, info = _depending(inside.eqns, tangents), inside.debug_info.with_unknown_names()
    known = [v for v in inside.invars if v not in moved]
    ahead = [e for e in inside.eqns if moved.isdisjoint(e.outvars)]
    after = [e for e in inside.eqns if not moved.isdisjoint(e.outvars)]
    read = dict.fromkeys(v for e in after for v in equations.variables(e) if v not in moved)
    make = lambda eqns, ins, outs: _jax.close_jaxpr(
        inside.replace(eqns=eqns, invars=ins, outvars=outs, debug_info=info)
    )
    n, outs = len(known), [v for v in _jax.variables(inside.outvars) if v in moved]
    residuals = Residuals(make(ahead, known, [*read]), 0, 0, n, [True] * n, device=device)
    back = make(after, [*read, *tangents], outs)
    outside = Outside(n, len(tangents), True, kept_by_compiler(residuals, back))
    most = max(m.values for m in timeline(residuals, back, outside).moments)
    return most, sum(equation_nanoseconds(e, device) for e in ahead)


def _depending(eqns: Sequence[_jax.Equation], some: Sequence[_jax.Var]) -> set:
    """Return the given variables and all that depend on them."""
    found = set(some)
    for eqn in eqns:
        if not found.isdisjoint(equations.variables(eqn)):
            found.update(eqn.outvars)
    return found


def described(eqn: _jax.Equation) -> str:
    """Return what an equation does and the line that it comes from."""
    loop, source = eqn.params.get("loop"), _jax.source_of(eqn)
    name = eqn.primitive.name if loop is None else loop.name
    name = name if _jax.checkpoint_name(eqn) is None else "code"
    if equations.is_remat(eqn):  # a stretch has no line of its own
        inside = _jax.open_jaxpr(equations.jaxprs_in(eqn)[0]).eqns
        name = "code that runs again"
        source = next(filter(None, map(_jax.source_of, inside)), source)
    return name if source is None else f"{name} at {os.path.basename(source[0])}:{source[1]}"


def _size(v: _jax.Var) -> int:
    return 0 if _jax.is_on_host(v.aval) else _jax.byte_count(v.aval)
