"""Cut a program into blocks of consecutive equations.

A loop, or an equation that must not run again, is a block of its own. Elsewhere, blocks end where
few bytes go from one to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from loopkit import _jax
from loopkit._engine.derivative.timeline import met_in
from loopkit._jaxprs import equations
from loopkit._jaxprs.repeatable import is_repeatable

BLOCKS = 48
"""The approximate number of blocks in a program."""


class Blocks(NamedTuple):
    """A program cut into blocks."""

    body: _jax.OpenJaxpr
    """The program with calls of jitted functions inlined."""
    last: Mapping[_jax.Var, int]
    """The index of the last equation that reads each variable."""
    cuts: Sequence[int]
    """The index of the first equation of each block, then the number of equations."""

    def ends(self, start: int, stop: int) -> tuple[list, list]:
        """Return what the equations from `start` up to, not including, `stop` read from others, and
        what later equations or the results read from them."""
        eqns, results = self.body.eqns[start:stop], set(_jax.variables(self.body.outvars))
        made = dict.fromkeys(v for eqn in eqns for v in eqn.outvars)
        reads = dict.fromkeys(v for eqn in eqns for v in equations.variables(eqn) if v not in made)
        return list(reads), [v for v in made if self.last.get(v, -1) >= stop or v in results]


def blocks_of(jaxpr: _jax.Jaxpr) -> Blocks:
    """Cut a program into blocks."""
    body = _jax.open_jaxpr(equations.inlined(jaxpr))
    last = {v: k for k, eqn in enumerate(body.eqns) for v in equations.variables(eqn)}
    return Blocks(body, last, [*_starts(body, last), len(body.eqns)])


def stays(eqn: _jax.Equation) -> bool:
    """Return whether an equation must not run again with its block; a loop follows its own plan."""
    return not is_repeatable(eqn) or any(True for _ in met_in(eqn, primal=True))


def _starts(body: _jax.OpenJaxpr, last: Mapping[_jax.Var, int]) -> Iterator[int]:
    """Yield where blocks start: in each window of equal bytes, where the fewest bytes cross."""
    made = [_jax.byte_count(*(v.aval for v in eqn.outvars)) for eqn in body.eqns]
    crossing, window = _crossing(body, last, made), sum(made) / BLOCKS
    alone = list(map(stays, body.eqns))
    best, filled = None, 0
    yield 0
    for k in range(1, len(body.eqns)):
        filled += made[k - 1]
        if alone[k] or alone[k - 1]:
            yield k
            best, filled = None, 0
            continue
        if best is None or crossing[k] <= crossing[best]:
            best = k
        if filled >= window:
            yield best
            best, filled = None, 0


def _crossing(body: _jax.OpenJaxpr, last: Mapping[_jax.Var, int], made: Sequence[int]) -> list[int]:
    """Return, for each equation, the bytes of earlier values that it or a later one reads."""
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
