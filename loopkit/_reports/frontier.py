"""The frontier of a step: what to keep of it, and the time to run the rest again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax

from loopkit import _jax
from loopkit._arguments.errors import size
from loopkit._engine.derivative.linearised import linearised
from loopkit._engine.loop import Active, Loop
from loopkit._jaxprs.min_cut import PICOSECONDS
from loopkit._plans.costs import Row
from loopkit._plans.plan import Plan

BY_HAND = "nothing_saveable", "dots_with_no_batch_dims_saveable", "dots_saveable"
"""Policies of JAX that a picture shows."""


class Choice(NamedTuple):
    """A way to keep part of a step."""

    bytes: int
    """Kept of each step."""
    nanoseconds: float
    """Predicted: to run the rest again, for each step."""
    is_taken: bool = False


@dataclass(frozen=True)
class Frontier:
    """The best ways to keep part of a step, from more bytes to fewer."""

    choices: tuple[Choice, ...]
    by_hand: Callable[[], dict[str, Choice]] = field(compare=False)
    """The choices of policies of JAX."""

    def __str__(self) -> str:
        return ", ".join(map(_in_words, self.choices))

    def plot(self, ax: Any = None) -> Any:
        """Draw bytes against time: the frontier, what is taken, and policies of JAX beside it."""
        import matplotlib.pyplot as plt

        ax = plt.subplots(layout="constrained")[1] if ax is None else ax
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
    """The frontier of a loop's step; empty where all residuals are small."""
    keeps_rows = plan.keeps_all or (plan.store == "residuals" and plan.segment > 1)
    rows = plan.step.rows if plan.step.smaller_rows else ()
    choices = (_of_row(row, keeps_rows and row == plan.row) for row in rows)
    return Frontier(tuple(choices), lambda: _by_hand(loop, active))


def _of_row(row: Row, is_taken: bool) -> Choice:
    return Choice(row.bytes, row.nanoseconds, is_taken)


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
