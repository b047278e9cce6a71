"""A function of arrays, traced, with its loops replaced; and how it is run outside jit.

Equations bound one by one take microseconds each, in Python. So a program is compiled as a whole
where that does the same, and once for all its calls.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from loopkit import _jax
from loopkit._jaxprs import equations


class Program(NamedTuple):
    """A function of arrays, traced, with its loops replaced."""

    jaxpr: Any
    """None if there is no need to run it."""
    closed_over: list
    out_tree: Any
    kept: list
    """What it returns as it is; None in the place of an array."""
    has_loops: bool
    has_rules: bool
    """Whether it calls functions with custom derivatives, in which there may be loops."""
    known: bool
    """Whether programs of the same equations are this very one."""

    @property
    def to_keep(self) -> Program:
        """The same; of a function without loops, which is called as it is, no more than that."""
        differentiated = self.has_rules and any(map(_jax.is_tracer, self.closed_over))
        if self.has_loops or differentiated:
            return self
        return self._replace(jaxpr=None, closed_over=[], kept=[])

    def run(self, leaves: Sequence[Any], again: bool = False) -> Any:
        """Its results; `again` if it has been run before."""
        arrays = [v for v in leaves if isinstance(v, jax.Array)]
        values = [*self.closed_over, *arrays]
        as_one = (self.known or again) and _on_one_device(values) and is_pure(self.jaxpr)
        outs = iter((_compiled if as_one else _jax.call_jaxpr)(self.jaxpr)(*values))
        return self.out_tree.unflatten(
            next(outs) if v is None else v.copy() if isinstance(v, np.ndarray) else v
            for v in self.kept
        )


@ft.lru_cache(256)
def _compiled(jaxpr: _jax.Jaxpr) -> Callable:
    return jax.jit(_jax.call_jaxpr(jaxpr))


@ft.lru_cache(256)
def is_pure(jaxpr: _jax.Jaxpr) -> bool:
    """Whether it does the same compiled as a whole: it has no effects, nothing is donated, and all
    of it is on one device.
    """
    for eqn in equations.all_equations(jaxpr):
        budget = getattr(eqn.params.get("loop"), "checkpoints", None)
        moves = eqn.primitive.name == "device_put" or getattr(budget, "host", None)
        if eqn.effects or moves or any(eqn.params.get("donated_invars", ())):
            return False
    return True


def _on_one_device(values: Sequence[Any]) -> bool:
    """Whether all are arrays, or stand for arrays, of the same devices, outside jit."""
    if _jax.jit_is_disabled():
        return False
    found = set()
    for v in map(_jax.innermost, values):
        if type(v) is not _jax.ArrayImpl:
            return False
        found.add(v.sharding)
    return len(found) < 2 or len({frozenset(s.device_set) for s in found}) < 2
