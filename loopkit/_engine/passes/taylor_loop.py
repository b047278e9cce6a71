"""The loop over values and their Taylor series, for `jax.experimental.jet`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from loopkit import _jax
from loopkit._engine.facts.activity import forward_activity
from loopkit._engine.loop import Active, Loop, Rewritten, kept, parts
from loopkit._engine.passes.dual_loop import open_dual
from loopkit._engine.primitives import while_p


def taylor(
    primals: Sequence[Any], series: Sequence[Any], order: int, *, loop: Loop
) -> tuple[list, list]:
    """Return the results of a loop and their series, which a single loop computes."""
    given = loop.split([s is not None for s in series])[0]
    active = forward_activity(loop, given, _jax.series_outputs)
    if not any(active.outputs):
        outs = while_p.bind(*primals, loop=loop)
        return outs, [None] * len(outs)
    new = loop.derived(("taylor", active, order), lambda: _taylor_loop(loop, active, order))
    inputs = kept(series[loop.cond_const_count :], active.inputs)
    pairs = zip(inputs, loop.input_types(active), strict=True)
    moving = chain.from_iterable(_terms(s, t, order) for s, t in pairs)
    outs = new.map_results(while_p.bind(*new.map_operands([*primals, *moving]), loop=new.loop))
    results, *terms = parts(outs, loop.primal_counts[1], *[order] * sum(active.outputs))
    found = iter(terms)
    return results, [next(found) if moves else None for moves in active.outputs]


def _taylor_loop(loop: Loop, active: Active, order: int) -> Rewritten:
    types = loop.body.out_avals

    def push(step: Any, inputs: list, moving: list, keep: Sequence[bool]) -> tuple[list, list]:
        series = parts(moving, *[order] * len(inputs))[:-1]
        outs, series = _jax.taylor(step, inputs, series, order)
        outs = [_as(v, t) for v, t in zip(outs, types, strict=True)]
        pairs = kept(list(zip(series, types, strict=True)), keep)
        return outs, [v for s, t in pairs for v in _terms(s, t.to_tangent_aval(), order)]

    trace = lambda *of: (_jax.trace_closed(*of), [])
    return open_dual(loop, active, trace, order, push)


def _terms(series: Any, aval: _jax.ShapedArray, order: int) -> list:
    return [_jax.zeros(aval)] * order if series is None else [_as(term, aval) for term in series]


def _as(value: Any, aval: _jax.ShapedArray) -> Any:
    return _jax.weak_as(_jax.as_type(_jax.as_array(value), aval), aval)
