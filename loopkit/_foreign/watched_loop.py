"""A loop of lax whose steps have to stay finite: it also carries what the errors say of a step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopkit import _jax
from loopkit._arguments.failed_step import Watched
from loopkit._engine.loop import CarryLeaf, parts
from loopkit._tracing.finite_steps import FiniteSteps
from loopkit._tracing.traced import as_loop


class WatchedLoop(NamedTuple):
    """The functions of a loop of lax."""

    cond: Any
    """None for a loop of known length."""
    body: Any
    cond_consts: int
    consts: int
    carry: int

    def run(
        self, function: str, kind: str, consts: list, init: list, xs: list, fields: dict[str, Any]
    ) -> list:
        """Its results. `consts`: those of the predicate, and those of the body."""
        first = consts[: self.cond_consts]
        hidden = [jnp.int32(0)]
        if self.cond is not None:
            hidden.append(_jax.call_jaxpr(self.cond)(*first, *init)[0])
        types = [
            *self.body.in_avals[self.consts : self.consts + self.carry],
            *map(jax.typeof, hidden),
        ]
        x_types = self.body.in_avals[self.consts + self.carry :]
        in_types = [*map(jax.typeof, consts), *types, *x_types]
        body, _ = _jax.trace(self._step, in_types, f"{kind}_body")
        body = self._finite(function, kind, len(hidden), len(x_types)).of_jaxpr(
            body, len(consts), jax.tree.structure([0] * (len(body.out_avals) - len(types)))
        )
        cond = None
        if self.cond is not None:
            cond, _ = _jax.trace(lambda *carry: [carry[-1]], types, f"{kind}_cond")
        carry = [CarryLeaf()] * (self.carry + 1) + [CarryLeaf(flag=True)] * (len(hidden) - 1)
        fields = fields | {"unroll": 1}
        loop = as_loop(cond, [], body, consts, carry, types, fields)
        final, ys = loop.run([*init, *hidden], xs)
        return [*final[: self.carry], *ys]

    def _step(self, *values: jax.Array) -> list:
        """(constants, carry, number of the step, whether it counts, x) -> (carry, ..., y)"""
        cond_consts, consts, given = parts(values, self.cond_consts, self.consts)
        carry, (number, *_), x = parts(given, self.carry, 1 + (self.cond is not None))
        outs = _jax.call_jaxpr(self.body)(*consts, *carry, *x)
        new, y = parts(outs, self.carry)
        hidden = [number + 1]
        if self.cond is not None:
            # Asked once a step: what it prints is printed once.
            hidden += _jax.call_jaxpr(self.cond)(*cond_consts, *new)
        return [*new, *hidden, *y]

    def _finite(self, function: str, kind: str, hidden: int, x: int) -> FiniteSteps:
        named = lambda what, count: tuple(f"`{what}[{i}]`" for i in range(count))
        scans = (None, ()) if kind == "scan" else None
        loop = Watched(function, kind, kind, _jax.source(), "leaves", self.carry, scans)
        names = (*named("carry", self.carry), *["a counter"] * hidden)
        flag = None if hidden == 1 else self.carry + 1
        return FiniteSteps(loop, names, named("x", x), flag, self.carry, (False,) * len(names))
