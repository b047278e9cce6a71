"""The frontier of a step, and the memory of a gradient: `explain` prints both below its table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax

from loopkit import _jax
from loopkit._arguments.errors import size
from loopkit._engine.derivative.choices import predicted
from loopkit._engine.derivative.divided import is_stretch
from loopkit._engine.derivative.linearised import linearised
from loopkit._engine.derivative.ways import temporary_bytes
from loopkit._engine.loop import Active, Loop
from loopkit._engine.primitives import while_p
from loopkit._jaxprs import equations
from loopkit._jaxprs.min_cut import PICOSECONDS
from loopkit._plans.budget import Bytes
from loopkit._plans.plan import Plan

BY_HAND = "nothing_saveable", "dots_with_no_batch_dims_saveable", "dots_saveable"
"""Policies of JAX that plots show."""
FEW = 3
"""How many holders of bytes at the peak are printed."""


class Choice(NamedTuple):
    """A way to keep part of a step."""

    bytes: int
    """The bytes kept of each step."""
    nanoseconds: float
    """The predicted time to run the rest of a step again."""
    is_taken: bool = False


@dataclass(frozen=True)
class Frontier:
    """The best ways to keep part of a step, from more bytes to fewer."""

    choices: tuple[Choice, ...]
    by_hand: Callable[[], dict[str, Choice]] = field(compare=False)
    """A function that returns the choices of JAX's policies, by name."""
    device: str = ""
    """The accelerator whose times these are; empty for a CPU."""

    def __str__(self) -> str:
        times = f" (times of {self.device})" if self.device else ""
        return ", ".join(map(_in_words, self.choices)) + times

    def plot(self, ax: Any = None) -> Any:
        """Draw bytes against time: the frontier, what is taken, and policies of JAX beside it."""
        ax = _axes(ax)
        megabytes = lambda choices: [c.bytes / 1e6 for c in choices]
        milliseconds = lambda choices: [c.nanoseconds / 1e6 for c in choices]
        ax.plot(megabytes(self.choices), milliseconds(self.choices), "o-", label="frontier")
        taken = [c for c in self.choices if c.is_taken]
        ax.plot(megabytes(taken), milliseconds(taken), "o", ms=12, mfc="none", label="taken")
        for name, choice in self.by_hand().items():
            ax.plot(megabytes([choice]), milliseconds([choice]), "x", label=name)
        ax.set(xlabel="MB kept of a step", ylabel="ms to run the rest again, predicted")
        ax.legend()
        return ax.figure


def frontier_of(loop: Loop, active: Active, plan: Plan) -> Frontier:
    """Return the frontier of a loop's step; it is empty if all residuals are small."""
    keeps_rows = plan.keeps_all or (plan.store == "residuals" and plan.segment > 1)
    rows = plan.step.rows if plan.step.smaller_rows else ()
    taken = lambda row: keeps_rows and row == plan.row
    choices = (Choice(row.bytes, row.nanoseconds, taken(row)) for row in rows)
    device = "" if loop.device is None else loop.device.kind
    return Frontier(tuple(choices), lambda: _by_hand(loop, active), device)


def _in_words(choice: Choice) -> str:
    words = f"{size(choice.bytes)} and {choice.nanoseconds / 1e6:.2g} ms"
    return f"[{words}]" if choice.is_taken else words


def _by_hand(loop: Loop, active: Active) -> dict[str, Choice]:
    """Return the choices of policies of JAX, by name."""
    residuals = linearised(loop, active).residuals

    def choice(name: str) -> Choice:
        policy = getattr(jax.checkpoint_policies, name)
        exact = replace(residuals, policy=policy, saves_all=True)
        cut = exact.cut(exact.least)
        again = sum(residuals.times[id(eqn)] for eqn in cut.again)
        return Choice(_jax.byte_count(*(v.aval for v in cut.stored)), again / PICOSECONDS)

    return {name: choice(name) for name in BY_HAND}


@dataclass(frozen=True)
class GradientBytes:
    """The temporary memory of the gradient of a function in all its arguments."""

    timeline: tuple[tuple[str, int], ...]
    """For each equation, forward and then backward, a description and the bytes that live then."""
    holders: tuple[tuple[str, int], ...]
    """For each holder of bytes at the peak, a description and its bytes."""
    again: float
    """The predicted nanoseconds of code between loops that runs again: code under `jax.checkpoint`,
    and code that a budget has run again."""
    program: Any = field(repr=False, compare=False)
    constants: list[Any] = field(repr=False, compare=False)

    @property
    def peak(self) -> int:
        """The most bytes that live at one moment, as predicted."""
        return max(count for _, count in self.timeline)

    @cached_property
    def compiled(self) -> int:
        """The compiler's figure, for which the gradient is compiled."""
        return temporary_bytes(self.program, self.constants)

    def __str__(self) -> str:
        most = sorted(self.holders, key=lambda held: -held[1])[:FEW]
        held = "; ".join(f"{size(count)} for {what}" for what, count in most if count > 0)
        again = f"; code between loops that runs again: {self.again / 1e6:.2g} ms"
        said = f"peak of the gradient, predicted: {size(self.peak)}: {held}"
        return said + again if self.again else said

    def plot(self, ax: Any = None) -> Any:
        """Draw the bytes over the equations, forward and then backward."""
        ax = _axes(ax)
        ax.step(range(len(self.timeline)), [n / 1e6 for _, n in self.timeline], where="mid")
        ax.set(xlabel="equations, forward and then backward", ylabel="MB that live, predicted")
        return ax.figure


def gradient_bytes(jaxpr: _jax.Jaxpr) -> GradientBytes:
    """Return the memory of a gradient."""
    alone = _jax.without_constants(jaxpr)
    moves = [*map(_jax.is_tracer, jaxpr.consts)] + [True] * len(jaxpr.in_avals)
    line, state = predicted(alone, moves)
    bytes_then = tuple((m.what, m.bytes(state.chosen)) for m in line.moments)
    holders = tuple(line.holders(state))
    return GradientBytes(bytes_then, holders, line.again, alone, list(jaxpr.consts))


def is_budgeted(jaxpr: _jax.Jaxpr) -> bool:
    """Return whether a budget in bytes plans a loop, or has code between loops run again."""
    found = list(equations.all_equations(jaxpr))
    loops = [e.params["loop"] for e in found if e.primitive is while_p]
    return any(map(is_stretch, found)) or any(isinstance(v.checkpoints, Bytes) for v in loops)


def _axes(ax: Any) -> Any:
    """Return axes to draw on."""
    import matplotlib.pyplot as plt

    return plt.subplots(layout="constrained")[1] if ax is None else ax
