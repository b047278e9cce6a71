"""Undo writes in the backward pass, so that checkpoints need no copies of buffers.

In the forward pass, each write logs its place and the value that it overwrites. The log is as large
as what is written, not as the buffer. The backward pass plays the log in reverse, so that the
buffer is as it was before any step that is replayed. If a row is provably written once, its old
value is not logged: the initial buffer has it. The place is not logged if a counter determines it.
An inner loop that may stop early logs where its rows begin and end.

All this applies to buffers that a step reads and writes. A log needs a bound on the steps. If an
inner loop may stop early, it must write each row once. Other buffers are saved like any carry.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from loopkit import _jax
from loopkit._buffers.slices import in_order, read, read_p, write
from loopkit._engine.facts.write_sites import Inner, Sites, Span, Write, find_writes, merged
from loopkit._engine.lanes.batched_loop import in_row, places_at
from loopkit._engine.loop import Loop, Operands, Output, kept, parts
from loopkit._engine.primitives import while_p
from loopkit._engine.steps import read_rows, repeat, repeat_backwards, row_of
from loopkit._jaxprs import equations
from loopkit._jaxprs.dataflow import interpret

largest_p = _jax.declare("loopkit_largest")
"""The maximum of integers over all lanes, so that a loop of as many steps has one predicate."""


@dataclass(frozen=True, eq=False)
class Undo:
    """How to undo the writes to the buffers of a loop. Instances are compared by identity."""

    leaves: tuple[bool, ...]
    """Which carry leaves are buffers that are undone instead of saved."""
    counted: tuple[bool, ...]
    """Which carry leaves are counters that say where a step wrote."""
    log_types: list[_jax.ShapedArray]
    """The types of what one step logs."""
    forward: _jax.Jaxpr
    """(consts, carry, x) -> carry, y, log"""
    back: _jax.Jaxpr
    """(initial buffers, counters before a step, buffers after it, its log) -> buffers before it"""
    batched: tuple[bool, ...] = ()
    """Which parts of the log have the new axis, if `batch_undo` made this."""

    def logged(self, loop: Loop) -> Loop:
        """Return the loop with its log after the ys. The loop must have a bound."""
        return loop.derived(("logged", self), lambda: with_log(loop, self.forward))

    def rewound(
        self,
        loop: Loop,
        init: list,
        log: Sequence[Any],
        counts: Callable[[Any], list],
        first: _jax.Whole,
        count: _jax.Whole,
        buffers: list,
    ) -> list:
        """Return the buffers before step `first`, from those at most `count` steps later.

        `log` has a row for each step of the loop that has run. `counts` returns the counters before
        a step.
        """
        initial = kept(init, self.leaves)

        def back(k: jax.Array, buffers: list) -> list:
            row = read_rows(log, row_of(loop, first + k))
            at = kept(counts(first + k), self.counted)
            return list(_jax.call_jaxpr(self.back)(*initial, *at, *buffers, *row))

        return repeat_backwards(count, back, buffers)


def with_log(loop: Loop, body: _jax.Jaxpr) -> Loop:
    """Return the loop with a body that returns a log after its ys, stacked along leading axes."""
    count = len(body.out_avals) - len(loop.body.out_avals)
    return loop.replace(body=body, ys=(*loop.ys, *[Output(log=True)] * count))


def find_undo(loop: Loop, saved: Sequence[bool]) -> Undo | None:
    """Return how to undo buffers among the `saved` carry leaves; None if none can be undone."""
    sites, leaves = {}, []
    for leaf, (is_buffer, keep) in enumerate(zip(loop.is_buffer, saved, strict=True)):
        found = find_writes(loop, leaf) if is_buffer and keep else None
        if found and loop.length is None and any(map(_log_size, found.values())):
            found = None  # a log would have no bound
        leaves.append(found is not None)
        sites = merged(sites, found or {})
    if not any(leaves):
        return None
    flags, logging = tuple(leaves), _logged(loop.body, sites)
    log_types = list(logging.out_avals[len(loop.body.out_avals) :])
    numbers = [i for i, f in enumerate(flags) if f]
    told = {i for site in sites.values() if isinstance(site, Write) for i in site.index_counters}
    counted = tuple(i in told for i in range(loop.carry_count))

    def back(*values: jax.Array) -> list:
        initial, at, buffers, log = parts(values, len(numbers), len(told), len(numbers))
        state = dict(zip(numbers, buffers, strict=True))
        first = dict(zip(numbers, initial, strict=True))
        counts = dict(zip(sorted(told), at, strict=True))
        state = _undone(sites, state, first, counts, log)
        return [state[i] for i in numbers]

    types = kept(loop.carry_types, flags)
    inputs = [*types, *kept(loop.carry_types, counted), *types, *log_types]
    undoing = _jax.trace_closed(back, inputs, "loop_step_undone")
    return Undo(flags, counted, log_types, logging, undoing)


def _logged(body: _jax.Jaxpr, sites: Sites) -> _jax.Jaxpr:
    """Return a step that returns its log after its results."""
    step = lambda *values: _logging(_jax.open_jaxpr(body), values, sites)
    return _jax.trace_closed(step, body.in_avals, "loop_step_logged")


def _logging(j: _jax.OpenJaxpr, values: Sequence[Any], sites: Sites) -> list:
    """Return the results of a jaxpr, then the log of its writes."""
    log: list = []
    reads: dict[Any, tuple] = {}
    numbers = itertools.count()

    def rule(eqn: _jax.Equation, ins: list) -> list:
        site = sites.get(next(numbers))
        if isinstance(site, Write) and site.starts is None:
            log.append(ins[2])
            if not site.fresh:
                starts, window, old = reads.get(eqn.invars[0], (None, None, None))
                if starts is not ins[2] or window != site.window:
                    old, ins[0] = read(ins[0], ins[2], site.window)
                    old, ins[1] = in_order(old, ins[1], ins[2], site.window)
                log.append(old)
        elif isinstance(site, Inner):
            if not site.sites:
                outs = _jax.bind_equation(eqn, ins)
            elif site.loop is None:
                outs = _logging(*equations.called(eqn, ins), site.sites)
            else:
                loop = with_log(site.loop, _logged(site.loop.body, site.sites))
                outs = while_p.bind(*ins, loop=loop)
            outs, more = parts(outs, len(eqn.outvars))
            log.extend(more)
            for span in site.spans:
                log.extend([ins[span.before], outs[span.after]])
            return outs
        outs = _jax.bind_equation(eqn, ins)
        if eqn.primitive is read_p and eqn.params["value"]:
            # The next write may be to the same place, and then need not read it again.
            reads[eqn.outvars[-1]] = (ins[1], eqn.params["window"], outs[0])
        return outs

    return [*interpret(j, values, rule), *log]


def _log_size(site: Any) -> int:
    if isinstance(site, Write):
        return 0 if site.starts is not None else 1 if site.fresh else 2
    return sum(map(_log_size, site.sites.values())) + 2 * len(site.spans)


def _undone(sites: Sites, state: dict, initial: dict, counts: dict, log: Sequence[Any]) -> dict:
    """Return the buffers before the equations at the sites, which it undoes from last to first."""
    order = sorted(sites)
    *logs, _ = parts(log, *[_log_size(sites[at]) for at in order])
    for at, rows in reversed(list(zip(order, logs, strict=True))):
        site = sites[at]
        if isinstance(site, Inner):
            inside, *ends = parts(rows, *[len(rows) - 2 * len(site.spans)], *[2] * len(site.spans))
            state = _undone_inside(site, state, initial, inside)
            for span, (first, last) in zip(site.spans, ends, strict=False):
                state = _restored(span, state, initial, first, last)
            continue
        if site.starts is None:
            starts = rows[0]
        else:
            (starts,) = _jax.call_jaxpr(site.starts)(*(counts[i] for i in site.index_counters))
        old = read(initial[site.leaf], starts, site.window)[0] if site.fresh else rows[1]
        state = {**state, site.leaf: write(state[site.leaf], old, starts, site.window)}
    return state


def _undone_inside(site: Inner, state: dict, initial: dict, log: Sequence[Any]) -> dict:
    loop = site.loop
    if loop is None:
        return _undone(site.sites, state, initial, {}, log)
    if not site.sites:
        return state

    def back(step: _jax.Whole, state: dict) -> dict:
        return _undone(site.sites, state, initial, {}, read_rows(log, row_of(loop, step)))

    return repeat_backwards(loop.length, back, state)


def _restored(span: Span, state: dict, initial: dict, first: jax.Array, last: jax.Array) -> dict:
    """Return the buffers without the rows of a span. Rows after it are not written yet."""

    def back(k: jax.Array, buffer: jax.Array) -> Any:
        (starts,) = _jax.call_jaxpr(span.starts)(first + k.astype(first.dtype))
        old, _ = read(initial[span.leaf], starts, span.window)
        return write(buffer, old, starts, span.window)

    (count,) = largest_p.bind((last - first).astype(jnp.int32))
    return {**state, span.leaf: repeat(count, back, state[span.leaf])}


def batch_undo(
    undo: Undo, loop: Loop, axis: _jax.AxisData, places: Operands, ys: Sequence[int | None]
) -> Undo:
    """Return the vmap of an undo of `loop`. The axes are those of the batched loop."""
    consts, carry = places.consts, places.init
    slices, rows = in_row(places.xs, loop.x_axes), in_row(ys, loop.y_axes)
    outs = [*carry, *rows, *["free"] * len(undo.log_types)]
    forward, flags = _jax.batch_jaxpr(undo.forward, axis, [*consts, *carry, *slices], outs)
    results = len(carry) + len(rows)
    log = flags[results:]
    buffers, counts = kept(carry, undo.leaves), kept(carry, undo.counted)
    ins = [*buffers, *counts, *buffers, *places_at(log, 0)]
    back, _ = _jax.batch_jaxpr(undo.back, axis, ins, buffers)
    log_types = list(forward.out_avals[results:])
    return Undo(undo.leaves, undo.counted, log_types, forward, back, tuple(log))


_jax.define(
    largest_p,
    lambda v: [v.max(initial=0)],
    lambda v: ([_jax.type_like(_jax.ShapedArray((), v.dtype), [v])], set()),
)
_jax.register_batching(largest_p, lambda axis, args, dims: (largest_p.bind(*args), [None]))
