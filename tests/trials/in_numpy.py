"""Programs in NumPy: a reference that no compiler has seen, and that waits for none.

What is not in the table (gathers, scatters, keys) is JAX's own operation, by itself.
"""

from __future__ import annotations

import contextlib
import functools as ft
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np

from trials.numpy_rules import RULES

INLINED = "jit", "pjit", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2", "closed_call"


def is_key(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", np.float64), jax.dtypes.extended)


def applied(primitive: Any, inputs: list[Any], params: dict[str, Any]) -> list[Any]:
    """Results of one operation."""
    own = RULES.get(primitive.name)
    if own is None or any(map(is_key, inputs)):
        outs = primitive.bind(*inputs, **params)
        outs = outs if primitive.multiple_results else [outs]
        return [out if is_key(out) else np.asarray(out) for out in outs]
    names = (
        {} if isinstance(own, np.ufunc) or own in (np.real, np.imag, np.array, np.abs) else params
    )
    with np.errstate(all="ignore"):
        outs = own(*map(np.asarray, inputs), **names)
    return list(outs) if primitive.multiple_results else [outs]


def evaluate(closed: Any, *args: Any) -> list[Any]:
    """A jaxpr, one operation after another."""
    return interpreted(closed.jaxpr, closed.consts, args)


def used(jaxpr: Any) -> list[Any]:
    """The equations that the results depend on; others may need values that cannot be computed."""
    needed, found = {v for v in jaxpr.outvars if not hasattr(v, "val")}, []
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            found.append(eqn)
            needed.update(v for v in eqn.invars if not hasattr(v, "val"))
    return found[::-1]


def interpreted(jaxpr: Any, consts: Any, args: Any) -> list[Any]:
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    read = lambda v: v.val if hasattr(v, "val") else known[v]
    for eqn in used(jaxpr):
        inputs, params = [read(v) for v in eqn.invars], eqn.params
        inner = params.get("jaxpr") or params.get("call_jaxpr")
        if eqn.primitive.name in INLINED and inner is not None:
            open_, own = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
            outs = interpreted(open_, own, inputs)
        else:
            outs = applied(eqn.primitive, inputs, params)
        known.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


@ft.cache
def primitives() -> list[Any]:
    found = vars(jex.core.primitives).values()
    return [p for p in found if getattr(p, "name", None) in RULES and hasattr(p, "impl")]


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Operations on arrays, outside of any trace, are NumPy's meanwhile."""
    before = [(p, p.impl) for p in primitives()]

    def own(primitive: Any, impl: Callable) -> Callable:
        def run(*inputs: Any, **params: Any) -> Any:
            if any(map(is_key, inputs)):
                return impl(*inputs, **params)
            outs = [jax.device_put(out) for out in applied(primitive, list(inputs), params)]
            return outs if primitive.multiple_results else outs[0]

        return run

    try:
        for p, impl in before:
            p.impl = own(p, impl)
        # Types are no longer weak: a constant is promoted with what it meets, and a counter of
        # int64 seems to be written to rows of int32.
        standard = jax.numpy_dtype_promotion("standard")
        with jax.disable_jit(), standard, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "scatter inputs have incompatible", FutureWarning)
            yield
    finally:
        for p, impl in before:
            p.impl = impl
