"""Turn a budget into a plan: how many checkpoints, how far apart, and what to store in between."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace

from loopkit._arguments import errors
from loopkit._jaxprs.kernels import near_divisor
from loopkit._plans.budget import Budget, Bytes, Part, Share, stores_every_step
from loopkit._plans.cheapest import (
    FEW_SLOTS,
    MANY_SLOTS,
    PLACED,
    PLANNED_REACH,
    TooLittle,
    can_keep_last,
    cheapest_plan,
    plans_by_time,
)
from loopkit._plans.costs import CACHES, StepCosts, Store
from loopkit._plans.plan import Plan, keeping_all

KEPT = 1 << 10
"""The total residual bytes up to which a loop keeps them: checkpointing would gain nothing."""
NESTED = 1 << 17
"""The total residual bytes up to which a loop of known length keeps them if its steps run other
loops. To run such a step again, those loops would be compiled again, at each level of nesting."""
REPLAYED = 1 << 13
"""The total residual bytes up to which a loop keeps nothing and runs again as a whole. With as few
bytes of carries, it keeps every carry. If its steps run other loops, it keeps the residuals."""
CACHED_BYTES = CACHES[0][0]
"""The total residual bytes up to which a loop of known length with expensive steps keeps them."""
NESTED_BYTES = CACHED_BYTES << 2
"""Like `CACHED_BYTES`, for steps that run other loops, which a replay would run and compile again,
or that run on an accelerator, where a replay would launch them again."""
EXPENSIVE = 4.0
"""A step is expensive if it takes this many times as long as storing its residuals."""
CHECKPOINT_BYTES = 1 << 19
"""The bytes of checkpoints, and of rows, that a loop of unknown length may use: they fit in a
core's cache, and setting them to zero takes negligible time."""
ROOM_FOR_ROWS = 1 << 14
"""The bytes of rows that a loop of unknown length uses, unless 16 rows take more."""
RECORDED = ROOM_FOR_ROWS >> 6
"""The residual bytes of a step up to which a loop of unknown length stores residuals in its rows,
however many arrays they are. If it stored carries, it would run each step again to reverse it, and
would compile the step once more for that."""
EVERY_CARRY = 9
"""The number of steps up to which a loop keeps every carry if that takes less time. The compiled
gradient then needs at most an eighth more memory than with the smallest plan."""
LITTLE = 8
"""A loop also keeps every carry if that is faster and adds at most 1 / LITTLE of the bytes that
live while a step is reversed. The compiler then gets one loop fewer."""
HARDLY_ANY = 32
"""The default may add 1 / HARDLY_ANY of the bytes that live while a step is reversed for speed."""
ALIKE = 2
"""A loop stores residuals instead of the log if they take at most this many times its bytes."""


