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
from loopkit._engine import steps
from loopkit._engine.facts.activity import moving_activity
from loopkit._engine.loop import Loop, Operands, kept, parts, prune, spread
from loopkit._engine.primitives import define, dual_p, while_p
from loopkit._engine.rules.dual_loop import dual_operands, dual_results, open_dual
from loopkit._engine.trials.unrolling import settled


def evaluate(*operands: Any, loop: Loop) -> list:
    with jax.named_scope(f"loopkit.{loop.name}"):
        return steps.evaluate(loop.unrolled(settled(loop)), loop.split(operands)[0])


def result_types(*_: Any, loop: Loop) -> tuple[list, Any]:
    return [*loop.carry_types, *(loop.ys_types if loop.ys_count else [])], loop.effects


def nonzero_tangents(loop: Loop, tangents: Sequence[Any]) -> Operands:
    return loop.split(_jax.nonzero(tangents))[0]


def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, loop: Loop) -> tuple[list, list]:
    active = moving_activity(loop, nonzero_tangents(loop, tangents))
    count = loop.cond_const_count
    moving = [_jax.instantiate(t) for t in kept(tangents[count:], active.inputs)]
    if any(map(_jax.is_tracer, _jax.jvp_jaxpr(loop.body, active.inputs)[0].consts)):
        # Rules in it close over values of a trace, which become operands.
        dual, closed_over = open_dual(loop, active)
        inputs = dual_operands(loop, [*primals, *moving], active)
        outs = while_p.bind(*inputs[:count], *closed_over, *inputs[count:], loop=dual)
        results, tangents = dual_results(loop, outs, active)
    else:
        outs = dual_p.bind(*primals, *moving, loop=loop, active=active)
        results, tangents = parts(outs, loop.primal_counts[1])
    zeros = [_jax.float0_zero(t) for t in result_types(loop=loop)[0]]
    return results, spread(tangents, active.outputs, zeros)


def transpose(cts: Sequence[Any], *operands: Any, loop: Loop) -> list:
    """A rule for custom derivatives, say, may loop over tangents."""
    quiet = loop.without_debug_effects()
    unknown = [_jax.is_undefined(v) for v in operands]
    reached = _jax.nonzero(cts)
    types = [v.aval for v in kept(operands, unknown)]

    def linear(*values: Any) -> list:
        return kept(while_p.bind(*spread(values, unknown, operands), loop=quiet), reached)

    _, pullback = jax.vjp(linear, *map(_jax.zeros, types))
    return spread(pullback(kept(cts, reached)), unknown, [None] * len(operands))


def known_part(unknown: list[bool], loop: Loop) -> tuple | None:
    """What is known where some operands are not: a rule may loop over primals and tangents."""
    flags, carry = loop.split(unknown)[0], list(loop.split(unknown)[0].init)
    while True:
        out = _jax.unknown_outputs(loop.body, [*flags.consts, *carry, *flags.xs])
        new, ys = parts([not u for u in out], loop.carry_count)
        new = [u or not k for u, k in zip(carry, new, strict=True)]
        if new == carry:
            break
        carry = new
    goes = (
        [] if loop.cond is None else _jax.unknown_outputs(loop.cond, [*flags.cond_consts, *carry])
    )
    if (all(carry) and not any(ys)) or any(goes) or loop.asks_the_host:
        return None
    pruned, needed = prune(loop.without_debug_effects(), [not u for u in carry], ys)
    if any(n and u for n, u in zip(needed.flat, unknown, strict=True)):
        return None
    return needed.flat, [*needed.init, *ys], {"loop": pruned}


def dce(used: list[bool], eqn: Any) -> tuple[list[bool], Any]:
    loop = eqn.params["loop"]
    if not any(used) and not eqn.effects:
        return [False] * len(eqn.invars), None
    if all(used):
        return [True] * len(eqn.invars), eqn
    carry, ys = parts(used, loop.carry_count)
    pruned, needed = loop.derived(("pruned", *used), lambda: prune(loop, carry, ys))
    invars = kept(eqn.invars, needed.flat)
    used_results = [*needed.init, *ys]
    outvars = kept(eqn.outvars, used_results)
    return needed.flat, _jax.new_equation(eqn, while_p, invars, outvars, {"loop": pruned})


define(while_p, evaluate, result_types, jvp=jvp, transpose=transpose, dce=dce)
_jax.register_known_part(while_p, known_part)
