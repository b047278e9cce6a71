"""Tangents of a sweep's results, in the same pass: `forward` and `pullback` in forward mode.

JAX differentiates the sweep itself. Saved values have tangents too, which the backward sweep reads.
So forward over reverse takes as many steps as a gradient, each with its tangents.

If tangents are unknown, or if the result is differentiated again, the primitive's rule computes
them with `pushforward`, `pullback` and `hessian`, which do not use tangents of saved values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import or_
from typing import Any, NamedTuple

import jax

from loopkit import _jax
from loopkit._engine.derivative.pieces import Reversal
from loopkit._engine.derivative.reversal import reversal
from loopkit._engine.facts.activity import forward_activity
from loopkit._engine.leaves import spread
from loopkit._engine.loop import Active, Loop, kept, parts
from loopkit._engine.sweeps import sweeps
from loopkit._jaxprs.dataflow import fixed_point


class Along(NamedTuple):
    """The tangents that a primitive takes after its operands, and returns after its results."""

    operands: tuple[bool, ...]
    """Which operands have a tangent."""
    results: tuple[bool, ...]
    """Which results have a tangent."""
    directions: int | None = None
    """The size of a leading axis that only the tangents have, if there is one."""

    def types(self, results: Sequence[_jax.ShapedArray]) -> list[_jax.ShapedArray]:
        """Return the types of the results, and of their tangents."""
        moving = [t.to_tangent_aval() for t in kept(results, self.results)]
        return [*results, *_jax.stack_types(moving, self.directions)]

    def apart(self, outs: Sequence[Any]) -> tuple[list, list]:
        """Return the results, and a tangent for each of them."""
        results, tangents = parts(outs, len(self.results))
        zeros = [_jax.float0_zero(jax.typeof(v)) for v in results]
        return results, spread(tangents, self.results, zeros)

    def evaluate(
        self, run: Callable[..., list], operands: Sequence[Any], still: Sequence[Any] = ()
    ) -> list:
        """Return the results of `run`, and their tangents.

        `still` holds further tangents, which are the same in all directions.
        """
        values, tangents = parts(operands, len(operands) - sum(self.operands) + len(still))

        def moved(*tangents: jax.Array) -> tuple[list, list]:
            moves = spread([*tangents, *still], self.operands, [None] * len(values))
            return _jax.jvp_in_moving(run, values, moves)

        return self._in_each_direction(moved, tangents)

    def by_others(
        self, rule: Callable[[list, list], tuple[list, list]], operands: Sequence[Any]
    ) -> list:
        """Return the results and tangents that a JVP rule computes."""
        values, tangents = parts(operands, len(self.operands))
        zeros = [_jax.float0_zero(jax.typeof(v)) for v in values]
        moved = lambda *tangents: rule(values, spread(tangents, self.operands, zeros))
        return self._in_each_direction(moved, tangents)

    def _in_each_direction(
        self, moved: Callable[..., tuple[list, list]], tangents: Sequence[Any]
    ) -> list:
        def one(*tangents: jax.Array) -> tuple[list, list]:
            outs, found = moved(*tangents)
            return list(outs), list(map(_jax.instantiate, kept(found, self.results)))

        if self.directions is not None:
            one = jax.vmap(one, out_axes=(None, 0))
        return [v for group in one(*tangents) for v in group]


def splits(_: Sequence[bool], along: Along | None = None, **__: object) -> int | None:
    """Return how many results have tangents beside them, if a primitive has any and so splits."""
    return None if along is None else len(along.results)


def without_tangents(eqn: _jax.Equation) -> Any:
    """Return the equation without its tangents."""
    params = {k: v for k, v in eqn.params.items() if k != "along"}
    operands, results = map(len, eqn.params["along"][:2])
    ends = eqn.invars[:operands], eqn.outvars[:results]
    return _jax.new_equation(eqn, eqn.primitive, *ends, params)


def dce_tangents(
    used: list[bool], eqn: _jax.Equation, dce: Callable[[list[bool], Any], tuple[list[bool], Any]]
) -> tuple[list[bool], Any]:
    """Remove tangents if none is used, and then what `dce(used, equation)` removes."""
    operands, results = map(len, eqn.params["along"][:2])
    if any(used[results:]):
        return [True] * len(eqn.invars), eqn
    needed, plain = dce(used[:results], without_tangents(eqn))
    return [*needed, *[False] * (len(eqn.invars) - operands)], plain


def moving(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[bool, ...]:
    """Return which values are differentiable, with tangents that are not symbolically zero."""
    pairs = zip(map(jax.typeof, values), _jax.nonzero(tangents), strict=True)
    return tuple(has and _jax.is_differentiable(t) for t, has in pairs)


def moved_by_forward(loop: Loop, layout: Active, operands: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return which results of `forward` have tangents if these operands do."""

    def found() -> tuple[bool, ...]:
        how, active = reversal(loop, layout), forward_activity(loop, loop.split(operands)[0])
        saved = [] if how.plan.keeps_all else kept(active.carry, how.slotted)
        if how.plan.stores_rows:
            of_step = _jax.jvp_jaxpr(how.split.forward, active.inputs)[1]
            saved += how.drop_counters(of_step[how.split.results :])
        if how.undo is not None:
            of_step = _jax.jvp_jaxpr(how.undo.forward, active.inputs)[1]
            saved += [*of_step[len(active.outputs) :], *kept(active.carry, how.undone)]
        return *active.outputs, *saved, False, False

    return loop.derived(("moved by forward", layout, operands), found)


def moved_by_pullback(loop: Loop, how: Reversal, operands: Sequence[bool]) -> list[bool]:
    """Return which cotangents have tangents if these operands of `pullback` do."""
    stacks = len(sweeps(how).stack_types)
    counts = loop.operand_count, stacks, len(how.log_types), sum(how.undone)
    values, rows, _, undone, rest = parts(operands, *counts)
    consts, carry, xs, _ = forward_activity(loop, loop.split(values)[0])
    slots, rows = parts(rows, 0 if how.plan.keeps_all else sum(how.slotted))
    stored = [False] * len(how.split.stored_types)
    if how.plan.stores_rows:
        stored = how.restore_counters(rows, [False] * len(carry))
    if not how.plan.keeps_all:
        moved = spread(undone, how.undone, spread(slots, how.slotted, carry))
        saved = kept(list(map(or_, moved, carry)), how.saved)
        again = _jax.jvp_jaxpr(how.forward, [*consts, *saved, *xs])[1][len(saved) :]
        stored = list(map(or_, stored, again))
    hoisted = _jax.jvp_jaxpr(how.split.hoist, consts)[1]
    of_step = [*consts, *hoisted, *xs, *stored]
    ct_carry, ct_ys = parts(rest[2:], sum(how.active.carry))

    def back(flowing: list[bool]) -> list[list[bool]]:
        out = _jax.jvp_jaxpr(how.backward, [*of_step, *flowing, *ct_ys])[1]
        return parts(out, len(flowing))

    found = fixed_point([*[False] * sum(how.active.consts), *ct_carry], back)
    return [flag for flags in found for flag in flags]
