"""Which leaves of a loop have tangents, and which cotangents reach an input.

One pair of functions that every rule uses, so that integer leaves, leaves that nothing
differentiable enters and symbolic zeros cost nothing, and a cotangent that nobody needs never
enters the body.
"""

from __future__ import annotations

from collections.abc import Sequence

from loopkit import _jax
from loopkit.engine.loop import Active, Loop, Operands, parts


def forward_activity(loop: Loop, nonzero: Operands) -> Active:
    """The leaves with a tangent, where those of `nonzero` have one at the start.

    A carry leaf is active if its initial value is, or if a step makes it so: the least fixed point.
    """
    differentiable = [
        [n and _jax.is_differentiable(t) for n, t in zip(flags, types, strict=True)]
        for flags, types in zip(
            nonzero[1:], (loop.const_types, loop.carry_types, loop.x_types), strict=True
        )
    ]
    consts, carry, xs = differentiable
    key = ("forward activity", tuple(consts), tuple(carry), tuple(xs))

    def fixed_point() -> Active:
        flags = list(carry)
        while True:
            out = _jax.jvp_activity(loop.body, [*consts, *flags, *xs])
            new, ys = parts(out, loop.carry_count)
            new = [a or b for a, b in zip(flags, new, strict=True)]
            if new == flags:
                return Active(tuple(consts), tuple(flags), tuple(xs), tuple(ys))
            flags = new

    return loop.derived(key, fixed_point)


def backward_activity(
    loop: Loop, active: Active, carry: Sequence[bool], ys: Sequence[bool]
) -> Active:
    """The part of `active` that reaches one of the outputs with a cotangent."""
    ys = tuple(a and b for a, b in zip(active.ys, ys, strict=True))
    live = [a and b for a, b in zip(active.carry, carry, strict=True)]
    while True:
        keep = [False] * len(loop.body.in_avals)
        _, used = _jax.dce(loop.body, [*live, *ys], keep)
        consts, reaching, xs = parts(used, loop.const_count, loop.carry_count)
        new = [l or (r and a) for l, r, a in zip(live, reaching, active.carry, strict=True)]
        if new == live:
            break
        live = new
    return Active(
        tuple(a and b for a, b in zip(active.consts, consts, strict=True)),
        tuple(live),
        tuple(a and b for a, b in zip(active.xs, xs, strict=True)),
        ys,
    )
