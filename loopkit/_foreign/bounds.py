"""How many steps a while loop of lax can take, as far as its predicate says it.

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


class Bound(NamedTuple):
    """The most steps of a loop."""

    steps: int
    exact: bool
    """Whether it takes just as many."""


def bound_of(
    cond: Any, cond_consts: Sequence[Any], body: Any, const_count: int, init: Sequence[Any]
) -> Bound | None:
    """The bound that the predicate itself has; None if it has none that is known."""
    test, step = _jax.open_jaxpr(cond), _jax.open_jaxpr(body)
    maker, made = equations.maker_of(test), equations.maker_of(step)
    carry, inside = test.invars[len(cond_consts) :], step.invars[const_count:]

    def known(v: Any) -> int | None:
        """A limit: a number, or what no step changes."""
        v = _source(v, maker)
        if isinstance(v, _jax.Literal):
            return _integer(v.val)
        if v in carry:
            i = carry.index(v)
            return _integer(init[i]) if step.outvars[i] is inside[i] else None
        return _integer(cond_consts[test.invars.index(v)]) if v in test.invars else None

    def steps(name: str, counter: Any, limit: Any) -> int | None:
        counter = _source(counter, maker)
        if isinstance(counter, _jax.Literal) or counter not in carry:
            return None
        i = carry.index(counter)
        first, last, up = _integer(init[i]), known(limit), name in UPWARDS
        moves = moved_by(step.outvars[i], inside[i], made)
        if first is None or last is None or moves != (1 if up else -1):
            return None
        if up:
            return max(0, last - first + UPWARDS[name])
        return max(0, first - last + DOWNWARDS[name])

    tests = _conjuncts(test.outvars[0], maker)
    bounds = []
    for eqn in tests:
        if eqn is not None and eqn.primitive.name in MIRRORED:
            (a, b), name = eqn.invars, eqn.primitive.name
            found = [steps(name, a, b), steps(MIRRORED[name], b, a)]
            bounds += [n for n in found if n is not None and n <= LAST_STEP]
    return Bound(min(bounds), len(tests) == 1) if bounds else None


def _conjuncts(v: Any, maker: Callable[[Any], Any]) -> list:
    """The equations of what has to hold for `v` to."""
    eqn = maker(_source(v, maker))
    if eqn is not None and eqn.primitive.name == "and":
        return [found for u in eqn.invars for found in _conjuncts(u, maker)]
    return [eqn]


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
