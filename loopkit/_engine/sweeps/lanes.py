"""Inputs at which the derivative of a step may be evaluated in every lane.

A lane that has stopped still runs the body, and nothing that comes out is used; but the body's
derivative there may be infinite, and zero times infinity is NaN in whatever all lanes share. So
derivatives are evaluated where the body is known to be active: a stopped lane gets its own first
step (initial carry, first slices), and one that takes no step at all gets the first step of a lane
that does, constants included. Constants may have the leading lane axes alone; so such a lane is
looked for next to its own, and further out only where all of those take no step. Where lanes read
slices in common, the first slices are gone: a stopped lane is then given all inputs of a lane that
is active now.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from loopkit import _jax
from loopkit._engine.loop import Loop, Operands, kept, spread
from loopkit._engine.steps import read_slices, select
from loopkit._engine.sweeps import lane_reads
from loopkit._engine.sweeps.lane_reads import is_sliced


@dataclass(frozen=True)
class SafeInputs:
    """The inputs of a step for its derivative, in every lane."""

    loop: Loop
    consts: list
    carry: list
    """A carry at which each lane is active. Empty where slices are shared."""
    x: list
    """The slices that go with it."""
    shared: bool
    """Whether lanes read slices in common."""
    flags: list[bool]
    """Which leaf of the carry says whether a step counts."""
    buffers: list[bool]
    """Which leaves are chosen of as they are read, slice by slice."""

    @staticmethod
    def of(
        loop: Loop, operands: Operands, active: jax.Array, saved: Sequence[bool], step: _jax.Jaxpr
    ) -> SafeInputs:
        """For a loop with lanes, of which some are `active` at the start.

        `step` takes the constants, of the carry the `saved` leaves, and the slices.
        """
        shared = any(n < len(loop.lanes) for n in loop.xs_lanes)
        substitute = _substitution(active)
        consts = _each(substitute, operands.consts, loop.const_lanes)
        flags = kept([i == loop.flag for i in range(loop.carry_count)], saved)
        if shared:
            return SafeInputs(loop, consts, [], [], shared, flags, [False] * len(flags))
        buffers = enumerate(kept(loop.is_buffer, saved), loop.const_count)
        buffers = [has and is_sliced(step, i) for i, has in buffers]
        carry = list(map(substitute, kept(operands.init, saved)))
        x = list(map(substitute, read_slices(loop, operands, jnp.int32(0))))
        return SafeInputs(loop, consts, carry, x, shared, flags, buffers)

    def call(self, step: _jax.Jaxpr, active: jax.Array, consts: list, carry: list, x: list) -> list:
        """The results of a step at inputs that these functions gave."""
        first = enumerate(zip(self.buffers, self.carry, strict=False), len(consts))
        places = {i: v for i, (has, v) in first if has}
        return lane_reads.call(step, [*consts, *carry, *x], places, active)

    def apart_from_carry(self, active: jax.Array, x: list) -> tuple[list, list]:
        """Constants and slices."""
        if not self.shared:
            return self.consts, select(active, x, self.x)
        consts = _where(active, self.consts, self.loop.const_lanes)
        return consts, _where(active, x, self.loop.xs_lanes)

    def carries(self, active: jax.Array, carry: list) -> list:
        """Of leaves that are None it says nothing.

        The flag stays as it is: nothing is written to the buffers of a lane that has stopped.
        """
        triples = zip(carry, self.flags, self.buffers, strict=True)
        moved = [v is not None and not flag and not buffer for v, flag, buffer in triples]
        values = kept(carry, moved)
        if self.shared:
            values = _where(active, values, [active.ndim] * len(values))
        else:
            values = select(active, values, kept(self.carry, moved))
        return spread(values, moved, carry)


def _substitution(active: jax.Array) -> Callable:
    """A function that gives lanes that are not active the value of one that is.

    Its second argument says how many lane axes the value begins with; all of them by default.
    """
    levels = []
    for lanes in range(active.ndim if active.size else 0, 0, -1):
        found = active.any(tuple(range(lanes, active.ndim)))
        pick = operator.getitem
        for _ in range(lanes - 1):
            pick = jax.vmap(pick)
        levels.append((lanes, found, jnp.argmax(found, -1), pick))

    def substitute(value: jax.Array, lanes: int = active.ndim) -> Any:
        for level, found, chosen, pick in levels:
            if level <= lanes:
                other = jnp.expand_dims(pick(_jax.gathered(value, level), chosen), level - 1)
                value = select(found, [value], [_jax.broadcast_like(other, value)])[0]
        return value

    return substitute


def _where(active: jax.Array, values: Sequence[Any], lanes: Sequence[int]) -> list:
    return _each(_substitution(active), values, lanes)


def _each(substitute: Callable, values: Sequence[Any], lanes: Sequence[int]) -> list:
    return [substitute(v, n) for v, n in zip(values, lanes, strict=True)]
