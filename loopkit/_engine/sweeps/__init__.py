"""The forward and the backward sweep of a loop under differentiation: a file for each strategy."""

from __future__ import annotations

from loopkit import _jax
from loopkit._engine.derivative.reversal import Reversal
from loopkit._engine.sweeps.every_carry import EveryCarry
from loopkit._engine.sweeps.every_residual import EveryResidual
from loopkit._engine.sweeps.every_segment import EverySegment
from loopkit._engine.sweeps.in_units import InUnits
from loopkit._engine.sweeps.scheduled import Scheduled
from loopkit._engine.sweeps.strategy import Strategy

STRATEGIES: dict[str, type[Strategy]] = {
    "every residual": EveryResidual,
    "every carry": EveryCarry,
    "every segment": EverySegment,
    "schedule": Scheduled,
}


LARGE = 1 << 23
"""Bytes of a carry that are written in less time than a host waits."""


def sweeps(how: Reversal) -> Strategy:
    """Those of a plan, on the device at hand."""
    plan = how.plan
    # A slot in the host's memory is not written over itself in passing, nor is a large one.
    light = not plan.host and plan.step.carry_bytes <= LARGE
    if plan.strategy == "schedule" and light and _jax.host_waits.value:
        return InUnits(how.for_waiting_hosts())
    return STRATEGIES[plan.strategy](how)
