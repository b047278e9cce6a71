"""Plans for hosts that wait: on a GPU, the host reads the predicate of a loop before each step."""

from __future__ import annotations

import functools as ft
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

from loopkit._plans import costs

Plan = TypeVar("Plan", bound=Any)
"""The class of plans, which has a property for this and so imports this module."""


@ft.lru_cache(maxsize=256)
def for_waiting_hosts(plan: Plan) -> Plan:
    """Return the plan, or one with longer segments whose carries and rows need no more memory.

    A GPU runs what the host has launched. If the compiler does not know the length of a loop, the
    host reads the predicate before each iteration, and waits for it. Between two kept carries, it
    waits once for each segment. So if a plan keeps carries alone, some of the slots may hold the
    rows of a longer segment instead.
    """
    if plan.strategy != "schedule" or (plan.segment > 1 and not plan.host):
        return plan
    steps = costs.WAITING_REACH * plan.slots if plan.bound is None else plan.bound
    plans = [plan, *(_beside_rows(plan, steps) if plan.host else _among_rows(plan))]
    most = costs.MORE * _runs(plan, steps)
    return min(
        (p for p in plans if _runs(p, steps) <= most), key=lambda p: _on_gpu_nanoseconds(p, steps)
    )


def _among_rows(plan: Plan) -> Iterator[Plan]:
    """Yield plans with longer segments, whose rows take the memory of some slots."""
    for segment in range(2, plan.rows + 2):
        slots = plan.rows + plan.spared - (segment - 1)
        if slots > 0:
            yield replace(plan, slots=slots, segment=segment, store="carries")


def _beside_rows(plan: Plan, steps: int) -> Iterator[Plan]:
    """Yield plans with slots on the host, and rows in the room left on the device."""
    store = "carries" if plan.segment == 1 else plan.store
    times = 2
    while times * plan.segment <= steps:
        wider = replace(plan, segment=times * plan.segment, store=store)
        on_its_way = plan.step.carry_bytes
        if wider.peak_bytes + on_its_way > (plan.room or 0):
            return
        yield wider
        times += 1 + times // 8


def _runs(plan: Any, steps: int) -> float:
    """Return how often a step runs, forward and backward, until each step is reversed."""
    return sum(plan.evaluations(steps)) + steps * (1 - 1 / plan.segment)


def waits(plan: Any, steps: int) -> int:
    """Return how often the host waits in the backward pass.

    It waits for each segment that runs to reach another, and at the end of each segment.
    """
    forward, again = plan.evaluations(steps)
    return (again - forward) // plan.segment + -(-steps // plan.segment)


def _on_gpu_nanoseconds(plan: Any, steps: int) -> float:
    return _runs(plan, steps) * plan.step.on_gpu + waits(plan, steps) * costs.WAIT
