"""How many steps a while loop can take, as far as its predicate says it.

i < 10 and improves        10 - i steps at most, if i is known and each step adds one
i < 10                     just that many
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from loopkit import _jax
from loopkit._engine.facts.counters import moved_by
from loopkit._engine.steps import LAST_STEP
from loopkit._jaxprs import equations

SAME = ("convert_element_type", "copy", "copy_p", "nonbatchable")
"""Primitives that pass a value on; the last one, of equinox, where lanes do not differ in it."""
UPWARDS = {"lt": 0, "le": 1}
DOWNWARDS = {"gt": 0, "ge": 1}
"""Comparisons of a counter with a limit, and how many steps they allow beyond their distance."""
MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}


class Limit(NamedTuple):
    """What has to hold for another step: a counter is not yet at its limit."""

    counter: int
    """Which operand of the predicate it is."""
    by: int
    """1 or -1: what each step adds to it."""
    beyond: int
    """Steps at the limit itself."""
    limit: int | None
    """None if it is an operand, too."""
    operand: int
    """Which of them."""
    dtype: Any
    """Of the counter."""

    def steps(self, operands: Sequence[Any]) -> int | None:
        """How many it allows; None if that is not known, or if it is no limit."""
        first = _integer(operands[self.counter])
        last = _integer(operands[self.operand]) if self.limit is None else self.limit
        if first is None or last is None:
            return None
        failing, holds = last + self.by * self.beyond, jnp.iinfo(self.dtype)
        if not holds.min <= failing <= holds.max:
            return None  # the counter wraps around, and never gets there
        return max(0, self.by * (failing - first))


class Limits(NamedTuple):
    """What is known of a predicate, whatever the loop starts from."""

    found: tuple[Limit, ...]
    alone: bool
    """Whether the predicate asks for nothing else, and does nothing else."""


class Bound(NamedTuple):
    """The most steps of a loop."""

    steps: int
    exact: bool
    """Whether it takes just as many."""


def limits_of(cond: Any, cond_const_count: int, body: Any, const_count: int) -> Limits:
    """The limits that a predicate sets to counters of the body."""
    test, step = _jax.open_jaxpr(cond), _jax.open_jaxpr(body)
    maker, made = equations.maker_of(test), equations.maker_of(step)
    inside = [None] * cond_const_count + step.invars[const_count:]
    after = [None] * cond_const_count + step.outvars
    place = {v: i for i, v in enumerate(test.invars)}

    def limit(name: str, counter: Any, stop: Any) -> Limit | None:
        counter, stop = _source(counter, maker), _source(stop, maker)
        if isinstance(counter, _jax.Literal) or place.get(counter, -1) < cond_const_count:
            return None
        i, by = place[counter], 1 if name in UPWARDS else -1
        if moved_by(after[i], inside[i], made) != by:
            return None
        beyond, dtype = (UPWARDS | DOWNWARDS)[name], counter.aval.dtype
        if isinstance(stop, _jax.Literal):
            number = _integer(stop.val)
            return None if number is None else Limit(i, by, beyond, number, -1, dtype)
        j = place.get(stop, -1)
        # What no step changes.
        return Limit(i, by, beyond, None, j, dtype) if j >= 0 and after[j] is inside[j] else None

    tests, found = _conjuncts(test.outvars[0], maker), []
    for eqn, holds in tests:
        if eqn is not None and eqn.primitive.name in MIRRORED:
            (a, b), name = eqn.invars, eqn.primitive.name
            name = name if holds else NEGATED[name]
            found += [limit(name, a, b), limit(MIRRORED[name], b, a)]
    alone = len(tests) == 1 and not test.effects
    return Limits(tuple(f for f in found if f is not None), alone)


def bound_of(limits: Limits, operands: Sequence[Any]) -> Bound | None:
    """The bound that they are together, for these operands of the predicate; None if not known."""
    found = (limit.steps(operands) for limit in limits.found)
    bounds = [n for n in found if n is not None and n <= LAST_STEP]
    return Bound(min(bounds), limits.alone) if bounds else None


def _conjuncts(v: Any, maker: Callable[[Any], Any], holds: bool = True) -> list:
    """The equations of what has to hold, or not to, for `v` to hold, or not to."""
    eqn = maker(_source(v, maker))
    if eqn is not None and v.aval.dtype == bool:
        if eqn.primitive.name == "not":
            return _conjuncts(eqn.invars[0], maker, not holds)
        if eqn.primitive.name == ("and" if holds else "or"):
            return [found for u in eqn.invars for found in _conjuncts(u, maker, holds)]
    return [(eqn, holds)]


def _source(v: Any, maker: Callable[[Any], Any]) -> Any:
    """Where a bool or an integer comes from, through what does not change it."""
    while (eqn := maker(v)) is not None and eqn.primitive.name in SAME:
        have, want = eqn.invars[0].aval.dtype, v.aval.dtype
        if have != want and not (jnp.issubdtype(have, jnp.integer) and jnp.can_cast(have, want)):
            return v
        v = eqn.invars[0]
    return v


def _integer(value: Any) -> int | None:
    """A scalar integer that is known now."""
    value = _jax.known(value)
    if value is None or jnp.shape(value) != ():
        return None
    return int(value) if jnp.issubdtype(jnp.result_type(value), jnp.integer) else None
