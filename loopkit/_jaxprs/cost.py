"""Which equations may run again, which cost nothing then, and how long each takes.

The predicted time of a step is that of its equations on a device, summed up. Without a device, it
is that of one core of a CPU.
"""

from __future__ import annotations

from typing import Any

from loopkit import _jax
from loopkit._jaxprs import accelerators, equations, prices
from loopkit._jaxprs.accelerators import Accelerator

ITERATION = 4.0
"""The nanoseconds that a step of a loop takes beyond its equations, on a CPU."""
SMALLEST = 1 << 15
"""The bytes up to which a matrix stays in the nearest cache, so that adding to it is fast."""
PARTS = frozenset(("slice", "squeeze", "reshape", "transpose"))
"""Primitives whose result is a matrix if the operand is one."""
UNKNOWN_TRIPS = 10
"""The assumed steps of an inner loop if its equations do not say how many it takes."""
_FREE_TO_REMAKE = """
    abs add add_any and bitcast_convert_type broadcast_in_dim ceil clamp complex concatenate conj
    convert_element_type copy copy_p div dynamic_slice eq expand_dims floor ge gt imag integer_pow
    iota is_finite le lt max min mul name ne neg not one_minus_square or pad pvary real
    reduce_precision rem reshape rev round select_n shift_left shift_right_arithmetic
    shift_right_logical sign slice split sqrt square squeeze stack stop_gradient sub transpose
    unstack xor
"""
CHEAP = frozenset(_FREE_TO_REMAKE.split())
"""Primitives that cost nothing to run again."""
UNREPEATABLE = frozenset(("rng_uniform", "pure_callback"))
"""Primitives that may give another result, or take any time, when they run again. Primitives with
effects do not run again either, except collectives."""


def is_repeatable(eqn: _jax.Equation) -> bool:
    """Return whether an equation gives the same result each time, and has no other effect."""
    inside = (e for j in equations.jaxprs_in(eqn) for e in equations.all_equations(j))
    return not any(_jax.acts(e.effects) or e.primitive.name in UNREPEATABLE for e in (eqn, *inside))


def is_cheap(eqn: _jax.Equation) -> bool:
    """Return whether an equation costs nothing to run again."""
    if eqn.effects:
        return False
    if equations.is_call(eqn):
        return all(map(is_cheap, _jax.open_jaxpr(eqn.params["jaxpr"]).eqns))
    return eqn.primitive.name in CHEAP


def nanoseconds(jaxpr: _jax.Jaxpr, device: Accelerator | None = None) -> float:
    """Predict the time of a jaxpr."""
    return sum(equation_nanoseconds(eqn, device) for eqn in _jax.open_jaxpr(jaxpr).eqns)


def loop_nanoseconds(loop: Any, device: Accelerator | None = None) -> float:
    """Predict the time of a loop of the engine, assuming that one with a predicate stops early."""
    trips = loop.length
    if loop.cond is not None:
        trips = UNKNOWN_TRIPS if trips is None else min(trips, UNKNOWN_TRIPS)
    return trips * (_iteration(device) + nanoseconds(loop.body, device))


def equation_nanoseconds(eqn: _jax.Equation, device: Accelerator | None = None) -> float:
    """Predict the time of an equation."""
    if "nanoseconds" in eqn.params:
        return eqn.params["nanoseconds"]
    if eqn.params.get("loop") is not None:
        return loop_nanoseconds(eqn.params["loop"], device)
    inner = () if eqn.primitive.name in prices.KNOWN else equations.jaxprs_in(eqn)
    if inner:
        return _around(eqn, [nanoseconds(j, device) for j in inner], device)
    return prices.nanoseconds(eqn) if device is None else accelerators.nanoseconds(eqn, device)


def _around(eqn: _jax.Equation, inner: list[float], device: Accelerator | None) -> float:
    """Predict the time of an equation that runs jaxprs: one of them, or all, perhaps many times."""
    name = eqn.primitive.name
    if name in ("cond", "custom_linear_solve"):  # a solve runs one of its functions
        return max(inner)
    if name in ("scan", "while"):
        trips = _jax.volume([eqn.params.get("length", UNKNOWN_TRIPS)])
        return trips * (_iteration(device) + sum(inner))
    grid = getattr(eqn.params.get("grid_mapping"), "grid", ())  # a Pallas kernel has one
    return sum(inner) * _jax.volume(grid)


def _iteration(device: Accelerator | None) -> float:
    return ITERATION if device is None else device.launch


def factor_bytes(jaxpr: _jax.Jaxpr, consts: int) -> tuple[int, int]:
    """Return the bytes of the factors of large matrices' gradients, and of these gradients."""
    j = _jax.open_jaxpr(jaxpr)
    matrices = {v for v in j.invars[:consts] if _jax.is_differentiable(v.aval)}
    others, total, products = set(j.invars[consts:]), 0, 0
    for eqn in j.eqns:
        reads = equations.variables(eqn)
        if eqn.primitive.name in PARTS and matrices.issuperset(reads):
            matrices.update(eqn.outvars)
        if eqn.primitive.name == "dot_general":
            out = _jax.byte_count(eqn.outvars[0].aval)
            size = max((_jax.byte_count(v.aval) for v in reads if v in matrices), default=0)
            if size > SMALLEST and out < 2 * size:
                total += out + sum(_jax.byte_count(v.aval) for v in reads if v in others)
                products += size
    return total, products
