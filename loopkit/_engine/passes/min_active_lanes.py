"""A loop that ends before all of its lanes have stopped, as one that says so in each lane.

`Loop.left` is cheap: lanes are counted where it is asked whether the loop goes on, and not in its
steps. It holds for a single axis of lanes. Where there are others around, each batch ends for
itself, and its lanes have to be held while another goes on.
"""

from __future__ import annotations

import jax

from loopkit import _jax
from loopkit._engine.loop import Loop, parts


def ended_in_each_lane(loop: Loop) -> Loop:
    """The same loop, whose predicate and flag hold in no lane once no more than `left` do."""
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
