"""Counters: carry leaves that every step moves by the same integer.

Before a step, the value of a counter follows from the step's number. So a counter is neither saved
nor stored, and values that follow from it are made again. The flag that says whether a step counts
is a counter in this sense, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loopkit import _jax
from loopkit._engine.loop import Loop
from loopkit._jaxprs import equations

KEEPS_VALUE = ("broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze")

Counters = tuple[int | None, ...]
"""The number by which a step moves each carry leaf; None if the leaf is not a counter."""


def find_counters(loop: Loop) -> Counters:
    """Return the counters of a loop."""
    return loop.derived("counters", lambda: _found(loop))


def _found(loop: Loop) -> Counters:
    j = _jax.open_jaxpr(loop.body)
    maker = equations.maker_of(j)
    before = j.invars[loop.const_count : loop.const_count + loop.carry_count]
    found = [
        moved_by(out, v, maker) if jnp.issubdtype(v.aval.dtype, jnp.integer) else None
        for out, v in zip(j.outvars, before, strict=False)
    ]
    # Lanes that go on together have a flag each, which is not a counter.
    if loop.flag is not None and equations.forwarded(loop.cond) == [
        loop.cond_const_count + loop.flag
    ]:
        found[loop.flag] = 0
    return tuple(found)


def moved_by(after: _jax.Atom, before: _jax.Atom, maker: Callable[[Any], Any]) -> int | None:
    """Return the integer that `after` is more than `before`; None if it is not known."""
    of_type = lambda eqn: eqn.invars[0].aval.dtype == before.aval.dtype
    copies = lambda eqn: eqn.primitive.name in ("convert_element_type", "copy") and of_type(eqn)
    eqn = maker(equations.source(after, maker, copies))
    if eqn is None or eqn.primitive.name not in ("add", "sub"):
        return None
    a, b = eqn.invars
    if eqn.primitive.name == "add" and b is before:
        a, b = b, a
    b = equations.source(b, maker, lambda eqn: eqn.primitive.name in KEEPS_VALUE)
    if a is not before or not isinstance(b, _jax.Literal) or np.ndim(b.val):
        return None
    return int(b.val) if eqn.primitive.name == "add" else -int(b.val)


def at_step(
    loop: Loop, init: Sequence[Any], counters: Counters, step: _jax.Whole, taken: jax.Array
) -> list[Any]:
    """Return the counters before a step, as if no lane had stopped; None for other leaves.

    `taken` is the number of steps of each lane.
    """
    out: list[Any] = [None] * len(counters)
    for i, (v, by, kind) in enumerate(zip(init, counters, loop.carry_types, strict=True)):
        if i == loop.flag and by is not None:
            out[i] = jnp.broadcast_to(step < taken, v.shape) if loop.lanes else jnp.array(True)
        elif by is not None:
            out[i] = v + jnp.asarray(step, v.dtype) * np.array(by).astype(v.dtype)
        out[i] = None if out[i] is None else _jax.vary_like(out[i], [kind])
    return out