def best_plan(
    budget: Budget,
    bound: int | None,
    exact: bool,
    steps: Sequence[StepCosts],
    name: str = "while_loop",
) -> Plan:
    """Return the best plan for a loop whose steps can be undone or saved in several ways.

    loopkit makes one plan for each way. It takes the one with the fewest bytes or, with a budget in
    bytes, the fastest one.
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


def all_plans(budget: Bytes, bound: int | None, exact: bool, step: StepCosts) -> list[Plan]:
    """Return the plans for budgets up to this one, from the fastest to the smallest."""
    step = step._replace(carry_bytes=max(step.carry_bytes, 1))
    loop = Plan(1, bound=bound, exact=exact, step=step)
    if budget.host is not None:
        loop = replace(loop, host=True, room=budget.count)
        return plans_by_time(loop, budget.count, budget.host, None)
    return plans_by_time(loop, budget.count, None, _default(loop))


def make_plan(
    budget: Budget, bound: int | None, exact: bool, step: StepCosts, name: str = "while_loop"
) -> Plan:
    """Return the plan for a loop of at most `bound` steps, or exactly as many if `exact`."""
    loop = Plan(1, bound=bound, exact=exact, step=step)
    if isinstance(budget, Share):
        return _shared(make_plan(None, bound, exact, step, name), budget)
    if budget is None and bound and bound * step.residual_bytes <= step.buffer_bytes:
        # The residuals take no more than one copy of the buffers that the loop would undo.
        return keeping_all(loop)
    if not step.carry_bytes and bound and (budget is None or isinstance(budget, int)):
        return _without_carry(loop, bound)
    step = step._replace(carry_bytes=max(step.carry_bytes, 1))
    loop = replace(loop, step=step)
    if isinstance(budget, Plan):
        return _adapted(budget, loop, name)
    if stores_every_step(budget):
        if bound is None:  # its results have no gradient
            return _default(loop)
        return keeping_all(loop)
    if isinstance(budget, Bytes):
        loops, host = budget.loops, budget.host
        if host is not None:
            loop = replace(loop, host=True, room=budget.count // loops)
            host = host // loops
        unasked = _default(loop) if host is None else None
        if isinstance(budget, Part) and budget.number is not None:
            return _default(loop)
        firm, count = not isinstance(budget, Part), budget.count // loops
        return cheapest_plan(count, loop, name, host, None, loops, unasked, firm)
    if isinstance(budget, int):
        return _in_carries(budget, loop)
    return _default(loop)


def _shared(whole: Plan, share: Share) -> Plan:
    """Return a plan that keeps part of what `whole` keeps."""
    plan = whole
    if share.likely < 1 and whole.strategy == "every segment" and whole.segments != 1:
        likely = max(1, int(share.likely * (whole.bound or 1)))
        few = _about_the_root(Plan(1, bound=likely, exact=whole.exact, step=whole.step))
        if few.strategy == "every segment" and few.segments != 1:
            plan = replace(few, bound=whole.bound)
    if share.part == 1 or plan.keeps_all or plan.peak_bytes <= CHECKPOINT_BYTES:
        return plan
    with contextlib.suppress(TooLittle):
        few = replace(plan, thinned=False)
        return cheapest_plan(int(plan.peak_bytes * share.part), few, "", unasked=_default(few))
    return plan


def _without_carry(loop: Plan, bound: int) -> Plan:
    """Return the plan for a loop that needs no saved carry to run a step again."""
    if not loop.step.residual_bytes:
        return keeping_all(loop)
    segment = min(16, bound) if loop.step.factor_bytes else 1
    return replace(loop, slots=-(-bound // segment) * segment, segment=segment)


def _adapted(plan: Plan, loop: Plan, name: str) -> Plan:
    """Fit a plan made elsewhere to this loop."""
    if plan.keeps_all and loop.bound is None:
        expected = "can be a plan that stores every step only if the number of steps is bounded"
        got, advice = f"{plan} and max_steps=None", "Pass `max_steps`."
        raise errors.wrong_value(name, "checkpoints", expected, got, advice)
    plan = replace(plan, bound=loop.bound, exact=loop.exact, step=loop.step)
    if plan.keeps_all:
        plan = keeping_all(plan, plan.price)
    if plan.keeps_last and not can_keep_last(plan):
        expected = "can be a plan that keeps the last segments only if the number of steps is known"
        expected += ", no writes are logged, nothing is on the host, and the plan stores residuals "
        expected += "and has slots for all others"
        advice = "Leave `keeps_last` out, or pass `memory` instead of a plan."
        raise errors.wrong_value(name, "checkpoints", expected, plan.stored, advice)
    return plan


def _default(loop: Plan) -> Plan:
    """Return the default plan: an extra forward pass, about the square root of the steps stored."""
    plan = _about_the_root(loop)
    if loop.bound is None or not loop.exact or plan.keeps_all:
        return plan
    device = loop.step.device
    most = NESTED_BYTES if loop.step.holds_loops or device else CACHED_BYTES
    found = [keeping_all(loop, row.price) for row in loop.step.rows]
    fit = [p for p in found if p.slot_bytes <= most and (device or _is_expensive(p, loop.bound))]
    return min([plan, *fit], key=lambda p: p.nanoseconds(p.bound or 0))


def _is_expensive(whole: Plan, bound: int) -> bool:
    """Return whether a step takes much longer than storing what the plan keeps of it."""
    run = bound * whole.step.record
    return run >= EXPENSIVE * (whole.nanoseconds(bound) - run - bound * whole.row.nanoseconds)


def _about_the_root(loop: Plan) -> Plan:
    """Return the default plan of a loop whose steps are not expensive."""
    step, bound = loop.step, loop.bound
    if bound is not None:
        few = KEPT
        if step.holds_loops:
            few = NESTED if loop.exact else REPLAYED
        like_log = step.log_bytes and step.residual_bytes <= ALIKE * step.log_bytes
        if like_log or bound * step.residual_bytes <= few:
            return keeping_all(loop)
        if bound * (step.residual_bytes + step.factor_bytes) <= REPLAYED:
            return replace(loop, slots=1, segment=bound, store="residuals")
        if bound * step.carry_bytes <= REPLAYED and not step.factor_bytes:
            # A longer segment would also have to run to its end: one more copy to compile.
            return replace(loop, slots=bound)
    if loop.exact:
        assert bound is not None, "a loop that takes just so many steps has a length"
        candidates = [_balanced(loop, store, bound) for store in step.stores]
        plan = _or_every_carry(min(candidates, key=lambda p: p.nanoseconds(bound)))
        plan = _with_smaller_rows(plan, bound)
        return plan if plan.keeps_all else _or_every_carry(plan, step.working_bytes // LITTLE)
    store = _cheaper_store(loop)
    row = max(step.row(store).bytes + step.factor_bytes, 1)
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
    """Return a plan with a slot for every segment, and about as many bytes in slots as in rows."""
    step, bound = loop.step, loop.bound or 0
    row = step.row(store, loop.price).bytes + step.factor_bytes
    root = math.ceil(math.sqrt(bound * row / step.carry_bytes))
    slots = max(1, min(bound, most, root))
    segment = max(1, -(-bound // slots))
    if loop.exact:
        segment = near_divisor(bound, segment)
    return replace(loop, slots=max(1, -(-bound // segment)), segment=segment, store=store)


def _with_smaller_rows(plan: Plan, bound: int) -> Plan:
    """Return the plan, or a faster one that stores less of each step in hardly any more memory."""
    rows = [replace(plan, store="residuals", price=r.price) for r in plan.step.smaller_rows]
    plans = [_balanced(p, "residuals", bound) for p in rows]
    whole = [replace(p, slots=0, segment=max(bound, 1), keeps_all=True) for p in rows]
    most = plan.peak_bytes + plan.step.working_bytes // HARDLY_ANY
    fit = [p for p in (*plans, *whole) if p.peak_bytes <= most]
    return min([plan, *fit], key=lambda p: p.nanoseconds(bound))


def _or_every_carry(plan: Plan, little: int = 0) -> Plan:
    """Return the plan or, if better, one that keeps every carry in up to `little` more bytes."""
    every = replace(plan, slots=max(1, plan.bound or 1), segment=1, store="carries")
    more = every.peak_bytes - plan.peak_bytes
    if more <= 0 and not little and not plan.step.factor_bytes:
        return every
    some = (plan, every) if (plan.bound or 0) <= EVERY_CARRY or 0 < more <= little else (plan,)
    return min(some, key=lambda p: p.nanoseconds(p.bound or 0))


def _cheaper_store(loop: Plan) -> Store:
    """Return what a long segment stores in less time: carries or residuals."""
    plans = [replace(loop, slots=1, segment=16, store=s) for s in loop.step.stores]
    return min(plans, key=lambda p: p.nanoseconds(16)).store


def _in_carries(budget: int, loop: Plan) -> Plan:
    """Return the plan for a budget in carries; rows of a segment count by their bytes."""
    bound = loop.bound
    if bound is not None and budget >= bound:
        return replace(loop, slots=max(bound, 1))
    count = budget * (loop.step.carry_bytes + 4) + loop.least_bytes
    return cheapest_plan(count, loop, "", most=budget)
