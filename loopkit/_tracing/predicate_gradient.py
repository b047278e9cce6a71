"""Keep gradients out of the predicate of a loop.

As in `jax.lax.while_loop`, a predicate may call functions without a derivative: callbacks,
collectives, functions with a custom VJP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jaxtyping import PyTree

from loopkit import _jax
from loopkit._buffers.slices import read_p
from loopkit._jaxprs import equations

SCOPE = "loopkit_predicate"
"""The named scope of the predicate in a step, which marks the calls that the predicate makes."""


def ask(predicate: Callable[[Any], Any], value: PyTree[Any]) -> Any:
    """Return `predicate(value)` outside a loop, without a gradient, in what it closes over too."""
    if not _jax.is_tracing():
        return predicate(value)  # there is no gradient to stop
    leaves, tree = jax.tree.flatten(value)
    asked = lambda *leaves: [predicate(tree.unflatten(leaves))]
    jaxpr, closed_over = _jax.trace(asked, list(map(jax.typeof, leaves)), "predicate")
    used = _jax.used_inputs(jaxpr, [True])
    pairs = zip([*closed_over, *leaves], used, strict=True)
    (result,) = _jax.call_jaxpr(jaxpr)(*[_still(v) if u else v for v, u in pairs])
    return result


def _still(value: jax.Array) -> Any:
    moves = _jax.is_differentiable(jax.typeof(value)) and not _jax.is_reference(value)
    return lax.stop_gradient(value) if moves else value


def stop_gradient_in_predicate(jaxpr: _jax.Jaxpr, place: int) -> _jax.Jaxpr:
    """Stop the gradient into what a step computes for one output alone, a bool.

    Calls that the predicate makes in `SCOPE` without using a result get no gradient either. Reads
    of buffers stay as they are, because a copy could not be written in place.
    """
    j = _jax.open_jaxpr(jaxpr)
    read = [v for eqn in j.eqns if eqn.primitive is read_p for v in eqn.outvars]
    other = _makers(j, [*(v for i, v in enumerate(j.outvars) if i != place), *read])
    calls = {i for i, eqn in enumerate(j.eqns) if eqn.effects and SCOPE in _jax.name_stack(eqn)}
    told = [v for i in calls for v in equations.variables(j.eqns[i])]
    alone = (_makers(j, [j.outvars[place], *told]) | calls) - other
    made_for_it = {v for i in alone for v in j.eqns[i].outvars}
    still: dict[Any, Any] = {}
    eqns = []
    for i, eqn in enumerate(j.eqns):
        if i in alone:
            for v in equations.variables(eqn):
                if v not in still and v not in made_for_it and _jax.is_differentiable(v.aval):
                    stops = _stops(v)
                    still[v] = stops.outvars[0]
                    eqns.append(stops)
            eqn = eqn.replace(invars=[equations.renamed(v, still) for v in eqn.invars])
        eqns.append(eqn)
    return jaxpr.replace(jaxpr=j.replace(eqns=eqns)) if still else jaxpr


def _makers(j: _jax.OpenJaxpr, variables: list) -> set[int]:
    """Return the places of the equations that variables depend on."""
    wanted = {v for v in variables if not isinstance(v, _jax.Literal)}
    found: set[int] = set()
    for i in reversed(range(len(j.eqns))):
        eqn = j.eqns[i]
        if not wanted.isdisjoint(eqn.outvars):
            found.add(i)
            wanted.update(equations.variables(eqn))
    return found


def _stops(v: _jax.Atom) -> Any:
    """Return an equation that gives a variable without its tangent."""
    j = _jax.open_jaxpr(_jax.trace_closed(lambda x: [lax.stop_gradient(x)], [v.aval], "still"))
    (eqn,) = j.eqns
    return eqn.replace(invars=[v])
