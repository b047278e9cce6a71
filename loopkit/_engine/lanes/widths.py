"""To how many lanes a batched loop narrows as lanes stop.

Lanes that have stopped cost what the others cost. So a loop of many lanes is run in phases, each of
fewer lanes than the one before: see passes/phases.py.
"""

from __future__ import annotations

import math
from typing import Any

import jax

from loopkit import _jax
from loopkit._engine.loop import Loop
from loopkit._jaxprs import equations
from loopkit._jaxprs.cost import nanoseconds
from loopkit._jaxprs.dataflow import interpret
from loopkit._plans.budget import Bytes

LEAST = 8
"""Lanes that take no longer than fewer do."""
LAST = 12
"""Lanes of the last phase, where there are many."""
SHRINK = 4.5
"""About how many times fewer lanes a phase has at most. Phases are compiled each for itself."""
LATER = 1.2
"""A power of the part of the way: at first lanes narrow by less, since many of them stop then."""
WORTH_NARROWING = 64
"""Lanes from which on it is decided, unless it is said."""
ENOUGH = 1e4
"""Nanoseconds that a step of all lanes has to take, or phases gain less than they cost."""
STEPS, RUNS = 1000, 1000
"""Steps that a loop without a bound is taken to run, and runs of a compiled loop."""
COMPILE_NANOSECONDS = 3e8, 5e6
"""Nanoseconds to compile a phase and its gradient, and for each equation of a step."""
TOGETHER = "unvmap_any"
"""A primitive of equinox: whether something holds in any lane."""

waiting = jax.make_user_context(False)
"""Whether lanes wait, whatever is asked: where what a loop saves is already laid out."""


def widths(loop: Loop, count: int) -> tuple[int, ...]:
    """To how many lanes a loop narrows of which there are so many lanes; none if they wait.

    It hangs on the loop of one lane: so all its derivatives agree. Widths that the user gives may
    be more than there are lanes, if others are to join these.
    """
    asked = loop.lane_policy
    if asked == "wait":
        return ()
    if asked is None or asked == "flatten":
        return () if why_waiting(loop, count) else _narrower(count)
    if isinstance(asked, tuple):
        return asked[asked[0] == count :]
    return _narrower(count)


def may_narrow(loop: Loop, axis: _jax.AxisData) -> bool:
    """Whether a loop narrows that is given this axis of lanes, or may where others join these."""
    if loop.lane_policy == "wait" or waiting.value or not _apart(loop, axis):
        return False
    return loop.lane_policy not in (None, "flatten") or not why_never(loop)


def _narrower(size: int) -> tuple[int, ...]:
    """About as many times fewer lanes in each phase."""
    if size <= LEAST:
        return ()
    last = min(LAST, max(LEAST, size // 2))
    count = max(1, math.ceil(math.log(size / last, SHRINK)))
    shares = [(last / size) ** ((k / count) ** LATER) for k in range(1, count)]
    return (*(4 * round(size * share / 4) for share in shares), last)


def why_waiting(loop: Loop, count: int) -> str:
    """Why so many lanes wait, unless they are told to narrow; empty if they do not.

    Phases have to gain more than they take longer to compile.
    """
    if (why := why_never(loop)) or count < WORTH_NARROWING:
        return why or f"are fewer than {WORTH_NARROWING}"
    step = count * loop.derived("nanoseconds", lambda: nanoseconds(loop.body))
    if step < ENOUGH:
        return f"take a step in {step / 1e3:.1f} microseconds, of {ENOUGH / 1e3:.0f} or more"
    steps = STEPS if loop.length is None else min(loop.length, STEPS)
    equation_count = sum(1 for _ in equations.all_equations(loop.body))
    a_phase = COMPILE_NANOSECONDS[0] + COMPILE_NANOSECONDS[1] * equation_count
    gains = RUNS * steps * step / 2 >= len(_narrower(count)) * a_phase
    return "" if gains else "would gain less than phases take to compile"


def why_never(loop: Loop) -> str:
    """Why lanes wait however many they are.

    They may be spread over devices, of which nothing is known while a loop is traced; on a GPU few
    take hardly less time than many; what is enough memory for one loop may not be for several.
    """
    reasons = {
        "have steps that call the host": bool(loop.effects),
        "are given `memory`, for one loop": isinstance(loop.checkpoints, Bytes),
        "are not run by a CPU": jax.default_backend() != "cpu",
        "may be spread over devices": jax.device_count() > 1,
    }
    return next((why for why, holds in reasons.items() if holds), "")


def _apart(loop: Loop, axis: _jax.AxisData) -> bool:
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

    def rule(eqn: _jax.Equation, ins: list) -> Any:
        return ins if eqn.primitive.name in (TOGETHER, "nonbatchable") else None

    def make() -> Loop:
        run = lambda *values: interpret(_jax.open_jaxpr(cond), values, rule)
        return loop.replace(cond=_jax.trace_closed(run, cond.in_avals, "loop_cond"))

    return loop.derived("asking each", make)
