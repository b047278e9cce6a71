"""The number of lanes to which a batched loop narrows as lanes stop.

Lanes that have stopped take as much time as others. So a loop of many lanes runs in phases, each of
fewer lanes than the one before (phases.py).
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
"""The number of lanes that take no longer than fewer lanes do."""
LAST = 12
"""The number of lanes in the last phase, if there are many."""
SHRINK = 4.5
"""The factor by which a phase has at most fewer lanes. Each phase is compiled separately."""
LATER = 1.2
"""The power that shapes the widths: first phases narrow by less, because many lanes stop then."""
WORTH_NARROWING = 64
"""The least lanes that narrow without being asked."""
ENOUGH = 1e4
"""The least nanoseconds of a step of all lanes with which phases gain more than they cost."""
STEPS, RUNS = 1000, 1000
"""The assumed steps of a loop without a bound, and the assumed runs of a compiled loop."""
COMPILE_NANOSECONDS = 3e8, 5e6
"""The nanoseconds to compile a phase and its gradient, and those for each equation of a step."""
TOGETHER = "unvmap_any"
"""A primitive of equinox that says whether something holds in any lane."""

waiting = jax.make_user_context(False)
"""Whether lanes wait whatever is asked, because the layout of saved values is fixed already."""


def widths(loop: Loop, count: int) -> tuple[int, ...]:
    """Return the widths to which a loop of `count` lanes narrows; none if its lanes wait.

    That depends on the loop of one lane, so that all its derivatives agree. Widths of the user may
    be larger than the number of lanes, in case others join these.
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
    """Return whether a loop with this axis of lanes narrows, or may narrow after others join."""
    if loop.lane_policy == "wait" or waiting.value or not _apart(loop, axis):
        return False
    return loop.lane_policy not in (None, "flatten") or not why_never(loop)


def _narrower(size: int) -> tuple[int, ...]:
    """Return widths that shrink by about the same factor in each phase."""
    if size <= LEAST:
        return ()
    last = min(LAST, max(LEAST, size // 2))
    count = max(1, math.ceil(math.log(size / last, SHRINK)))
    shares = [(last / size) ** ((k / count) ** LATER) for k in range(1, count)]
    return (*(4 * round(size * share / 4) for share in shares), last)


def why_waiting(loop: Loop, count: int) -> str:
    """Return why so many lanes wait, unless they are told to narrow; empty if they narrow.

    Phases have to gain more time than they take to compile.
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
    """Return why lanes wait, however many there are; empty if they may narrow.

    They may be spread over devices, of which nothing is known while a loop is traced. On a GPU, few
    lanes take almost as long as many. Memory that is enough for one loop may not be for several.
    """
    reasons = {
        "have steps that call the host": bool(loop.effects),
        "are given `memory`, for one loop": isinstance(loop.checkpoints, Bytes),
        "are not run by a CPU": jax.default_backend() != "cpu",
        "may be spread over devices": jax.device_count() > 1,
    }
    return next((why for why, holds in reasons.items() if holds), "")


def _apart(loop: Loop, axis: _jax.AxisData) -> bool:
    """Return whether lanes can be moved: on one device, of a known number, not communicating."""
    spread = axis.spmd_name or axis.explicit_mesh_axis
    speak = axis.name in loop.axis_names
    # If the predicate tests more than a flag, the flag does not say which lanes write to buffers.
    masked = loop.flag is None or not loop.cond_const_count
    return isinstance(axis.size, int) and masked and not spread and not speak


def asking_each(loop: Loop) -> Loop | None:
    """Return the loop without what equinox puts into predicates so that lanes go on together.

    Return None if the predicate has none of that.
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
