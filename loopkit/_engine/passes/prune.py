"""A loop without what nobody uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import or_

from loopkit import _jax
from loopkit._engine.loop import Loop, Operands, kept, parts, spread
from loopkit._engine.passes.rewritten import Rewritten
from loopkit._jaxprs.dataflow import fixed_point


@dataclass(frozen=True)
class Pruned(Rewritten):
    """The loop, and which operands and results of the other it has."""

    operands: list[bool]
    results: list[bool]


def prune(loop: Loop, used: Sequence[bool], inputs: Sequence[bool] = ()) -> Pruned:
    """The loop with only the results that are used, and what those need.

    `inputs`: of a step; those that are needed besides.
    """
    key = ("pruned", tuple(used), tuple(inputs))
    return loop.derived(key, lambda: _prune(loop, used, inputs))


def _prune(loop: Loop, used: Sequence[bool], inputs: Sequence[bool]) -> Pruned:
    if (lane := loop.lane) is not None:
        one = prune(lane.loop, used, inputs)
        flags = one.loop.split(one.map_operands(lane.flags.flat))[0]
        return replace(one, loop=lane.replaced(one.loop, flags))
    inputs = inputs or [False] * len(loop.body.in_avals)
    consts, also, xs = parts(inputs, loop.const_count, loop.carry_count)
    carry, used_ys = parts(used, loop.carry_count)
    cond, used_cond_consts = loop.cond, []
    if loop.cond is not None:
        asked = _jax.used_inputs(loop.cond, [True])
        used_cond_consts = asked[: loop.cond_const_count]
        carry = [a or b for a, b in zip(carry, asked[loop.cond_const_count :], strict=True)]

    carry = list(map(or_, carry, also))

    def needed(carry: list[bool]) -> tuple:
        keep = [*consts, *carry, *xs]
        body, inputs = _jax.dce(loop.body, [*carry, *used_ys], keep)
        used = parts(inputs, loop.const_count, loop.carry_count)
        return used[1], body, used[0], used[2]

    carry, body, consts, xs = fixed_point(carry, needed)
    if loop.cond is not None:
        cond, _ = _jax.dce(loop.cond, [True], [*used_cond_consts, *carry])
    operands, results = Operands(used_cond_consts, consts, carry, xs).flat, [*carry, *used_ys]
    pruned = loop.replace(
        cond=cond,
        body=body,
        cond_const_count=sum(used_cond_consts),
        consts=tuple(kept(loop.consts, consts)),
        carry=tuple(kept(loop.carry, carry)),
        xs=tuple(kept(loop.xs, xs)),
        ys=tuple(kept(loop.ys, used_ys)),
    )
    map_operands = lambda values: kept(values, operands)
    map_results = lambda values, _=(): spread(values, results, [None] * len(results))
    return Pruned(pruned, map_operands, map_results, operands, results)
