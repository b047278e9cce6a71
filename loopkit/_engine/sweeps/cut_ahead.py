"""Slice constants once, before the forward sweep, and not in each of its steps.

A matrix product reads whole arrays, and compilers leave the slices of its operands in the loop,
where each step copies them. The backward sweep reads whole constants, because their cotangents are
sums over whole arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loopkit import _jax
from loopkit._engine.leaves import Const
from loopkit._engine.loop import Loop, Operands
from loopkit._jaxprs import equations

SAME_ORDER = frozenset(("squeeze", "reshape"))
WHOLE = frozenset(("dot_general", "conv_general_dilated", "transpose"))
"""Primitives that read whole arrays. Others are fused with the slices that they read."""


def cut_ahead(
    forward: _jax.Jaxpr, loop: Loop, operands: Operands
) -> tuple[_jax.Jaxpr, Loop, Operands]:
    """Return the forward half of a step, the loop and its operands, with slices as constants."""
    if loop.lanes:  # constants may have lane axes
        return forward, loop, operands
    steps = [_jax.open_jaxpr(j) for j in (forward, loop.body)]
    found = [_cut_out(j, loop.const_count) for j in steps]
    slices = list(dict.fromkeys(v for _, some in found for v in some))
    if not slices:
        return forward, loop, operands
    values: dict[Any, Any] = {}
    for j, (eqns, some) in zip(steps, found, strict=True):
        env = dict(zip(j.invars, operands.consts, strict=False))
        values |= zip(some, equations.run(eqns, env, some), strict=True)
    forward, body = (
        _given(j, loop.const_count, slices, set(some))
        for j, (_, some) in zip(steps, found, strict=True)
    )
    loop = loop.replace(body=body, consts=loop.consts + (Const(),) * len(slices))
    return forward, loop, operands._replace(consts=[*operands.consts, *map(values.get, slices)])


def _cut_out(j: _jax.OpenJaxpr, count: int) -> tuple[list, list]:
    """Return the equations that slice constants, and those of their results that are read whole."""
    consts, cut, eqns, read = set(j.invars[:count]), set(), [], []
    for eqn in j.eqns:
        name, values = eqn.primitive.name, equations.variables(eqn)
        of = consts | cut if name == "slice" else cut if name in SAME_ORDER else set()
        if of.intersection(values):
            cut.update(eqn.outvars)
            eqns.append(eqn)
        elif name in WHOLE or equations.jaxprs_in(eqn):
            read += values
    return eqns, [v for v in dict.fromkeys(read) if v in cut]


def _given(j: _jax.OpenJaxpr, count: int, slices: Sequence[Any], own: set) -> _jax.Jaxpr:
    """Return the step with `slices` as further constants, of which it reads its `own`."""
    more = [v if v in own else _jax.like(v) for v in slices]
    eqns = [eqn for eqn in j.eqns if own.isdisjoint(eqn.outvars)]
    inputs = [*j.invars[:count], *more, *j.invars[count:]]
    info = j.debug_info.with_unknown_names()
    step = _jax.with_equations(j, eqns, invars=inputs, debug_info=info)
    return _jax.dce(step, [True] * len(j.outvars), [True] * len(inputs))[0]
