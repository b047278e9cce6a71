"""hessian: d/dtheta <w, L(theta) u>, linear in u.

operands  those of the loop, cotangents w of the active outputs, tangents u of the active inputs
results   cotangents of the active inputs
JVP       of its definition, a pullback of the dual loop
transpose itself in u: second derivatives commute
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from loopkit import _jax
from loopkit.engine.dual_loop import active_inputs, replace_active
from loopkit.engine.loop import Active, Loop, parts
from loopkit.engine.primitives import hessian_p
from loopkit.engine.pushforward import run_dual


def evaluate(*operands: Any, loop: Loop, active: Active, batch: Any) -> list:
    values, cts, u = parts(operands, loop.operand_count, sum(active.outputs))
    quiet = loop.without_debug_effects()
    loop.check_repeats()

    def one(cts: list, u: list) -> list:
        def tangents_at(*moved: Any) -> list:
            at = replace_active(quiet, values, active, moved)
            return run_dual(quiet, at, u, active, None)

        _, pull = jax.vjp(tangents_at, *active_inputs(quiet, values, active))
        return list(pull(cts))

    return one(cts, u) if batch is None else jax.vmap(one)(cts, u)


def result_types(*_: Any, loop: Loop, active: Active, batch: Any) -> tuple[list, Any]:
    types = loop.input_types(active)
    effects = loop.without_debug_effects().effects
    return [t if batch is None else _jax.stack_type(t, batch) for t in types], effects


def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list, list]:
    places = [i for i, t in enumerate(tangents) if type(t) is not _jax.Zero]

    def at(*moved: Any) -> list:
        values = list(primals)
        for i, v in zip(places, moved, strict=True):
            values[i] = v
        return evaluate(*values, **params)

    return jax.jvp(at, [primals[i] for i in places], [tangents[i] for i in places])


def transpose(cts: Sequence[Any], *operands: Any, **params: Any) -> list:
    loop, active = params["loop"], params["active"]
    constant = loop.operand_count + sum(active.outputs)
    known, linear = operands[:constant], operands[constant:]
    none = [None] * constant
    if all(type(c) is _jax.Zero for c in cts):
        return [*none, *[_jax.float0_zero(l.aval) for l in linear]]
    u = [_jax.instantiate(c) for c in cts]
    return [*none, *hessian_p.bind(*known, *u, **params)]


_jax.define(hessian_p, evaluate, result_types)
_jax.register_jvp(hessian_p, jvp)
_jax.register_transpose(hessian_p, transpose)
