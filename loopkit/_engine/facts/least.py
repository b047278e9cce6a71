"""Integers below which counters are known not to start, in a loop and in those inside it.

A negative index counts from the end of a buffer: a counter that comes from below zero may name a
row twice. Where it starts is known if that is a number in the program, or where the counter of a
loop around it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from loopkit import _jax
from loopkit._engine.facts.counters import PASSING, find_counters
from loopkit._engine.loop import Loop
from loopkit._engine.primitives import while_p
from loopkit._jaxprs import equations

Least = int | None
"""None where nothing is known."""


FEW = 8
"""The largest number that is told from larger ones: for each there is a program of its own."""
FAR = 1 << 30
"""A counter that starts below this does not come to the largest integer of 4 bytes."""
WIDE = 4
"""Bytes of integers that count over all rows of a buffer without starting over."""


def with_least(loop: Loop, init: Sequence[Any]) -> Loop:
    """The loop, knowing where its counters of rows start; inner ones, too."""
    inside = equations.holds_while_loop(loop.body)
    if not any(loop.is_buffer) or (loop.cond is None and not inside):
        return loop  # else the number of steps is known, and says whether a row is written twice
    counts = [by == 1 or inside for by in find_counters(loop)]
    pairs = zip(init, counts, strict=True)
    return _starting_from(loop, tuple(_least_of(_jax.known(v)) if c else None for v, c in pairs))


def _least_of(value: Any) -> Least:
    if value is None or jnp.ndim(value) or not _is_wide(jnp.result_type(value)):
        return None
    return min(int(value), FEW) if 0 <= int(value) < FAR else None


def _is_wide(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize >= WIDE


def _starting_from(loop: Loop, least: Sequence[Least]) -> Loop:
    """The loop, if its carry starts from no less than this."""

    def make() -> Loop:
        now = list(least)
        while True:  # until no step goes below
            consts, xs = [None] * loop.const_count, [None] * loop.xs_count
            body, after = _followed(loop.body, [*consts, *now, *xs])
            new = [
                n if n is not None and a is not None and a >= n else None
                for n, a in zip(now, after, strict=False)
            ]
            if new == now:
                carry = (c._replace(least=n) for c, n in zip(loop.carry, now, strict=True))
                return loop.replace(body=body, carry=tuple(carry))
            now = new

    return loop.derived(("starting from", tuple(least)), make)


def _followed(jaxpr: Any, ins: Sequence[Least]) -> tuple[Any, list[Least]]:
    """A jaxpr whose loops know where they start, and the least that its results can be."""
    j = _jax.open_jaxpr(jaxpr)
    consts = map(_least_of, getattr(jaxpr, "consts", ()))
    known = dict(zip((*j.constvars, *j.invars), (*consts, *ins), strict=True))
    read = lambda v: _least_of(v.val) if isinstance(v, _jax.Literal) else known.get(v)
    eqns = []
    for eqn in j.eqns:
        eqn, outs = _after(eqn, list(map(read, eqn.invars)))
        eqns.append(eqn)
        known |= zip(eqn.outvars, outs, strict=True)
    if any(a is not b for a, b in zip(eqns, j.eqns, strict=True)):
        new = j.replace(eqns=eqns)
        jaxpr = new if j is jaxpr else jaxpr.replace(jaxpr=new)
    return jaxpr, list(map(read, j.outvars))


def _after(eqn: Any, ins: list[Least]) -> tuple[Any, list[Least]]:
    name = eqn.primitive.name
    nothing: list[Least] = [None] * len(eqn.outvars)
    if eqn.primitive is while_p:
        loop = eqn.params["loop"]
        loop = _starting_from(loop, loop.split(ins)[0].init)
        eqn = eqn.replace(params=dict(eqn.params, loop=loop))
        return eqn, [c.least for c in loop.carry] + nothing[loop.carry_count :]
    if equations.is_call(eqn):
        inside, outs = _followed(eqn.params["jaxpr"], ins)
        if inside is not eqn.params["jaxpr"]:
            eqn = eqn.replace(params=dict(eqn.params, jaxpr=inside))
        return eqn, outs
    if name == "cond":
        found = [_followed(branch, ins[1:]) for branch in eqn.params["branches"]]
        branches, outs = zip(*found, strict=True)
        if any(a is not b for a, b in zip(branches, eqn.params["branches"], strict=True)):
            eqn = eqn.replace(params=dict(eqn.params, branches=tuple(branches)))
        return eqn, list(map(_smallest, zip(*outs, strict=True)))
    if len(eqn.outvars) != 1 or not _is_wide(eqn.outvars[0].aval.dtype):
        return eqn, nothing
    if name == "add":
        # More, by no more than a counter of steps can count.
        other = [n for v, n in zip(eqn.invars, ins[::-1], strict=True) if _is_small(v)]
        return eqn, other[:1] or nothing
    if name in ("max", "min"):
        return eqn, [_smallest(ins)]
    if name == "select_n":
        return eqn, [_smallest(ins[1:])]
    if name in PASSING and len(ins) == 1:
        return eqn, ins
    return eqn, nothing


def _smallest(values: Sequence[Least]) -> Least:
    known = [n for n in values if n is not None]
    return min(known) if len(known) == len(values) else None


def _is_small(v: Any) -> bool:
    """Whether it is 0 or 1, as what is added to a counter of rows."""
    return isinstance(v, _jax.Literal) and np.ndim(v.val) == 0 and int(v.val) in (0, 1)
