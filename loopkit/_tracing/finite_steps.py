"""Watch the steps of a loop for values that are not finite.

`watch` checks what the steps take, return and close over, and the rows of buffers that they read
and write.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import keystr, tree_leaves_with_path
from jaxtyping import PyTree

from loopkit import _jax
from loopkit._arguments import errors
from loopkit._arguments.failed_step import Watched
from loopkit._arguments.finite import WatchedLeaf, watch
from loopkit._buffers.slices import read_p, write_p
from loopkit._engine.loop import parts
from loopkit._jaxprs.dataflow import interpret

SLICES = "dynamic_slice", "gather"


class Given(NamedTuple):
    """The inputs of a step, as leaves."""

    consts: Sequence[Any]
    carry: Sequence[Any]
    x: Sequence[Any]


@dataclass(frozen=True)
class FiniteSteps:
    """How to watch the steps of a loop."""

    loop: Watched
    names: tuple[str, ...]
    """The names of the leaves of the carry."""
    x_names: tuple[str, ...]
    number: int
    """The index of the leaf that counts the steps."""
    buffers: tuple[bool, ...]
    """Which leaves of the carry are buffers."""

    def around(
        self, given: Given, take: Callable[[Given, Any], tuple[list, Sequence[str]]]
    ) -> list:
        """Watch the inputs and outputs of a step; return the next carry and y.

        `take` gets the inputs and the level of the worst leaf of the carry, or None. It returns the
        outputs and the names of the leaves of y.
        """
        report, count = self.report(given), len(self.names)
        consts = [_closed_over(self.loop, jax.typeof(v)) for v in given.consts]
        watched = lambda names, carried: [
            WatchedLeaf(name, backward=True, is_carried=carried) for name in names
        ]
        leaves = [
            *watched(consts, False),
            *watched(self.names, True),
            *watched(self.x_names, False),
        ]
        values = [*given.consts, *given.carry, *given.x]
        leaves = self._some(leaves, values, len(consts))
        seen, levels = watch(self.loop, report, leaves, values, [None] * len(values))
        entered = Given(*parts(seen, len(consts), count))
        _, before, _ = parts(levels, len(consts), count)
        told = [level for level in before if level is not None]
        worst = lax.stop_gradient(ft.reduce(jnp.maximum, told)) if told else None
        outs, y_names = take(entered, worst)
        new, y = parts(outs, count)
        # A leaf that a step passes through needs no check. A new leaf may be as bad as the worst
        # leaf before the step.
        passed = [out is inside for out, inside in zip(new, entered.carry, strict=True)]
        leaves = [
            None
            if same and level is None
            else WatchedLeaf(name, takes_level=level is not None, forward=not same)
            for same, name, level in zip(passed, self.names, before, strict=True)
        ]
        leaves += [WatchedLeaf(name, forward=True, backward=True) for name in y_names]
        leaves = self._some(leaves, [*new, *y], 0)
        report = self.report(entered._replace(x=given.x))
        found, _ = watch(self.loop, report, leaves, [*new, *y], [*before, *[None] * len(y)])
        carry = zip(passed, given.carry, found, strict=False)
        return [*(old if same else v for same, old, v in carry), *found[count:]]

    def _some(self, leaves: list, values: Sequence[Any], first: int) -> list:
        """Return leaves, with None for those that cannot be watched, such as buffers.

        The leaves of the carry come after the `first` leaves.
        """
        buffers = [*[False] * first, *self.buffers, *[False] * len(values)]
        return [
            leaf if not has and _is_watched(v) else None
            for leaf, v, has in zip(leaves, values, buffers, strict=False)
        ]

    def report(self, given: Given) -> tuple:
        carry = [v for v, has in zip(given.carry, self.buffers, strict=True) if not has]
        return given.carry[self.number], carry, list(given.x)

    def of_jaxpr(self, body: _jax.Jaxpr, const_count: int, y_tree: _jax.TreeDef) -> _jax.Jaxpr:
        """Return the watched step, (consts, carry, x) -> (carry, y)."""
        j, count = _jax.open_jaxpr(body), len(self.names)
        y_names = names_of("ys", y_tree.unflatten(body.out_avals[count:]))
        of_consts = j.invars[:const_count]
        # If a step reads slices of a constant, watch the slices, whose cotangents are smaller.
        sliced = {eqn.invars[0] for eqn in j.eqns if _reads_slices(eqn)}.intersection(of_consts)
        names = {v: _closed_over(self.loop, v.aval) for v in sliced}
        leaves = zip(j.invars[const_count:], self.names, self.buffers, strict=False)
        names |= {v: name for v, name, has in leaves if has}

        def step(*values: jax.Array) -> list:
            given = Given(*parts(values, const_count, count))
            report = self.report(given)
            one = lambda leaf, value, level: watch(self.loop, report, [leaf], [value], [level])[0]

            def rule(worst: jax.Array | None, eqn: _jax.Equation, ins: list) -> list:
                touches = eqn.primitive in (read_p, write_p) or _reads_slices(eqn)
                name = names.get(eqn.invars[0]) if touches else None
                if name is None:
                    return _jax.bind_equation(eqn, ins)
                if eqn.primitive is write_p and _is_watched(ins[1]):
                    takes_level = worst is not None
                    leaf = WatchedLeaf(
                        f"{name}, in a row that is written,", takes_level=takes_level, forward=True
                    )
                    ins = [ins[0], *one(leaf, ins[1], worst), *ins[2:]]
                outs = _jax.bind_equation(eqn, ins)
                if eqn.primitive in (read_p, write_p):
                    names[eqn.outvars[-1]] = name
                if _reads_slices(eqn) and _is_watched(outs[0]):
                    leaf = WatchedLeaf(f"{name}, in a row that is read,", backward=True)
                    outs = [*one(leaf, outs[0], None), *outs[1:]]
                return outs

            def take(seen: Given, worst: jax.Array | None) -> tuple[list, Sequence[str]]:
                triples = zip(given.consts, seen.consts, of_consts, strict=True)
                consts = [c if v in sliced else s for c, s, v in triples]
                values = [*consts, *seen.carry, *seen.x]
                return interpret(j, values, ft.partial(rule, worst)), y_names

            return self.around(given, take)

        return _jax.trace(step, list(body.in_avals), self.loop.function)[0]


def _reads_slices(eqn: _jax.Equation) -> bool:
    reads = eqn.primitive is read_p and eqn.params["value"]
    sliced = eqn.primitive.name in SLICES
    return (reads or sliced) and not isinstance(eqn.invars[0], _jax.Literal)


def _is_watched(value: jax.Array) -> bool:
    return _jax.is_differentiable(jax.typeof(value))


def _closed_over(loop: Watched, aval: _jax.ShapedArray) -> str:
    return f"what `{loop.argument}` closes over ({errors.short_type(aval)})"


def names_of(argument: str, tree: PyTree[Any]) -> tuple[str, ...]:
    """Return the names of the leaves of a tree in errors."""
    return tuple(f"`{argument}{keystr(path)}`" for path, _ in tree_leaves_with_path(tree))
