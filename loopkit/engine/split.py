"""The derivative of one step, split in two: what is stored going forward, what is done going back.

`jax.vjp` of the body is traced once and cut at its residuals, the values that the backward half
reads. A residual that depends on constants alone is computed once, before the sweep ("hoisted"); one
that is a slice of xs is read again; only the others are stored.

    hoist(consts)                                -> hoisted
    forward(consts, carry, x)                    -> carry, y, stored
    backward(consts, hoisted, x, stored, cts)    -> cotangents of the active consts, carry, x
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from loopkit import _jax
from loopkit._jax import Jaxpr, ShapedArray
from loopkit.engine.loop import Active, Loop, Operands, kept, parts, spread


@dataclass(frozen=True)
class Split:
    """The two halves of a step's derivative. See the module."""

    hoist: Jaxpr
    forward: Jaxpr
    backward: Jaxpr
    results: int
    """How many outputs of `forward` are carry or y."""
    stored_batched: tuple[bool, ...] = ()
    """For the split of a batched loop that was made from another split: which rows have the axis."""

    @property
    def stored_types(self) -> list[ShapedArray]:
        return list(self.forward.out_avals[self.results :])


def split_step(loop: Loop, active: Active) -> Split:
    """The halves of the derivative of the body in its active inputs and outputs."""
    return loop.derived(("split", active), lambda: _split(loop, active))


def _split(loop: Loop, active: Active) -> Split:
    body = loop.body
    in_types = list(body.in_avals)
    tree = None

    def vjp_residuals(*values: Any) -> list:
        nonlocal tree

        def differentiated(*moving: Any) -> tuple[list, list]:
            outs = _jax.call_jaxpr(body)(*spread(moving, active.inputs, values))
            return kept(outs, active.outputs), outs

        _, vjp, outs = jax.vjp(differentiated, *kept(values, active.inputs), has_aux=True)
        residuals, tree = jax.tree.flatten(vjp)
        return [*outs, *residuals]

    whole, closed_over = _jax.trace(vjp_residuals, in_types, "loop_step")
    assert not closed_over, "a body's jaxpr closes over nothing"
    n, c, total = len(body.out_avals), loop.const_count, len(whole.out_avals)
    slices = c + loop.carry_count
    residual_types = list(whole.out_avals[n:])

    def vjp_apply(*values: Any) -> list:
        residuals, cts = parts(values, len(residual_types))
        out = jax.tree.unflatten(tree, residuals)(cts)
        return list(out)

    ct_types = [t.to_tangent_aval() for t in kept(body.out_avals, active.outputs)]
    apply, closed_over = _jax.trace(vjp_apply, [*residual_types, *ct_types], "loop_step_transpose")
    assert not closed_over, "a transposed body closes over nothing"

    moving = [False] * c + [True] * (len(in_types) - c)
    varies = _jax.outputs_depending(whole, moving)
    source = _jax.forwarded(whole)
    first = _jax.distinct_outputs(whole)
    is_x = [s is not None and s >= slices for s in source]
    hoisted = [i for i in range(n, total) if not varies[i]]
    groups: dict[int, int] = {}
    for i in range(n, total):
        if varies[i] and not is_x[i]:
            groups.setdefault(first[i], i)
    stored = sorted(groups.values())
    everything = [True] * len(in_types)
    hoist_part, _ = _jax.dce(whole, [i in set(hoisted) for i in range(total)], everything)
    forward, _ = _jax.dce(whole, [i < n or i in set(stored) for i in range(total)], everything)

    def hoist(*consts: Any) -> list:
        # Nothing hoisted depends on the carry or the slices; any value does.
        rest = [_jax.blank(t) for t in in_types[c:]]
        return list(_jax.call_jaxpr(hoist_part)(*consts, *rest)) if hoisted else []

    hoist_jaxpr, _ = _jax.trace(hoist, in_types[:c], "loop_constants")

    def backward(*values: Any) -> list:
        consts, constant, x, rows, cts = parts(
            values, c, len(hoisted), loop.xs_count, len(stored)
        )
        constant = dict(zip(hoisted, constant, strict=True))
        row = {first[i]: r for i, r in zip(stored, rows, strict=True)}
        residuals = []
        for i in range(n, total):
            if i in constant:
                residuals.append(constant[i])
            elif is_x[i]:
                residuals.append(x[source[i] - slices])
            else:
                residuals.append(row[first[i]])
        return _jax.call_jaxpr(apply)(*residuals, *cts)

    types = [
        *in_types[:c],
        *(whole.out_avals[i] for i in hoisted),
        *loop.x_types,
        *(whole.out_avals[i] for i in stored),
        *ct_types,
    ]
    backward_jaxpr, _ = _jax.trace(backward, types, "loop_step_transpose")
    return Split(hoist_jaxpr, forward, backward_jaxpr, n)



def batch_split(split: Split, loop: Loop, axis: Any, places: Operands, active: Active) -> Split:
    """vmap of a split, residual for residual. Every active input has the new axis."""
    slices = [None if a is None else a - 1 for a in places.xs]
    consts = places.consts
    hoist, hoisted = _jax.batch_jaxpr(
        split.hoist, axis, consts, ["free"] * len(split.hoist.out_avals)
    )
    lane = next((a for a in places.init if a is not None), len(loop.lanes))
    ys = [lane if a else "free" for a in active.ys]
    carry = [*places.init]
    stored_count = len(split.stored_types)
    forward, flags = _jax.batch_jaxpr(
        split.forward,
        axis,
        [*consts, *carry, *slices],
        [*carry, *ys, *["free"] * stored_count],
    )
    stored = flags[split.results :]
    cts = [*kept(carry, active.carry), *[lane for a in active.ys if a]]
    outs = [*kept(consts, active.consts), *kept(carry, active.carry), *kept(slices, active.xs)]
    backward, _ = _jax.batch_jaxpr(
        split.backward,
        axis,
        [*consts, *_first(hoisted), *slices, *_first(stored), *cts],
        outs,
    )
    return Split(hoist, forward, backward, split.results, tuple(stored))


def _first(flags: Sequence[bool]) -> list[int | None]:
    return [0 if f else None for f in flags]
