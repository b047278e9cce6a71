"""Run code between loops again in a gradient, so that less of it lives: `_plans/stretches.py`.

Loops, and equations that must not run again, are blocks of their own. Between these, blocks end
where few bytes go from one to the next. A stretch that runs again is put under `jax.checkpoint`,
which is right in every transformation.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from loopkit import _jax
from loopkit._engine.derivative.linearised import Linearised, linearised
from loopkit._engine.derivative.reversal import asked
from loopkit._engine.derivative.timeline import (
    Met,
    Outside,
    Timeline,
    met_in,
    timeline,
)
from loopkit._engine.loop import Active, Const, Loop, Output, kept
from loopkit._engine.primitives import forward_p
from loopkit._jaxprs import equations
from loopkit._jaxprs.accelerators import planned_for
from loopkit._jaxprs.compiled_memory import (
    index_bytes,
    kept_by_compiler,
    term_bytes,
)
from loopkit._jaxprs.cost import equation_nanoseconds
from loopkit._jaxprs.min_cut import PICOSECONDS, Residuals
from loopkit._jaxprs.repeatable import is_repeatable
from loopkit._plans.one_price import without_dominated
from loopkit._plans.stretches import Block, Division, Row, Stretch, divisions
from loopkit._programs import shared

BLOCKS = 48
"""About how many blocks a program has."""
STORED = "loopkit: stored"
"""The name of a value that a stretch stores although it runs again."""
COMPLEX = "complex64", "complex128"
"""Types of values that JAX cannot save by name."""
POLICY = jax.checkpoint_policies.save_only_these_names(STORED)
"""The policy of all stretches."""


class Divided(NamedTuple):
    """A program, and the ways to divide it."""

    whole: _jax.Jaxpr
    body: _jax.OpenJaxpr
    """The program without calls of jitted functions."""
    last: Mapping[_jax.Var, int]
    """The last equation that reads each variable."""
    cuts: Sequence[int]
    """Where blocks start, and the number of equations."""
    loops: Mapping[Hashable, Met]
    """The loops of the program."""
    divisions: list[Division]

    def program(self, division: Division) -> Any:
        """Return the program whose stretches run again as a division says."""
        if len(division.stretches) == 1 and not division.stretches[0].again:
            return self.whole

        def divided(*values: jax.Array) -> list:
            env: dict[Any, Any] = dict(zip(self.body.invars, values, strict=True))
            for stretch in division.stretches:
                if stretch.again:
                    self._run_again(stretch, env)
                else:
                    self._run(stretch, env)
                reads, _ = self._ends(stretch)
                # Cotangents are summed by stretch, of what is read in it and after it.
                stop = self.cuts[stretch.stop]
                env |= {v: _apart(env[v]) for v in reads if self.last[v] >= stop}
            return equations.run([], env, self.body.outvars)

        types = [v.aval for v in self.body.invars]
        return _jax.trace_closed(divided, types, "divided")

    def _ends(self, stretch: Stretch) -> tuple[list, list]:
        start, stop = self.cuts[stretch.start], self.cuts[stretch.stop]
        return _ends(self.body, self.last, start, stop)

    def _run(self, stretch: Stretch, env: dict, rule: Any = _jax.bind_equation) -> None:
        """Run the blocks of a stretch; no fusion crosses the ends of blocks."""
        cuts = self.cuts[stretch.start : stretch.stop + 1]
        for start, stop in pairwise(cuts):
            equations.run(self.body.eqns[start:stop], env, [], rule)
            if stretch.again or stop < cuts[-1]:
                _, makes = _ends(self.body, self.last, start, stop)
                env |= {v: _apart(env[v]) for v in makes}

    def _run_again(self, stretch: Stretch, env: dict) -> None:
        """Run a stretch that runs again when it is reversed."""
        reads, makes = self._ends(stretch)

        def named(eqn: _jax.Equation, ins: list) -> list:
            outs = zip(eqn.outvars, _jax.bind_equation(eqn, ins), strict=True)
            # JAX cannot save complex values by name: they run again.
            stores = lambda v: v in stretch.stored and v.aval.dtype not in COMPLEX
            return [checkpoint_name(x, STORED) if stores(v) else x for v, x in outs]

        def again(*values: jax.Array) -> list:
            inside: dict[Any, Any] = dict(zip(reads, values, strict=True))
            self._run(stretch, inside, named)
            return equations.run([], inside, makes)

        made = jax.checkpoint(again, policy=POLICY)(*(env[v] for v in reads))
        env |= zip(makes, made, strict=True)


def _apart(value: jax.Array) -> jax.Array:
    """Return a value that no fusion crosses, and whose cotangents are summed part by part.

    A compiler that sums those of all parts at the end would keep all of them until then.
    """
    moves = _jax.is_differentiable(jax.typeof(value))
    return jax.lax.optimization_barrier(value) if moves else value


def is_stretch(eqn: _jax.Equation) -> bool:
    """Return whether an equation is a stretch that runs again."""
    return _jax.params_of(eqn).get("policy") is POLICY


def divided(jaxpr: _jax.Jaxpr, moves: Sequence[bool]) -> Divided:
    """Return the ways to divide a program, for the gradient in the inputs that move."""
    body = _jax.open_jaxpr(equations.inlined(jaxpr))
    last = {v: k for k, eqn in enumerate(body.eqns) for v in equations.variables(eqn)}
    cuts = [*_starts(body, last), len(body.eqns)]
    sizes = {v: _jax.byte_count(v.aval) for e in body.eqns for v in e.outvars}
    sizes |= dict.fromkeys(_jax.variables(body.outvars), 0)
    moving, blocks, loops = set(filter(_moves, kept(body.invars, moves))), [], {}
    indices = index_bytes(body.eqns, planned_for())
    for start, stop in pairwise(cuts):
        reads, makes = _ends(body, last, start, stop)
        eqns, arguments = body.eqns[start:stop], set(body.invars)
        reads.sort(key=lambda v: v not in arguments)
        count = sum(v in arguments for v in reads)
        piece = _piece(body, eqns, reads, makes, count, [v in moving for v in reads])
        moving.update(kept(makes, piece.moving))
        made = [v for eqn in eqns for v in eqn.outvars]
        block = _block(piece, reads[count:], made, start, sizes)
        shared = [v for v in reads[:count] if last[v] >= stop and v in moving]
        terms = term_bytes(eqns)
        summed = sum(min(terms[v], _jax.byte_count(v.aval)) for v in shared)
        moments = tuple(m._replace(values=m.values + indices) for m in block.moments)
        blocks.append(replace(block, summed=summed, moments=moments))
        loops |= piece.line.loops
    return Divided(jaxpr, body, last, cuts, loops, divisions(blocks, sizes))


def _moves(v: _jax.Var) -> bool:
    return _jax.is_differentiable(v.aval)


def _stays(eqn: _jax.Equation) -> bool:
    """Return whether an equation does not run again: a loop has a plan for that."""
    return not is_repeatable(eqn) or any(True for _ in met_in(eqn, primal=True))


def _starts(body: _jax.OpenJaxpr, last: Mapping[_jax.Var, int]) -> Iterator[int]:
    """Yield where blocks start: of windows of as many bytes, where the fewest go on."""
    made = [_jax.byte_count(*(v.aval for v in eqn.outvars)) for eqn in body.eqns]
    crossing, window = _crossing(body, last, made), sum(made) / BLOCKS
    stays = list(map(_stays, body.eqns))
    best, filled = None, 0
    yield 0
    for k in range(1, len(body.eqns)):
        filled += made[k - 1]
        if stays[k] or stays[k - 1]:
            yield k
            best, filled = None, 0
            continue
        if best is None or crossing[k] <= crossing[best]:
            best = k
        if filled >= window:
            yield best
            best, filled = None, 0


def _crossing(body: _jax.OpenJaxpr, last: Mapping[_jax.Var, int], made: Sequence[int]) -> list[int]:
    """Return the bytes of values from before each equation that it, or a later one, reads."""
    changes = [0] * (len(made) + 2)
    for k, eqn in enumerate(body.eqns):
        for v in eqn.outvars:
            if v in last:
                changes[k + 1] += _jax.byte_count(v.aval)
                changes[last[v] + 1] -= _jax.byte_count(v.aval)
    found, live = [], 0
    for change in changes:
        live += change
        found.append(live)
    return found


def _ends(
    body: _jax.OpenJaxpr, last: Mapping[_jax.Var, int], start: int, stop: int
) -> tuple[list, list]:
    """Return the variables that some equations read of others, and that others read of them."""
    eqns, results = body.eqns[start:stop], set(_jax.variables(body.outvars))
    made = dict.fromkeys(v for eqn in eqns for v in eqn.outvars)
    reads = dict.fromkeys(v for eqn in eqns for v in equations.variables(eqn) if v not in made)
    return list(reads), [v for v in made if last.get(v, -1) >= stop or v in results]


class Piece(NamedTuple):
    """The derivative of some equations. A value that one makes is known by its number."""

    results: Sequence[int]
    """The values that later equations read."""
    moving: Sequence[bool]
    """Which of these have a tangent if all arguments of the program have one that can."""
    kept: dict[Hashable, int]
    """The bytes of each value that the derivative reads, and that is no argument of a program."""
    rows: tuple[Row, ...]
    through: float
    line: Timeline


def _block(
    piece: Piece, reads: Sequence[_jax.Var], made: Sequence[_jax.Var], start: int, sizes: dict
) -> Block:
    """Return a piece as a block of a program; adds the sizes of values that it alone knows."""
    known: dict[Hashable, Any] = {("made", k): v for k, v in enumerate(made)}
    known |= {("read", k): v for k, v in enumerate(reads)}
    known |= {v: (start, v) for v in piece.kept if v not in known}
    for v, size in piece.kept.items():
        sizes.setdefault(known[v], size)
    moments = without_dominated(piece.line.moments)
    whose = lambda values: frozenset(known[v] for v in values)
    bytes_kept = sum(sizes[known[v]] for v in piece.kept)
    return Block(
        frozenset(reads),
        whose(("made", k) for k in piece.results),
        whose(piece.kept),
        tuple(row._replace(stored=whose(row.stored)) for row in piece.rows),
        piece.through,
        tuple(m._replace(values=m.values - bytes_kept) for m in moments),
        tuple((met.key, met.times) for met in piece.line.loops.values()),
    )


def _piece(
    body: _jax.OpenJaxpr,
    eqns: Sequence[_jax.Equation],
    reads: list,
    makes: list,
    count: int,
    moving: list[bool],
) -> Piece:
    """Return the derivative of equations, of whose operands the first are arguments."""
    made = [v for eqn in eqns for v in eqn.outvars]
    numbers, n, ends = {v: k for k, v in enumerate(made)}, len(reads), set(makes)
    inside = [v for v in made if v not in ends and not _jax.is_dropped(v)]
    info = body.debug_info.with_unknown_names()
    j = body.replace(eqns=eqns, invars=reads, outvars=[*makes, *inside], debug_info=info)
    outputs = len(j.outvars)
    jaxpr, _ = _jax.dce(j, [True] * outputs, [True] * n)
    loop = shared(Loop(None, jaxpr, 0, (Const(),) * n, (), (), (Output(),) * outputs, 1))
    again, results = not any(map(_stays, eqns)), [numbers[v] for v in makes]
    values = [*results, *(numbers[v] for v in inside)]
    flags = _moving(eqns, reads, makes, moving)
    active = Active(flags[0], (), (), (*flags[1], *[False] * len(inside)))
    key = "piece", count, again, len(results), *values, active
    with asked():
        whole = linearised(loop, active)
    make = lambda: _linearised(whole, count, len(results), values, again)
    return loop.derived(key, make)


STILL = frozenset(("stop_gradient", "floor", "ceil", "round", "sign"))
"""Primitives whose results have no tangents."""


def _moving(
    eqns: Sequence[_jax.Equation], reads: list, makes: list, given: Sequence[bool]
) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Return which operands have tangents that reach a result, and which results have tangents."""
    passing = [eqn for eqn in eqns if eqn.primitive.name not in STILL]
    moved = set(kept(reads, given))
    for eqn in passing:
        if not moved.isdisjoint(equations.variables(eqn)):
            moved.update(filter(_moves, eqn.outvars))
    reaching = moved.intersection(makes)
    for eqn in reversed(passing):
        if not reaching.isdisjoint(eqn.outvars):
            reaching.update(moved.intersection(equations.variables(eqn)))
    return tuple(v in reaching for v in reads), tuple(v in moved for v in makes)


