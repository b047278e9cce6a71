"""References to memory, `jax.new_ref`, and what they become among values."""

from __future__ import annotations

from typing import Any

from jax._src import core
from jax._src.state.discharge import discharge_state
from jax._src.state.types import AbstractRef, RefEffect

from loopkit._jax.avals import ShapedArray
from loopkit._jax.jaxprs import Jaxpr

_EFFECTS = RefEffect, core.InternalMutableArrayEffect


def is_reference(value: object) -> bool:
    return isinstance(core.typeof(value), AbstractRef)


def type_in(reference: Any) -> ShapedArray:
    """Return the type of what it holds."""
    return core.typeof(reference).inner_aval


def has_references(jaxpr: Jaxpr) -> bool:
    """Return whether it makes, reads or writes references."""
    return any(isinstance(e, _EFFECTS) for e in jaxpr.effects)


def of_values(jaxpr: Jaxpr) -> Jaxpr:
    """Turn references into values: they are operands, and their final values follow the results."""
    try:
        return discharge_state(jaxpr)
    except NotImplementedError as error:
        if "call_hi_primitive" not in str(error):
            raise
        raise NotImplementedError(
            "loopkit: a step must not run a scan that was traced under `jax_scan3`. Trace it in "
            "the step, or without the flag."
        ) from error
