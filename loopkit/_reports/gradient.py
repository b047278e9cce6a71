"""The memory of a whole gradient: what lives at each moment of it, as predicted."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from loopkit import _jax
from loopkit._arguments.errors import size
from loopkit._engine.derivative.whole_program import predicted, temporary_bytes
from loopkit._jaxprs import equations
from loopkit._plans.budget import Part

FEW = 3
"""How many of those that hold bytes at the peak are printed."""


@dataclass(frozen=True)
class GradientBytes:
    """The temporary memory of the gradient of a function in all its arguments."""

    timeline: tuple[tuple[str, int], ...]
    """For each equation, forward and then backward, what it is and the bytes that live then."""
    holders: tuple[tuple[str, int], ...]
    """For each of those that hold bytes at the peak, what it is and its bytes."""
    program: Any = field(repr=False, compare=False)

    @property
    def peak(self) -> int:
        """The most bytes that live at one moment, as predicted."""
        return max(count for _, count in self.timeline)

    @cached_property
    def compiled(self) -> int:
        """The compiler's figure. It takes as long as to compile the gradient."""
        return temporary_bytes(self.program)

    def __str__(self) -> str:
        most = sorted(self.holders, key=lambda held: -held[1])[:FEW]
        held = "; ".join(f"{size(count)} for {what}" for what, count in most if count > 0)
        return f"peak of the gradient, predicted: {size(self.peak)}: {held}"

    def plot(self, ax: Any = None) -> Any:
        """Draw the bytes over the equations, forward and then backward."""
        import matplotlib.pyplot as plt

        ax = plt.subplots(layout="constrained")[1] if ax is None else ax
        ax.step(range(len(self.timeline)), [n / 1e6 for _, n in self.timeline], where="mid")
        ax.set(xlabel="equations, forward and then backward", ylabel="MB that live, predicted")
        return ax.figure


def gradient_bytes(jaxpr: _jax.Jaxpr) -> GradientBytes | None:
    """Return the memory of a gradient; None unless the loops of a program share a budget."""
    found = (getattr(e.params.get("loop"), "checkpoints", None) for e in _outermost(jaxpr))
    if not any(isinstance(budget, Part) for budget in found):
        return None
    line, state = predicted(jaxpr)
    bytes_then = tuple((m.what, m.bytes(state.chosen)) for m in line.moments)
    return GradientBytes(bytes_then, tuple(line.holders(state)), jaxpr)


def _outermost(jaxpr: _jax.Jaxpr) -> list:
    """Return the equations of loops that are not derivatives yet."""
    return [e for e in equations.all_equations(jaxpr) if e.primitive.name == "loopkit_while"]
