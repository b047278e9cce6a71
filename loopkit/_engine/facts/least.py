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
from loopkit._engine.facts.counters import PASSING
from loopkit._engine.loop import Loop
from loopkit._engine.primitives import while_p
from loopkit._jaxprs import equations

Least = int | None
"""None where nothing is known."""


def with_least(loop: Loop, init: Sequence[Any]) -> Loop:
    """The loop, knowing where it starts; inner ones, too."""
    return _starting_from(loop, tuple(_least_of(_jax.known(v)) for v in init))


def _least_of(value: Any) -> Least:
    if value is None or jnp.ndim(value) or not jnp.issubdtype(jnp.result_type(value), jnp.integer):
        return None
    return int(value)


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
    if len(eqn.outvars) != 1 or not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.integer):
        return eqn, nothing
    if name == "add":
        # By one at a time it takes as long as a counter of steps can count to overflow.
        pairs = zip(eqn.invars, ins[::-1], strict=True)
        sums = [n + int(v.val) for v, n in pairs if n is not None and _is_small(v)]
        return eqn, [max(sums, default=None)]
    if name == "max":
        return eqn, [max((n for n in ins if n is not None), default=None)]
    if name == "min":
        return eqn, [_smallest(ins)]
    if name == "select_n":
        return eqn, [_smallest(ins[1:])]
    if name in PASSING and len(ins) == 1:
        wide = eqn.outvars[0].aval.dtype.itemsize >= min(4, eqn.invars[0].aval.dtype.itemsize)
        return eqn, ins if wide else nothing
    return eqn, nothing


def _smallest(values: Sequence[Least]) -> Least:
    known = [n for n in values if n is not None]
    return min(known) if len(known) == len(values) else None


def _is_small(v: Any) -> bool:
    return isinstance(v, _jax.Literal) and np.ndim(v.val) == 0 and int(v.val) in (0, 1)
