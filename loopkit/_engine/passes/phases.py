"""A batched loop in phases, each of fewer lanes than the one before.

    256 lanes, while more than 92 are active
     92 lanes, while more than 32 are
     32 lanes, while more than 12 are
     12 lanes, while any is

Those that go on are gathered between two phases, and each lane leaves with the phase in which it
stops. A phase is a loop as any other, whose predicate asks besides whether enough lanes are
active: so all derivatives follow, and each phase has checkpoints of its own.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopkit import _jax
from loopkit._engine.facts.widths import asking_each, widths
from loopkit._engine.loop import CarryLeaf, Loop, Operands, parts
from loopkit._engine.passes.batched_loop import Batched, batch_loop
from loopkit._engine.passes.lanes_left import ended_in_each_lane
from loopkit._engine.primitives import while_p
from loopkit._engine.steps import is_active
from loopkit._plans.budget import for_phases
from loopkit._progress.progress import Progress


class Lanes(NamedTuple):
    """Some lanes, between two phases."""

    ids: Any
    """Which they are."""
    carry: list
    """Behind that of the loop, if they are counted, the steps that each lane has taken."""
    ys: list
    """Written as far as steps were taken; none before the first phase."""


@dataclass(frozen=True, eq=False)
class Phases:
    """The phases of a loop that is given an axis of lanes."""

    loop: Loop
    """Without that axis."""
    flags: Operands
    """Which of its operands have it."""
    whole: Batched
    """The loop of all lanes."""
    widths: tuple[int, ...]
    """Lanes of each phase; of the first, all."""
    counted: bool = False
    """Whether the steps that each lane has taken are wanted, too."""

    @property
    def counts(self) -> bool:
        """Whether steps are counted, for that or because there is a bound."""
        return self.counted or self.loop.length is not None

    @ft.partial(jax.jit, static_argnums=0, inline=True)
    def run(self, *operands: Any) -> list:
        """What the loop of all lanes gives, of the same operands."""
        given, gone = self.whole.loop.split(operands)[0], []
        counts = map(_jax.zeros, self._count_types(self.whole.loop))
        left = Lanes(jnp.arange(self.widths[0]), [*given.init, *counts], [])
        for number, narrower in enumerate((*self.widths[1:], 0)):
            left = self._advanced(number, given, left)
            if narrower:
                order = jnp.argsort(~self._active(number, given, left.carry), stable=True)
                gone.append(self._some(left, order[narrower:]))
                left = self._some(left, order[:narrower])
                given = self._given(given, order[:narrower])
        ids, carry, ys = self._joined([*gone, left])
        every = self._some(Lanes(ids, carry, ys), jnp.argsort(ids))
        carry, taken = parts(every.carry, self.loop.carry_count)
        return [*carry, *every.ys, *taken[: self.counted]]

    def phase(self, number: int) -> Loop:
        """The loop of so many lanes, while more are active than the next one has."""
        return self.loop.derived(
            ("phase", number, self.widths, self.counts, *map(tuple, self.flags)),
            lambda: self._phase(number),
        )

    def _of_width(self, number: int) -> Loop:
        return batch_loop(self.loop, _jax.axis(self.widths[number]), self.flags, whole=True).loop

    def _count_types(self, loop: Loop) -> list:
        """Of the steps that each lane has taken, if they are counted."""
        assert loop.cond is not None, "it has lanes"
        count = _jax.ShapedArray(loop.lanes, jnp.dtype("int32"))
        return [_jax.type_like(count, loop.cond.out_avals)] * self.counts

    def _phase(self, number: int) -> Loop:
        loop, narrower = self._of_width(number), (*self.widths, 0)[number + 1]
        assert loop.cond is not None, "it has lanes"
        counts, k, n = self._count_types(loop), loop.cond_const_count, loop.carry_count

        def goes_on(*values: Any) -> list:
            consts, carry = parts(values, k)
            return [self._all_active(loop, Operands(consts, [], [], []), carry)]

        asks = _jax.trace(goes_on, [*loop.cond.in_avals, *counts], "loop_phase_cond")[0]

        def advance(*values: Any) -> list:
            consts, carry, x = parts(values, loop.const_count, n + len(counts))
            new = list(carry[:n])
            if loop.flag is not None:
                new[loop.flag] = _jax.call_jaxpr(asks)(*carry)[0]
            new, y = parts(_jax.call_jaxpr(loop.body)(*consts, *new, *x), n)
            return [*new, *(count + 1 for count in carry[n:]), *y]

        types = [*loop.const_types, *loop.body.in_avals[len(loop.const_types) :][:n], *counts]
        phase = loop.replace(
            cond=asks,
            body=_jax.trace(advance, [*types, *loop.x_types], "loop_phase_body")[0],
            carry=(*loop.carry, *[CarryLeaf("steps")] * len(counts)),
            checkpoints=for_phases(loop.checkpoints, self.widths)[number],
            progress=self._shown(loop, number),
            narrows="wait",
            left=narrower,
        )
        # Lanes that go on in the next phase may wait for those of another batch in this.
        return phase if len(loop.lanes) == 1 else ended_in_each_lane(phase)

    def _shown(self, loop: Loop, number: int) -> Progress | None:
        """One bar for all phases."""
        if loop.progress is None:
            return None
        first, last = number == 0, number + 1 == len(self.widths)
        return loop.progress.part(first, last, whole=loop.progress.whole or loop.length)

    def _all_active(self, loop: Loop, given: Operands, carry: Sequence[Any]) -> Any:
        """Which lanes are active, those included for which there is no place in this phase."""
        carry, counts = parts(carry, loop.carry_count)
        active = is_active(loop, given, carry)
        return active if loop.length is None else active & (counts[0] < loop.length)

    def _active(self, number: int, given: Operands, carry: Sequence[Any]) -> Any:
        return _lane(self._all_active(self._of_width(number), given, carry))

    def _advanced(self, number: int, given: Operands, left: Lanes) -> Lanes:
        """The lanes after a phase, whose own steps and rows begin at zero."""
        loop, xs = self.phase(number), given.xs
        begun = left.carry[-1].max() if number and (xs or left.ys) else 0
        if number:
            xs = [_rolled(loop, x, -begun, a) for x, a in zip(xs, loop.x_axes, strict=True)]
        begin = zip(left.carry, loop.carry_types, strict=True)
        init = [_jax.vary_like(v, [t]) for v, t in begin]
        operands = [*given.cond_consts, *given.consts, *init, *xs]
        carry, ys = parts(while_p.bind(*operands, loop=loop), loop.carry_count)
        if number:
            triples = zip(left.ys, ys, loop.y_axes, strict=True)
            ys = [_after(loop, begun, old, y, a) for old, y, a in triples]
        return Lanes(left.ids, carry, ys)

    def _some(self, lanes: Lanes, which: Any) -> Lanes:
        carry = [_taken(v, which, 0) for v in lanes.carry]
        ys = [_taken(v, which, a) for v, a in zip(lanes.ys, self.whole.ys, strict=True)]
        return Lanes(lanes.ids[which], carry, ys)

    def _joined(self, groups: Sequence[Lanes]) -> Lanes:
        ids = jnp.concatenate([g.ids for g in groups])
        carry = [jnp.concatenate(v) for v in zip(*(g.carry for g in groups), strict=True)]
        columns = zip(zip(*(g.ys for g in groups), strict=True), self.whole.ys, strict=True)
        return Lanes(ids, carry, [jnp.concatenate(v, axis) for v, axis in columns])

    def _given(self, given: Operands, which: Any) -> Operands:
        """Of some lanes, what has lanes."""
        groups = zip(given, self.whole.axes, strict=True)
        of = lambda v, axis: v if axis is None else _taken(v, which, axis)
        consts, own, _, xs = ([*map(of, vs, axes)] for vs, axes in groups)
        return Operands(consts, own, [], xs)


def in_phases(loop: Loop, axis: Any, flags: Operands, counted: bool = False) -> Phases | None:
    """The phases of a loop that is given an axis; None if it does not narrow."""
    if loop.cond is None:
        return None
    if len(batch_loop(loop, axis, flags).loop.lanes) == len(loop.lanes):
        apart = asking_each(loop)
        return None if apart is None else in_phases(apart, axis, flags, counted)
    narrower = widths(loop, axis)
    if not narrower:
        return None
    key = ("in phases", axis, *map(tuple, flags), narrower, counted)
    whole = batch_loop(loop, axis, flags, whole=True)
    make = lambda: Phases(loop, flags, whole, (axis.size, *narrower), counted)
    return loop.derived(key, make)


def _lane(active: Any) -> Any:
    """Which lanes of the first axis are active, or hold one that is."""
    return active.any(tuple(range(1, active.ndim)))


def _taken(value: Any, which: Any, axis: int) -> Any:
    place = (slice(None),) * axis + (which,)
    return value.at[place].get(mode="promise_in_bounds", unique_indices=True)


def _rolled(loop: Loop, rows: Any, by: Any, axis: int) -> Any:
    """Rows moved by so many steps."""
    return jnp.roll(rows, -by if loop.reverse else by, axis)


def _after(loop: Loop, begun: Any, old: Any, new: Any, axis: int) -> Any:
    """The rows of the first steps, so many, and those of the steps after them."""
    assert loop.length is not None, "rows have a length"
    step = jnp.arange(loop.length)
    step = step[::-1] if loop.reverse else step
    shape = [1] * jnp.ndim(old)
    shape[axis] = loop.length
    return jnp.where((step < begun).reshape(shape), old, _rolled(loop, new, begun, axis))
