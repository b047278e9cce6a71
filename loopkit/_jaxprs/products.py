"""Merge adjacent axes in products of matrices.

The gradient of w in x @ w is a sum over all axes of x but the last. If there are several, XLA for
CPUs copies an operand to move them, and takes 1.4 to 2.5 times as long as for the same sum over one
axis. Merging adjacent axes moves nothing. Other compilers move no axes, and on several devices an
axis may be divided between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax import lax

from loopkit import _jax
from loopkit._jaxprs import equations

Run = tuple[int, ...]
"""Adjacent axes of an operand that are all summed over, or all not."""
MOVED = 1 << 14
"""The fewest bytes of an operand for which it pays not to move axes."""


def with_merged_axes(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a jaxpr whose products, at any depth, sum over merged axes.

    It is the same object unless a program is being lowered for a single CPU.
    """
    if not _jax.for_one_cpu():
        return jaxpr
    return _with_calls(jaxpr, lambda eqn: _are_long(left for left, _ in _summed(eqn)))


def ready_to_transpose(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a jaxpr whose products have transposes that sum over merged axes, except in loops.

    It is the same object unless there is one device, a CPU.
    """
    one_cpu = jax.default_backend() == "cpu" and jax.device_count() == 1
    return _with_calls(jaxpr, _gains_by_merging) if one_cpu else jaxpr


def transposes_to_several_axes(jaxpr: _jax.Jaxpr) -> bool:
    """Return whether a transpose of a product in a jaxpr sums over axes that are worth merging."""
    products = (e for e in equations.all_equations(jaxpr) if e.primitive.name == "dot_general")
    return any(map(_gains_by_merging, products))


def product(eqn: _jax.Equation, left: jax.Array, right: jax.Array) -> Any:
    """Evaluate the equation of a product, with merged axes if it is lowered for a single CPU."""
    if _jax.for_one_cpu():
        return _merged_product(eqn, left, right)
    return _jax.bind_equation(eqn, [left, right])[0]


def _with_calls(jaxpr: _jax.Jaxpr, gains: Callable[[Any], bool]) -> _jax.Jaxpr:
    """Return a jaxpr in which products that gain by merging axes call a function that does so."""

    def as_call(eqn: _jax.Equation) -> _jax.Equation:
        if eqn.primitive.name != "dot_general" or not gains(eqn):
            return eqn

        def merged_product(*operands: jax.Array) -> list:
            return [_merged_product(eqn, *operands)]

        types = [v.aval for v in eqn.invars]
        made = _jax.trace_closed(jax.jit(merged_product), types, "product")
        (call,) = _jax.open_jaxpr(made).eqns
        return eqn.replace(primitive=call.primitive, params=call.params)

    # Pallas kernels are written for a device, and loops are lowered by themselves.
    as_it_is = lambda eqn: not eqn.params.keys().isdisjoint(("loop", "grid_mapping"))
    return equations.map_equations(jaxpr, as_call, as_it_is)


def _gains_by_merging(eqn: _jax.Equation) -> bool:
    """Return whether a transpose of a product sums a large array over several adjacent axes."""
    is_large = _jax.byte_count(eqn.outvars[0].aval) >= MOVED
    return is_large and any(_are_long(_free(eqn, k, v.aval.ndim)) for k, v in enumerate(eqn.invars))


def _are_long(runs: Iterable[Run]) -> bool:
    return any(len(run) > 1 for run in runs)


def _merged_product(eqn: _jax.Equation, *operands: jax.Array) -> Any:
    """Evaluate the equation of a product with merged axes."""
    _, batched = eqn.params["dimension_numbers"]
    summed, flat, numbers = _summed(eqn), [], ([], [])
    for side, value in enumerate(operands):
        runs = [run[side] for run in summed]
        shape, place = _merged(value.shape, [*runs, *_free(eqn, side, value.ndim)])
        flat.append(lax.reshape(value, shape))
        numbers[0].append(tuple(place[run[0]] for run in runs))
        numbers[1].append(tuple(place[axis] for axis in batched[side]))
    eqn = eqn.replace(params=eqn.params | {"dimension_numbers": tuple(map(tuple, numbers))})
    return lax.reshape(_jax.bind_equation(eqn, flat)[0], eqn.outvars[0].aval.shape)


def _summed(eqn: _jax.Equation) -> list[tuple[Run, Run]]:
    """Return the axes that are summed over, in runs that are adjacent in both operands."""
    (left, right), _ = eqn.params["dimension_numbers"]
    return [(i, k) for i, k in _adjacent(sorted(zip(left, right, strict=True)))]


def _free(eqn: _jax.Equation, side: int, count: int) -> list[Run]:
    """Return which of the `count` axes of an operand only it has, in adjacent runs."""
    summed, batched = eqn.params["dimension_numbers"]
    others = {*summed[side], *batched[side]}
    return [run for (run,) in _adjacent((axis,) for axis in range(count) if axis not in others)]


def _adjacent(places: Iterable[tuple[int, ...]]) -> list[list[Run]]:
    """Divide places, with an axis in each operand, into runs; return the axes by operand."""
    runs: list[list[tuple[int, ...]]] = []
    for place in places:
        if runs and place == tuple(axis + 1 for axis in runs[-1][-1]):
            runs[-1].append(place)
        else:
            runs.append([place])
    return [list(zip(*run, strict=True)) for run in runs]


def _merged(shape: Sequence[int], runs: Sequence[Run]) -> tuple[list[int], list[int]]:
    """Return a shape with each run merged into one axis, and the new index of each axis."""
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
