"""What a step costs: nanoseconds of an ordinary processor, estimated from its equations.

Only ratios matter: is it cheaper to run a step again or to store what it has computed?
"""

from __future__ import annotations

from typing import Any

from loopkit import _jax
from loopkit._jaxprs import equations

FLOPS = 100.0
"""Of a matrix product, in a nanosecond."""
EQUATION = 0.3
"""Nanoseconds that any equation takes."""
_SLOWER = {
    "sin cos tan asin acos atan atan2 sinh cosh": 1.5,
    "pow erf_inv digamma lgamma igamma igammac bessel_i0e": 2.0,
    "exp exp2 log log1p expm1 tanh logistic erf erfc cbrt": 0.3,
    "gather scatter scatter_add scatter-add sort cumsum top_k threefry2x32 random_bits": 2.0,
    "div rem sqrt rsqrt concatenate": 0.1,
}
PER_ELEMENT = {name: cost for names, cost in _SLOWER.items() for name in names.split()}
"""Nanoseconds to an element of the result."""
ELEMENT = 0.04
"""Nanoseconds to an element where nothing else is said."""
_SLICED = {
    "dynamic_slice gather slice loopkit_read": lambda eqn: eqn.outvars[0],
    "dynamic_update_slice loopkit_write": lambda eqn: eqn.invars[1],
    "scatter scatter_add scatter-add": lambda eqn: eqn.invars[2],
}
SLICED = {name: of for names, of in _SLICED.items() for name in names.split()}
"""Primitives that touch a part of an array: which of their variables is as large as that."""
UNKNOWN_TRIPS = 10
"""Steps that an inner loop is taken to run if its equations do not say."""


def nanoseconds(jaxpr: _jax.Jaxpr) -> float:
    return sum(map(equation_nanoseconds, _jax.open_jaxpr(jaxpr).eqns))


def loop_nanoseconds(loop: Any) -> float:
    """Of a loop of the engine; one that ends by itself may do so before its bound."""
    trips = loop.length
    if loop.cond is not None:
        trips = UNKNOWN_TRIPS if trips is None else min(trips, UNKNOWN_TRIPS)
    return trips * nanoseconds(loop.body)


def equation_nanoseconds(eqn: Any) -> float:
    if "nanoseconds" in eqn.params:
        return eqn.params["nanoseconds"]
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        depth = _jax.volume(eqn.invars[0].aval.shape[a] for a in contracted)
        return EQUATION + 2 * _jax.elements(eqn.outvars[0].aval) * depth / FLOPS
    if name == "conv_general_dilated":
        out, kernel = eqn.outvars[0].aval, eqn.invars[1].aval
        features = eqn.params["dimension_numbers"].rhs_spec[0]
        depth = _jax.elements(kernel) / _jax.volume([kernel.shape[features]])
        return EQUATION + 2 * _jax.elements(out) * depth / FLOPS
    loop = eqn.params.get("loop")
    if loop is not None:
        return loop_nanoseconds(loop)
    inner = equations.jaxprs_in(eqn)
    if inner:
        costs = list(map(nanoseconds, inner))
        if name == "cond":
            return max(costs)
        trips = {"scan": eqn.params.get("length"), "while": UNKNOWN_TRIPS}.get(name, 1)
        return sum(costs) * (_jax.volume([trips]) or 1)
    touched = [SLICED[name](eqn)] if name in SLICED else [*eqn.outvars, *eqn.invars]
    elements = max((_jax.elements(v.aval) for v in touched), default=1)
    return EQUATION + elements * PER_ELEMENT.get(name, ELEMENT)


def factor_bytes(jaxpr: _jax.Jaxpr, consts: int, smallest: int) -> tuple[int, int]:
    """Of what multiplies into the gradients of large matrices among the constants, and of those."""
    j = _jax.open_jaxpr(jaxpr)
    matrices = {v for v in j.invars[:consts] if _jax.is_differentiable(v.aval)}
    others, total, products = set(j.invars[consts:]), 0, 0
    for eqn in (eqn for eqn in j.eqns if eqn.primitive.name == "dot_general"):
        reads, out = equations.variables(eqn), _jax.byte_count(eqn.outvars[0].aval)
        size = max((_jax.byte_count(v.aval) for v in reads if v in matrices), default=0)
        if size > smallest and out < 2 * size:
            total += out + sum(_jax.byte_count(v.aval) for v in reads if v in others)
            products += size
    return total, products
