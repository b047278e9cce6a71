"""The cotangents of a loop from two loops: one stores every carry, and one runs backward.

They compute what `pullback` computes, and are differentiated like any loop. A function with a
custom VJP needs this: its rule is arbitrary code, which may not be linear, and the next derivative
is the derivative of that code. Memory grows with the length.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from loopkit import _jax
from loopkit._arguments import errors
from loopkit._engine.derivative.reversal import reversal
from loopkit._engine.derivative.split import primal_half
from loopkit._engine.loop import Active, CarryLeaf, Const, Input, Loop, Output, kept, parts
from loopkit._engine.primitives import while_p
from loopkit._engine.sweeps import sweeps
from loopkit._engine.sweeps.step import StepReversal, zero_cotangents


def stored_pullback(loop: Loop, active: Active, batch: int | None, operands: Sequence[Any]) -> list:
    """Return the cotangents of the active inputs.

    `operands` are those of the loop, the steps taken, and cotangents of the active outputs.
    """
    if loop.length is None:
        expected = (
            "may call a function with a custom VJP in a second derivative only if the steps have a "
            "bound, since loopkit then stores every carry"
        )
        advice = "Pass `max_steps`, or give the function a custom JVP."
        raise NotImplementedError(
            errors.wrong(loop.name, "body_fun", expected, "a loop without a bound", advice)
        )
    if any(reversal(loop, active).on_host):
        expected = "cannot keep checkpoints on the host in a second derivative if the body calls a "
        expected += "function with a custom VJP, since the device then stores every carry"
        advice = "Pass `memory` as one number or a plan with host=False, or write a custom JVP."
        raise NotImplementedError(
            errors.wrong(loop.name, "memory", expected, "checkpoints on the host", advice)
        )
    key = ("stored pullback", active, batch)
    jaxpr = loop.derived(key, lambda: _traced(loop, active, batch))
    return list(_jax.call_jaxpr(jaxpr)(*operands))


def _traced(loop: Loop, active: Active, batch: int | None) -> Any:
    quiet = loop.without_debug_effects()
    ct_types = _jax.stack_types(loop.output_types(active), batch)
    taken = sweeps(reversal(loop, active)).residual_types[-1]

    two_loops = ft.partial(_two_loops, quiet, active, batch)
    return _jax.trace_closed(two_loops, [*loop.operand_types, taken, *ct_types], "loop_cotangents")


def _two_loops(loop: Loop, active: Active, batch: int | None, *values: jax.Array) -> list:
    primals, (taken,), ct_carry, ct_ys = parts(values, loop.operand_count, 1, sum(active.carry))
    d_consts = zero_cotangents(kept(loop.const_types, active.consts), batch)
    if not loop.length:
        d_xs = zero_cotangents(kept(loop.xs_types, active.xs), batch)
        return [*d_consts, *ct_carry, *d_xs]
    operands, _ = loop.split(primals)
    how = reversal(loop, active)
    rows = _carries(primal_half(loop, active), how.saved, primals)
    step = StepReversal(how, operands, taken, batch)
    steps = taken.max(initial=0) if loop.lanes else taken
    xs = [*operands.xs, *rows, *ct_ys]
    axes = [*loop.x_axes, *[0] * len(rows), *step.axes(loop.y_axes, active.ys)]
    # The row of the last step taken comes first.
    unused = (loop.length - steps) * (-1 if loop.reverse else 1)
    if loop.cond is not None:
        xs = [jnp.roll(v, unused, a) for v, a in zip(xs, axes, strict=True)]
    counts = (len(d_consts), len(ct_carry), len(operands.xs), len(rows))

    def back(k: _jax.Whole, *values: jax.Array) -> list:
        d_consts, ct_carry, x, row, ct_y = parts(values, *counts)
        at, flowing = steps - 1 - k, [*ct_carry, *ct_y]
        stored = step.residuals(at, row, x)[1]
        d_consts, ct_carry, d_x, _ = step.back(at, x, stored, d_consts, flowing)
        return [k + 1, *d_consts, *ct_carry, *d_x]

    start = [0 * steps, *d_consts, *ct_carry]
    types = [jax.typeof(v) for v in start]
    slices = [_jax.slice_type(jax.typeof(v), a) for v, a in zip(xs, axes, strict=True)]
    body, consts = _jax.trace(back, [*types, *slices], "loop_step_back")
    cond, cond_consts = None, []
    if loop.cond is not None:
        cond, cond_consts = _jax.trace(lambda k, *_: [k < steps], types, "loop_goes_back")
    backward = loop.replace(
        cond=cond,
        body=body,
        cond_const_count=len(cond_consts),
        consts=(Const(),) * len(consts),
        carry=(CarryLeaf(),) * len(start),
        xs=tuple(map(Input, axes)),
        ys=tuple(map(Output, step.x_axes)),
        reverse=not loop.reverse,
        min_active_lanes=0,  # all lanes go back together
        masks_itself=False,
    )
    outs = while_p.bind(*cond_consts, *consts, *start, *xs, loop=backward)
    _, d_consts, ct_carry, d_xs = parts(outs, 1, *counts[:2])
    if loop.cond is not None:
        d_xs = [jnp.roll(v, -unused, a) for v, a in zip(d_xs, step.x_axes, strict=True)]
    return [*d_consts, *ct_carry, *d_xs]


def _carries(loop: Loop, saved: Sequence[bool], primals: Sequence[Any]) -> list:
    """Return the saved carry leaves before every step, stacked."""
    step = _jax.call_jaxpr(loop.body)

    def storing(*values: jax.Array) -> list:
        carry = values[loop.const_count : loop.const_count + loop.carry_count]
        return [*step(*values)[: loop.carry_count], *kept(carry, saved)]

    body = _jax.trace_closed(storing, loop.body.in_avals, "loop_step_stored")
    storing_loop = loop.replace(body=body, ys=(Output(),) * sum(saved))
    return while_p.bind(*primals, loop=storing_loop)[loop.carry_count :]
