"""Policies of `jax.checkpoint`: what they say of an equation, and which names they know."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from jax._src.interpreters import partial_eval as pe

from loopkit._jax.types import Equation


def may_save(policy: Callable[..., Any], eqn: Equation) -> bool:
    """Whether a policy lets the results of an equation be kept; on the host also counts."""
    return verdict(policy, eqn) is not pe.Recompute


def offloads(policy: Callable[..., Any], eqn: Equation) -> bool:
    """Whether a policy keeps the results of an equation in the memory of the host."""
    return isinstance(verdict(policy, eqn), pe.Offloadable)


def verdict(policy: Callable[..., Any], eqn: Equation) -> Any:
    """`Saveable`, `Recompute` or `Offloadable(...)`."""
    said = policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
    if isinstance(said, (bool, pe.SaveableType, pe.RecomputeType, pe.Offloadable)):
        return pe.ensure_enum(said)
    raise TypeError(
        "loopkit: `checkpoints` must be a policy of jax.checkpoint if it is a function: one that "
        "returns a bool, or an `Offloadable`, for a primitive and the types of its operands, got "
        f"{said!r} for `{eqn.primitive}`. Pass one of `jax.checkpoint_policies`."
    )


def asked_names(policy: Callable[..., Any]) -> frozenset[str]:
    """The names that a policy of JAX keeps, of values marked by `checkpoint_name`."""
    if not inspect.isfunction(policy):
        return frozenset()
    found = inspect.getclosurevars(policy).nonlocals
    names = ("names_which_can_be_saved", "names_which_can_be_offloaded", "names_not_to_save")
    return frozenset(n for key in names if key in found for n in found[key])
