"""What lanes that have stopped read of buffers: what they began with.

Such a lane is given the inputs of another step (lanes.py). To choose between two buffers costs as
much as they are large; to choose what is read of them, a slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from loopkit import _jax
from loopkit._buffers.slices import read, read_p, write_p
from loopkit._buffers.window import Window
from loopkit._jaxprs import equations


def is_sliced(jaxpr: _jax.Jaxpr, place: int) -> bool:
    """Whether an input is read and written in slices, and nothing else is done with it."""
    j = _jax.open_jaxpr(jaxpr)
    return _states(j, {j.invars[place]}) is not None


def _states(j: _jax.OpenJaxpr, states: set) -> set | None:
    """The variables that are these buffers, read and written; None if they are used otherwise."""
    states = set(states)
    for eqn in j.eqns:
        uses = [i for i, v in enumerate(eqn.invars) if v.__hash__ is not None and v in states]
        if not uses:
            continue
        if equations.is_call(eqn):
            inside = _jax.open_jaxpr(eqn.params["jaxpr"])
            within = _states(inside, {inside.invars[i] for i in uses})
            if within is None:
                return None
            states |= {o for o, v in _results(eqn, inside) if v in within}
        elif uses == [0] and eqn.primitive in (read_p, write_p):
            states.add(eqn.outvars[-1])
        else:
            return None
    return states


def _results(eqn: _jax.Equation, inside: Any) -> list:
    pairs = zip(eqn.outvars, inside.outvars, strict=True)
    return [(o, v) for o, v in pairs if not isinstance(v, _jax.Literal)]


def call(
    jaxpr: _jax.Jaxpr, values: Sequence[Any], first: dict[int, Any], active: jax.Array
) -> list:
    """The results; of the inputs in `first`, lanes that are not active read what is there."""
    j = _jax.open_jaxpr(jaxpr)
    return _run(j, list(values), {j.invars[i]: v for i, v in first.items()}, active)


def _run(j: _jax.OpenJaxpr, values: list, first: dict, active: jax.Array) -> list:
    def rule(eqn: _jax.Equation, ins: list) -> Any:
        began = {
            i: first[v] for i, v in enumerate(eqn.invars) if v.__hash__ is not None and v in first
        }
        if not began:
            return _jax.bind_equation(eqn, ins)
        if equations.is_call(eqn):
            inside, ins = equations.called(eqn, ins)
            within = {inside.invars[i]: v for i, v in began.items()}
            outs = _run(inside, ins, within, active)
            first.update((o, within[v]) for o, v in _results(eqn, inside) if v in within)
            return outs
        first[eqn.outvars[-1]] = began[0]
        outs = list(_jax.bind_equation(eqn, ins))
        if eqn.primitive is read_p and eqn.params["value"]:
            window = eqn.params["window"]
            other, _ = read(began[0], ins[1], window, held=False)
            goes_on = _of_slices(active, ins[1], window)
            outs[0] = jnp.where(goes_on, outs[0], other)
        return outs

    return equations.interpret(j, values, rule)


def _of_slices(active: jax.Array, starts: jax.Array, window: Window) -> Any:
    """Which elements of slices are of active lanes; the lanes are the first axes of the buffer."""
    lanes, batch = range(active.ndim), starts.shape[:-1]
    placed = [a for a in lanes if a in window.axes]
    whole = [a for a in lanes if a not in window.axes]
    columns = tuple(starts[..., window.axes.index(a)] for a in placed)
    found = active.transpose(*placed, *whole)[columns]
    sizes = [active.shape[a] if a in whole else 1 for a in range(len(window.sizes))]
    return found.reshape(*(batch if placed else (1,) * len(batch)), *sizes)
