"""D, the dual of a loop: the same loop over values and tangents, in one body.

For `jax.experimental.jet`, D has several tangents for each leaf: the terms of a Taylor series.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import jax

from loopkit import _jax
from loopkit._engine.facts.activity import forward_activity
from loopkit._engine.leaves import spread
from loopkit._engine.loop import Active, CarryLeaf, Const, Loop, Rewritten, kept, parts
from loopkit._engine.primitives import while_p


def dual_loop(loop: Loop, active: Active) -> Rewritten:
    """Return D, over the loop's operands and the active inputs' tangents.

    Its results are those of the loop and the active outputs' tangents.
    """
    return loop.derived(("dual", active), lambda: open_dual(loop, active, _trace_closed))


def _trace_closed(*of: Any) -> tuple[Any, list]:
    return _jax.trace_closed(*of), []


def _push_tangents(
    step: Callable, inputs: list, moving: list, keep: Sequence[bool]
) -> tuple[list, list]:
    def differentiated(*inputs: jax.Array) -> tuple[list, list]:
        outs = step(*inputs)
        return kept(outs, keep), outs

    _, tangents, outs = jax.jvp(differentiated, inputs, moving, has_aux=True)
    return outs, tangents


def open_dual(
    loop: Loop,
    active: Active,
    trace: Callable = _jax.trace,
    terms: int = 1,
    push: Callable = _push_tangents,
) -> Rewritten:
    """Return D, whose first constants are the values that the rules of a step close over.

    D may have more than one tangent for each active leaf, the `terms` of a series.
    `push(step, inputs, tangents, keep)` returns a step's results, and tangents of those to `keep`.
    """
    body = _jax.call_jaxpr(loop.body)
    counts = loop.const_count, loop.carry_count, loop.xs_count
    each = lambda values, flags: [v for v in kept(values, flags) for _ in range(terms)]
    both = [n + terms * sum(flags) for n, flags in zip(counts, active[:3], strict=True)]

    def dual_body(*values: jax.Array) -> list:
        groups = parts(values, *both[:2])
        pairs = [parts(group, n) for group, n in zip(groups, counts, strict=True)]
        primals, moving = ([v for pair in pairs for v in pair[k]] for k in (0, 1))

        step = lambda *inputs: body(*spread(inputs, active.inputs, primals))
        inputs = kept(primals, active.inputs)
        outs, tangents = push(step, inputs, moving, active.outputs)
        new, y = parts(outs, loop.carry_count)
        t_new, t_y = parts(tangents, terms * sum(active.carry))
        return [*new, *t_new, *y, *t_y]

    types = []
    for group, flags in zip(
        (loop.const_types, loop.carry_types, loop.x_types), active[:3], strict=True
    ):
        types += [*group, *(t.to_tangent_aval() for t in each(group, flags))]
    dual, closed_over = trace(dual_body, types, "dual_body")
    types = [t.to_tangent_aval() for t in each(loop.carry_types, active.carry)]
    cond = None if loop.cond is None else _dual_cond(loop, loop.cond, types)
    tangents = (CarryLeaf(buffer=leaf.buffer) for leaf in each(loop.carry, active.carry))
    new = loop.replace(
        cond=cond,
        body=dual,
        consts=(*[Const()] * len(closed_over), *loop.consts, *each(loop.consts, active.consts)),
        carry=(*loop.carry, *tangents),
        xs=(*loop.xs, *each(loop.xs, active.xs)),
        ys=(*loop.ys, *each(loop.ys, active.ys)),
    )

    def map_operands(operands: Sequence[Any]) -> list:
        p, tangents = loop.split(operands)
        t_consts, t_carry, t_xs = parts(tangents, *(terms * sum(flags) for flags in active[:2]))
        given = [*closed_over, *p.consts, *t_consts]
        return [*p.cond_consts, *given, *p.init, *t_carry, *p.xs, *t_xs]

    def map_results(results: Sequence[Any], _: object = ()) -> list:
        counts = loop.carry_count, terms * sum(active.carry), loop.ys_count
        carry, t_carry, ys, t_ys = parts(results, *counts)
        return [*carry, *ys, *t_carry, *t_ys]

    return Rewritten(new, map_operands, map_results)


def _dual_cond(loop: Loop, cond: _jax.Jaxpr, tangents: Sequence[Any]) -> _jax.Jaxpr:
    """Return the predicate over values and tangents, which reads the values alone."""
    predicate, used = _jax.call_jaxpr(cond), loop.cond_const_count + loop.carry_count
    of_values = lambda *a: predicate(*a[:used])
    return _jax.trace_closed(of_values, [*cond.in_avals, *tangents], "dual_cond")


def bind_dual(dual: Rewritten, operands: Sequence[Any]) -> list:
    """Return the results and tangents that a dual loop computes."""
    return dual.map_results(while_p.bind(*dual.map_operands(operands), loop=dual.loop))


def run_dual(
    loop: Loop, primals: Sequence[Any], tangents: Sequence[Any], active: Active, batch: int | None
) -> list:
    """Return the active outputs' tangents, which the dual loop computes.

    If there is a `batch`, only the tangents have that axis, and it comes first.
    """
    dual = dual_loop(loop, active)

    def run(*tangents: jax.Array) -> list:
        return bind_dual(dual, [*primals, *tangents])[loop.primal_counts[1] :]

    return run(*tangents) if batch is None else jax.vmap(run)(*tangents)


def replace_active(
    loop: Loop, primals: Sequence[Any], active: Active, moving: Sequence[Any]
) -> list:
    """Return the operands with other values for the active inputs."""
    count = loop.cond_const_count
    return [*primals[:count], *spread(moving, active.inputs, primals[count:])]


def active_inputs(loop: Loop, primals: Sequence[Any], active: Active) -> list:
    return kept(primals[loop.cond_const_count : loop.operand_count], active.inputs)


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
    outs = bind_dual(new, [*primals, *moving])
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

    return open_dual(loop, active, _trace_closed, order, push)


def _terms(series: Any, aval: _jax.ShapedArray, order: int) -> list:
    return [_jax.zeros(aval)] * order if series is None else [_as(term, aval) for term in series]


def _as(value: Any, aval: _jax.ShapedArray) -> Any:
    return _jax.weak_as(_jax.as_type(_jax.as_array(value), aval), aval)
