"""Bytes in, plan out: how many checkpoints, how far apart, and what is stored between them.

Of all plans within a budget, that of least predicted time is taken. Bytes count as well as steps:
what is written and read has a price that rises where it leaves the caches.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from loopkit._plans.plan import CACHES, SPARED, TABLES, Budget, Bytes, Plan, Share, StepCosts, Store

KEPT = 1 << 10
"""Bytes of all residuals of a loop up to which it keeps them: to checkpoint gains nothing."""
NESTED = 1 << 17
"""The same of a loop that takes just its bound of steps, which hold loops. To run such a step again
compiles all of them again, and at each level of loops in loops."""
REPLAYED = 1 << 13
"""Bytes up to which it is run again as a whole, and keeps nothing; of carries, keeps all."""
CACHED_BYTES = CACHES[0][0]
"""Bytes of residuals up to which a loop of known length keeps them if its steps are expensive."""
EXPENSIVE = 4.0
"""So many times as long as to store its residuals does an expensive step take to run again."""
CHECKPOINT_BYTES = 1 << 19
"""Bytes of checkpoints, and of rows, that a loop may use whose steps are not known: what a core's
cache holds, and what is set to zero in no time."""
FEW_SLOTS = 32
"""Slots that such a loop may use, however large its carry."""
ROOM_FOR_ROWS = 1 << 14
"""Bytes of rows that it uses where it does not have to use more."""
RECORDED = ROOM_FOR_ROWS >> 6
"""Bytes of residuals up to which its rows are those, whatever their arrays cost: where carries are
stored, a step is run again to reverse it, and compiled once more for that."""
MANY_SLOTS = 1024
"""Slots, and steps to a segment, that it needs at most, however small its carry."""
PLACED = 128
"""Slots at most where a schedule places the checkpoints online: its tables grow with them."""
SPLIT = 512
"""Slots at most where recomputation is split."""
ALIKE = 2
"""Residuals up to this many times the log of a step are stored in its place: all of them."""
NEAR_LEAST_TIME = 1.02
"""Times the least predicted time up to which a plan is taken that moves less to the host."""
PLANNED_REACH = 100
"""Steps to a carry of its budget for which a loop without a bound is planned."""


class TooLittle(ValueError):
    """No plan needs as few bytes as there may be."""

    def __init__(self, message: str, needed: int):
        super().__init__(message)
        self.needed = needed


def best_plan(
    budget: Budget,
    bound: int | None,
    exact: bool,
    steps: Sequence[StepCosts],
    name: str = "while_loop",
) -> Plan:
    """The plan for a loop whose steps can be undone or saved in several ways.

    Of one plan for each, that of fewest bytes, or, within a budget of bytes, of least time.
    """
    plans, refused = [], []
    for step in steps:
        try:
            plans.append(make_plan(budget, bound, exact, step, name))
        except TooLittle as error:
            refused.append(error)
    if not plans:
        raise ValueError(*min(refused, key=lambda error: error.needed).args)
    if isinstance(budget, Bytes):
        return min(plans, key=lambda p: p.nanoseconds(bound or PLANNED_REACH))
    return min(plans, key=lambda p: p.peak_bytes)


def make_plan(
    budget: Budget, bound: int | None, exact: bool, step: StepCosts, name: str = "while_loop"
) -> Plan:
    """The plan for a loop of `bound` steps at most; `exact` if it takes just that many."""
    loop = Plan(1, bound=bound, exact=exact, step=step)
    if isinstance(budget, Share):
        return _shared(make_plan(None, bound, exact, step, name), budget)
    if budget is None and bound and bound * step.residual_bytes <= step.buffer_bytes:
        # No more than one of the buffers that would be brought back from their last state.
        return replace(loop, segment=bound, store="residuals", keeps_all=True)
    if not step.carry_bytes and bound and (budget is None or isinstance(budget, int)):
        return _without_carry(loop, bound)
    step = step._replace(carry_bytes=max(step.carry_bytes, 1))
    loop = replace(loop, step=step)
    if isinstance(budget, Plan):
        return _adapted(budget, loop)
    if budget == "all":
        assert bound is not None, "checked where the loop is made"
        return replace(loop, segment=max(bound, 1), store="residuals", keeps_all=True)
    if isinstance(budget, Bytes):
        loops, host = budget.loops, budget.host
        if host is not None:
            loop = replace(loop, host=True, room=budget.count // loops)
            host = host // loops
        return _cheapest(budget.count // loops, loop, name, host, loops=loops)
    if isinstance(budget, int):
        return _in_carries(budget, loop)
    return _default(loop)


def _shared(whole: Plan, share: Share) -> Plan:
    """The plan that keeps part of what `whole` does."""
    plan = whole
    if share.likely < 1 and whole.strategy == "every segment" and whole.segments != 1:
        few = _about_the_root(replace(whole, bound=max(1, int(share.likely * (whole.bound or 1)))))
        if few.strategy == "every segment" and few.segments != 1:
            plan = replace(few, bound=whole.bound)
    if share.part == 1 or plan.keeps_all or plan.peak_bytes <= CHECKPOINT_BYTES:
        return plan
    with contextlib.suppress(TooLittle):
        return _cheapest(int(plan.peak_bytes * share.part), replace(plan, thinned=False), "")
    return plan


def _without_carry(loop: Plan, bound: int) -> Plan:
    """Where nothing has to be saved to run a step again, no step is run to get to another."""
    if not loop.step.residual_bytes:
        return replace(loop, segment=bound, store="residuals", keeps_all=True)
    segment = min(16, bound) if loop.step.factor_bytes else 1
    return replace(loop, slots=-(-bound // segment) * segment, segment=segment)


def _adapted(plan: Plan, loop: Plan) -> Plan:
    """A plan made elsewhere, for this loop."""
    if plan.keeps_all and loop.bound is None:
        raise ValueError(
            "loopkit: `checkpoints` can be a plan that stores every step only if the number of "
            f"steps is bounded, got {plan} and max_steps=None. Pass `max_steps`."
        )
    if plan.keeps_all:
        plan = replace(plan, segment=max(1, loop.bound or 1), store="residuals")
    return replace(plan, bound=loop.bound, exact=loop.exact, step=loop.step)


def _default(loop: Plan) -> Plan:
    """One extra forward pass, and about the square root of the steps in memory."""
    plan = _about_the_root(loop)
    if loop.bound is None or not loop.exact or plan.keeps_all:
        return plan
    whole = replace(loop, segment=max(loop.bound, 1), store="residuals", keeps_all=True)
    times = [p.nanoseconds(loop.bound) for p in (whole, plan)]
    stored = times[0] - loop.bound * loop.step.record
    is_expensive = loop.step.record * loop.bound >= EXPENSIVE * stored
    return (
        whole if whole.slot_bytes <= CACHED_BYTES and is_expensive and times[0] < times[1] else plan
    )


def _about_the_root(loop: Plan) -> Plan:
    """The same, whatever a step costs."""
    step, bound = loop.step, loop.bound
    if bound is not None and step.log_bytes and step.residual_bytes <= ALIKE * step.log_bytes:
        return replace(loop, segment=max(bound, 1), store="residuals", keeps_all=True)
    few = NESTED if step.holds_loops and loop.exact else KEPT
    if bound is not None and bound * step.residual_bytes <= few:
        return replace(loop, segment=max(bound, 1), store="residuals", keeps_all=True)
    if bound is not None and bound * (step.residual_bytes + step.factor_bytes) <= REPLAYED:
        return replace(loop, slots=1, segment=bound, store="residuals")
    if bound is not None and bound * step.carry_bytes <= REPLAYED and not step.factor_bytes:
        # A segment of several steps would be run to its end, besides: one more copy to compile.
        return replace(loop, slots=bound)
    if loop.exact:
        assert bound is not None, "a loop that takes just so many steps has a length"
        candidates = [_balanced(loop, store, bound) for store in step.stores]
        return _or_every_carry(min(candidates, key=lambda p: p.nanoseconds(bound)))
    store = _cheaper_store(loop)
    row = max(step.row_bytes(store) + step.factor_bytes, 1)
    most = min(MANY_SLOTS, max(FEW_SLOTS, CHECKPOINT_BYTES // step.carry_bytes))
    rows = min(MANY_SLOTS, max(FEW_SLOTS // 4, CHECKPOINT_BYTES // row))
    if bound is not None and bound <= 16 * most * rows:
        return _or_every_carry(_balanced(loop, store, 2 * most))
    if step.residual_bytes <= RECORDED:
        store, row = "residuals", max(step.residual_bytes + step.factor_bytes, 1)
    few = max(16, ROOM_FOR_ROWS // row)
    return replace(
        loop, slots=min(most, PLACED), segment=min(rows, PLACED, few), store=store, thinned=True
    )


def _balanced(loop: Plan, store: Store, most: int) -> Plan:
    """A slot for every segment, slots and rows of about the same size."""
    step, bound = loop.step, loop.bound or 0
    row = step.row_bytes(store) + step.factor_bytes
    slots = max(1, min(bound, most, _root(bound * row / step.carry_bytes)))
    segment = max(1, -(-bound // slots))
    if loop.exact:
        segment = _near_divisor(bound, segment)
    return replace(loop, slots=max(1, -(-bound // segment)), segment=segment, store=store)


def _or_every_carry(plan: Plan) -> Plan:
    """The plan, or one that keeps every carry if that takes no more memory."""
    every = replace(plan, slots=max(1, plan.bound or 1), segment=1, store="carries")
    fits = every.peak_bytes <= plan.peak_bytes and not plan.step.factor_bytes
    return every if fits else plan


def _near_divisor(bound: int, segment: int) -> int:
    """A divisor of `bound` near `segment`: segments all of one length have a trip count."""
    near = range(max(1, math.ceil(0.7 * segment)), math.floor(1.4 * segment) + 1)
    divisors = [k for k in near if bound % k == 0]
    return min(divisors, key=lambda k: abs(k - segment), default=segment)


def _cheaper_store(loop: Plan) -> Store:
    """What a long segment had better store."""
    plans = [replace(loop, slots=1, segment=16, store=s) for s in loop.step.stores]
    return min(plans, key=lambda p: p.nanoseconds(16)).store


def _root(value: float) -> int:
    """The square root, rounded up."""
    return math.isqrt(max(0, math.ceil(value) - 1)) + 1


def _in_carries(budget: int, loop: Plan) -> Plan:
    """At most `budget` carries, of which a row of a segment is as many as it has the bytes of."""
    bound = loop.bound
    if bound is not None and budget >= bound:
        return replace(loop, slots=max(bound, 1))
    count = budget * (loop.step.carry_bytes + 4) + loop.least_bytes
    return _cheapest(count, loop, "", most=budget)


@lru_cache(maxsize=256)
def _cheapest(
    count: int, loop: Plan, name: str, host: Any = None, most: Any = None, loops: int = 1
) -> Plan:
    """The plan of least predicted time that needs at most `count` bytes, and `most` slots.

    Checkpoints may be in so many bytes of the host's memory.
    """
    step, steps = loop.step, loop.bound
    if steps is None:
        steps = PLANNED_REACH * max(1, min(count // step.carry_bytes, MANY_SLOTS))
    room = count if host is None else host
    # More slots than fit in a cache are not always better than those that do.
    sizes = {min(count, size) for size, _ in CACHES}
    plans = [p for size in sizes for p in _candidates(int(size), room, loop, steps, most)]
    small = list(_smallest(loop)) if most is None else []
    small += [_default(loop)] if most is None and host is None else []
    plans += small
    plans = [p for p in plans if p.peak_bytes <= count and p.host_bytes <= room]
    if plans and host is not None:  # on an accelerator steps are faster than what goes to the host
        least = min(p.nanoseconds(steps) for p in plans)
        near = [p for p in plans if p.nanoseconds(steps) <= NEAR_LEAST_TIME * least]
        return min(near, key=lambda p: (p.host_bytes, p.nanoseconds(steps)))
    if plans:
        return min(plans, key=lambda p: (p.nanoseconds(steps), p.peak_bytes))
    if most is not None:
        return replace(loop, slots=1)
    raise _refusal(small, count, host, loops, name)


def _smallest(loop: Plan) -> Iterator[Plan]:
    """Plans of which one needs the fewest bytes."""
    bound, few = loop.bound, 1 + loop.host  # on the host, one that has memory
    yield replace(loop, slots=few)
    if bound is None:
        return
    yield replace(loop, segment=max(bound, 1), store="residuals", keeps_all=True)
    # With a slot for every segment there are no tables, which may be more than small carries.
    segments = {-(-bound // slots) for slots in range(1, 1 + min(SPARED, bound))}
    for segment in segments.union(_leaves(bound, loop.exact)):
        slots = max(few, -(-bound // segment))
        if segment == 1 or slots * loop.step.carry_bytes <= 2 * TABLES:
            for store in loop.step.stores:
                yield replace(loop, slots=slots, segment=segment, store=store)


def _refusal(
    plans: Sequence[Plan], count: int, host: int | None, loops: int, name: str
) -> TooLittle:
    """What to say where none of these plans fits."""
    each = " for each of the loops that share it" if loops > 1 else ""
    fewest = min(p.host_bytes for p in plans)
    if host is not None and host < fewest:
        return TooLittle(
            f"loopkit.{name}: `memory` must be at least {fewest * loops} bytes on the "
            f"host, got {host * loops} bytes. That is one checkpoint{each}. Pass more for 'host'.",
            fewest,
        )
    fit = [p for p in plans if host is None or p.host_bytes <= host]
    least = min(fit, key=lambda p: p.peak_bytes)
    needed = least.peak_bytes * loops
    where, advice = "", f"`memory={needed}` or more"
    if host is not None:
        where, advice = " on the device", f"{needed} or more for 'device'"
    return TooLittle(
        f"loopkit.{name}: `memory` must be at least {needed} bytes{where}, got {count * loops} "
        f"bytes. That is a carry of {least.step.carry_bytes} bytes, and what else a gradient needs "
        f"however little is kept{each}. Pass {advice}.",
        needed,
    )


def _candidates(count: int, room: int, loop: Plan, steps: int, most: int | None) -> Iterator[Plan]:
    """Plans whose checkpoints are in `room` bytes, and near `count` bytes on the device."""
    step, bound = loop.step, loop.bound
    if bound is not None:
        yield replace(loop, segment=max(bound, 1), store="residuals", keeps_all=True)
        for segment in {1, min(16, bound)} - {0} if "carries" in step.stores else ():
            yield replace(loop, slots=-(-bound // segment) * segment, segment=segment)
    for store in step.stores:
        for segment in _leaves(steps, loop.exact):
            segments = -(-steps // segment)
            plan = replace(loop, slots=1, segment=segment, store=store)
            left = room if loop.host else count - plan.row_bytes - plan.least_bytes
            slots = _slots_in(left, step.carry_bytes)
            if slots < segments or bound is None:
                slots = _slots_in(left, step.carry_bytes, place=4)
                slots = min(slots, SPLIT if loop.exact else PLACED)
            slots = min(slots, segments)
            if most is not None:
                slots = min(slots, most - (plan.row_bytes > 0))
            least = min(segments, 1 + loop.host)
            # To save one of a few carries may cost more than to compute it again.
            for some in {*range(least, slots if segments <= FEW_SLOTS else 0), slots}:
                if some >= least and not (some >= steps and segment > 1):
                    yield replace(plan, slots=some)


def _slots_in(count: int, carry: int, place: int = 0) -> int:
    """How many slots so many bytes are enough for, with `place` bytes each beside the carries."""
    few = (count + carry) // (carry + place)  # of which one has no carry
    return max(count // (carry + place), min(few, SPARED))


def _leaves(steps: int, exact: bool) -> list[int]:
    """Segment lengths to try."""
    leaves, segment = set(), 1.0
    while segment <= min(steps, 4 * MANY_SLOTS):
        near = exact and segment >= 8
        leaves.add(_near_divisor(steps, int(segment)) if near else int(segment))
        segment = max(segment + 1, segment * 1.15)
    return sorted(leaves)
