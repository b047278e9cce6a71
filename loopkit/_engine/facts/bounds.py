"""Find counters, and how many steps the predicate of a while loop allows.

A counter is a carry leaf to which every step adds the same integer. Its value before a step follows
from the step's number. So neither checkpoints nor residuals hold counters, and values that follow
from them are made again. The flag that says whether a step counts is a counter to which steps add
0. A predicate that compares a counter with a limit bounds the steps:

i < 10 and improves        at most 10 - i steps, if i is known and each step adds one
not (i >= 10 or done)      at most 10 - i steps
i < 10                     exactly 10 - i steps
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from loopkit import _jax
from loopkit._engine.leaves import Operands
from loopkit._engine.loop import Loop
from loopkit._engine.primitives import while_p
from loopkit._engine.steps import LAST_STEP
from loopkit._jaxprs import equations
from loopkit._jaxprs.integers import ANY, Range
from loopkit._plans.budget import stores_every_step
from loopkit._programs import with_fields

KEEPS_VALUE = ("broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze")

Counters = tuple[int | None, ...]
"""The integer that a step adds to each carry leaf; None if the leaf is not a counter."""


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
    # A flag is a counter only if the predicate is the flag alone, not if lanes go on together.
    if loop.flag is not None and equations.forwarded(loop.cond) == [
        loop.cond_const_count + loop.flag
    ]:
        found[loop.flag] = 0
    return tuple(found)


def moved_by(after: _jax.Atom, before: _jax.Atom, maker: Callable[[Any], Any]) -> int | None:
    """Return the integer `after - before`; None if it is not known."""
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
    if loop.reads_lanes and loop.lanes:  # other lanes read what a stopped lane holds
        step = jnp.minimum(step, taken)
    for i, (v, by, kind) in enumerate(zip(init, counters, loop.carry_types, strict=True)):
        if i == loop.flag and by is not None:
            out[i] = jnp.broadcast_to(step < taken, v.shape) if loop.lanes else jnp.array(True)
        elif by is not None:
            out[i] = v + jnp.asarray(step, v.dtype) * np.array(by).astype(v.dtype)
        out[i] = None if out[i] is None else _jax.vary_like(out[i], [kind])
    return out


SAME = ("convert_element_type", "copy", "copy_p", "nonbatchable")
"""Primitives that return their operand. The last, of equinox, marks a value equal in all lanes."""
UPWARDS = {"lt": 0, "le": 1}
DOWNWARDS = {"gt": 0, "ge": 1}
"""Comparisons of a counter with a limit, and the steps that they allow at the limit itself."""
MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}
PLANNED = 1 << 24
"""The largest bound for which a loop is planned. A schedule for more steps would take seconds to
compute."""


class Limit(NamedTuple):
    """A condition for another step: a counter is not yet at its limit."""

    counter: int
    """The number of the operand that is the counter."""
    by: int
    """The integer that each step adds to it."""
    beyond: int
    """1 if the loop may take a step at the limit itself, else 0."""
    limit: int | None
    """The limit; None if it is an operand, too."""
    operand: int
    """The number of the operand that is the limit; -1 if none is."""
    dtype: Any
    """The type of the counter."""

    def ends(self, ranges: Sequence[Range]) -> tuple[float, float]:
        """Return the start and the limit that are farthest apart, for operands in these ranges."""
        up, counter = self.by > 0, ranges[self.counter]
        limit = ranges[self.operand] if self.limit is None else Range(self.limit, self.limit)
        return (counter.low, limit.high) if up else (counter.high, limit.low)

    def steps(self, ranges: Sequence[Range]) -> int | None:
        """Return the most steps that it allows; None if they are not known, or not limited."""
        if not all(map(isfinite, self.ends(ranges))):
            return None
        first, last = map(int, self.ends(ranges))
        way, holds = 1 if self.by > 0 else -1, jnp.iinfo(self.dtype)
        failing = last + way * self.beyond
        steps = max(0, -(way * (first - failing) // abs(self.by)))
        farthest = first + steps * self.by
        if not self.is_known(ranges):  # from another start, the counter may get farther
            farthest = failing + self.by - way
        if not (holds.min <= min(failing, farthest) and max(failing, farthest) <= holds.max):
            return None  # the counter wraps around, and may never get there
        return steps

    def is_known(self, ranges: Sequence[Range]) -> bool:
        """Return whether it allows exactly the number of steps that `steps` returns."""
        limit = () if self.limit is not None else (ranges[self.operand],)
        return all(r.is_point for r in (ranges[self.counter], *limit))

    def inside(self, ranges: Sequence[Range]) -> Range:
        """Return the range of the counter at the start of a step."""
        counter, (_, last) = ranges[self.counter], self.ends(ranges)
        if self.steps(ranges) is None:
            return ANY
        if self.by > 0:
            return Range(counter.low, last - 1 + self.beyond)
        return Range(last + 1 - self.beyond, counter.high)


class Limits(NamedTuple):
    """The limits in a predicate, for any initial values."""

    found: tuple[Limit, ...]
    alone: bool
    """Whether the predicate tests nothing else, and has no effects."""
    anyway: int = 0
    """The number of steps that the loop may take whatever the limits say."""


class StepBound(NamedTuple):
    """The most steps of a loop."""

    steps: int
    exact: bool
    """Whether the loop takes exactly that many."""

    def is_planned_for(self, checkpoints: object) -> bool:
        """Return whether a plan uses the bound.

        If the bound is too large, a plan would reserve storage for steps that are never taken.
        """
        return self.exact or stores_every_step(checkpoints) or self.steps <= PLANNED


def limits_of(
    cond: _jax.Jaxpr, cond_const_count: int, body: _jax.Jaxpr, const_count: int
) -> Limits:
    """Return the limits that a predicate sets to counters, in terms of its own operands."""
    test, step = _jax.open_jaxpr(cond), _jax.open_jaxpr(body)
    place = {v: i for i, v in enumerate(test.invars)}
    return _limits(test, test.outvars[0], place, cond_const_count, step, const_count)


def limits_in(loop: Loop) -> Limits:
    """Return the limits of a loop with a predicate, in terms of operands `asked(loop, ...)`."""
    counts = loop.cond_const_count, loop.body, loop.const_count
    of_predicate = lambda loop: limits_of(loop.cond, *counts)
    find = of_predicate if loop.flag is None else _limits_of_flag
    return loop.derived("limits", lambda: find(loop))


def asked(loop: Loop, of: Operands) -> list:
    """Return the operands that decide whether there is another step."""
    return [*(of.cond_consts if loop.flag is None else of.consts), *of.init]


def _limits_of_flag(loop: Loop) -> Limits:
    """Find limits in the flag that says if there is another step, in terms of body operands."""
    assert loop.flag is not None, "there is a leaf that says so"
    j = _jax.open_jaxpr(loop.body)
    place = {v: i for i, v in enumerate(j.invars[: loop.const_count])}
    carry = enumerate(j.outvars[: loop.carry_count], loop.const_count)
    place |= {v: i for i, v in carry if not isinstance(v, _jax.Literal)}
    flag = j.outvars[loop.flag]
    limits = _limits(j, flag, place, loop.const_count, j, loop.const_count)
    return limits._replace(alone=False, anyway=1)


def _limits(
    test: _jax.OpenJaxpr,
    holds: _jax.Atom,
    place: dict[Any, int],
    const_count: int,
    step: Any,
    step_consts: int,
) -> Limits:
    """Find the limits in `holds`, the result of `test`; `place` numbers variables as operands.

    The operands are `const_count` constants, and then the carry.
    """
    maker, made = equations.maker_of(test), equations.maker_of(step)
    inside = [None] * const_count + step.invars[step_consts:]
    after = [None] * const_count + step.outvars

    def limit(name: str, counter: Any, stop: Any) -> Limit | None:
        counter, stop = _source(counter, maker, place), _source(stop, maker, place)
        if isinstance(counter, _jax.Literal) or place.get(counter, -1) < const_count:
            return None
        i = place[counter]
        if not jnp.issubdtype(inside[i].aval.dtype, jnp.integer):
            return None
        by = _moved_in_all(after[i], inside[i], made)
        if not by or (by > 0) != (name in UPWARDS):
            return None
        beyond, dtype = (UPWARDS | DOWNWARDS)[name], counter.aval.dtype
        if isinstance(stop, _jax.Literal):
            number = _integer(stop.val)
            return None if number is None else Limit(i, by, beyond, number, -1, dtype)
        j = place.get(stop, -1)
        # A limit must be a value that no step changes.
        return Limit(i, by, beyond, None, j, dtype) if j >= 0 and after[j] is inside[j] else None

    tests, found = _conjuncts(holds, maker), []
    for eqn, true in tests:
        if eqn is not None and eqn.primitive.name in MIRRORED:
            (a, b), name = eqn.invars, eqn.primitive.name
            name = name if true else NEGATED[name]
            found += [limit(name, a, b), limit(MIRRORED[name], b, a)]
    alone = len(tests) == 1 and not test.effects
    return Limits(tuple(f for f in found if f is not None), alone)


def of_all_steps(loop: Loop, length: int) -> Loop:
    """Return the loop without its predicate, which takes exactly `length` steps."""
    return with_fields(loop, cond=None, cond_const_count=0, length=length)


def bound_of(limits: Limits, operands: Sequence[Any]) -> StepBound | None:
    """Return the bound that limits give for these operands of the predicate; None if not known."""
    # Reading other operands would wait for their device.
    read = {i for limit in limits.found for i in (limit.counter, limit.operand)}
    known = [_integer(v) if i in read else None for i, v in enumerate(operands)]
    return bound_in(limits, [ANY if n is None else Range(n, n) for n in known])


def bound_in(limits: Limits, ranges: Sequence[Range]) -> StepBound | None:
    """Return the bound that limits give together, for all operands in these ranges."""
    found = [(limit.steps(ranges), limit.is_known(ranges)) for limit in limits.found]
    bounds = [(n, known) for n, known in found if n is not None and n <= LAST_STEP]
    if not bounds:
        return None
    steps, known = min(bounds)
    return StepBound(max(steps, limits.anyway), limits.alone and known)


def _moved_in_all(after: _jax.Atom, before: _jax.Atom, maker: Callable[[Any], Any]) -> int | None:
    """Return how much a step adds to a counter, inner loops of known length included."""
    eqn = maker(after)
    if eqn is None or (found := _steps_in(eqn)) is None:
        return moved_by(after, before, maker)
    body, consts, carry, length = found
    place = eqn.outvars.index(after)
    if place >= carry or eqn.invars[consts + place] is not before:
        return None
    j = _jax.open_jaxpr(body)
    by = _moved_in_all(j.outvars[place], j.invars[consts + place], equations.maker_of(j))
    return None if by is None else by * length


def _steps_in(eqn: _jax.Equation) -> tuple[Any, int, int, int] | None:
    """Return the body of a loop of known length, and how many constants, carries and steps it has.

    Return None for any other equation.
    """
    params = eqn.params
    if eqn.primitive is _jax.lax_scan_p:
        found = params["jaxpr"], *_jax.scan_counts(params), params["length"]
    elif eqn.primitive is while_p and params["loop"].cond is None:
        loop = params["loop"]
        found = loop.body, loop.const_count, loop.carry_count, loop.length
    else:
        return None
    return found if isinstance(found[-1], int) else None


def _conjuncts(v: _jax.Atom, maker: Callable[[Any], Any], true: bool = True) -> list:
    """Return the equations that decide whether `v` is `true`, and what each must be for that."""
    eqn = maker(_source(v, maker, {}))
    if eqn is not None and v.aval.dtype == bool:
        if eqn.primitive.name == "not":
            return _conjuncts(eqn.invars[0], maker, not true)
        if eqn.primitive.name == ("and" if true else "or"):
            return [found for u in eqn.invars for found in _conjuncts(u, maker, true)]
    return [(eqn, true)]


def _source(v: _jax.Atom, maker: Callable[[Any], Any], place: dict[Any, int]) -> Any:
    """Return the source of a bool or an integer, through equations that do not change it."""

    def passes(eqn: _jax.Equation) -> bool:
        if eqn.primitive.name not in SAME or eqn.outvars[0] in place:
            return False
        have, want = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
        integers = jnp.issubdtype(have, jnp.integer) and jnp.issubdtype(want, jnp.integer)
        return have == want or bool(integers and jnp.can_cast(have, want))

    return equations.source(v, maker, passes)


def _integer(value: Any) -> int | None:
    """Return a scalar integer if it is known now, else None."""
    value = _jax.known(value)
    if value is None or jnp.shape(value) != ():
        return None
    return int(value) if jnp.issubdtype(jnp.result_type(value), jnp.integer) else None
