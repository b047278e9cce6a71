"""A loop that counts its steps, and ends at its bound by itself. In lanes, each counts its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from loopkit import _jax
from loopkit._engine.loop import CarryLeaf, Loop, parts


def counted(loop: Loop) -> Loop:
    """The loop whose last carry leaf is the steps taken; it has to begin at zero."""
    return loop.derived("counted", lambda: _counted(loop))


def _counted(loop: Loop) -> Loop:
    assert loop.cond is not None, "nobody knows how many steps it takes"
    k, c, n, flag = loop.cond_const_count, loop.const_count, loop.carry_count, loop.flag
    asks, steps = _jax.call_jaxpr(loop.cond), _jax.call_jaxpr(loop.body)
    count = _jax.type_like(_jax.ShapedArray(loop.lanes, jnp.dtype("int32")), loop.cond.out_avals)
    asked, taken = loop.cond.in_avals, loop.body.in_avals

    def goes_on(*values: jax.Array) -> list:
        go = asks(*values[: k + n])[0]
        return [go if loop.length is None else go & (values[-1] < loop.length)]

    cond = _jax.trace_closed(goes_on, [*asked, count], "counted_cond")

    def advance(*values: jax.Array) -> list:
        consts, carry, (count, *x) = parts(values, c, n)
        if flag is not None:  # it is to say that the bound is reached, too
            carry[flag] = _jax.call_jaxpr(cond)(*carry, count)[0]
        new, y = parts(steps(*consts, *carry, *x), n)
        return [*new, count + 1, *y]

    body = _jax.trace_closed(advance, [*taken[: c + n], count, *taken[c + n :]], "counted_body")
    return loop.replace(cond=cond, body=body, carry=(*loop.carry, CarryLeaf("steps")))
