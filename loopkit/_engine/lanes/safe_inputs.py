"""Inputs at which the derivative of a step may be evaluated in every lane.

A stopped lane still runs the body, and the result is discarded. But the body's derivative there may
be infinite, and zero times infinity puts NaN into derivatives that all lanes share. So derivatives
are evaluated only at inputs of active steps. A stopped lane takes those of its own first step
(initial carry, first slices). A lane that takes no step at all takes those of a lane that does,
constants included. Constants may have only the leading lane axes. So such a lane looks for another
along the last lane axis, and further out only if no lane there takes a step. If lanes share slices,
the first slices are gone: a stopped lane then takes all inputs of a lane that is active now.

Selecting between two whole buffers takes time in proportion to their size. So each slice that is
read from them is selected instead.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopkit import _jax
from loopkit._buffers.slices import read, read_p, write_p
from loopkit._buffers.window import Window
from loopkit._engine.leaves import spread
from loopkit._engine.loop import Loop, Operands, kept
from loopkit._engine.steps import hold, read_slices, select
from loopkit._jaxprs.dataflow import analyse, interpret_marked


@dataclass(frozen=True)
class EveryInput:
    """The inputs of a step of a loop without lanes, all of which are safe."""

    consts: list
    shared: bool = False
    """Whether lanes share slices."""
    buffers: Sequence[bool] = ()
    """Which carry leaves are buffers, selected slice by slice."""

    def apart_from_carry(self, active: Any, x: list) -> tuple[list, list]:
        return self.consts, x

    def carries(self, active: Any, carry: list) -> list:
        return carry

    def call(self, step: _jax.Jaxpr, active: Any, consts: list, carry: list, x: list) -> list:
        return list(_jax.call_jaxpr(step)(*consts, *carry, *x))

    def hold(
        self,
        active: Any,
        new: list,
        old: Sequence[Any] | None,
        is_buffer: Sequence[bool] = (),
        leading: int = 0,
    ) -> list:
        """Return new values in active lanes, old values in the others; `old` is None for zeros."""
        return new


@dataclass(frozen=True)
class HeldInputs(EveryInput):
    """The inputs that a stopped lane holds, if other lanes read them, safe or not."""

    def hold(self, active: Any, new: list, old: Any, is_buffer: Any = (), leading: int = 0) -> list:
        old = [_jax.zeros(jax.typeof(v)) for v in new] if old is None else old
        return hold(active, new, old, is_buffer, leading)


@dataclass(frozen=True, kw_only=True)
class SafeInputs(HeldInputs):
    """Inputs of a step at which its derivative may be evaluated, in every lane."""

    loop: Loop
    flags: list[bool]
    """Which carry leaf says whether a step is active."""
    carry: list
    """A carry at which each lane is active; empty if lanes share slices."""
    x: list
    """The slices that belong to that carry."""

    @staticmethod
    def of(
        loop: Loop, operands: Operands, active: jax.Array, saved: Sequence[bool], step: _jax.Jaxpr
    ) -> HeldInputs:
        """Make the inputs for a loop with lanes; `active` marks those that take any step.

        `step` takes the constants, the `saved` leaves of the carry, and the slices.
        """
        if loop.reads_lanes:
            return HeldInputs(operands.consts)
        shared = any(n < len(loop.lanes) for n in loop.xs_lanes)
        substitute = _substitution(active)
        consts = _each(substitute, operands.consts, loop.const_lanes)
        flags = kept([i == loop.flag for i in range(loop.carry_count)], saved)
        buffers, carry, x = [False] * len(flags), [], []
        if not shared:
            places = enumerate(kept(loop.is_buffer, saved), loop.const_count)
            buffers = [has and is_sliced(step, i) for i, has in places]
            carry = list(map(substitute, kept(operands.init, saved)))
            x = list(map(substitute, read_slices(loop, operands, jnp.int32(0))))
        return SafeInputs(consts, shared, buffers, loop=loop, flags=flags, carry=carry, x=x)

    def call(self, step: _jax.Jaxpr, active: jax.Array, consts: list, carry: list, x: list) -> list:
        """Return the results of a step at inputs that the other methods returned."""
        first = enumerate(zip(self.buffers, self.carry, strict=False), len(consts))
        places = {i: v for i, (has, v) in first if has}
        return call_sliced(step, [*consts, *carry, *x], places, active)

    def apart_from_carry(self, active: jax.Array, x: list) -> tuple[list, list]:
        """Return constants and slices at which each lane is active."""
        if not self.shared:
            return self.consts, select(active, x, self.x)
        consts = _where(active, self.consts, self.loop.const_lanes)
        return consts, _where(active, x, self.loop.xs_lanes)

    def carries(self, active: jax.Array, carry: list) -> list:
        """Return carry leaves at which each lane is active; leaves that are None stay None.

        The flag stays as it is, so that nothing is written to the buffers of a lane that has
        stopped.
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
    """Return a function that gives inactive lanes the value of an active lane.

    Its second argument is the number of lane axes that the value begins with, by default all.
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


def is_sliced(jaxpr: _jax.Jaxpr, place: int) -> bool:
    """Return whether an input is only read and written in slices.

    The analysis follows which values are this buffer.
    """
    otherwise = []

    def transfer(eqn: _jax.Equation, ins: list[bool]) -> list[bool]:
        goes_on = ins[:1] == [True] and eqn.primitive in (read_p, write_p)
        otherwise.append(any(ins[goes_on:]))
        return [False] * (len(eqn.outvars) - 1) + [goes_on] * bool(eqn.outvars)

    analyse(jaxpr, [i == place for i in range(len(jaxpr.in_avals))], transfer, False)
    return not any(otherwise)


class Begun(NamedTuple):
    """A mark for a buffer, with the buffer that stopped lanes read instead."""

    value: Any
    first: Any


def call_sliced(
    jaxpr: _jax.Jaxpr, values: Sequence[Any], first: dict[int, Any], active: jax.Array
) -> list:
    """Return the results of a jaxpr in which stopped lanes read the buffers in `first` instead."""

    def rule(eqn: _jax.Equation, ins: list) -> list:
        (buffer, first), *given = ins
        *found, after = _jax.bind_equation(eqn, [buffer, *given])
        if eqn.primitive is read_p and eqn.params["value"]:
            window = eqn.params["window"]
            other, _ = read(first, given[0], window, held=False)
            goes_on = _of_slices(active, given[0], window)
            found[0] = jnp.where(goes_on, found[0], other)
        return [*found, Begun(after, first)]

    given = [Begun(v, first[i]) if i in first else v for i, v in enumerate(values)]
    outs = interpret_marked(_jax.open_jaxpr(jaxpr), given, Begun, rule)
    return [v.value if isinstance(v, Begun) else v for v in outs]


def _of_slices(active: jax.Array, starts: jax.Array, window: Window) -> Any:
    """Return which elements of slices belong to active lanes; lane axes come first in buffers."""
    lanes, batch = range(active.ndim), starts.shape[:-1]
    placed = [a for a in lanes if a in window.axes]
    whole = [a for a in lanes if a not in window.axes]
    columns = tuple(starts[..., window.axes.index(a)] for a in placed)
    found = active.transpose(*placed, *whole)[columns]
    sizes = [active.shape[a] if a in whole else 1 for a in range(len(window.sizes))]
    return found.reshape(*(batch if placed else (1,) * len(batch)), *sizes)
