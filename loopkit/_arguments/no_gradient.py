"""Values without a gradient: reverse-mode differentiation raises an error that says why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from loopkit import _jax
from loopkit._arguments.error_on_use import evaluate_alone

no_gradient_p = _jax.declare("loopkit_no_gradient")


def without_gradient(values: Sequence[Any], reason: str) -> list:
    """Return the same values, with tangents and without cotangents."""
    moving = [_jax.is_differentiable(jax.typeof(v)) for v in values]
    some = [v for v, has in zip(values, moving, strict=True) if has]
    outs = iter(no_gradient_p.bind(*some, reason=reason) if some else [])
    return [next(outs) if has else v for v, has in zip(values, moving, strict=True)]


def is_refused(jaxpr: _jax.Jaxpr) -> bool:
    """Return whether results of a program have no gradient, for a reason."""
    return any(eqn.primitive is no_gradient_p for eqn in _jax.open_jaxpr(jaxpr).eqns)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, reason: str) -> tuple[list, list]:
    moved = [type(t) is not _jax.Zero for t in tangents]
    some = iter(without_gradient([t for t, m in zip(tangents, moved, strict=True) if m], reason))
    outs = no_gradient_p.bind(*primals, reason=reason)
    return outs, [next(some) if m else t for t, m in zip(tangents, moved, strict=True)]


def _transpose(*_: Any, reason: str) -> list:
    raise ValueError(reason)


def _batched(_: _jax.AxisData, args: Sequence[Any], dims: Sequence[Any], *, reason: str) -> tuple:
    return no_gradient_p.bind(*args, reason=reason), dims


_jax.define(
    no_gradient_p,
    lambda *values, reason: list(values),
    lambda *types, reason: (list(types), set()),
    jvp=_jvp,
    transpose=_transpose,
    run=evaluate_alone,
)
_jax.register_batching(no_gradient_p, _batched)
