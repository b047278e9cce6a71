"""Taylor mode, which is `jax.experimental.jet`: how a primitive propagates series of terms.

JAX passes zeros to the rules in its own table as the terms of a value that does not move, but a
PRNG key has no zeros. So loopkit's primitives apply their rules before JAX looks into that table.
Nothing here imports `jet`, which is experimental, until somebody uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax._src import core
from jax._src.interpreters import ad

from loopkit._jax.avals import Zero, float0_zero, instantiate
from loopkit._jax.jaxprs import Jaxpr, call_jaxpr, trace

Series = list[Any] | None
"""The terms of a value, from the first order on, or None if they are zeros."""


class SeriesPrimitive(core.Primitive):
    """A primitive with a rule of its own for Taylor mode."""

    taylor: Callable | None = None
    """`(primals, series, order, **params) -> (results, series)`; by default the JVP for each term,
    which is right for a primitive that is linear in the operands that move."""

    def bind_with_trace(self, trace: Any, args: Any, avals: Any, params: Any, /) -> Any:
        if type(trace).__module__ != "jax.experimental.jet":
            return super().bind_with_trace(trace, args, avals, params)
        primals, series = _apart(trace, args)
        with core.set_current_trace(trace.parent_trace):
            if all(s is None for s in series):
                outs = self.bind(*primals, **params)
                return _together(trace, outs, [None] * len(outs))
            rule = self.taylor or self._by_jvp
            return _together(trace, *rule(primals, series, trace.order, **params))

    def _by_jvp(
        self, primals: Sequence[Any], series: Sequence[Series], order: int, **params: Any
    ) -> tuple[list, list[Series]]:
        zeros, outs, terms = [float0_zero(core.typeof(v)) for v in primals], [], []
        for k in range(order):
            tangents = [z if s is None else s[k] for z, s in zip(zeros, series, strict=True)]
            outs, moved = ad.primitive_jvps[self](primals, tangents, **params)
            terms.append(moved)
        moving = lambda each: not all(type(t) is Zero for t in each)
        found = zip(*terms, strict=True)
        return outs, [list(map(instantiate, each)) if moving(each) else None for each in found]


def _apart(trace: Any, values: Sequence[Any]) -> tuple[list, list[Series]]:
    from jax.experimental import jet

    primals, series = zip(*map(trace.to_primal_terms_pair, values), strict=True)
    return list(primals), [None if s is jet.zero_series else list(s) for s in series]


def _together(trace: Any, primals: Sequence[Any], series: Sequence[Series]) -> list:
    from jax.experimental import jet

    pairs = zip(primals, series, strict=True)
    return [jet.JetTracer(trace, v, jet.zero_series if s is None else s) for v, s in pairs]


def taylor(
    fun: Callable, primals: Sequence[Any], series: Sequence[Series], order: int
) -> tuple[list, list[Series]]:
    """Return the results of `fun(*primals) -> list` in Taylor mode, and their series."""
    from jax.experimental import jet

    with core.take_current_trace() as around:
        trace = jet.JetTrace(core.TraceTag(), around, order)
        with core.set_current_trace(trace):
            outs = fun(*_together(trace, primals, series))
        return _apart(trace, outs)


def series_outputs(jaxpr: Jaxpr, moving: Sequence[bool]) -> list[bool]:
    """Mark the outputs of a jaxpr that have a series if the marked inputs have one."""
    found: list[bool] = []

    def once(*values: Any) -> list:
        given = [[v] if m else None for v, m in zip(values, moving, strict=True)]
        outs, series = taylor(call_jaxpr(jaxpr), values, given, 1)
        found.extend(s is not None for s in series)
        return outs

    trace(once, jaxpr.in_avals, "series")
    return found
