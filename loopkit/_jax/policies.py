"""Policies of `jax.checkpoint`: their verdict on an equation, and the names that they mention."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from jax._src import ad_checkpoint
from jax._src.interpreters import partial_eval as pe

from loopkit._jax.avals import Equation

_NAMING = tuple(
    vars(ad_checkpoint)[name]
    for name in ("CheckpointName", "CheckpointNameFwd")
    if name in vars(ad_checkpoint)
)
"""The operations that `checkpoint_name` makes under `jax_remat3`."""


def checkpoint_name(eqn: Equation) -> str | None:
    """Return the name that an equation gives to a value; None if it gives none."""
    operation: Any = eqn.params.get("_prim")
    if isinstance(operation, _NAMING):
        return operation.name
    return eqn.params["name"] if eqn.primitive is ad_checkpoint.name_p else None


def may_save(policy: Callable[..., Any], eqn: Equation) -> bool:
    """Return whether a policy lets the results of an equation be saved, here or on the host."""
    return verdict(policy, eqn) is not pe.Recompute


def offloads(policy: Callable[..., Any], eqn: Equation) -> bool:
    """Return whether a policy saves the results of an equation in the memory of the host."""
    return isinstance(verdict(policy, eqn), pe.Offloadable)


def verdict(policy: Callable[..., Any], eqn: Equation) -> Any:
    """Return what a policy says of an equation: `Saveable`, `Recompute` or `Offloadable(...)`."""
    name = checkpoint_name(eqn)
    primitive = eqn.primitive if name is None else ad_checkpoint.name_p
    params = eqn.params if name is None else {"name": name}
    try:
        said = policy(primitive, *(v.aval for v in eqn.invars), **params)
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise
        said = error  # it takes other arguments
    if isinstance(said, (bool, pe.SaveableType, pe.RecomputeType, pe.Offloadable)):
        return pe.ensure_enum(said)
    raise TypeError(
        "loopkit: `checkpoints` must be a policy of jax.checkpoint if it is a function, which "
        "returns a bool or an `Offloadable` for a primitive and the types of its operands. Pass "
        f"one of `jax.checkpoint_policies`. Got: {said!r} for `{eqn.primitive}`."
    )


def held_by(policy: object) -> tuple[Any, dict[str, Any]] | None:
    """Return the code or type of a policy of JAX's own, and the values that it holds.

    Return None for a user's own policy, of which nothing is known.
    """
    is_function = inspect.isfunction(policy)
    made_by = (policy if is_function else type(policy)).__module__
    if made_by != ad_checkpoint.__name__ or not callable(policy):
        return None
    if is_function:
        function: Any = policy
        return function.__code__, dict(inspect.getclosurevars(function).nonlocals)
    return type(policy), dict(vars(policy))


def asked_names(policy: object) -> frozenset[str]:
    """Return the names, given to `checkpoint_name`, that a policy of JAX's own mentions."""
    found: frozenset[str] = frozenset()
    for value in (held_by(policy) or (None, {}))[1].values():
        if isinstance(value, (set, frozenset)):
            found |= value
        elif callable(value):
            found |= asked_names(value)
    return found


def name_of(policy: object) -> str:
    """Return the name of a policy in errors."""
    return getattr(policy, "__name__", None) or repr(policy)
