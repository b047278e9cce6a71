"""Products of matrices summed over several axes, as products summed over one.

The gradient of w in x @ w is a sum over all axes of x but the last. If there are several, XLA for
CPUs copies an operand to move them, and takes 1.4 to 2.5 times as long as for the same sum over one
axis. To merge axes that lie together moves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
from jax import lax

from loopkit import _jax
from loopkit._jaxprs import equations

Run = tuple[int, ...]
"""Axes of an operand that lie together and are summed over."""
MOVED = 1 << 14
"""The bytes of an operand that are worth not moving."""


def with_merged_axes(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a jaxpr whose products, at any depth, sum over merged axes.

    It is the same object unless a program is being lowered for a single CPU: in any other, an axis
    may be divided between devices.
    """
    return equations.map_equations(jaxpr, _as_call) if _jax.for_one_cpu() else jaxpr


def transposes_to_several_axes(jaxpr: _jax.Jaxpr) -> bool:
    """Return whether a transpose of a product in a jaxpr sums over axes that are worth merging."""
    return any(map(_has_several_free_axes, equations.all_equations(jaxpr)))


def _has_several_free_axes(eqn: _jax.Equation) -> bool:
    if eqn.primitive.name != "dot_general" or _jax.byte_count(eqn.outvars[0].aval) < MOVED:
        return False
    contracted, batched = eqn.params["dimension_numbers"]
    for v, *used in zip(eqn.invars, contracted, batched, strict=True):
        free = [axis not in {*used[0], *used[1]} for axis in range(v.aval.ndim)]
        if any(a and b for a, b in pairwise(free)):
            return True
    return False


def _as_call(eqn: _jax.Equation) -> _jax.Equation:
    """Return a product as a call of a function that merges its axes, if there are any to merge."""
    if eqn.primitive.name != "dot_general" or not any(len(left) > 1 for left, _ in _runs(eqn)):
        return eqn
    call = jax.jit(lambda left, right: [product(eqn, left, right)])
    (made,) = _jax.open_jaxpr(_jax.trace_closed(call, [v.aval for v in eqn.invars], "product")).eqns
    return eqn.replace(primitive=made.primitive, params=made.params)


def product(eqn: _jax.Equation, left: jax.Array, right: jax.Array) -> Any:
    """Evaluate the equation of a product, over merged axes if it is lowered for a single CPU."""
    if not _jax.for_one_cpu():
        return _jax.bind_equation(eqn, [left, right])[0]
    _, batched = eqn.params["dimension_numbers"]
    operands, contracted, batch = [], [], []
    for value, runs, axes in zip((left, right), zip(*_runs(eqn), strict=True), batched, strict=True):
        shape, place = _merged(value.shape, runs)
        operands.append(lax.reshape(value, shape))
        contracted.append(tuple(place[run[0]] for run in runs))
        batch.append(tuple(place[axis] for axis in axes))
    numbers = tuple(contracted), tuple(batch)
    eqn = eqn.replace(params=eqn.params | {"dimension_numbers": numbers})
    return _jax.bind_equation(eqn, operands)[0]


def _runs(eqn: _jax.Equation) -> list[tuple[Run, Run]]:
    """Return the axes that are summed over, in runs that lie together in both operands."""
    (left, right), _ = eqn.params["dimension_numbers"]
    runs: list[tuple[Run, Run]] = []
    for l, r in sorted(zip(left, right, strict=True)):
        if runs and (l - 1, r - 1) == (runs[-1][0][-1], runs[-1][1][-1]):
            runs[-1] = (*runs[-1][0], l), (*runs[-1][1], r)
        else:
            runs.append(((l,), (r,)))
    return runs


def _merged(shape: Sequence[int], runs: Sequence[Run]) -> tuple[list[int], list[int]]:
    """Return a shape whose runs are one axis each, and the new place of each axis."""
    follows = {axis for run in runs for axis in run[1:]}
    sizes: list[int] = []
    places = []
    for axis, size in enumerate(shape):
        if axis in follows:
            sizes[-1] *= size
        else:
            sizes.append(size)
        places.append(len(sizes) - 1)
    return sizes, places
