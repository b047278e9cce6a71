"""Find the fastest plan within a budget of bytes.

Among the plans that fit, loopkit takes the one with the least predicted time. That time counts
bytes as well as steps: reading and writing a byte costs more once the caches are full.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from loopkit._jaxprs.kernels import near_divisor
from loopkit._plans.costs import SPARED, TABLES, Store
from loopkit._plans.one_price import host_prices
from loopkit._plans.plan import Plan, keeping_all

FEW_SLOTS = 32
"""The slots that a loop of unknown length may use, however large its carry."""
FEW_SEGMENTS = 8
"""The fewest segments of a plan that keeps the last ones; also the parts it counts them in."""
MANY_SLOTS = 1024
"""The most slots, or steps in a segment, of a loop of unknown length, however small its carry."""
PLACED = 128
"""The most slots if checkpoints are placed online: the tables grow with the slots."""
SPLIT = 512
"""The most slots of a schedule for a known number of steps."""
NEAR_LEAST_TIME = 1.02
"""A plan may take this many times the least predicted time if it moves less to the host."""
NEXT_SLOTS = 1.15
"""The ratio of one number of slots to try to the next, from 14 on. The numbers do not depend on the
budget, so a larger budget has all plans of a smaller one."""
NEXT_SEGMENT, NEXT_OF_FEW = 1.15, 1.5
"""The ratio of one segment length to try to the next: for one budget, or for all sizes."""
PLANNED_REACH = 100
"""A loop without a bound is planned for this many steps per carry in its budget."""


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
    """Return the plan with the least predicted time in at most `count` bytes and `most` slots.

    With `host`, checkpoints may take that many bytes of the host's memory. `unasked` is the plan
    that loopkit would take without a budget. If the bytes are `firm`, it is an error if nothing
    fits.
    """
    steps = loop.bound
    if steps is None:
        steps = PLANNED_REACH * max(1, min(count // loop.step.carry_bytes, MANY_SLOTS))
    small = list(_smallest(loop)) if most is None else []
    small += [] if unasked is None else [unasked]
    if host is None and most is None:
        plans = _by_size(loop, steps, tuple(small))
        if fit := [p for p in plans if p.peak_bytes <= count]:
            return fit[-1]
    else:
        plans = [*_candidates(loop, steps, most, NEXT_SEGMENT, host), *small]
        fit = [p for p in plans if p.peak_bytes <= count and p.host_bytes <= (host or 0)]
        least = min((p.nanoseconds(steps) for p in fit), default=0.0)
        least *= NEAR_LEAST_TIME if host else 1  # transfers to the host take longer than steps
        if near := [p for p in fit if p.nanoseconds(steps) <= least]:
            return min(near, key=lambda p: (p.host_bytes, p.nanoseconds(steps), p.peak_bytes))
    if most is not None:
        return replace(loop, slots=1)
    if not firm:
        return min(small, key=lambda p: (p.host_bytes, p.peak_bytes))
    raise _refusal(small, count, host, loops, name)


@lru_cache(maxsize=256)
def _by_size(loop: Plan, steps: int, small: tuple[Plan, ...]) -> list[Plan]:
    plans = dict.fromkeys([*small, *_candidates(loop, steps, None, NEXT_SEGMENT)])
    return _worth_their_bytes(plans, steps, lambda p: p.peak_bytes)


@lru_cache(maxsize=256)
def plans_by_time(loop: Plan, most: int, host: int | None, unasked: Plan | None) -> list[Plan]:
    """Return plans from the fastest to the smallest, each the fastest in its bytes.

    They take at most `most` bytes on the device and, if given, `host` bytes on the host. More bytes
    remove no plan from the list.
    """
    small = [*_smallest(loop), *([] if unasked is None else [unasked])]
    few = min(small, key=lambda p: (p.host_bytes, p.peak_bytes))
    steps = steps_of(loop)
    fits = lambda p: p.peak_bytes <= most and (host is None or p.host_bytes <= host)
    plans = dict.fromkeys([*small, *_candidates(loop, steps, None, NEXT_OF_FEW)])
    fit = [p for p in plans if p is few or fits(p)]
    found = []
    for price in host_prices(host):
        size = lambda p, price=price: p.peak_bytes + price * p.host_bytes
        found += _worth_their_bytes(fit, steps, size)
    return sorted(dict.fromkeys(found), key=lambda p: p.nanoseconds(steps))


def _worth_their_bytes(
    plans: Iterable[Plan], steps: int, size: Callable[[Plan], float]
) -> list[Plan]:
    """Return plans from the smallest to the fastest.

    Each takes less time than all smaller ones, and runs no more steps. The predicted time of a run
    is more reliable than that of a byte.
    """
    found: list[Plan] = []
    least, runs = math.inf, math.inf
    # Times that differ by rounding alone must not decide: of such plans, the plainest comes first.
    timed = [(size(p), float(f"{p.nanoseconds(steps):.9g}"), p.price, p) for p in plans]
    for _, time, _, plan in sorted(timed, key=lambda found: found[:3]):
        if time < least and (again := runs_again(plan, steps)) <= runs:
            found.append(plan)
            least, runs = time, again
    return found


def runs_again(plan: Plan, steps: int) -> int:
    """Return how often steps run in the backward pass, whole or for their residuals alone."""
    twice = plan.strategy in ("every segment", "schedule") and plan.segment > 1
    return plan.evaluations(steps)[1] + steps * (twice and plan.store == "carries")


def steps_of(loop: Plan) -> int:
    """Return the number of steps for which plans of a loop are compared."""
    return PLANNED_REACH * FEW_SLOTS if loop.bound is None else loop.bound


def _smallest(loop: Plan) -> Iterator[Plan]:
    """Yield plans, including the one that needs the fewest bytes."""
    bound, few = loop.bound, 1 + loop.host  # on the host, one slot needs memory
    yield replace(loop, slots=few)
    if bound is None:
        return
    for price in _prices(loop):
        yield keeping_all(loop, price)
    # If each segment has a slot, the plan needs no tables, which may be larger than small carries.
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
    loop: Plan, steps: int, most: int | None, ratio: float, host: int | None = None
) -> Iterator[Plan]:
    """Yield plans of all sizes, with at most `most` slots, including those that rows take.

    `ratio` is that of one segment length to the next. With `host`, slots fill that many bytes.
    """
    step, bound = loop.step, loop.bound
    if bound is not None:
        for price in _prices(loop):
            yield keeping_all(loop, price)
        for segment in {1, min(16, bound)} - {0} if "carries" in step.stores else ():
            yield replace(loop, slots=-(-bound // segment) * segment, segment=segment)
    for segment in _leaves(steps, loop.exact, ratio):
        segments = -(-steps // segment)
        for store, price in _rows(loop):
            plan = replace(loop, slots=1, segment=segment, store=store, price=price)
            if host is not None:
                counts = [_slots_in(host, plan, segments)]
            elif price and bound is not None and most is None:
                counts = [segments]  # what reruns parts of steps does not also rerun whole steps
            else:
                counts = _slot_counts(plan, segments, most)
            for slots in counts:
                if slots > 0 and (slots < steps or segment == 1):
                    yield replace(plan, slots=slots)
            if most is None and FEW_SEGMENTS <= segments <= FEW_SLOTS:
                yield from _keeping_last(replace(plan, slots=segments))


def _keeping_last(plan: Plan) -> Iterator[Plan]:
    """Yield plans that keep the last segments, from few of them to most."""
    if can_keep_last(plan):
        for part in range(1, FEW_SEGMENTS):
            last = plan.slots * part // FEW_SEGMENTS
            yield replace(plan, slots=plan.slots - last, keeps_last=last)


def can_keep_last(plan: Plan) -> bool:
    """Return whether the last segments may keep their rows: not on the host, and not with a log."""
    moved = plan.host or plan.step.buffer_bytes or plan.step.offloaded_bytes
    known = plan.exact and plan.strategy == "every segment" and plan.store == "residuals"
    return known and not moved


def _slot_counts(plan: Plan, segments: int, most: int | None) -> list[int]:
    """Return the numbers of slots to try for this many segments."""
    last = min(segments, SPLIT if plan.exact else PLACED)
    slots, found = min(segments, 1 + plan.host), []
    while slots <= last:
        found.append(slots)
        slots = max(slots + 1, int(slots * NEXT_SLOTS))
    found += [last] if plan.bound is None else [last, segments]
    if most is not None:  # in carries, including those that the rows of a segment take
        slot = plan.step.carry_bytes + 4
        left = most * slot - plan.row_bytes
        room = max(left // slot, min((left + slot - 4) // slot, SPARED))
        room = min(room, most - (plan.row_bytes > 0))
        found = [*(n for n in found if n <= room), min(room, last)]
    return [n for n in dict.fromkeys(found) if n > 0]


def _slots_in(host: int, plan: Plan, segments: int) -> int:
    """Return how many slots fit in this many bytes on the host."""
    size = lambda slots: replace(plan, slots=slots).slot_bytes
    every = segments if plan.bound is not None else min(segments, PLACED)
    if size(every) <= host:
        return every
    some = range(1, 1 + min(every, SPLIT if plan.exact else PLACED))
    return bisect_right(some, host, key=size)


def _prices(loop: Plan) -> list[float]:
    """Return the prices from which residuals are stored in different ways."""
    return [row.price for row in loop.step.rows]


def _rows(loop: Plan) -> list[tuple[Store, float]]:
    """Return what a segment may store of a step, with the price of each choice."""
    priced = {"carries": [0.0], "residuals": _prices(loop)}
    return [(store, price) for store in loop.step.stores for price in priced[store]]


def _leaves(steps: int, exact: bool, ratio: float = NEXT_SEGMENT) -> list[int]:
    """Return the segment lengths to try."""
    leaves, segment = set(), 1.0
    while segment <= min(steps, 4 * MANY_SLOTS):
        near = exact and segment >= 8
        leaves.add(near_divisor(steps, int(segment)) if near else int(segment))
        segment = max(segment + 1, segment * ratio)
    return sorted(leaves)
