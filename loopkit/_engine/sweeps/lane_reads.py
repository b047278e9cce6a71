"""What lanes that have stopped read of buffers: what they began with.

Such a lane is given the inputs of another step (lanes.py). To choose between two buffers costs as
much as they are large; to choose what is read of them, a slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopkit import _jax
from loopkit._buffers.slices import read, read_p, write_p
from loopkit._buffers.window import Window
from loopkit._jaxprs.dataflow import analyse, interpret_marked


def is_sliced(jaxpr: _jax.Jaxpr, place: int) -> bool:
    """Return whether an input is read and written in slices, and nothing else is done with it.

    The fact of a value is whether it is this buffer.
    """
    otherwise = []

    def transfer(eqn: _jax.Equation, ins: list[bool]) -> list[bool]:
        goes_on = ins[:1] == [True] and eqn.primitive in (read_p, write_p)
        otherwise.append(any(ins[goes_on:]))
        return [False] * (len(eqn.outvars) - 1) + [goes_on] * bool(eqn.outvars)

    analyse(jaxpr, [i == place for i in range(len(jaxpr.in_avals))], transfer, False)
    return not any(otherwise)


class Begun(NamedTuple):
    """Stands for a buffer, with what lanes that have stopped read in its place."""

    value: Any
    first: Any


def call(
    jaxpr: _jax.Jaxpr, values: Sequence[Any], first: dict[int, Any], active: jax.Array
) -> list:
    """Return the results; of the inputs in `first`, lanes that have stopped read what is there."""

    def rule(eqn: _jax.Equation, ins: list) -> list:
        (buffer, first), *given = ins
        *found, after = _jax.bind_equation(eqn, [buffer, *given])
        if eqn.primitive is read_p and eqn.params["value"]:
            window = eqn.params["window"]
            other, _ = read(first, given[0], window, held=False)
            goes_on = _of_slices(active, given[0], window)
            found[0] = jnp.where(goes_on, found[0], other)
        return [*found, Begun(after, first)]

    given = [Begun(v, first[i]) if i in first else v for i, v in enumerate(values)]
    outs = interpret_marked(_jax.open_jaxpr(jaxpr), given, Begun, rule)
    return [v.value if isinstance(v, Begun) else v for v in outs]


def _of_slices(active: jax.Array, starts: jax.Array, window: Window) -> Any:
    """Which elements of slices are of active lanes; the lanes are the first axes of the buffer."""
    lanes, batch = range(active.ndim), starts.shape[:-1]
    placed = [a for a in lanes if a in window.axes]
    whole = [a for a in lanes if a not in window.axes]
    columns = tuple(starts[..., window.axes.index(a)] for a in placed)
    found = active.transpose(*placed, *whole)[columns]
    sizes = [active.shape[a] if a in whole else 1 for a in range(len(window.sizes))]
    return found.reshape(*(batch if placed else (1,) * len(batch)), *sizes)
