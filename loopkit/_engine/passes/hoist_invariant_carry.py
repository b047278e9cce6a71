"""Turn carry leaves that no step changes into constants, which are never saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loopkit import _jax
from loopkit._engine.leaves import spread
from loopkit._engine.loop import Const, Loop, Rewritten, kept, parts
from loopkit._jaxprs import equations


def hoist_invariant_carry(loop: Loop) -> Loop | Rewritten:
    """Return the loop whose last constants are the carry leaves that no step changes."""
    c, n, k = loop.const_count, loop.carry_count, loop.cond_const_count
    source = equations.forwarded(loop.body)
    still = [source[i] == c + i and not leaf.flag for i, leaf in enumerate(loop.carry)]
    if not any(still):
        return loop
    moving = [not s for s in still]
    order = sorted(range(n), key=moving.__getitem__)
    outs = [i for i in range(len(loop.body.out_avals)) if i >= n or moving[i]]
    leaves, xs = [c + i for i in order], range(c + n, len(loop.body.in_avals))
    cond, asked = loop.cond, 0
    if cond is not None:
        cond, asked = _jax.rearranged(cond, [*range(k), *(k + i for i in order)], [0]), sum(still)
    new = loop.replace(
        cond=cond,
        body=_jax.rearranged(loop.body, [*range(c), *leaves, *xs], outs),
        cond_const_count=k + asked,
        consts=loop.consts + (Const(),) * sum(still),
        carry=tuple(kept(loop.carry, moving)),
    )

    def map_operands(operands: Sequence[Any]) -> list:
        p, _ = loop.split(operands)
        stay = kept(p.init, still)
        return [*p.cond_consts, *stay[:asked], *p.consts, *stay, *kept(p.init, moving), *p.xs]

    def map_results(results: Sequence[Any], operands: Sequence[Any]) -> list:
        carry, ys = parts(results, sum(moving))
        return [*spread(carry, moving, loop.split(operands)[0].init), *ys]

    return Rewritten(new, map_operands, map_results)
