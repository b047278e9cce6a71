"""Find the ways to run code between loops again in a gradient, so that fewer of its values live.

This module finds the derivative of each block of a program once. `_plans/stretches.py` groups the
blocks into stretches, and `divided.py` runs these.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from loopkit import _jax
from loopkit._engine.derivative.divided import Divided, blocks_of, stays
from loopkit._engine.derivative.linearised import Linearised, linearised
from loopkit._engine.derivative.reversal import asked
from loopkit._engine.derivative.timeline import (
    Outside,
    Timeline,
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
from loopkit._jaxprs.slice_cotangents import read_in_slices
from loopkit._plans.one_price import without_dominated
from loopkit._plans.stretches import Block, Row, divisions
from loopkit._programs import shared


def divided(jaxpr: _jax.Jaxpr, moves: Sequence[bool]) -> Divided:
    """Return the ways to divide a program, for the gradient in the inputs marked in `moves`."""
    cut = blocks_of(jaxpr)
    body = cut.body
    sizes = {v: _jax.byte_count(v.aval) for e in body.eqns for v in e.outvars}
    sizes |= dict.fromkeys(_jax.variables(body.outvars), 0)
    moving, blocks, loops = set(filter(_moves, kept(body.invars, moves))), [], {}
    indices, sliced = index_bytes(body.eqns, planned_for()), read_in_slices(body.eqns)
    for start, stop in pairwise(cut.cuts):
        reads, makes = cut.ends(start, stop)
        eqns, arguments = body.eqns[start:stop], set(body.invars)
        reads.sort(key=lambda v: v not in arguments)
        count = sum(v in arguments for v in reads)
        piece = _piece(body, eqns, reads, makes, count, [v in moving for v in reads])
        moving.update(kept(makes, piece.moving))
        made = [v for eqn in eqns for v in eqn.outvars]
        block = _block(piece, reads[count:], made, start, sizes)
        later = [v for v in reads[:count] if cut.last[v] >= stop and v in moving]
        terms = term_bytes(eqns)
        summed = sum(min(terms[v], _jax.byte_count(v.aval)) for v in later if v not in sliced)
        moments = tuple(m._replace(values=m.values + indices) for m in block.moments)
        blocks.append(replace(block, summed=summed, moments=moments))
        loops |= piece.line.loops
    return Divided(jaxpr, cut, sliced, loops, divisions(blocks, sizes))


def _moves(v: _jax.Var) -> bool:
    return _jax.is_differentiable(v.aval)


class Piece(NamedTuple):
    """The derivative of some equations, which refers to the values they make or read by number."""

    results: Sequence[int]
    """The values that later equations read."""
    moving: Sequence[bool]
    """Which results have a tangent if all moving arguments of the program have one."""
    kept: dict[Hashable, int]
    """The bytes of each value that the derivative reads, except arguments of the program."""
    rows: tuple[Row, ...]
    through: float
    line: Timeline


def _block(
    piece: Piece, reads: Sequence[_jax.Var], made: Sequence[_jax.Var], start: int, sizes: dict
) -> Block:
    """Return a piece as a block of a program, and add the values that only it has to `sizes`."""
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
    """Return the derivative of equations, the first `count` of whose operands are arguments."""
    made = [v for eqn in eqns for v in eqn.outvars]
    numbers, n, ends = {v: k for k, v in enumerate(made)}, len(reads), set(makes)
    inside = [v for v in made if v not in ends and not _jax.is_dropped(v)]
    info = body.debug_info.with_unknown_names()
    j = body.replace(eqns=eqns, invars=reads, outvars=[*makes, *inside], debug_info=info)
    outputs = len(j.outvars)
    jaxpr, _ = _jax.dce(j, [True] * outputs, [True] * n)
    loop = shared(Loop(None, jaxpr, 0, (Const(),) * n, (), (), (Output(),) * outputs, 1))
    again, results = not any(map(stays, eqns)), [numbers[v] for v in makes]
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
    """Return the derivative of a block; `values` has the numbers of its results, then of others."""
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
    """Return the time of the equations that the results need but the residuals do not."""
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
