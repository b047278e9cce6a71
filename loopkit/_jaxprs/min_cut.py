"""The least that must be stored for the backward half of a step.

The residuals of a step are derived from one another: 1 - y**2 beside y, four stages of a
Runge-Kutta step beside the state before it. What cheap, elementwise equations make of other values
is made again going back; among all sets of values from which the residuals follow in this way, the
one of fewest bytes is a minimum cut of the step's graph.

Source: Chen et al. 2016 for the trade; the cut is that of a maximum flow (Ford & Fulkerson 1956).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from loopkit import _jax
from loopkit._jaxprs import equations

_FREE_TO_REMAKE = """
    abs add add_any and bitcast_convert_type broadcast_in_dim ceil clamp complex concatenate conj
    convert_element_type copy copy_p div dynamic_slice eq expand_dims floor ge gt imag integer_pow
    iota is_finite le lt max min mul ne neg not one_minus_square or pad pvary real
    reduce_precision rem reshape rev round select_n shift_left shift_right_arithmetic
    shift_right_logical sign slice split sqrt square squeeze stack stop_gradient sub transpose
    unstack xor
"""
CHEAP = frozenset(_FREE_TO_REMAKE.split())
"""Primitives that are run again rather than stored."""

EACH = 32
"""What an array costs beyond its bytes, in bytes."""
LARGEST_GRAPH = 4000
"""Equations of a step for which a cut is sought; of longer ones the residuals are stored."""


@dataclass(frozen=True)
class Cut:
    """What to compute once, what to store of each step, and how the rest follows."""

    hoisted: list
    """Variables that depend on constants alone."""
    stored: list
    """Variables to store of each step."""
    given: set
    """The constants and the slices that the residuals are made of."""
    remake: Callable[[dict], list]
    """Residuals, from an environment of constants, slices, hoisted and stored variables."""
    uncut: int
    """Bytes of the residuals as they are: what jax.lax.scan stores of a step."""


def least_stored(
    jaxpr: _jax.Jaxpr,
    results: int,
    constants: int,
    slices: int,
    free: Sequence[bool],
    again: Container[int] = (),
) -> Cut:
    """How to store the outputs of a step from `results` on.

    The inputs are `constants`, then the carry, then the xs from `slices` on. To store a carry leaf
    that is `free` costs nothing. Equations whose ids are in `again` are run again, whatever they
    cost, unless they depend on constants alone.
    """
    j = _jax.open_jaxpr(jaxpr)
    residuals = [v for v in j.outvars[results:] if not isinstance(v, _jax.Literal)]
    maker = equations.maker_of(j)
    constant = equations.following_from(j, j.invars[:constants])
    given = set(j.invars[:constants]) | set(j.invars[slices:])
    repeated = [eqn for eqn in j.eqns if id(eqn) in again and eqn.outvars[0] not in constant]
    cheap = {id(eqn) for eqn in (*filter(_is_cheap, j.eqns), *repeated)}

    def operands(v: _jax.Atom) -> list | None:
        """What `v` is made again from; None if it is not made again."""
        eqn = maker(v)
        return None if eqn is None or id(eqn) not in cheap else equations.variables(eqn)

    varying = [v for v in residuals if v not in constant]
    if len(j.eqns) > LARGEST_GRAPH and not repeated:
        stored = [v for v in dict.fromkeys(varying) if v not in given]
    else:
        costs = {v: 0 for v, f in zip(j.invars[constants:slices], free, strict=True) if f}
        costs |= {v: inf for eqn in repeated for v in eqn.outvars}
        stored = _minimum_cut(varying, operands, given | constant, costs)
    met, needed, hoisted, read = given | set(stored), set(), [], set()
    pending = list(residuals)
    while pending:
        v = pending.pop()
        read.add(v)
        if v in met:
            continue
        met.add(v)
        before = operands(v)
        if before is None:
            assert v in constant, "a value that is not made again is stored"
            hoisted.append(v)
        else:
            needed.add(v)
            pending += before
    order = [eqn for eqn in j.eqns if any(v in needed for v in eqn.outvars)]

    def remake(values: dict) -> list:
        return equations.run(order, dict(values), j.outvars[results:])

    whole = _jax.byte_count(*(v.aval for v in dict.fromkeys(varying) if v not in given))
    return Cut(hoisted, stored, read & given, remake, whole)


def _is_cheap(eqn: _jax.Equation) -> bool:
    if eqn.effects:
        return False
    if equations.is_call(eqn):
        return all(map(_is_cheap, _jax.open_jaxpr(eqn.params["jaxpr"]).eqns))
    return eqn.primitive.name in CHEAP


def _minimum_cut(targets: Sequence, operands: Callable, given: set, costs: dict) -> list:
    """The variables of fewest bytes from which `targets` follow, nearest to the targets.

    `costs`: of those that cost something else.
    """
    capacity: dict[Any, dict[Any, float]] = {"source": {}, "target": {}}

    def edge(a: Hashable, b: Hashable, size: float) -> None:
        capacity.setdefault(a, {})[b] = size
        capacity.setdefault(b, {}).setdefault(a, 0)

    order: dict = {}
    pending = [v for v in targets if v not in given]
    for v in pending:
        edge((v, 1), "target", inf)
    while pending:
        v = pending.pop()
        if v in order:
            continue
        order[v] = None
        edge((v, 0), (v, 1), costs.get(v, _jax.byte_count(v.aval) + EACH))
        before = operands(v)
        if before is None:
            edge("source", (v, 0), inf)
        for u in before or ():
            if u not in given:
                edge((u, 1), (v, 0), inf)
                pending.append(u)
    while True:
        before_on_path: dict = {"source": None}
        queue = deque(["source"])
        while queue and "target" not in before_on_path:
            a = queue.popleft()
            for b, left in capacity[a].items():
                if left > 0 and b not in before_on_path:
                    before_on_path[b] = a
                    queue.append(b)
        if "target" not in before_on_path:
            break
        path, b = [], "target"
        while b != "source":
            path.append((before_on_path[b], b))
            b = before_on_path[b]
        flow = min(capacity[a][b] for a, b in path)
        for a, b in path:
            capacity[a][b] -= flow
            capacity[b][a] += flow
    beyond, pending = {"target"}, ["target"]
    while pending:
        b = pending.pop()
        for a in capacity[b]:
            if a not in beyond and capacity[a].get(b, 0) > 0:
                beyond.add(a)
                pending.append(a)
    return [v for v in reversed(order) if (v, 0) not in beyond and (v, 1) in beyond]
