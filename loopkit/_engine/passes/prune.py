"""A loop without what nobody uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loopkit import _jax
from loopkit._engine.loop import Loop, Operands, fixed_point, kept, parts, spread
from loopkit._engine.passes.rewritten import Rewritten


@dataclass(frozen=True)
class Pruned(Rewritten):
    """The loop, and which operands and results of the other it has."""

    operands: list[bool]
    results: list[bool]


def prune(loop: Loop, used: Sequence[bool]) -> Pruned:
    """The loop with only the results that are used, and what those need."""
    return loop.derived(("pruned", *used), lambda: _prune(loop, used))


def _prune(loop: Loop, used: Sequence[bool]) -> Pruned:
    carry, used_ys = parts(used, loop.carry_count)
    cond, used_cond_consts = loop.cond, []
    if loop.cond is not None:
        asked = _jax.used_inputs(loop.cond, [True])
        used_cond_consts = asked[: loop.cond_const_count]
        carry = [a or b for a, b in zip(carry, asked[loop.cond_const_count :], strict=True)]

    def needed(carry: list[bool]) -> tuple:
        keep = [False] * loop.const_count + carry + [False] * loop.xs_count
        body, inputs = _jax.dce(loop.body, [*carry, *used_ys], keep)
        consts, new, xs = parts(inputs, loop.const_count, loop.carry_count)
        return new, body, consts, xs

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
    into = lambda values: kept(values, operands)
    back = lambda values, _=(): spread(values, results, [None] * len(results))
    return Pruned(pruned, into, back, operands, results)
