"""Which integers an array can hold, as far as the program says.

The lattice consists of ranges with two ends; a larger range says less, and an unknown end is
infinite. `join` returns the smallest range that holds others. A number that may wrap around is not
known, with one exception: a counter of steps is assumed not to reach the largest integer of 4
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isfinite
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from loopkit import _jax
from loopkit._jaxprs import equations


class Range(NamedTuple):
    """The least and the greatest possible integer; an end that is not known is infinite."""

    low: float = -inf
    high: float = inf

    @property
    def is_known(self) -> bool:
        return isfinite(self.low) and isfinite(self.high)

    @property
    def is_point(self) -> bool:
        """Whether there is exactly one integer."""
        return self.low == self.high


ANY = Range()
FAR = 1 << 30
"""A counter that starts below this is assumed not to reach the largest integer of 4 bytes."""
WIDE = 4
"""The fewest bytes of an integer that counts all rows of a buffer without wrapping around."""
LOOKED_AT = 4096
"""The most entries of an array whose values are read."""
DEEP = 50
MANY_EQUATIONS = 1000
"""The most equations to follow back one after another, and the most in all."""
KEEPS_ENTRIES = (
    *("broadcast_in_dim", "copy", "copy_p", "dynamic_slice", "nonbatchable", "pvary"),
    *("reduce_max", "reduce_min", "reshape", "rev", "slice", "squeeze", "transpose"),
)
"""Primitives whose result has only entries of their first operand."""


After = Callable[[Any, list[Range]], tuple[Any, Sequence[Range]]]
"""`(equation, ranges of operands)` returns the changed equation, and the ranges of its results."""


def join(ranges: Sequence[Range]) -> Range:
    return Range(min(r.low for r in ranges), max(r.high for r in ranges))


def range_of(value: Any) -> Range:
    """Return the range of an array, or of a tracer, as far as the program says what makes it."""
    return _range_of(_jax.innermost(value), {}, DEEP)


def _range_of(value: Any, found: dict[int, Range], deep: int) -> Range:
    """Return the range of a value. `found` holds the ranges of tracers, by identity."""
    if not _jax.is_tracer(value):
        return ANY if _jax.is_symbolic(value) else _of_array(value)
    if id(value) not in found and is_integer(value.aval) and deep and len(found) < MANY_EQUATIONS:
        found[id(value)], made = ANY, _jax.origin(value)
        if isinstance(made, tuple):
            eqn, place = made
            ins = [_range_of(v, found, deep - 1) for v in eqn.invars]
            found[id(value)] = ranges_after(eqn, ins)[place]
        elif made is not None:
            found[id(value)] = _range_of(made, found, deep - 1)
    return found.get(id(value), ANY)


def is_integer(aval: _jax.ShapedArray) -> bool:
    """Return whether a type is of arrays of integers or bools, of a known size and not empty."""
    dtype = getattr(aval, "dtype", None)
    kinds = jnp.integer, jnp.bool_
    integer = dtype is not None and any(jnp.issubdtype(dtype, kind) for kind in kinds)
    return integer and not any(map(_jax.is_symbolic, aval.shape)) and 0 not in aval.shape


def _of_array(value: Any) -> Range:
    if not is_integer(jax.typeof(value)) or np.size(value) > LOOKED_AT:
        return ANY
    if np.ndim(value) and isinstance(value, jax.Array):
        return ANY  # reading an array on a device would wait for it
    value = np.asarray(value)
    return Range(int(value.min()), int(value.max()))


def follow(jaxpr: _jax.Jaxpr, ranges: Sequence[Range], after: After) -> tuple[Any, list[Range]]:
    """Return a jaxpr with its equations as `after` makes them, and the ranges of its results.

    The walk also enters calls and branches.
    """
    j, eqns = _jax.open_jaxpr(jaxpr), []

    def made(eqn: _jax.Equation, ins: list[Range]) -> Sequence[Range]:
        inside = _follow_inside(eqn, ins, after)
        eqn, outs = after(eqn, ins) if inside is None else inside
        eqns.append(eqn)
        return outs

    consts = map(_of_array, getattr(jaxpr, "consts", ()))
    env = dict(zip((*j.constvars, *j.invars), (*consts, *ranges), strict=True))
    outs = equations.run(j.eqns, env, j.outvars, made, _of_array)
    if any(a is not b for a, b in zip(eqns, j.eqns, strict=True)):
        new = _jax.with_equations(j, eqns)
        jaxpr = new if j is jaxpr else jaxpr.replace(jaxpr=new)
    return jaxpr, outs


def _follow_inside(
    eqn: _jax.Equation, ins: list[Range], after: After
) -> tuple[Any, list[Range]] | None:
    """Follow the jaxprs of a call or of a branch; return None for any other equation."""
    if eqn.primitive.name == "cond":
        ins, old = ins[1:], eqn.params["branches"]
    elif equations.is_call(eqn):
        old = (eqn.params["jaxpr"],)
    else:
        return None
    new, outs = zip(*(follow(j, ins, after) for j in old), strict=True)
    if any(a is not b for a, b in zip(new, old, strict=True)):
        changed = {"jaxpr": new[0]} if equations.is_call(eqn) else {"branches": new}
        eqn = eqn.replace(params=eqn.params | changed)
    return eqn, list(map(join, zip(*outs, strict=True)))


def ranges_after(eqn: _jax.Equation, ins: list[Range]) -> list[Range]:
    """Return the ranges of the results of an equation, from those of its operands."""
    after = lambda eqn, ins: (eqn, ranges_after(eqn, ins))
    if (inside := _follow_inside(eqn, ins, after)) is not None:
        return inside[1]
    nothing = [ANY] * len(eqn.outvars)
    if len(eqn.outvars) != 1 or not is_integer(eqn.outvars[0].aval):
        return nothing
    aval, name = eqn.outvars[0].aval, eqn.primitive.name
    if aval.dtype == bool:
        return [Range(0, 1)]
    if name in KEEPS_ENTRIES and is_integer(eqn.invars[0].aval):
        return [ins[0]]
    if name == "convert_element_type":
        return [_converted(ins[0], eqn.invars[0].aval.dtype, aval.dtype)]
    if name in ("concatenate", "pad"):
        return [join(ins)]
    if name == "select_n":
        return [join(ins[1:])]
    if name == "iota":
        return [Range(0, aval.shape[eqn.params["dimension"]] - 1)]
    if name in ("argmax", "argmin"):
        size = max(eqn.invars[0].aval.shape)
        return [ANY if _jax.is_symbolic(size) else Range(0, size - 1)]
    found = _of_two(name, ins, aval.dtype) if len(ins) == 2 else None
    if name == "clamp":
        least, x, most = ins
        low, high = max(least.low, x.low), max(least.high, x.high)
        found = Range(min(low, most.low), min(high, most.high))
    return [found or ANY]


def _of_two(name: str, ins: Sequence[Range], dtype: np.dtype[Any]) -> Range | None:
    """Return the range of arithmetic with two operands; None if it is not known."""
    a, b = ins
    if name == "max":
        return Range(max(a.low, b.low), max(a.high, b.high))
    if name == "min":
        return Range(min(a.low, b.low), min(a.high, b.high))
    if not (a.is_known and b.is_known):
        return (
            _counted(a, b) or _counted(b, a) if name == "add" and dtype.itemsize >= WIDE else None
        )
    ends = [(x, y) for x in a for y in b]
    match name:
        case "add":
            made = [x + y for x, y in ends]
        case "sub":
            made = [x - y for x, y in ends]
        case "mul":
            made = [x * y for x, y in ends]
        case "shift_left" if a.low >= 0 and b.low >= 0 and b.high < 64:
            made = [x * 2**y for x, y in ends]
        case "div" if b.low > 0:
            made = [abs(x) // y * (1 if x > 0 else -1) for x, y in ends]
        case "rem" if b.low > 0 and a.low >= 0:
            made = [0, min(a.high, b.high - 1)]
        case _:
            return None
    return within(Range(min(made), max(made)), dtype)


def _counted(a: Range, b: Range) -> Range | None:
    """Return the range of a counter of steps, which may be large, plus 0 or 1."""
    return Range(a.low + b.low, inf) if 0 <= b.low <= b.high <= 1 and 0 <= a.low < FAR else None


def _converted(found: Range, have: np.dtype[Any], want: np.dtype[Any]) -> Range:
    if found.is_known:
        return within(found, want)
    wide = all(jnp.issubdtype(d, jnp.integer) and d.itemsize >= WIDE for d in (have, want))
    return Range(found.low) if wide and 0 <= found.low < FAR else ANY


def within(found: Range, dtype: np.dtype[Any]) -> Range:
    """Return the range, if the dtype holds all of it. Otherwise it may have wrapped around."""
    holds = jnp.iinfo(dtype)
    return found if holds.min <= found.low and found.high <= holds.max else ANY
