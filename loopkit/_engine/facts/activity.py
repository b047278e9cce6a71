"""Which leaves of a loop have tangents, and which cotangents reach an input.

Every differentiation rule uses these functions. So integer leaves, leaves that depend on nothing
differentiable and symbolic zeros cost nothing, and a cotangent that nobody needs never enters the
body. A missing cotangent is not a cotangent of zeros, which custom rules may turn into anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loopkit import _jax
from loopkit._engine.leaves import spread
from loopkit._engine.loop import Active, Loop, Operands, kept, parts
from loopkit._jaxprs.dataflow import fixed_point


def forward_activity(
    loop: Loop, nonzero: Operands, moved_outputs: Callable = _jax.moved_outputs
) -> Active:
    """Return the leaves with a tangent if the operands flagged in `nonzero` have one.

    `moved_outputs(jaxpr, moving)` marks the outputs with a tangent, for marked inputs.

    A carry leaf is active if its initial value is active, or if a step makes it active: the flags
    are the least fixed point.
    """
    types = loop.const_types, loop.carry_types, loop.x_types
    consts, carry, xs = (
        tuple(n and _jax.is_differentiable(t) for n, t in zip(*pair, strict=True))
        for pair in zip(nonzero[1:], types, strict=True)
    )

    def moved(flags: list[bool]) -> list[list[bool]]:
        return parts(moved_outputs(loop.body, [*consts, *flags, *xs]), loop.carry_count)

    def found() -> Active:
        flags, ys = fixed_point(carry, moved)
        return Active(consts, tuple(flags), xs, tuple(ys))

    return loop.derived_of_step(("forward activity", moved_outputs, consts, carry, xs), found)


def backward_activity(
    loop: Loop, active: Active, carry: Sequence[bool], ys: Sequence[bool]
) -> Active:
    """Return the part of `active` whose tangents reach one of the outputs with a cotangent.

    The outputs may depend on more: a value that a step only compares with has no cotangent, which
    is not the same as a cotangent of zeros.
    """
    ys = tuple(a and b for a, b in zip(active.ys, ys, strict=True))
    live = tuple(a and b for a, b in zip(active.carry, carry, strict=True))

    def found() -> Active:
        none = [False] * len(active.inputs)
        step, moved = _jax.jvp_jaxpr(loop.body, active.inputs)

        def reaching(flags: list[bool]) -> list[list[bool]]:
            used = _jax.used_inputs(step, [*[False] * len(moved), *kept([*flags, *ys], moved)])
            inputs = spread(used[len(none) :], active.inputs, none)
            consts, carry, xs = parts(inputs, loop.const_count, loop.carry_count)
            return [carry, consts, xs]

        flags, consts, xs = fixed_point(live, reaching)
        return Active(tuple(consts), tuple(flags), tuple(xs), ys)

    return loop.derived_of_step(("backward activity", active, live, ys), found)


def moving_activity(loop: Loop, nonzero: Operands) -> Active:
    """Return the leaves with a tangent that reaches an output."""
    active = forward_activity(loop, nonzero)
    return backward_activity(loop, active, active.carry, active.ys)


def whole_activity(loop: Loop) -> Active:
    """Return the leaves with a tangent that reaches an output, if each operand that may has one."""
    types = [*loop.const_types, *loop.body.in_avals[loop.const_count :]]
    flags = [False] * loop.cond_const_count + list(map(_jax.is_differentiable, types))
    return moving_activity(loop, loop.split(flags)[0])


def linear_activity(loop: Loop, active: Active, nonzero: Sequence[bool]) -> Active:
    """Return the part of `active` that tangents of some inputs reach, and that reaches outputs.

    `nonzero` has a flag for each active input.
    """
    flags = spread(nonzero, active.inputs, [False] * len(active.inputs))
    moving = forward_activity(loop, Operands([], *parts(flags, loop.const_count, loop.carry_count)))
    return backward_activity(loop, moving, active.carry, active.ys)


def cotangent_activity(loop: Loop, active: Active, nonzero: Sequence[bool]) -> Active:
    """Return the part of `active` that reaches the active outputs flagged in `nonzero`."""
    flags = spread(nonzero, active.outputs, [False] * len(active.outputs))
    return backward_activity(loop, active, *parts(flags, loop.carry_count))


def either(a: Active, b: Active) -> Active:
    return Active(
        *(tuple(x or y for x, y in zip(*pair, strict=True)) for pair in zip(a, b, strict=True))
    )
