"""Which leaves of a loop have tangents, and which cotangents reach an input.

One pair of functions that every rule uses, so that integer leaves, leaves that nothing
differentiable enters and symbolic zeros cost nothing, and a cotangent that nobody needs never
enters the body: no cotangent is not a cotangent of zeros, of which rules may make anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from loopkit import _jax
from loopkit._engine.loop import Active, Loop, Operands, kept, parts, spread


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
            _, out = _jax.jvp_jaxpr(loop.body, [*consts, *flags, *xs])
            new, ys = parts(out, loop.carry_count)
            new = [a or b for a, b in zip(flags, new, strict=True)]
            if new == flags:
                return Active(tuple(consts), tuple(flags), tuple(xs), tuple(ys))
            flags = new

    return loop.derived(key, fixed_point)


def backward_activity(
    loop: Loop, active: Active, carry: Sequence[bool], ys: Sequence[bool]
) -> Active:
    """The part of `active` whose tangents reach one of the outputs with a cotangent.

    Not what the outputs depend on: a value that a step only compares with has no cotangent, which
    is not a cotangent of zeros.
    """
    ys = tuple(a and b for a, b in zip(active.ys, ys, strict=True))
    live = [a and b for a, b in zip(active.carry, carry, strict=True)]

    def fixed_point() -> Active:
        flags, none = list(live), [False] * len(active.inputs)
        step, moved = _jax.jvp_jaxpr(loop.body, active.inputs)
        primal = [False] * len(moved)
        while True:
            wanted = [*primal, *kept([*flags, *ys], moved)]
            used = _jax.used_inputs(step, wanted)
            reaching = spread(used[len(none) :], active.inputs, none)
            consts, new, xs = parts(reaching, loop.const_count, loop.carry_count)
            new = [a or b for a, b in zip(flags, new, strict=True)]
            if new == flags:
                return Active(tuple(consts), tuple(flags), tuple(xs), ys)
            flags = new

    return loop.derived(("backward activity", active, tuple(live), ys), fixed_point)


def moving_activity(loop: Loop, nonzero: Operands) -> Active:
    """The leaves with a tangent, as far as they reach an output."""
    active = forward_activity(loop, nonzero)
    return backward_activity(loop, active, active.carry, active.ys)


def linear_activity(loop: Loop, active: Active, nonzero: Sequence[bool]) -> Active:
    """The part of `active` that the tangents of some of its inputs reach, and the outputs from it.

    `nonzero` has a flag for each active input.
    """
    flags = spread(nonzero, active.inputs, [False] * len(active.inputs))
    moving = forward_activity(loop, Operands([], *parts(flags, loop.const_count, loop.carry_count)))
    return backward_activity(loop, moving, active.carry, active.ys)


def cotangent_activity(loop: Loop, active: Active, nonzero: Sequence[bool]) -> Active:
    """The part of `active` that reaches some of its outputs; a flag for each active output."""
    flags = spread(nonzero, active.outputs, [False] * len(active.outputs))
    return backward_activity(loop, active, *parts(flags, loop.carry_count))


def either(a: Active, b: Active) -> Active:
    return Active(
        *(tuple(x or y for x, y in zip(*pair, strict=True)) for pair in zip(a, b, strict=True))
    )
