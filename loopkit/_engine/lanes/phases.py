"""A batched loop in phases, each with fewer lanes than the one before.

    256 lanes, while more than 112 are active
    112 lanes, while more than 40 are
     40 lanes, while more than 12 are
     12 lanes, while any is

Between two phases, the loop gathers the lanes that go on; the others keep their results. A phase is
an ordinary loop that also ends once too few lanes are active. So it can be differentiated like any
other, and has checkpoints of its own.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from loopkit import _jax
from loopkit._engine.lanes.batched_loop import Batched, batch_loop, waiting
from loopkit._engine.lanes.many_lanes import widths
from loopkit._engine.lanes.predicates import counted, ended_in_each_lane
from loopkit._engine.loop import Loop, Operands, parts
from loopkit._engine.primitives import while_p
from loopkit._engine.steps import is_active
from loopkit._plans.budget import for_phases
from loopkit._progress.progress import ProgressSettings


@dataclass(frozen=True, eq=False)
class Phases:
    """The phases of a loop of many lanes."""

    one: Loop
    """The loop of one lane. If it has a bound, it counts its steps."""
    flags: Operands
    """Which of its operands have lanes."""
    widths: tuple[int, ...]
    """The number of lanes in each phase; the first phase has all lanes."""

    @property
    def bounded(self) -> bool:
        return self.one.length is not None

    @cached_property
    def whole(self) -> Batched:
        return self._of_width(0)

    @ft.partial(jax.jit, static_argnums=0, inline=True)
    def run(self, *operands: jax.Array) -> list:
        """Return the results of the loop of all lanes, from its operands."""
        carry, ys = parts(self._from(0, *self._begun(operands)), self.one.carry_count)
        return [*carry[: len(carry) - self.bounded], *ys]

    def _from(self, number: int, given: Operands, begun: list) -> list:
        """Run this phase and all later ones; return its lanes as they are after the last.

        Lanes are the carry and the ys, written as far as steps were taken.
        """
        ended, axes = self._advanced(number, given, begun), self.whole.results
        if number + 1 == len(self.widths):
            return ended
        order = jnp.argsort(~self._active(number, given, ended), stable=True)
        on = order[: self.widths[number + 1]]
        given = self._given(given, on)
        some = [_taken(v, on, a) for v, a in zip(ended, axes, strict=True)]
        later = self._from(number + 1, given, some)
        return [_put(v, on, a, w) for v, a, w in zip(ended, axes, later, strict=True)]

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list, list]:
        """Return the results of `run` and their tangents; symbolic zeros stay symbolic."""
        return _jax.jvp_in_moving(self.run, primals, tangents)

    def _begun(self, operands: Sequence[Any]) -> tuple[Operands, list]:
        """Return the operands without the carry, and the carry of all lanes."""
        loop = self.whole.loop
        count = loop.cond_const_count, loop.const_count, loop.carry_count - self.bounded
        cond_consts, consts, carry, xs = parts(operands, *count)
        if self.bounded:
            carry.append(_jax.zeros(loop.carry_types[-1]))
        return Operands(cond_consts, consts, [], xs), carry

    def phase(self, number: int) -> Loop:
        """Return the loop of a phase. It runs while more lanes are active than the next one has."""
        return self.one.derived(
            ("phase", number, self.widths, waiting.value, *map(tuple, self.flags)),
            lambda: self._phase(number),
        )

    def _of_width(self, number: int) -> Batched:
        return batch_loop(self.one, _jax.axis(self.widths[number]), self.flags, whole=True)

    def _phase(self, number: int) -> Loop:
        loop, narrower = self._of_width(number).loop, (*self.widths, 0)[number + 1]
        phase = loop.replace(
            checkpoints=for_phases(loop.checkpoints, self.widths)[number],
            progress=self._shown(loop, number),
            lane_policy="wait",
            min_active_lanes=narrower,
        )
        # Lanes that are done with this phase may have to wait until another batch is. A buffer must
        # know that before vmap adds the batch: saved values are laid out for the phase as it is.
        alone = len(loop.lanes) == 1 and not any(loop.is_buffer)
        return phase if alone else ended_in_each_lane(phase)

    def _shown(self, loop: Loop, number: int) -> ProgressSettings | None:
        """Return settings for one progress bar over all phases."""
        if loop.progress is None:
            return None
        first, last = number == 0, number + 1 == len(self.widths)
        return loop.progress.part(first, last, whole=loop.progress.whole or loop.length)

    def _active(self, number: int, given: Operands, lanes: list) -> Any:
        """Return which lanes are active, or hold an active lane of another axis."""
        loop = self._of_width(number).loop
        active = is_active(loop, given, lanes[: loop.carry_count])
        return active.any(tuple(range(1, active.ndim)))

    def _advanced(self, number: int, given: Operands, left: list) -> list:
        """Run a phase, whose own steps and rows begin at zero, and return its lanes."""
        loop, xs = self.phase(number), given.xs
        carry, before = parts(left, loop.carry_count)
        begun = carry[-1].max() if number and (xs or before) else 0
        if number:
            xs = [_rolled(loop, x, -begun, a) for x, a in zip(xs, loop.x_axes, strict=True)]
        init = [_jax.vary_like(v, [t]) for v, t in zip(carry, loop.carry_types, strict=True)]
        operands = [*given.cond_consts, *given.consts, *init, *xs]
        carry, ys = parts(while_p.bind(*operands, loop=loop), loop.carry_count)
        if number:
            triples = zip(before, ys, loop.y_axes, strict=True)
            ys = [_after(loop, begun, old, y, a) for old, y, a in triples]
        return [*carry, *ys]

    def _given(self, given: Operands, which: jax.Array) -> Operands:
        """Return the operands of some of the lanes."""
        groups = zip(given, self.whole.axes, strict=True)
        of = lambda v, axis: v if axis is None else _taken(v, which, axis)
        consts, own, _, xs = ([*map(of, vs, axes)] for vs, axes in groups)
        return Operands(consts, own, [], xs)


def phases_of(loop: Loop) -> Phases | None:
    """Return the phases of a loop of many lanes; None if these wait for each other."""
    if (lane := loop.lane) is None:
        return None
    narrower = tuple(n for n in widths(lane.loop, lane.count) if n < lane.count)
    if not narrower:
        return None
    one, flags = lane.loop, lane.flags
    if one.length is not None:
        one, flags = counted(one), flags._replace(init=[*flags.init, False])
    make = lambda: Phases(one, flags, (lane.count, *narrower))
    return loop.derived(("phases", narrower), make)


def _taken(value: jax.Array, which: jax.Array, axis: int) -> Any:
    place = (slice(None),) * axis + (which,)
    return value.at[place].get(mode="promise_in_bounds", unique_indices=True)


def _put(value: jax.Array, which: jax.Array, axis: int, new: Any) -> Any:
    place = (slice(None),) * axis + (which,)
    return value.at[place].set(new, mode="promise_in_bounds", unique_indices=True)


def _rolled(loop: Loop, rows: jax.Array, by: _jax.Whole, axis: int) -> Any:
    """Return rows shifted by a number of steps."""
    return jnp.roll(rows, -by if loop.reverse else by, axis)


def _after(loop: Loop, begun: Any, old: Any, new: Any, axis: int) -> Any:
    """Return the old rows of the first `begun` steps, and the new rows of the steps after them."""
    assert loop.length is not None, "rows have a length"
    step = jnp.arange(loop.length, dtype=jnp.int32)
    step = step[::-1] if loop.reverse else step
    shape = [1] * jnp.ndim(old)
    shape[axis] = loop.length
    return jnp.where((step < begun).reshape(shape), old, _rolled(loop, new, begun, axis))