def _linearised(
    whole: Linearised, count: int, results: int, values: Sequence[int], again: bool
) -> Piece:
    """Return the derivative of a block; `values` are the numbers of its results, and of others."""
    outs, n, device = whole.residuals.step.outvars, whole.loop.const_count, whole.loop.device
    some = [*outs[:results], *outs[len(values) :]]
    jaxpr = _jax.with_outputs(whole.residuals.jaxpr, some, [True] * n)
    residuals = Residuals(jaxpr, results, 0, n, [True] * n, device=device)
    step = residuals.step
    known: dict[Any, tuple[str, int]] = {}
    for v, number in zip(outs, values, strict=False):
        if not isinstance(v, _jax.Literal):
            known.setdefault(v, ("made", number))
    arguments = set(step.invars[:count])
    known |= {v: ("read", k - count) for k, v in enumerate(step.invars)}
    saved = {v for eqn in step.eqns if eqn.primitive is forward_p for v in eqn.outvars}
    size = lambda v: 0 if v in saved else _jax.byte_count(v.aval)
    stored = kept_by_compiler(residuals, whole.tangents)
    kept: dict[Hashable, int] = {known.get(v, id(v)): size(v) for v in stored if v not in arguments}
    outside = Outside(count, sum(whole.active.inputs[:count]), False, stored)
    line = timeline(residuals, whole.tangents, outside)
    moving, made = whole.active.ys[:results], values[:results]
    if not again:
        return Piece(made, moving, kept, (), 0.0, line)
    some = replace(residuals, only=known.keys() - set(step.invars))
    stored = lambda point: frozenset(known[v] for v in point.stored if known[v][0] == "made")
    time = lambda point: sum(equation_nanoseconds(e, device) for e in some.cut(point).again)
    rows = tuple(Row(point.price, time(point), stored(point)) for point in some.frontier)
    return Piece(made, moving, kept, rows, _through(residuals), line)


def _through(residuals: Residuals) -> float:
    """Return the time of the equations that the results need, and the residuals do not."""
    step = residuals.step

    def needed(values: Sequence[_jax.Atom]) -> set[int]:
        found, wanted = set(), set(_jax.variables(values))
        for eqn in reversed(step.eqns):
            if not wanted.isdisjoint(eqn.outvars):
                found.add(id(eqn))
                wanted.update(equations.variables(eqn))
        return found

    ends = step.outvars[: residuals.results], step.outvars[residuals.results :]
    more = needed(ends[0]) - needed(ends[1])
    return sum(residuals.times[k] for k in more) / PICOSECONDS
