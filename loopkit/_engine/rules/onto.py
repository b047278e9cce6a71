"""A `pullback` that adds cotangents to existing arrays, slice by slice.

    operands  arrays that results are added to (`onto` flags these results), those of `pullback`
    results   those of `pullback`, with the arrays added

The transpose of `pushforward` binds it if cotangents go into references. All its rules except
evaluation treat it as a `pullback` followed by sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loopkit import _jax
from loopkit._engine.leaves import kept, parts, spread
from loopkit._engine.lowering.scratch import with_scratch
from loopkit._engine.primitives import define, pullback_onto_p, pullback_p
from loopkit._engine.rules import while_
from loopkit._engine.rules.linear import evaluate_pullback, transpose_pullback, types_of_pullback

Flags = tuple[bool, ...]


def _apart(operands: Sequence[Any], onto: Flags) -> tuple[list, list]:
    """Return what each result is added to, or None, and the operands of `pullback`."""
    sums, others = parts(operands, sum(onto))
    return spread(sums, onto, [None] * len(onto)), others


def evaluate(*operands: Any, onto: Flags, **params: Any) -> list:
    sums, others = _apart(operands, onto)
    return evaluate_pullback(*others, **params, sums=sums)


def by_pullback(*operands: Any, onto: Flags, **params: Any) -> list:
    sums, others = _apart(operands, onto)
    out = pullback_p.bind(*others, **params)
    return [ct if s is None else s + ct for s, ct in zip(sums, out, strict=True)]


def transpose(cts: Sequence[Any], *operands: Any, onto: Flags, **params: Any) -> list:
    sums, others = parts(operands, sum(onto))
    return [*_jax.asked_for(kept(cts, onto), sums), *transpose_pullback(cts, *others, **params)]


define(
    pullback_onto_p,
    evaluate,
    types_of_pullback,
    jvp=while_.jvp_of(by_pullback),
    transpose=transpose,
    on_cpu=with_scratch,
)
_jax.register_batching(pullback_onto_p, while_.batching_of(by_pullback))
