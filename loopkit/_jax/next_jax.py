"""JAX's next generation, behind flags that are off by default, and what it changes in jaxprs."""

from __future__ import annotations

import copy
import functools as ft
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from jax._src import config, hijax
from jax._src.lax.control_flow import loops as lax_loops

from loopkit._jax.avals import Equation

hi_primitive_p = hijax.call_hi_primitive_p
"""The primitive of all operations that are Python objects: `jax_remat3` makes them for functions
under `jax.checkpoint`, `jax_custom_vjp3` and `jax_custom_jvp3` for functions with a rule."""
_Object: Any = getattr(hijax, "HiPrim", ())
_RULES = "fwd", "bwd", "bwd_accums", "jvp_rule"


def scan_as_primitive() -> AbstractContextManager[object]:
    """Make lax.scan bind its usual primitive, which has all rules, whatever `jax_scan3` says.

    With the flag, jax 0.12 binds another primitive, over references. That one has no gradient and
    no vmap yet, cannot be in other loops, and runs a reversed scan forward.
    """
    return config.scan3(False) if config.scan3.value else nullcontext()


def is_scan3(params: dict[str, Any]) -> bool:
    """Return whether the parameters of a `hi_primitive_p` are those of a scan under `jax_scan3`."""
    return isinstance(params["_prim"], lax_loops.Scan3)


def name_of_primitive(eqn: Equation) -> str:
    """Return the name of a primitive; for an operation that is an object, that of its class."""
    operation = eqn.params.get("_prim")
    return type(operation).__name__ if isinstance(operation, _Object) else eqn.primitive.name


def params_of(eqn: Equation) -> dict[str, Any]:
    """Return the parameters of an equation; for an operation that is an object, its own."""
    operation: Any = eqn.params.get("_prim")
    return operation.params if isinstance(operation, _Object) else eqn.params


def is_object(value: object) -> bool:
    """Return whether the value is an operation that is an object."""
    return isinstance(value, _Object)


def with_params(operation: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return an operation with the parameters that `change` returns, its jaxprs included.

    The operation stays as it is if JAX runs functions that it holds, and not its jaxpr. Its class
    then takes other arguments: those of functions with a rule, and of `lax.custom_root`, do.
    """
    traced = operation.params.get("traced")
    if traced is not None:
        change({"jaxpr": traced.jaxpr})
        return operation
    params = change(operation.params)
    same = all(params[k] is v for k, v in operation.params.items())
    stays = same or params.keys() != inspect.signature(type(operation)).parameters.keys()
    return operation if stays else type(operation)(**params)


def with_rules(operation: Any, within: Callable[[Callable], Callable]) -> Any:
    """Return an operation whose rules for derivatives run as `within(rule)`."""
    found = {k: v for k, v in operation.params.items() if k in _RULES and v is not None}
    rules = {k: ft.update_wrapper(within(v), v) for k, v in found.items()}
    new = copy.copy(operation)
    vars(new).update(rules, params=operation.params | rules)
    return new
