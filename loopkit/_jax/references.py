"""Cotangents that a pullback adds to references (`jax.vjp(f, x)[1].with_refs(ref)`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax._src import core
from jax._src.interpreters import ad

from loopkit._jax.avals import Primitive, is_tracer, same_type


def transpose_onto_references(primitive: Primitive) -> None:
    """Make the transpose of a primitive add cotangents to references.

    Its rule takes `sums`: for each operand, the value of its reference, or None. For operands with
    a sum it returns the cotangent plus the sum, or a symbolic zero; for others, the cotangent.
    """
    transpose = ad.primitive_transposes[primitive]

    def rule(cts: Sequence[Any], *operands: Any, **params: Any) -> None:
        sums = _sums(operands)
        linear = [isinstance(v, ad.GradAccum) for v in operands]
        pairs = list(zip(operands, linear, strict=True))
        values = [ad.UndefinedPrimal(v.aval) if is_linear else v for v, is_linear in pairs]
        results = transpose(cts, *values, sums=sums, **params)
        for (v, is_linear), before, ct in zip(pairs, sums, results, strict=True):
            if before is not None and type(ct) is not ad.Zero:
                v.ref[...] = ct
            elif is_linear:
                v.accum(ct)

    ad.fancy_transposes[primitive] = rule


def _sums(operands: Sequence[Any]) -> list:
    """Return the value of each reference, but only once: others add their cotangents afterwards.

    Outside jit, return none: the value would be a copy, which takes as much memory as a cotangent.
    """
    seen: set[int] = set()

    def held(v: Any) -> Any:
        ref = v.ref if isinstance(v, ad.RefAccum) else None
        at = id(core.get_referent(ref))
        if ref is None or not is_tracer(ref) or at in seen:
            return None
        seen.add(at)
        return ref[...] if same_type(jax.typeof(ref).inner_aval, v.aval) else None

    return list(map(held, operands))
