"""A step cut at its inner loops, and the flat loop that this becomes.

    while any lane goes on:
        lanes between two steps        run the part before the inner loop, and enter it
        lanes in the inner loop        take a few of its steps
        lanes that have finished it    run the part after it

Each of the three is a loop itself, and takes no step in lanes that are elsewhere. So derivatives
are evaluated only at values that a lane reaches, and parts that no lane needs do not run. Several
inner loops follow each other in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from loopkit import _jax
from loopkit._buffers.slices import write
from loopkit._buffers.window import Window
from loopkit._engine.lanes.predicates import count_type, counted, gated
from loopkit._engine.lanes.vain_steps import bound_if
from loopkit._engine.loop import CarryLeaf, Const, Loop, Rewritten, parts
from loopkit._engine.primitives import while_p
from loopkit._engine.steps import read_rows, row_of
from loopkit._jaxprs import equations
from loopkit._jaxprs.cost import equation_nanoseconds, nanoseconds
from loopkit._plans.budget import stores_every_step


def steps_nanoseconds(eqns: Sequence[Any]) -> float:
    return sum(map(equation_nanoseconds, eqns))


@dataclass(frozen=True, eq=False)
class Inside:
    """An inner loop, a few steps at a time."""

    eqn: Any
    loop: Loop
    """The loop of a few steps. If the inner loop has a bound, the last carry leaf counts steps."""
    most: int | None
    """The most times that a lane runs the loop of a few steps; None if that is not known."""

    @classmethod
    def of(cls, eqn: _jax.Equation, few: int) -> Inside:
        inner: Loop = eqn.params["loop"]
        if inner.masks_itself:
            return cls(eqn, inner, None)
        if inner.length is None:
            return cls(eqn, gated(inner).replace(length=few), None)
        counts = gated(counted(inner)).replace(length=min(few, inner.length))
        return cls(eqn, counts, max(1, math.ceil(inner.length / few)))

    @property
    def begins(self) -> list:
        """The initial carry of the inner loop, as variables of the step, and a count of zero."""
        count, bounded = len(self.eqn.outvars), self.most is not None
        zero = _jax.Literal(np.int32(0), count_type())
        return [*self.eqn.invars[len(self.eqn.invars) - count :], *[zero] * bounded]

    def results(self, carry: Sequence[Any]) -> dict:
        return dict(zip(self.eqn.outvars, carry[: len(self.eqn.outvars)], strict=True))

    def goes_on(self, env: dict, here: jax.Array, carry: Sequence[Any]) -> Any:
        """Return whether a lane that is here has steps left to take."""
        given, _ = self.loop.split(self._operands(env, here, carry))
        assert self.loop.cond is not None, "it ends by itself"
        return _jax.call_jaxpr(self.loop.cond)(*given.cond_consts, *carry)[0]

    def some_steps(self, env: dict, here: jax.Array, carry: Sequence[Any]) -> list:
        if self.loop.masks_itself:
            # A step of this loop leaves lanes that are elsewhere as they are.
            given, _ = self.loop.split(self._operands(env, here, carry))
            return _jax.call_jaxpr(self.loop.body)(*given.consts, *carry)
        if (flag := self.loop.flag) is None:
            return while_p.bind(*self._operands(env, here, carry), loop=self.loop)
        # Lanes that are elsewhere write nothing into buffers.
        held = list(carry)
        held[flag] = self.goes_on(env, here, carry)
        new = while_p.bind(*self._operands(env, here, held), loop=self.loop)
        new[flag] = jnp.where(held[flag], new[flag], carry[flag])
        return new

    def _operands(self, env: dict, here: jax.Array, carry: Sequence[Any]) -> list:
        names = self.eqn.invars[: len(self.eqn.invars) - len(self.eqn.outvars)]
        gate = [] if self.loop.masks_itself else [here]
        return [*gate, *equations.run((), env, names), *carry]


class State(NamedTuple):
    """Where a lane is in the step, and its values."""

    go: Any
    """Whether the lane takes another step."""
    steps: Any
    """The number of steps of the outer loop that it has taken."""
    at: Any
    """The number of the inner loop that it is in, from 1; 0 between two steps."""
    carry: list
    made: list[list]
    """The values of each piece of the step that are used after the piece."""
    inner: list[list]
    """The carry of each inner loop."""
    ys: list
    """The ys, as whole arrays."""


@dataclass(frozen=True, eq=False)
class Nest:
    """A loop whose step is cut at its inner loops."""

    outer: Loop
    pieces: list[list]
    """The equations between the cuts: one list more than there are inner loops."""
    inside: list[Inside]
    made: list[list]
    """For each piece, its variables that are used after the piece."""

    @property
    def is_worth_it(self) -> bool:
        """Whether inner steps cost so much that waiting for them matters."""
        around = sum(map(steps_nanoseconds, self.pieces))
        return 2 * sum(nanoseconds(i.eqn.params["loop"].body) for i in self.inside) >= around

    def flat(self) -> Rewritten:
        """Return the flat loop, which replaces the outer loop."""
        return Rewritten(self._loop(), self._into, self._back)

    @property
    def types(self) -> State:
        """The types of the state."""
        loop, made = self.outer, [[_strong(v.aval) for v in of] for of in self.made]
        bit = _jax.ShapedArray((), jnp.dtype(bool))
        inner = [list(map(_strong, i.loop.carry_types)) for i in self.inside]
        carry, ys = list(map(_strong, loop.carry_types)), list(map(_strong, loop.ys_types))
        return State(bit, count_type(), count_type(), carry, made, inner, ys)

    def _into(self, operands: Sequence[Any]) -> list:
        """Return the operands of the flat loop, from those of the outer loop."""
        given, types = self.outer.split(operands)[0], self.types
        carry = [_jax.as_type(v, t) for v, t in zip(given.init, types.carry, strict=True)]
        state = jax.tree.map(_jax.zeros, types)._replace(carry=carry)
        state = state._replace(go=self._goes_on(given.cond_consts, state))
        return [*given.cond_consts, *given.consts, *given.xs, *jax.tree.leaves(state)]

    def _back(self, results: Sequence[Any], _: object = ()) -> list:
        """Return the results of the outer loop, from those of the flat loop."""
        state = jax.tree.structure(self.types).unflatten(results)
        return list(map(_jax.weak_as, [*state.carry, *state.ys], self.outer.result_types))

    def _loop(self) -> Loop:
        """Make the flat loop."""
        old, types, bound = self.outer, jax.tree.leaves(self.types), self._bound()
        consts = [*old.cond_types, *old.const_types, *old.xs_types]
        count, ys = len(types) - len(old.ys), CarryLeaf("ys", buffer=True)
        named = [CarryLeaf(leaf.name) for leaf in old.carry]
        records = CarryLeaf("go", flag=bool(old.ys)), CarryLeaf(), CarryLeaf(), *named
        records += (CarryLeaf(),) * (count - len(records)) + (ys,) * len(old.ys)
        unknown = stores_every_step(old.checkpoints) and bound is None
        return old.replace(
            cond=_jax.trace_closed(lambda go, *_: [go], types, "flattened_cond"),
            body=_jax.trace_closed(self._advance, [*consts, *types], "flattened_body"),
            cond_const_count=0,
            consts=(Const(),) * len(consts),
            carry=records,
            xs=(),
            ys=(),
            length=bound,
            # The number of steps is not known, so "all" would need unbounded memory.
            checkpoints=None if unknown else old.checkpoints,
            reverse=False,
            unroll=1,
            lane_policy="wait",
            masks_itself=True,
        )

    def _bound(self) -> int | None:
        """Return the most steps of the flat loop, if the bounds of all loops are known."""
        most = [inside.most for inside in self.inside if inside.most is not None]
        if self.outer.length is None or len(most) < len(self.inside):
            return None
        return self.outer.length * (sum(most) - len(most) + 1)

    def _goes_on(self, cond_consts: Sequence[Any], state: State) -> Any:
        """Return whether the outer loop takes another step."""
        loop, go = self.outer, jnp.bool_(True)
        if loop.cond is not None:
            go = _jax.call_jaxpr(loop.cond)(*cond_consts, *state.carry)[0]
        return go if loop.length is None else go & (state.steps < loop.length)

    def _advance(self, *values: jax.Array) -> list:
        """Run the next part in each lane, and return the new state."""
        loop, step = self.outer, _jax.open_jaxpr(self.outer.body)
        counts = loop.cond_const_count, loop.const_count, loop.xs_count
        cond_consts, consts, xs, leaves = parts(values, *counts)
        state: State = jax.tree.structure(self.types).unflatten(leaves)
        row = row_of(loop, state.steps)
        x = read_rows(xs, row, loop.x_axes) if xs else []
        env = dict(zip(step.invars, [*consts, *state.carry, *x], strict=True))
        for names, values_ in zip(self.made, state.made, strict=True):
            env |= zip(names, values_, strict=True)
        for inside, carry in zip(self.inside, state.inner, strict=True):
            env |= inside.results(carry)
        inner, at, here = list(state.inner), state.at, state.go & (state.at == 0)
        for number, inside in enumerate(self.inside):
            inner[number] = self._piece(number, env, here, inside.begins, inner[number])
            at = jnp.where(here, number + 1, at)
            here = state.go & (at == number + 1)
            inner[number] = inside.some_steps(env, here, inner[number])
            env |= inside.results(inner[number])
            here = here & ~inside.goes_on(env, here, inner[number])
        y = list(map(_jax.zeros, map(_strong, loop.y_types)))
        ends = self._piece(len(inner), env, here, step.outvars, [*state.carry, *y])
        carry, y = parts(ends, loop.carry_count)
        triples = zip(state.ys, y, loop.y_axes, strict=True)
        new = State(
            go=state.go,
            steps=state.steps + here.astype(jnp.int32),
            at=jnp.where(here, 0, at),
            carry=carry,
            made=[[env[v] for v in names] for names in self.made],
            inner=inner,
            ys=[_with_row(rows, v, row, axis, here) for rows, v, axis in triples],
        )
        go = (new.at != 0) | self._goes_on(cond_consts, new)
        return jax.tree.leaves(new._replace(go=go))

    def _piece(
        self, number: int, env: dict, here: jax.Array, ends: Sequence[Any], old: Sequence[Any]
    ) -> list:
        """Run a piece in lanes that are here, and return its results; other lanes keep `old`.

        Values that are used after the piece are put into `env`.
        """
        eqns, made = self.pieces[number], self.made[number]
        inside = {v for eqn in eqns for v in eqn.outvars}
        wanted = _jax.variables((*made, *ends))
        read = [v for eqn in eqns for v in equations.variables(eqn)] + wanted
        names = list(dict.fromkeys(v for v in read if v not in inside))
        first = [here, *(env[v] for v in made), *old]
        types = list(map(_strong, map(jax.typeof, first)))

        def body(*values: jax.Array) -> list:
            known = dict(zip(names, values, strict=False))
            outs = equations.run(eqns, known, [*made, *ends], bound_if(values[len(names)]))
            return [jnp.bool_(False), *map(_jax.as_type, outs, types[1:])]

        consts = [env[v] for v in names]
        loop = Loop(
            cond=_jax.trace_closed(lambda go, *_: [go], types, "piece_cond"),
            body=_jax.trace_closed(body, [*map(jax.typeof, consts), *types], "piece"),
            cond_const_count=0,
            consts=(Const(),) * len(names),
            carry=(CarryLeaf(),) * len(first),
            xs=(),
            ys=(),
            length=1,
            device=self.outer.device,
            name=self.outer.name,
            replaced_by=self.outer.replaced_by,
            lane_policy="wait",
        )
        results = while_p.bind(*consts, *map(_jax.as_type, first, types), loop=loop)
        env |= zip(made, results[1:], strict=False)
        return results[1 + len(made) :]


def _strong(aval: _jax.ShapedArray) -> Any:
    return aval.update(weak_type=False) if aval.weak_type else aval


def _with_row(rows: jax.Array, value: jax.Array, row: jax.Array, axis: int, here: jax.Array) -> Any:
    """Return rows with `value` written as one of them, in lanes that are here."""
    ones = (1,) * rows.ndim
    sizes = tuple(1 if a == axis else n for a, n in enumerate(rows.shape))
    window = Window((axis,), (0,) * rows.ndim, sizes, "promise_in_bounds", wrap=False)
    value = jnp.expand_dims(value, axis)
    return write(rows, value, row[None], window, here.reshape(ones))
