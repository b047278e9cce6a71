"""Remove references and the gradient of the predicate from traced functions.

A reference to memory (`jax.new_ref`) that a step makes for itself is removed, which leaves a
function of values. A reference made outside becomes a leaf of the carry, which is read before the
loop and written after it.

As in `jax.lax.while_loop`, a predicate may call functions without a derivative: callbacks,
collectives, functions with a custom VJP. No gradient flows into it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jaxtyping import PyTree

from loopkit import _jax
from loopkit._buffers.slices import read_p
from loopkit._engine.loop import parts
from loopkit._jaxprs import equations

SCOPE = "loopkit_predicate"
"""The named scope of the predicate in a step. It marks the calls that the predicate makes."""


class Functions(NamedTuple):
    """The predicate and the body of a loop, as functions of values."""

    cond: Any
    cond_consts: list
    body: Any
    consts: list
    references: Sequence[Any] = ()
    """The references made outside the loop: the last leaves of the carry."""


def without_references(functions: Functions, carry_count: int) -> Functions:
    """Turn references among the constants into leaves of the carry that hold their values."""
    cond, cond_consts, body, consts, _ = functions
    of = {id(v): v for v in (*cond_consts, *consts) if _jax.is_reference(v)}
    if cond is not None:
        cond, cond_consts = _of_values(cond, cond_consts, of, carry_count, None)
    body, consts = _of_values(body, consts, of, carry_count, carry_count)
    return Functions(cond, cond_consts, body, consts, [*of.values()])


def _of_values(
    jaxpr: _jax.Jaxpr, consts: list, references: dict, carry_count: int, behind: int | None
) -> tuple[Any, list]:
    """Return the function of (constants, carry, values of references, x), and its constants.

    It returns the final values of the references after its first `behind` results, or leaves them
    out if `behind` is None.
    """
    kept, of_values = [v for v in consts if id(v) not in references], _jax.of_values(jaxpr)

    def function(*values: jax.Array) -> list:
        given, carry, held, x = parts(values, len(kept), carry_count, len(references))
        now, left = dict(zip(references, held, strict=True)), iter(given)
        every = [now[id(v)] if id(v) in now else next(left) for v in consts]
        outs, ends = parts(_jax.call_jaxpr(of_values)(*every, *carry, *x), len(jaxpr.out_avals))
        now |= zip([id(v) for v in consts if id(v) in now], ends, strict=True)
        return outs if behind is None else [*outs[:behind], *now.values(), *outs[behind:]]

    _, carry_types, x_types = parts(jaxpr.in_avals, len(consts), carry_count)
    held = map(_jax.type_in, references.values())
    types = [*map(jax.typeof, kept), *carry_types, *held, *x_types]
    return _jax.trace_closed(function, types, "loop_of_values"), kept


def read(references: Sequence[Any]) -> list:
    return [r[...] for r in references]


def write(references: Sequence[Any], values: Sequence[Any]) -> None:
    for reference, value in zip(references, values, strict=True):
        # Under vmap, jax 0.10 expects a value written to `...` to have its batch axis where the
        # reference has it.
        reference[slice(None) if value.ndim else ...] = value


def ask(predicate: Callable[[Any], Any], value: PyTree[Any]) -> Any:
    """Return `predicate(value)` outside a loop, without a gradient into either."""
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
    """Stop the gradient into what a step computes only for the predicate, the output at `place`.

    Calls in `SCOPE` whose results the predicate does not use get no gradient either. Reads of
    buffers stay as they are, because a copy could not be written in place.
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
    """Return the indices of the equations that variables depend on."""
    wanted = set(_jax.variables(variables))
    found: set[int] = set()
    for i in reversed(range(len(j.eqns))):
        eqn = j.eqns[i]
        if not wanted.isdisjoint(eqn.outvars):
            found.add(i)
            wanted.update(equations.variables(eqn))
    return found


def _stops(v: _jax.Atom) -> Any:
    """Return an equation that stops the gradient of a variable."""
    j = _jax.open_jaxpr(_jax.trace_closed(lambda x: [lax.stop_gradient(x)], [v.aval], "still"))
    (eqn,) = j.eqns
    return eqn.replace(invars=[v])
