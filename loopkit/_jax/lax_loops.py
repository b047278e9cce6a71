"""The loops of lax, and how others replace them."""

from __future__ import annotations

import functools as ft
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import jax
from jax._src.interpreters import mlir
from jax._src.interpreters import partial_eval as pe
from jax._src.lax.control_flow import loops as lax_loops

from loopkit._jax.jaxprs import Jaxpr
from loopkit._jax.sources import MACHINERY, PACKAGE

lax_scan_p = lax_loops.scan_p
lax_while_p = lax_loops.while_p
SCAN_KEEPS_RULES = jax.__version_info__ >= (0, 12)
"""Whether the second derivative of lax.scan respects custom_jvp rules in the steps."""
replacing = jax.make_user_context(None)
"""The replacement for lax's loops in this thread, or None. It is part of every cache's key."""
noting = jax.make_user_context(None)
"""An object that notes the loops that this thread leaves to lax, or None. It is part of every
cache's key too."""
_lower = mlir.lower_jaxpr_to_module


def _lower_as_written(*args: Any, **kwargs: Any) -> Any:
    with replacing(None):
        return _lower(*args, **kwargs)


def trace_bodies_within(context: Callable | None) -> None:
    """Make lax trace the functions of a loop within `context(kind, carry types, length)`."""

    def trace_to_jaxpr(fun: Callable[..., Any], avals: Any, *rest: Any, **params: Any) -> Any:
        trace, caller = ft.partial(pe.trace_to_jaxpr, fun, avals, *rest, **params), sys._getframe(2)
        kind = caller.f_code.co_name
        if context is None or kind not in ("scan", "while_loop"):
            return trace()
        (carry, *_), _ = avals.unflatten()
        with context(kind, jax.tree.leaves(carry), caller.f_locals.get("length")):
            return trace()

    other = SimpleNamespace(**{**vars(pe), "trace_to_jaxpr": trace_to_jaxpr})
    cast(Any, lax_loops).pe = pe if context is None else other


def is_settled() -> bool:
    """Return whether no user wrote the loop that is being bound: it is one of this library's own,
    or a rule of lax made it from another loop."""
    frame: Any = sys._getframe(1)
    while (code := frame.f_code).co_filename.endswith(MACHINERY):
        derived = code.co_name.startswith(("_scan", "_while")) or code.co_name == "tangent_fun"
        if derived and not code.co_name.endswith(("discharge_rule", "lojax")):
            return True
        frame = frame.f_back
    return code.co_filename.startswith(os.path.join(PACKAGE, "_engine"))


def steps_of(params: dict[str, Any]) -> Jaxpr:
    """Return the body of a loop of lax."""
    return params["jaxpr"] if "jaxpr" in params else params["body_jaxpr"]


def with_steps(params: dict[str, Any], body: Jaxpr) -> dict[str, Any]:
    """Return the parameters of a loop of lax with another body."""
    return params | {"jaxpr" if "jaxpr" in params else "body_jaxpr": body}


def lower_as_written(on: bool) -> None:
    """Set whether lowering leaves loops as they are: lax lowers a scan through a while loop."""
    mlir.lower_jaxpr_to_module = _lower_as_written if on else _lower


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Return how many operands of a lax scan are constants, and how many are the initial carry."""
    if "ft_in" in params:  # since jax 0.11
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]
