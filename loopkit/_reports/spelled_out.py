"""Expand loops into the phases in which their lanes narrow, otherwise made only in lowering."""

from __future__ import annotations

import functools as ft
from typing import Any

from loopkit import _jax
from loopkit._engine.lanes.phases import phases_of
from loopkit._engine.primitives import evaluated_p, narrowed_p, while_p
from loopkit._engine.rules import narrowed
from loopkit._jaxprs import equations


def spelled_out(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a jaxpr with each loop that narrows its lanes expanded into the loops that run."""

    def in_phases(eqn: _jax.Equation) -> bool:
        if eqn.primitive is narrowed_p:
            return True
        return eqn.primitive is while_p and phases_of(eqn.params["loop"]) is not None

    def change(eqn: _jax.Equation) -> Any:
        if not in_phases(eqn):
            return eqn
        types, run = [v.aval for v in eqn.invars], ft.partial(narrowed.evaluate, **eqn.params)
        if (phases := phases_of(eqn.params["loop"])) is not None and eqn.primitive is while_p:
            run = phases.run
        inner = spelled_out(_jax.trace_closed(run, types, "loop_phases"))
        return _jax.new_equation(eqn, evaluated_p, eqn.invars, eqn.outvars, {"jaxpr": inner})

    return equations.map_equations(jaxpr, change, in_phases)
