"""A predicate that is asked inside a step, of which no derivative is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from loopkit import _jax
from loopkit._engine.loop import kept, spread


def ask(predicate: Callable[[Any], Any], value: Any) -> Any:
    """`predicate(value) -> bool[]`, of values without tangents, those it closes over too.

    What it calls may have no derivative: callbacks, collectives, functions with a custom VJP.
    """
    leaves, tree = jax.tree.flatten(value)
    is_array = [isinstance(v, jax.Array) for v in leaves]
    arrays = kept(leaves, is_array)

    def asked(*values: Any) -> list:
        return [predicate(tree.unflatten(spread(values, is_array, leaves)))]

    jaxpr, closed_over = _jax.trace(asked, list(map(jax.typeof, arrays)), "until")
    used = _jax.used_inputs(jaxpr, [True])
    pairs = zip([*closed_over, *arrays], used, strict=True)
    (result,) = _jax.call_jaxpr(jaxpr)(*[_still(v) if u else v for v, u in pairs])
    return result


def still(tree: Any) -> Any:
    """The arrays of a tree without tangents. Buffers stay what they are."""
    return jax.tree.map(lambda v: _still(v) if isinstance(v, jax.Array) else v, tree)


def _still(value: Any) -> Any:
    moves = _jax.is_differentiable(jax.typeof(value)) and not _jax.is_reference(value)
    return lax.stop_gradient(value) if moves else value
