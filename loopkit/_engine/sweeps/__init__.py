"""The forward and the backward sweep of a loop under differentiation: a file for each strategy."""

from __future__ import annotations

from loopkit._engine.derivative.reversal import Reversal
from loopkit._engine.sweeps.every_carry import EveryCarry
from loopkit._engine.sweeps.every_residual import EveryResidual
from loopkit._engine.sweeps.every_segment import EverySegment
from loopkit._engine.sweeps.scheduled import Scheduled
from loopkit._engine.sweeps.strategy import Strategy

STRATEGIES: dict[str, type[Strategy]] = {
    "every residual": EveryResidual,
    "every carry": EveryCarry,
    "every segment": EverySegment,
    "schedule": Scheduled,
}


def sweeps(how: Reversal) -> Strategy:
    """Those of a plan."""
    return STRATEGIES[how.plan.strategy](how)
