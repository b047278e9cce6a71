"""while: the results of a loop.

operands  cond_consts, consts, init, xs
results   carry, ys
JVP       one `dual`, in the leaves that turn out to be active
transpose of a loop that is linear in some operands: a pullback, at zero
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from loopkit import _jax
from loopkit.engine import steps
from loopkit.engine.activity import forward_activity
from loopkit.engine.loop import Loop, Operands, kept, parts, prune, spread
from loopkit.engine.primitives import dual_p, while_p
from loopkit.engine.unrolling import settled


def evaluate(*operands: Any, loop: Loop) -> list:
    with jax.named_scope(f"loopkit.{loop.name}"):
        return steps.evaluate(loop.unrolled(settled(loop)), loop.split(operands)[0])


def result_types(*_: Any, loop: Loop) -> tuple[list, Any]:
    return [*loop.carry_types, *(loop.ys_types if loop.ys_count else [])], loop.effects


def nonzero_tangents(loop: Loop, tangents: Sequence[Any]) -> Operands:
    flags = [type(t) is not _jax.Zero for t in tangents]
    return loop.split(flags)[0]


def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, loop: Loop) -> tuple[list, list]:
    active = forward_activity(loop, nonzero_tangents(loop, tangents))
    count = loop.cond_const_count
    moving = [_jax.instantiate(t) for t in kept(tangents[count:], active.inputs)]
    outs = dual_p.bind(*primals, *moving, loop=loop, active=active)
    results, tangents = parts(outs, loop.primal_counts[1])
    zeros = [_jax.float0_zero(t) for t in result_types(loop=loop)[0]]
    return results, spread(tangents, active.outputs, zeros)


def transpose(cts: Sequence[Any], *operands: Any, loop: Loop) -> list:
    """A rule for custom derivatives, say, may loop over tangents."""
    quiet = loop.without_debug_effects()
    unknown = [_jax.is_undefined(v) for v in operands]
    reached = [type(ct) is not _jax.Zero for ct in cts]
    types = [v.aval for v in kept(operands, unknown)]

    def linear(*values: Any) -> list:
        return kept(while_p.bind(*spread(values, unknown, operands), loop=quiet), reached)

    _, pullback = jax.vjp(linear, *map(_jax.zeros, types))
    return spread(pullback(kept(cts, reached)), unknown, [None] * len(operands))


def dce(used: list[bool], eqn: Any) -> tuple[list[bool], Any]:
    loop = eqn.params["loop"]
    if not any(used) and not _jax.has_effects(eqn):
        return [False] * len(eqn.invars), None
    if all(used):
        return [True] * len(eqn.invars), eqn
    carry, ys = parts(used, loop.carry_count)
    pruned, needed = loop.derived(("pruned", *used), lambda: prune(loop, carry, ys))
    invars = kept(eqn.invars, needed.flat)
    used_results = [*needed.init, *ys]
    outvars = kept(eqn.outvars, used_results)
    return needed.flat, _jax.new_equation(eqn, while_p, invars, outvars, {"loop": pruned})


_jax.define(while_p, evaluate, result_types)
_jax.register_jvp(while_p, jvp)
_jax.register_transpose(while_p, transpose)
_jax.register_dce(while_p, dce)
