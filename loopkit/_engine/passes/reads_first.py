"""Move reads of a buffer before a write that they do not depend on.

b.at[i].set(b[j]).at[j].set(b[i])

reads b[i] as it was before the write, after the write has happened. So a compiler would keep a copy
of all of b. The read does not depend on the write, so this pass moves it before the write, which
then updates the buffer that the read passes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loopkit import _jax
from loopkit._buffers.slices import read_p, write_p
from loopkit._engine.loop import Loop
from loopkit._jaxprs.equations import variables


def reads_first(loop: Loop) -> Loop:
    """Return the loop whose steps read buffers before they write to them, if possible."""
    body = read_before_written(loop.body) if any(loop.is_buffer) else loop.body
    return loop if body is loop.body else loop.replace(body=body)


def read_before_written(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a jaxpr in which reads of a buffer come before the write to it, if possible."""
    j = _jax.open_jaxpr(jaxpr)
    eqns, moved = list(j.eqns), None
    while (new := _one_moved(eqns)) is not None:
        eqns = moved = new
    return jaxpr if moved is None else _jax.close_jaxpr(j.replace(eqns=moved))


def _one_moved(eqns: Sequence[Any]) -> list | None:
    """Return the equations with one read moved before a write; None if there is none to move."""
    for at, write in enumerate(eqns):
        if write.primitive is not write_p:
            continue
        for place in range(at + 1, len(eqns)):
            read = eqns[place]
            if read.primitive is read_p and read.invars[0] is write.invars[0]:
                needed = _needed(eqns[at:place], read)
                if needed is not None:
                    onward = write.replace(invars=[read.outvars[-1], *write.invars[1:]])
                    done = {id(eqn) for eqn in (*needed, read, write)}
                    rest = [eqn for eqn in eqns[at:] if id(eqn) not in done]
                    return [*eqns[:at], *needed, read, onward, *rest]
    return None


def _needed(eqns: Sequence[Any], read: _jax.Equation) -> list | None:
    """Return the equations after a write that a read needs; None if the read cannot move.

    A read cannot move if it depends on the write, or if such an equation has effects, whose order
    must not change.
    """
    write, found, operands = eqns[0], [], set(variables(read))
    for eqn in reversed(eqns):
        if operands.isdisjoint(eqn.outvars):
            continue
        if eqn is write or eqn.effects:
            return None
        found.append(eqn)
        operands.update(variables(eqn))
    return found[::-1]
