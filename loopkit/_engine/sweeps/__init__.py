"""The forward and backward sweeps of a differentiated loop: a class for each strategy."""

from __future__ import annotations

from loopkit import _jax
from loopkit._engine.derivative.pieces import Reversal
from loopkit._engine.sweeps.every_step import EveryCarry, EveryResidual, LastSegments
from loopkit._engine.sweeps.in_segments import InSegments
from loopkit._engine.sweeps.segments import EverySegment, Scheduled
from loopkit._engine.sweeps.strategy import Sweep

STRATEGIES: dict[str, type[Sweep]] = {
    "every residual": EveryResidual,
    "every carry": EveryCarry,
    "every segment": EverySegment,
    "schedule": Scheduled,
}


def sweeps(how: Reversal) -> Sweep:
    """Return the sweeps of a plan for the current device."""
    if how.plan.strategy == "schedule" and _jax.host_waits.value:
        return InSegments(how.for_waiting_hosts())
    return (LastSegments if how.plan.keeps_last else STRATEGIES[how.plan.strategy])(how)
