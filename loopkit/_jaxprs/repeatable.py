"""Which equations may run again, and which cost nothing then."""

from __future__ import annotations

from loopkit import _jax
from loopkit._jaxprs import equations

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
