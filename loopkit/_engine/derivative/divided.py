"""Cut a program into blocks, and run it in stretches of these, some of which run again.

A block is a few consecutive equations. A loop, or an equation that must not run again, is a block
of its own. Elsewhere, blocks end where few bytes go from one to the next.

A stretch that runs again is put under `jax.checkpoint`, which every transformation of JAX supports.
If an array is read slice by slice, as in an unrolled loop, its cotangent is added up in place.
"""

from __future__ import annotations

import itertools as it
from collections.abc import Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from loopkit import _jax
from loopkit._engine.derivative.timeline import Met, met_in
from loopkit._jaxprs import equations
from loopkit._jaxprs.accelerators import planned_for
from loopkit._jaxprs.cost import is_repeatable
from loopkit._jaxprs.dataflow import interpret
from loopkit._jaxprs.slice_cotangents import as_read, read_in_slices
from loopkit._plans.stretches import Division, Stretch

BLOCKS = 48
"""The approximate number of blocks in a program."""
STORED = "loopkit: stored"
"""The name of a value that a stretch stores although it runs again."""
COMPLEX = "complex64", "complex128"
"""Types of values that JAX cannot save by name."""
POLICY = jax.checkpoint_policies.save_only_these_names(STORED)
"""The policy of all stretches that run again."""


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


class Divided(NamedTuple):
    """A program and the ways to divide it."""

    whole: _jax.Jaxpr
    blocks: Blocks
    sliced: frozenset[_jax.Var]
    """Variables that many equations read slices of."""
    loops: Mapping[Hashable, Met]
    """The loops of the program."""
    divisions: list[Division]

    def program(self, division: Division) -> Any:
        """Return the program in the stretches of a division, some of which run again."""
        if len(division.stretches) == 1 and not division.stretches[0].again:
            return with_slices_in_place(self.whole)

        def divided(*values: jax.Array) -> list:
            env: dict[Any, Any] = dict(zip(self.blocks.body.invars, values, strict=True))
            for stretch in division.stretches:
                if stretch.again:
                    self._run_again(stretch, env)
                else:
                    self._run(stretch, env)
                # If later stretches also read a value, sum its cotangents stretch by stretch.
                env |= {v: _apart(env[v]) for v in self._read_later(stretch)}
            return equations.run([], env, self.blocks.body.outvars)

        types = [v.aval for v in self.blocks.body.invars]
        return _jax.trace_closed(divided, types, "divided")

    def _ends(self, stretch: Stretch) -> tuple[list, list]:
        cuts = self.blocks.cuts
        return self.blocks.ends(cuts[stretch.start], cuts[stretch.stop])

    def _read_later(self, stretch: Stretch) -> list:
        """Return the variables that both a stretch and later equations read."""
        reads, _ = self._ends(stretch)
        return [v for v in reads if self.blocks.last[v] >= self.blocks.cuts[stretch.stop]]

    def _run(self, stretch: Stretch, env: dict, rule: Any = _jax.bind_equation) -> None:
        """Run the blocks of a stretch."""
        cuts, body = self.blocks.cuts[stretch.start : stretch.stop + 1], self.blocks.body
        reading = _reading(env, self.sliced, rule)
        for start, stop in it.pairwise(cuts):
            equations.run(body.eqns[start:stop], env, [], reading)
            if stretch.again or stop < cuts[-1]:
                _end_block(self.blocks, start, stop, env)

    def _run_again(self, stretch: Stretch, env: dict) -> None:
        """Run a stretch under `jax.checkpoint`, so that it runs again when it is reversed."""
        reads, makes = self._ends(stretch)
        makes += [v for v in self._read_later(stretch) if v in self.sliced]

        def named(eqn: _jax.Equation, ins: list) -> list:
            # JAX cannot save complex values by name, so they are computed again.
            stored = {v for v in eqn.outvars if v in stretch.stored and v.aval.dtype not in COMPLEX}
            return _stored(eqn, ins, stored) if stored else _jax.bind_equation(eqn, ins)

        def again(*values: jax.Array) -> list:
            inside: dict[Any, Any] = dict(zip(reads, values, strict=True))
            self._run(stretch, inside, named)
            return equations.run([], inside, makes)

        made = jax.checkpoint(again, policy=POLICY)(*(env[v] for v in reads))
        env |= zip(makes, made, strict=True)


