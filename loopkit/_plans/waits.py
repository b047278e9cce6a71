"""A schedule for GPUs: few waits of the host, at the price of a few more steps.

A GPU runs what the host has launched. Of a loop whose length is not known when it is compiled, the
host reads the predicate before each iteration, and waits for it. To get from a kept carry to
another takes such a wait for each segment. Where a plan keeps carries alone, some of the slots may
hold the rows of a longer segment instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

AnyPlan = Any
"""A `loopkit.Plan`, which imports this file."""

LAUNCH = 3_800.0
"""Nanoseconds to launch a kernel: what each takes of many short ones in a row, the next launched
while the last still runs (NVIDIA, "Getting Started with CUDA Graphs", 2019)."""
STEP = 2 * LAUNCH
"""To launch those of a small step."""
GPU_SPEEDUP = 30.0
"""A GPU runs a large step in so much less time than is predicted for a CPU (`_jaxprs/cost.py`).

By what XLA says of an H100 (132 cores of 128 units at 1.98 GHz, 3.35 TB/s) that is 17 for adding
numbers, which takes 0.04 ns there and 8 bytes here, and 670 for products of matrices. Nearer the
first: steps that a GPU waits for seldom fill it.
"""
WAIT = 12_000.0
"""Nanoseconds until the host has read a predicate, and the device runs again: 5.8 microseconds more
a kernel where the host waits for each (9.6 against 3.8, as for `LAUNCH`), and about 6 to copy a few
bytes to the host (Wu et al. 2026, "DualPath", arXiv:2602.21548, section 5.2: 5 to 7 a copy)."""
MORE = 1.1
"""Runs of a step at most, relative to those with as many carries and segments of one step."""
LARGE_CARRY = 1 << 23
"""Bytes of a carry that are written in less time than a host waits."""
WAITING_REACH = 100
"""Steps to a slot for which a loop without a bound is planned."""


@lru_cache(maxsize=256)
def for_waiting_hosts(plan: AnyPlan) -> AnyPlan:
    """The plan itself, or one for longer segments whose carries and rows need no more memory."""
    if plan.strategy != "schedule" or (plan.segment > 1 and not plan.host):
        return plan
    steps = WAITING_REACH * plan.slots if plan.bound is None else plan.bound
    plans = [plan, *(_beside_rows(plan, steps) if plan.host else _among_rows(plan))]
    most = MORE * _runs(plan, steps)
    return min((p for p in plans if _runs(p, steps) <= most), key=lambda p: _nanoseconds(p, steps))


def _among_rows(plan: AnyPlan) -> Iterator[AnyPlan]:
    """Plans for rows that lie in slots."""
    for segment in range(2, plan.rows + 2):
        slots = plan.rows + plan.spared - (segment - 1)
        if slots > 0:
            yield replace(plan, slots=slots, segment=segment, store="carries")


def _beside_rows(plan: AnyPlan, steps: int) -> Iterator[AnyPlan]:
    """Plans for rows that lie in what room there is on the device, and slots on the host."""
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
    """Of a step, forward and backward, until each is reversed."""
    replayed = steps * (1 - 1 / plan.segment)
    return sum(plan.evaluations(steps)) + replayed


def waits(plan: AnyPlan, steps: int) -> int:
    """Of the host, going back: for each segment run to get to another, and for its end."""
    segments = -(-steps // plan.segment)
    forward, again = plan.evaluations(steps)
    return (again - forward) // plan.segment + segments


def _nanoseconds(plan: AnyPlan, steps: int) -> float:
    step = max(STEP, plan.step.run / GPU_SPEEDUP)
    return _runs(plan, steps) * step + waits(plan, steps) * WAIT


def writes_in_passing(plan: AnyPlan) -> bool:
    """Whether a slot is written over itself where nothing is saved, rather than wait once more.

    One in the host's memory is not, nor is a large one.
    """
    return not plan.host and plan.step.carry_bytes <= LARGE_CARRY
