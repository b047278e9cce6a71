"""The fastest plan within a budget of bytes.

Among the plans that fit, loopkit takes the one with the least predicted time. That time counts
bytes as well as steps: reading and writing a byte costs more once the caches are full.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from loopkit._plans.costs import CACHES, SPARED, TABLES, Store
from loopkit._plans.plan import Plan

FEW_SLOTS = 32
"""The slots that a loop of unknown length may use, however large its carry."""
MANY_SLOTS = 1024
"""The most slots, and the most steps in a segment, that a loop needs, however small its carry."""
PLACED = 128
"""The most slots if a schedule places the checkpoints online: its tables grow with the slots."""
SPLIT = 512
"""The most slots if a schedule for a known number of steps splits the recomputation."""
NEAR_LEAST_TIME = 1.02
"""A plan may take this many times the least predicted time if it moves less to the host."""
GRADES = 3
"""How many sizes are planned for before the size doubles, if a budget is to be divided."""
NEXT_SEGMENT, NEXT_OF_FEW = 1.15, 1.5
"""The ratio of the lengths of segments to try, for one budget and for each of many sizes."""
PLANNED_REACH = 100
"""A loop without a bound is planned for this many steps to each carry of its budget."""


class TooLittle(ValueError):
    """No plan fits in the given number of bytes."""

    def __init__(self, message: str, needed: int):
        super().__init__(message)
        self.needed = needed


@lru_cache(maxsize=256)
def cheapest_plan(
    count: int,
    loop: Plan,
    name: str,
    host: int | None = None,
    most: int | None = None,
    loops: int = 1,
    unasked: Plan | None = None,
    firm: bool = True,
) -> Plan:
    """Return the plan of least predicted time, of at most `count` bytes and `most` slots.

    With `host`, checkpoints may take that many bytes of the host's memory. `unasked` is the plan
    that loopkit would take without a budget. If nothing fits in the bytes, that is an error only if
    they are `firm`.
    """
    step, steps = loop.step, loop.bound
    if steps is None:
        steps = PLANNED_REACH * max(1, min(count // step.carry_bytes, MANY_SLOTS))
    room = count if host is None else host
    # More slots than fit in a cache are not always better than those that do.
    sizes = {min(count, size) for size, _ in CACHES}
    plans = [p for size in sizes for p in _candidates(int(size), room, loop, steps, most)]
    small = list(_smallest(loop)) if most is None else []
    small += [] if unasked is None else [unasked]
    plans += small
    plans = [p for p in plans if p.peak_bytes <= count and p.host_bytes <= room]
    if plans and host is not None:  # transfers to the host take longer than steps
        least = min(p.nanoseconds(steps) for p in plans)
        near = [p for p in plans if p.nanoseconds(steps) <= NEAR_LEAST_TIME * least]
        return min(near, key=lambda p: (p.host_bytes, p.nanoseconds(steps)))
    if plans:
        return min(plans, key=lambda p: (p.nanoseconds(steps), p.peak_bytes))
    if most is not None:
        return replace(loop, slots=1)
    if not firm:
        return min(small, key=lambda p: (p.host_bytes, p.peak_bytes))
    raise _refusal(small, count, host, loops, name)


def plans_by_time(loop: Plan, most: int, host: int | None, unasked: Plan | None) -> list[Plan]:
    """Return plans from the fastest to the smallest, each the fastest in its bytes.

    They take at most `most` bytes of the device and, if those are given, `host` bytes of the host.
    More bytes do not remove any plan from the list.
    """
    small = [*_smallest(loop), *([] if unasked is None else [unasked])]
    few = min(small, key=lambda p: (p.host_bytes, p.peak_bytes))
    steps, part = steps_of(loop), 1.0 if host is None else host / most
    plans = dict.fromkeys(small)
    for count in _sizes(few.peak_bytes, most):
        room = int(count * part)
        plans |= dict.fromkeys(_candidates(count, room, loop, steps, None, NEXT_OF_FEW))
    priced = [(p.nanoseconds(steps), p.peak_bytes, p.host_bytes * loop.host, p) for p in plans]
    room = most if host is None else host
    found: list[Plan] = []
    least = math.inf
    for _, device, on_host, plan in sorted(priced, key=lambda found: found[:3]):
        size = device + on_host / part
        if size < least and (plan is few or (device <= most and on_host <= room)):
            found.append(plan)
            least = size
    return found


def steps_of(loop: Plan) -> int:
    """Return the steps for which plans of a loop are compared."""
    return PLANNED_REACH * FEW_SLOTS if loop.bound is None else loop.bound


def _sizes(least: int, most: int) -> list[int]:
    """Return numbers of bytes to plan for; a greater `most` only adds some."""
    first = math.ceil(GRADES * math.log2(max(least, 1)))
    last = math.floor(GRADES * math.log2(max(most, 1)))
    return [min(least, most), *(math.ceil(2 ** (k / GRADES)) for k in range(first, last + 1))]


def _smallest(loop: Plan) -> Iterator[Plan]:
    """Yield plans, among them the one that needs the fewest bytes."""
    bound, few = loop.bound, 1 + loop.host  # on the host, also a slot with memory
    yield replace(loop, slots=few)
    if bound is None:
        return
    for price in _prices(loop):
        yield replace(loop, segment=max(bound, 1), store="residuals", price=price, keeps_all=True)
    # If each segment has a slot, the plan needs no tables. Those may be larger than small carries.
    segments = {-(-bound // slots) for slots in range(1, 1 + min(SPARED, bound))}
    for segment in segments.union(_leaves(bound, loop.exact)):
        slots = max(few, -(-bound // segment))
        if segment == 1 or slots * loop.step.carry_bytes <= 2 * TABLES:
            for store, price in _rows(loop):
                yield replace(loop, slots=slots, segment=segment, store=store, price=price)


def _refusal(
    plans: Sequence[Plan], count: int, host: int | None, loops: int, name: str
) -> TooLittle:
    """Make the error for a budget in which none of these plans fits."""
    each = f", in each of the {loops} loops that share it" if loops > 1 else ""
    fewest = min(p.host_bytes for p in plans)
    if host is not None and host < fewest:
        return TooLittle(
            f"loopkit.{name}: `memory` must be at least {fewest * loops} bytes on the host, for a "
            f"checkpoint{each}. Pass more for 'host'. Got: {host * loops} bytes.",
            fewest,
        )
    fit = [p for p in plans if host is None or p.host_bytes <= host]
    least = min(fit, key=lambda p: p.peak_bytes)
    needed = least.peak_bytes * loops
    where, advice = "", f"`memory={needed}` or more"
    if host is not None:
        where, advice = " on the device", f"{needed} or more for 'device'"
    return TooLittle(
        f"loopkit.{name}: `memory` must be at least {needed} bytes{where}, for a carry of "
        f"{least.step.carry_bytes} bytes and for what every gradient needs besides{each}. Pass "
        f"{advice}. Got: {count * loops} bytes.",
        needed,
    )


def _candidates(
    count: int, room: int, loop: Plan, steps: int, most: int | None, ratio: float = NEXT_SEGMENT
) -> Iterator[Plan]:
    """Yield plans whose checkpoints fit in `room` bytes, near `count` bytes on the device.

    `ratio` is that of one length of segments to the next.
    """
    step, bound = loop.step, loop.bound
    if bound is not None:
        for price in _prices(loop):
            yield replace(
                loop, segment=max(bound, 1), store="residuals", price=price, keeps_all=True
            )
        for segment in {1, min(16, bound)} - {0} if "carries" in step.stores else ():
            yield replace(loop, slots=-(-bound // segment) * segment, segment=segment)
    for store, price in _rows(loop):
        for segment in _leaves(steps, loop.exact, ratio):
            segments = -(-steps // segment)
            plan = replace(loop, slots=1, segment=segment, store=store, price=price)
            left = room if loop.host else count - plan.row_bytes - plan.least_bytes
            slots = _slots_in(left, step.carry_bytes)
            if slots < segments or bound is None:
                slots = _slots_in(left, step.carry_bytes, place=4)
                slots = min(slots, SPLIT if loop.exact else PLACED)
            slots = min(slots, segments)
            if most is not None:
                slots = min(slots, most - (plan.row_bytes > 0))
            least = min(segments, 1 + loop.host)
            # Saving one of a few carries may cost more than computing it again.
            fewer = slots if segments <= FEW_SLOTS and ratio == NEXT_SEGMENT else 0
            for some in {*range(least, fewer), slots}:
                if some >= least and not (some >= steps and segment > 1):
                    yield replace(plan, slots=some)
            if slots == segments and (last := _last_in(count, replace(plan, slots=slots))):
                yield replace(plan, slots=slots - last, keeps_last=last)


def can_keep_last(plan: Plan) -> bool:
    """Return whether the last segments may keep their rows: on the device, and without a log."""
    moved = plan.host or plan.step.buffer_bytes or plan.step.offloaded_bytes
    known = plan.exact and plan.strategy == "every segment" and plan.store == "residuals"
    return known and not moved


def _last_in(count: int, plan: Plan) -> int:
    """Return how many of the last segments may keep their rows if the plan takes `count` bytes."""
    if not can_keep_last(plan):
        return 0
    rows = plan.segment * plan.row.bytes
    room = count - plan.peak_bytes + (0 if plan.factor_bytes else plan.row_bytes)
    return max(0, min(plan.slots - 2, room // max(1, rows - plan.step.carry_bytes)))


def _prices(loop: Plan) -> list[float]:
    """Return the prices at which the residuals are stored in different ways."""
    return [row.price for row in loop.step.rows]


def _rows(loop: Plan) -> list[tuple[Store, float]]:
    """Return what a segment may store of a step, with the price of each choice."""
    priced = {"carries": [0.0], "residuals": _prices(loop)}
    return [(store, price) for store in loop.step.stores for price in priced[store]]


def _slots_in(count: int, carry: int, place: int = 0) -> int:
    """Return how many slots fit in `count` bytes, with `place` bytes each beside the carry."""
    few = (count + carry) // (carry + place)  # one of these has no carry
    return max(count // (carry + place), min(few, SPARED))


def _leaves(steps: int, exact: bool, ratio: float = NEXT_SEGMENT) -> list[int]:
    """Return the segment lengths to try."""
    leaves, segment = set(), 1.0
    while segment <= min(steps, 4 * MANY_SLOTS):
        near = exact and segment >= 8
        leaves.add(near_divisor(steps, int(segment)) if near else int(segment))
        segment = max(segment + 1, segment * ratio)
    return sorted(leaves)


def near_divisor(bound: int, segment: int) -> int:
    """Return a divisor of `bound` near `segment`, or `segment` if there is none.

    If all segments have one length, compilers know how many steps each loop takes.
    """
    near = range(max(1, math.ceil(0.7 * segment)), math.floor(1.4 * segment) + 1)
    divisors = [k for k in near if bound % k == 0]
    return min(divisors, key=lambda k: abs(k - segment), default=segment)
