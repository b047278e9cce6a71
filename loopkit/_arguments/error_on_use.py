"""Errors on use: two primitives, for a condition at run time and for the values that it concerns.

taken (condition)      -> condition
heard (checks, values) -> values

Every condition that may raise an error at run time passes through `taken`. A loop that may take
steps that do not count, such as steps of stopped lanes, finds the condition there and makes it
false in such a step (`_engine/lanes/vain_steps.py`).

The compiler removes unused results, and their errors with them. So tangents and cotangents pass
through the same checks as their values, in `heard`, and using any of these raises the error.
Values without a gradient have no check: `heard` raises the error when it is transposed.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import PyTree

from loopkit import _jax

taken_p = _jax.declare("loopkit_taken")
heard_p = _jax.declare("loopkit_heard")


def if_taken(condition: jax.typing.ArrayLike) -> Any:
    """Return the condition, which enclosing loops make false in steps that do not count."""
    return taken_p.bind(condition)[0]


@ft.cache
def _equinox() -> Any:
    """Import equinox on first use, since that takes longer than importing loopkit."""
    with jax.ensure_compile_time_eval():  # keep the import out of the loop's trace
        import equinox
    return equinox


@dataclass(frozen=True)
class ErrorIf:
    """Raise an equinox error if the check holds in any lane."""

    message: str

    def __call__(self, checks: Sequence[Any], values: list) -> list:
        keys = [jnp.issubdtype(v.dtype, jax.dtypes.prng_key) for v in values]
        if any(keys):  # equinox does not take these
            data = [jax.random.key_data(v) if k else v for v, k in zip(values, keys, strict=True)]
            raised = zip(self(checks, data), values, keys, strict=True)
            made = lambda data, key: jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
            return [made(r, v) if k else r for r, v, k in raised]
        failed, types = checks[0].any(), list(map(jax.typeof, values))
        if not any(map(_jax.varying, types)):
            return _equinox().error_if(values, failed, self.message)
        # What the host returns does not vary between devices.
        same = [_jax.zeros(_jax.ShapedArray(t.shape, t.dtype)) for t in types]
        raised = _equinox().error_if(same, failed, self.message)
        return [jnp.where(failed, r, v) for r, v in zip(raised, values, strict=True)]


@dataclass(frozen=True)
class NoGradient:
    """Raise an error if values are differentiated in reverse mode; tangents pass."""

    reason: str

    def __call__(self, _: Sequence[Any], values: list) -> list:
        return values


def call_if(
    found: jax.Array, report: Callable[..., Any], operands: Sequence[Any], values: Sequence[Any]
) -> list:
    """Return the values; if `found` holds at run time, call `report(*operands)`, which raises."""
    if not any(map(_jax.is_tracer, (found, *operands))):
        if found:
            report(*operands)
        return list(values)
    types = list(map(jax.typeof, operands))
    same = lambda v: _jax.vary_like(v, types)

    def call(*operands: jax.Array) -> Any:
        def on_host(*given: jax.Array) -> Any:
            report(*given)
            return np.True_

        return same(jax.pure_callback(on_host, jax.ShapeDtypeStruct((), jnp.bool_), *operands))

    # Call the host only if there is something to report.
    done = lax.cond(found, call, lambda *_: same(jnp.bool_(True)), *operands)
    # Make the values depend on the call. Otherwise the compiler would remove it.
    return [jnp.where(done, v, _jax.zeros(jax.typeof(v))) for v in values]


def error_on_use(
    raising: Callable[[Sequence, list], list], checks: Sequence[Any], values: PyTree[Any]
) -> Any:
    """Return a tree of values, and raise at run time if the checks say so.

    `raising` is hashable; `raising(checks, values)` returns the values, with an error at run time
    if the first check holds anywhere. Under vmap, all checks have the batch axis in front.
    """
    leaves, tree = jax.tree.flatten(values)
    if not any(map(_jax.is_tracer, (*checks, *leaves))):
        return tree.unflatten(raising(checks, leaves))
    checks = [if_taken(checks[0]), *checks[1:]]
    return tree.unflatten(_bind(raising, checks, list(map(jnp.asarray, leaves))))


def without_gradient(values: Sequence[Any], reason: str) -> list:
    """Return the same values, with tangents and without cotangents, for the `reason` to raise."""
    moving = [_jax.is_differentiable(jax.typeof(v)) for v in values]
    some = [v for v, moves in zip(values, moving, strict=True) if moves]
    outs = iter(_bind(NoGradient(reason), [], some))
    return [next(outs) if moves else v for v, moves in zip(values, moving, strict=True)]


def is_refused(jaxpr: _jax.Jaxpr) -> bool:
    """Return whether results of a program have no gradient, for a reason."""
    heard = [eqn for eqn in _jax.open_jaxpr(jaxpr).eqns if eqn.primitive is heard_p]
    return any(isinstance(eqn.params["raising"], NoGradient) for eqn in heard)


def _bind(raising: Callable, checks: Sequence[Any], values: Sequence[Any]) -> list:
    """Bind the primitive to all values except symbolic zeros, whose errors nobody would see."""
    some = [v for v in values if type(v) is not _jax.Zero]
    out = iter(heard_p.bind(*checks, *some, raising=raising, count=len(checks)) if some else [])
    return [v if type(v) is _jax.Zero else next(out) for v in values]


def _taken_types(condition: _jax.ShapedArray) -> tuple[list, Any]:
    return [condition], set()


def _taken_jvp(primals: Sequence[Any], _: Sequence[Any]) -> tuple[list, list]:
    outs = taken_p.bind(*primals)
    return outs, [_jax.float0_zero(jax.typeof(v)) for v in outs]


def _taken_batched(_: _jax.AxisData, args: Sequence[Any], dims: Sequence[Any]) -> tuple:
    return taken_p.bind(*args), dims


def evaluate_alone(_: object, evaluate: Any, *operands: jax.Array, **params: Any) -> list:
    """Evaluate outside jit, so that an error is raised where the step is taken."""
    return evaluate(*operands, **params)


def _types(*types: _jax.ShapedArray, raising: Callable, count: int) -> tuple[list, Any]:
    return [_jax.type_like(t, types[:count]) for t in types[count:]], set()


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, raising: Callable, count: int
) -> tuple[list, list]:
    checks = primals[:count]
    return _bind(raising, checks, primals[count:]), _bind(raising, checks, tangents[count:])


def _transpose(cts: Sequence[Any], *operands: Any, raising: Callable, count: int) -> list:
    if isinstance(raising, NoGradient):
        raise ValueError(raising.reason)
    return [*[None] * count, *_bind(raising, operands[:count], cts)]


def _batched(
    axis: _jax.AxisData, args: Sequence[Any], dims: Sequence[Any], *, raising: Callable, count: int
) -> tuple:
    checks = list(args[:count])
    if any(d is not None for d in dims[:count]):
        pairs = zip(checks, dims, strict=False)
        checks = [_jax.move(c, d, 0, axis.size) for c, d in pairs]
    return _bind(raising, checks, args[count:]), dims[count:]


def _dce(used: list[bool], eqn: _jax.Equation) -> tuple[list[bool], Any]:
    needed = [*[any(used)] * eqn.params["count"], *used]
    if all(used) or not any(used):
        return needed, eqn if any(used) else None
    return needed, _jax.part_of(eqn, needed, used, eqn.params)


itself = lambda condition: [condition]
_jax.define(taken_p, itself, _taken_types, jvp=_taken_jvp, run=evaluate_alone)
_jax.register_batching(taken_p, _taken_batched)

evaluate = lambda *operands, raising, count: raising(operands[:count], list(operands[count:]))
_jax.define(heard_p, evaluate, _types, jvp=_jvp, transpose=_transpose, dce=_dce)
_jax.register_batching(heard_p, _batched)
