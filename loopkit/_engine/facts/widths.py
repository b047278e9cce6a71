"""To how many lanes a batched loop narrows as lanes stop.

Lanes that have stopped cost what the others cost. So a loop of many lanes is run in phases, each of
fewer lanes than the one before: see passes/phases.py.
"""

from __future__ import annotations

from typing import Any

import jax

from loopkit import _jax
from loopkit._arguments import errors
from loopkit._engine.loop import Loop
from loopkit._jaxprs import equations

LEAST = 8
"""Lanes that take no longer than fewer do."""
SHRINK = 4
"""How many times fewer lanes each phase has. Phases are compiled each for itself."""
TOGETHER = "unvmap_any"
"""A primitive of equinox: whether something holds in any lane."""

waiting = jax.make_user_context(False)
"""Whether lanes wait, whatever is asked: where what a loop saves is already laid out."""


def widths(loop: Loop, axis: Any) -> tuple[int, ...]:
    """To how many lanes a loop narrows that is given this axis of lanes; none if they wait.

    It hangs on the loop as it is without the axis: so all its derivatives agree.
    """
    asked, size = loop.narrows, axis.size
    if asked in (None, "wait") or waiting.value or not _apart(loop, axis):
        return ()
    if isinstance(asked, tuple):
        if asked[0] > size:
            advice = 'Pass fewer lanes, or "compact".'
            expected = f"must not exceed the {size} lanes"
            raise errors.wrong_value(loop.name, "lanes", expected, str(asked), advice)
        return asked[asked[0] == size :]
    if size <= LEAST:
        return ()
    found = [max(LEAST, size // SHRINK)]
    while found[-1] > 2 * LEAST:
        found.append(max(LEAST, found[-1] // SHRINK))
    return tuple(found)


def _apart(loop: Loop, axis: Any) -> bool:
    """Whether lanes can be moved: they are on one device, of a known number, and do not speak."""
    spread = axis.spmd_name or axis.explicit_mesh_axis
    speak = axis.name in loop.axis_names
    # A flag beside which the predicate asks for more does not say which lanes write to buffers.
    masked = loop.flag is None or not loop.cond_const_count
    return isinstance(axis.size, int) and masked and not spread and not speak


def asking_each(loop: Loop) -> Loop | None:
    """The loop without what equinox puts into predicates so that lanes go on together.

    None if there is nothing of that.
    """
    cond = loop.cond
    if cond is None or not any(
        eqn.primitive.name == TOGETHER for eqn in equations.all_equations(cond)
    ):
        return None

    def rule(eqn: Any, ins: list) -> Any:
        if equations.is_call(eqn):
            return equations.interpret(*equations.called(eqn, ins), rule)
        if eqn.primitive.name in (TOGETHER, "nonbatchable"):
            return ins
        return _jax.bind_equation(eqn, ins)

    def make() -> Loop:
        run = lambda *values: equations.interpret(_jax.open_jaxpr(cond), values, rule)
        return loop.replace(cond=_jax.trace_closed(run, cond.in_avals, "loop_cond"))

    return loop.derived("asking each", make)
