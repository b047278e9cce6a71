"""A schedule for GPUs: the host waits less often, at the price of a few more steps.

A GPU runs what the host has launched. If the compiler does not know the length of a loop, the host
reads the predicate before each iteration, and waits for it. Between two kept carries, it waits once
for each segment. So if a plan keeps carries alone, some of the slots may hold the rows of a longer
segment instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

AnyPlan = Any
"""The type of `loopkit.Plan`, whose file imports this one."""

LAUNCH = 3_800.0
"""Nanoseconds to launch a kernel. Each of many short kernels in a row takes this time, if the next
is launched while the last still runs (NVIDIA, "Getting Started with CUDA Graphs", 2019)."""
STEP = 2 * LAUNCH
"""Nanoseconds to launch the kernels of a small step."""
GPU_SPEEDUP = 30.0
"""The predicted time of a large step on a CPU (`_jaxprs/cost.py`), divided by that on a GPU.

XLA describes an H100 as 132 cores of 128 units at 1.98 GHz, with 3.35 TB/s. By that, the ratio is
670 for products of matrices. It is 17 for adding numbers: each takes 0.04 ns on the CPU, and moves
8 bytes on the GPU. The value is nearer to that of adding, because steps that a GPU waits for seldom
fill it.
"""
WAIT = 12_000.0
"""Nanoseconds until the host has read a predicate and the device runs again. A kernel takes 5.8
microseconds more if the host waits for each (9.6 against 3.8, as for `LAUNCH`). To copy a few bytes
to the host takes about 6 (Wu et al. 2026, "DualPath", arXiv:2602.21548, section 5.2: 5 to 7 a
copy)."""
MORE = 1.1
"""The most runs of a step, relative to the same memory with segments of one step."""
LARGE_CARRY = 1 << 23
"""The bytes of a carry that take less time to write than a wait of the host."""
WAITING_REACH = 100
"""A loop without a bound is planned for this many steps to each slot."""


@lru_cache(maxsize=256)
def for_waiting_hosts(plan: AnyPlan) -> AnyPlan:
    """Return the plan, or one of longer segments whose carries and rows need no more memory."""
    if plan.strategy != "schedule" or (plan.segment > 1 and not plan.host):
        return plan
    steps = WAITING_REACH * plan.slots if plan.bound is None else plan.bound
    plans = [plan, *(_beside_rows(plan, steps) if plan.host else _among_rows(plan))]
    most = MORE * _runs(plan, steps)
    return min((p for p in plans if _runs(p, steps) <= most), key=lambda p: _nanoseconds(p, steps))


def _among_rows(plan: AnyPlan) -> Iterator[AnyPlan]:
    """Yield plans whose rows lie in slots."""
    for segment in range(2, plan.rows + 2):
        slots = plan.rows + plan.spared - (segment - 1)
        if slots > 0:
            yield replace(plan, slots=slots, segment=segment, store="carries")


def _beside_rows(plan: AnyPlan, steps: int) -> Iterator[AnyPlan]:
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


def _runs(plan: AnyPlan, steps: int) -> float:
    """Return how often a step runs, forward and backward, until each step is reversed."""
    replayed = steps * (1 - 1 / plan.segment)
    return sum(plan.evaluations(steps)) + replayed


def waits(plan: AnyPlan, steps: int) -> int:
    """Return how often the host waits, going back.

    It waits for each segment that runs to reach another, and at the end of each segment.
    """
    segments = -(-steps // plan.segment)
    forward, again = plan.evaluations(steps)
    return (again - forward) // plan.segment + segments


def _nanoseconds(plan: AnyPlan, steps: int) -> float:
    step = max(STEP, plan.step.run / GPU_SPEEDUP)
    return _runs(plan, steps) * step + waits(plan, steps) * WAIT


def writes_in_passing(plan: AnyPlan) -> bool:
    """Return whether a slot is written over itself, if nothing is saved, to avoid one more wait.

    A slot in the host's memory is not, and neither is a large one.
    """
    return not plan.host and plan.step.carry_bytes <= LARGE_CARRY
