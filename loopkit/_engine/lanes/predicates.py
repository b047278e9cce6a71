"""Loops whose predicates test more than those of the loops from which they are made.

- `counted`: a loop counts its steps, and its predicate ends it at its bound.
- `gated`: a loop takes no step unless its gate is open.
- `ended_in_each_lane`: a loop that ends before all of its lanes have stopped says so in each lane.
  `Loop.min_active_lanes` is cheaper: it counts lanes where the predicate is evaluated, and not in
  each step. But it works for a single axis of lanes. If there are other axes, each batch ends by
  itself, and its lanes are held while another batch goes on.
- `lockstep`: lanes read each other's values by the name of their axis of `jax.vmap`. Other lanes
  still read the values of a stopped lane, and differentiate them. So all lanes go on together while
  one of them does, and a step keeps stopped lanes as they are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from loopkit import _jax
from loopkit._engine.loop import CarryLeaf, Const, Loop, Rewritten, parts
from loopkit._engine.steps import hold, select
from loopkit._jaxprs import equations


def counted(loop: Loop) -> Loop:
    """Return the loop with a last carry leaf that counts steps. Its initial value must be zero."""
    return loop.derived("counted", lambda: _counted(loop))


def _counted(loop: Loop) -> Loop:
    assert loop.cond is not None, "nobody knows how many steps it takes"
    k, c, n, flag = loop.cond_const_count, loop.const_count, loop.carry_count, loop.flag
    asks, steps = _jax.call_jaxpr(loop.cond), _jax.call_jaxpr(loop.body)
    count = _jax.type_like(count_type(loop.lanes), loop.cond.out_avals)
    asked, taken = loop.cond.in_avals, loop.body.in_avals

    def goes_on(*values: jax.Array) -> list:
        go = asks(*values[: k + n])[0]
        return [go if loop.length is None else go & (values[-1] < loop.length)]

    cond = _jax.trace_closed(goes_on, [*asked, count], "counted_cond")

    def advance(*values: jax.Array) -> list:
        consts, carry, (count, *x) = parts(values, c, n)
        if flag is not None and not k:  # the flag has to be false at the bound, too
            carry[flag] = _jax.call_jaxpr(cond)(*carry, count)[0]
        new, y = parts(steps(*consts, *carry, *x), n)
        return [*new, count + 1, *y]

    body = _jax.trace_closed(advance, [*taken[: c + n], count, *taken[c + n :]], "counted_body")
    return loop.replace(cond=cond, body=body, carry=(*loop.carry, CarryLeaf("steps")))


def gated(loop: Loop) -> Loop:
    """Return the loop whose predicate has one more constant: whether to take any step."""
    assert loop.cond is not None, "it ends by itself"
    asks = _jax.call_jaxpr(loop.cond)
    go = _jax.ShapedArray((), jnp.dtype(bool))
    cond = lambda here, *values: [here & asks(*values)[0]]
    return loop.replace(
        cond=_jax.trace_closed(cond, [go, *loop.cond.in_avals], "here"),
        cond_const_count=loop.cond_const_count + 1,
        lane_policy="wait",
    )


def count_type(lanes: tuple[int, ...] = ()) -> Any:
    """Return the type of the number of steps of each lane."""
    return _jax.ShapedArray(lanes, jnp.dtype("int32"))


def ended_in_each_lane(loop: Loop) -> Loop:
    """Return the loop whose predicate and flag are false in all lanes once few are active."""
    if not loop.min_active_lanes:
        return loop
    return loop.derived("ended in each lane", lambda: _ended_in_each_lane(loop))


def _ended_in_each_lane(loop: Loop) -> Loop:
    assert loop.cond is not None, "it has lanes"
    asked, flag = _jax.call_jaxpr(loop.cond), loop.flag

    def goes_on(*values: jax.Array) -> list:
        (active,) = asked(*values)
        around = tuple(range(1, active.ndim))
        return [active & (active.any(around).sum() > loop.min_active_lanes)]

    cond, body = _jax.trace_closed(goes_on, loop.cond.in_avals, "loop_cond"), loop.body
    if flag is not None:

        def masked(*values: jax.Array) -> list:
            consts, carry, x = parts(values, loop.const_count, loop.carry_count)
            carry[flag] = _jax.call_jaxpr(cond)(*carry)[0]
            return _jax.call_jaxpr(loop.body)(*consts, *carry, *x)

        body = _jax.trace_closed(masked, body.in_avals, "loop_body")
    return loop.replace(cond=cond, body=body, min_active_lanes=0)


def axes_between_lanes(loop: Loop) -> tuple:
    """Return the axes of `jax.vmap` along which a step reads the values of other lanes."""
    axes = _jax.vmapped_axes() if loop.axis_names and loop.cond is not None else set()
    return tuple(axes & equations.axis_names(loop.body, others=True)) if axes else ()


def lockstep(loop: Loop) -> Loop | Rewritten:
    """Return the loop of lanes in lockstep; its body takes the predicate's constants first."""
    axes, cond, body = axes_between_lanes(loop), loop.cond, loop.body
    if cond is None or not axes:
        return loop
    k, c, n = loop.cond_const_count, loop.const_count, loop.carry_count
    asks, steps = _jax.call_jaxpr(cond), _jax.call_jaxpr(body)
    # Writes to buffers are masked already.
    source = equations.forwarded(body)
    same = [leaf.buffer or source[i] == c + i for i, leaf in enumerate(loop.carry)]

    def any_goes_on(*values: jax.Array) -> list:
        return [lax.psum(asks(*values)[0].astype(int), axes) > 0]

    def held(*values: jax.Array) -> list:
        own, carry, x = parts(values, k + c, n)
        active = asks(*own[:k], *carry)[0]
        new, y = parts(steps(*own[k:], *carry, *x), n)
        return [*hold(active, new, carry, same), *select(active, y, list(map(jnp.zeros_like, y)))]

    types = [*cond.in_avals[:k], *body.in_avals]
    new = loop.replace(
        cond=_jax.trace(any_goes_on, cond.in_avals, "any_lane")[0],
        body=_jax.trace(held, types, "lanes_in_step")[0],
        consts=(Const(),) * k + loop.consts,
    )
    map_operands = lambda operands: [*operands[:k], *operands]
    return Rewritten(new, map_operands, lambda results, _=(): list(results))