def with_slices_in_place(jaxpr: _jax.Jaxpr) -> Any:
    """Return a program that adds up the cotangents of arrays read in many slices in place."""
    blocks = blocks_of(jaxpr)
    body = blocks.body
    sliced = read_in_slices(body.eqns)
    # XLA for CPUs would fuse unrolled steps, and compute much of them several times.
    on_cpu = planned_for() is None

    def run(*values: jax.Array) -> list:
        env: dict[Any, Any] = dict(zip(body.invars, values, strict=True))
        reading = _reading(env, sliced)
        for start, stop in it.pairwise(blocks.cuts):
            equations.run(body.eqns[start:stop], env, [], reading)
            if on_cpu:
                _end_block(blocks, start, stop, env)
        return equations.run([], env, body.outvars)

    return _jax.trace_closed(run, jaxpr.in_avals, "with_slices") if sliced else jaxpr


def _end_block(blocks: Blocks, start: int, stop: int, env: dict) -> None:
    """Stop XLA from fusing operations across the end of a block."""
    _, makes = blocks.ends(start, stop)
    env |= {v: _apart(env[v]) for v in makes}


def _reading(env: dict, sliced: frozenset[_jax.Var], rule: Any = _jax.bind_equation) -> Any:
    """Return a rule for equations in which each read of a slice passes the array to the next.

    A slice at known indices is read once: if two writes in turn were fused, XLA would copy the
    array of cotangents for them.
    """
    known: dict[tuple, list] = {}

    def reading(eqn: _jax.Equation, ins: list) -> Any:
        first = _jax.variables(eqn.invars[:1])
        if not sliced.intersection(first):
            return rule(eqn, ins)
        place = (first[0], *eqn.params.items()) if eqn.primitive is lax.slice_p else None
        if place in known:
            return known[place]
        found = as_read(eqn, ins)
        if found is None:
            return rule(eqn, ins)
        outs, env[first[0]] = found
        if place is not None:
            known[place] = outs
        return outs

    return reading


def _apart(value: jax.Array) -> jax.Array:
    """Put a value behind a barrier: no fusion crosses it, and cotangents are summed part by part.

    If XLA summed the cotangents of all parts at the end, it would keep all of them until then.
    """
    moves = _jax.is_differentiable(jax.typeof(value))
    return jax.lax.optimization_barrier(value) if moves else value


def _stored(eqn: _jax.Equation, ins: list, values: AbstractSet[_jax.Var]) -> list:
    """Return the results of an equation, with those in `values` marked as stored."""
    at = [i for i, v in enumerate(eqn.invars) if not isinstance(v, _jax.Literal)]
    if len(at) != 1 or not _jax.is_differentiable(jax.typeof(ins[at[0]])):
        return _named(eqn, ins, values)
    operands = lambda x: [*ins[: at[0]], x, *ins[at[0] + 1 :]]

    # The derivative of exp(x) reads exp(x). JAX's own rule reads the value before it has a name.
    @jax.custom_jvp
    def run(x: jax.Array) -> list:
        return _named(eqn, operands(x), values)

    @run.defjvp
    def derivative(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple:
        bind = lambda x: _jax.bind_equation(eqn, operands(x))
        both = lambda x, t: list(it.chain(*jax.jvp(bind, [x], [t])))
        types = [jax.typeof(x) for x in (*primals, *tangents)]
        j = _jax.open_jaxpr(_jax.trace_closed(both, types, "jvp"))
        made = {v for v, w in zip(j.outvars, eqn.outvars, strict=False) if w in values}
        outs = interpret(j, [*primals, *tangents], partial(_named, values=made))
        return outs[: len(eqn.outvars)], outs[len(eqn.outvars) :]

    return run(ins[at[0]])


def _named(eqn: _jax.Equation, ins: list, values: AbstractSet[_jax.Var]) -> list:
    """Return the results of an equation, with the name `STORED` for those in `values`."""
    outs = zip(eqn.outvars, _jax.bind_equation(eqn, ins), strict=True)
    return [checkpoint_name(x, STORED) if v in values else x for v, x in outs]


def is_stretch(eqn: _jax.Equation) -> bool:
    """Return whether an equation is a stretch that runs again."""
    return _jax.params_of(eqn).get("policy") is POLICY
