"""Bytes in, plan out: how many checkpoints, how far apart, and what is stored between them.

Time is cut into segments of `leaf` steps. Going forward, the carry at the start of a segment is
saved in one of `slots`; going back, one segment at a time is reached from the last checkpoint
before it, replayed, storing one row a step, and then reversed. With a slot for every step nothing
is replayed; with the residuals of every step stored nothing is computed again.

Of all plans within a budget, that of least predicted time is taken. Bytes count as well as steps:
what is written and read has a price that rises where it leaves the caches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from loopkit.schedules import binomial

SMALL = 1 << 19
"""Bytes of checkpoints, and of rows, that a loop may use whose steps are not known: what a core's
cache holds, and what is set to zero in no time."""
FEW = 32
"""Slots that such a loop may use, however large its carry."""
MANY = 1024
"""Slots, and steps to a segment, that it needs at most, however small its carry."""
PLACED = 128
"""Slots at most where a schedule places the checkpoints online: its tables grow with them."""
SPLIT = 512
"""Slots at most where recomputation is split."""
REACH = 100
"""Steps to a carry of its budget for which a loop without a bound is planned."""
SEGMENT = 300.0
"""Nanoseconds that a segment costs beyond its steps."""
CACHES = (1 << 20, 0.06), (1 << 25, 0.12), (math.inf, 1.2)
"""Up to so many bytes in use, so many nanoseconds to write and read one of them. Beyond the last
cache, memory is new at every call, and has to be cleared by the system first."""

COUNTERS = 512
"""Bytes of step numbers and the like."""

Store = Literal["carries", "residuals"]


@dataclass(frozen=True)
class Bytes:
    """A budget in bytes."""

    count: int


class Step(NamedTuple):
    """What planning has to know of one step of a loop."""

    carry_bytes: int
    """Of what a checkpoint holds."""
    residual_bytes: int
    """Of what the derivative reads, loop constants excluded."""
    run: float = 1.0
    """Nanoseconds to run it."""
    record: float = 1.0
    """Nanoseconds to run it and make its residuals."""
    remake: float = 1.0
    """Nanoseconds to make its residuals from the carry."""
    factor_bytes: int = 0
    """Of the factors of products that are put off to the end of a segment."""
    sum_bytes: int = 0
    """Of what is summed over the steps: the cotangents of the loop's constants."""

    def row_bytes(self, store: Store) -> int:
        return self.residual_bytes if store == "residuals" else self.carry_bytes


UNKNOWN = Step(0, 0)


@dataclass(frozen=True)
class Plan:
    """What the backward pass of a loop keeps: accepted by `checkpoints`.

        Plan(slots=8, leaf=16)      # 8 carries, and those of the 16 steps being reversed

    The other fields are filled in for the loop that it is used for.
    """

    slots: int
    """Carries saved at the starts of segments; as many as steps: one for each, and no replay."""
    leaf: int = 1
    """Steps in a segment, the unit of checkpointing."""
    store: Store = "carries"
    """What is stored of each step of the segment at hand."""
    keeps_all: bool = False
    """Whether the forward pass itself stores the residuals of every step."""
    thinned: bool = False
    """Whether checkpoints are thinned evenly; else the one that costs least is dropped."""
    bound: int | None = None
    """The most steps the loop can take; None if nothing bounds it."""
    exact: bool = False
    """Whether it takes just that many."""
    step: Step = UNKNOWN
    """The loop's step."""

    @property
    def direct(self) -> bool:
        """Whether every segment has a slot of its own, so that no step is run a third time."""
        return self.bound is not None and self.slots * self.leaf >= self.bound

    @property
    def every_carry(self) -> bool:
        """Whether the forward pass stores the carry of every step."""
        return self.bound is not None and self.store == "carries" and self.slots >= self.bound

    @property
    def segments(self) -> int | None:
        return None if self.bound is None else -(-self.bound // self.leaf)

    @property
    def slot_bytes(self) -> int:
        """Of what the forward pass hands on to the backward pass."""
        if self.keeps_all:
            return (self.bound or 0) * self.step.residual_bytes
        return self.slots * (self.step.carry_bytes + (0 if self.direct else 4))

    @property
    def row_bytes(self) -> int:
        """Of what is stored of the segment at hand."""
        if self.leaf == 1 or self.keeps_all:
            return 0
        row = 0 if self.every_carry else self.step.row_bytes(self.store)
        return self.leaf * (row + self.step.factor_bytes)

    @property
    def peak_bytes(self) -> int:
        """Predicted: what the gradient of the loop needs beyond that of a single step."""
        if self.bound is not None and self.bound <= 1:
            return 0
        return self.slot_bytes + self.row_bytes + self.least_bytes

    @property
    def least_bytes(self) -> int:
        """What any plan needs: the carry on its way, the sums, a few counters."""
        return self.step.carry_bytes + self.step.sum_bytes + COUNTERS

    def evaluations(self, steps: int | None = None) -> tuple[int, int]:
        """Predicted runs of the body, forward and backward, for a loop of `steps` steps.

        The number of steps is the bound by default. Where it is not known beforehand the backward
        count is that of the best placement, which online placement comes close to.
        """
        steps = self.bound if steps is None else steps
        if steps is None:
            raise ValueError(
                "loopkit.Plan.evaluations: `steps` must be given for a loop without a bound, got "
                "None. Pass the number of steps that the loop takes."
            )
        if self.keeps_all:
            return steps, 0
        if steps == 0 or self.direct:
            return steps, steps
        units = -(-steps // self.leaf)
        climbed = binomial.evaluations(units, self.slots) - units
        return steps, steps + climbed * self.leaf

    def __str__(self) -> str:
        if self.keeps_all:
            stored = "the residuals of every step"
        elif self.every_carry:
            stored = "the carry of every step"
        else:
            stored = f"{self.slots} carries"
            if self.leaf > 1:
                stored += f", then the {self.store} of {self.leaf} steps at a time"
        lines = [f"stores     {stored}"]
        if self.step is not UNKNOWN:
            of_step = self.step.carry_bytes, self.step.residual_bytes
            lines.append("of a step  {:,} bytes of carry, {:,} of residuals".format(*of_step))
            lines.append(f"peak       {self.peak_bytes:,} bytes")
        if self.bound is not None:
            run, again = self.evaluations()
            at_most = "" if self.exact else "at most "
            lines.append(f"steps      {at_most}{self.bound:,}")
            lines.append(f"runs       {run:,} forward, {again:,} backward")
        return "\n".join(["Plan", *(f"  {line}" for line in lines)])

    def nanoseconds(self, steps: int) -> float:
        """Predicted time, less that of the steps' reversal proper: for comparing plans."""
        step = self.step
        in_use = self.peak_bytes
        price = next(p for size, p in CACHES if in_use <= size)
        if self.keeps_all:
            return steps * (step.record + price * step.residual_bytes)
        if self.every_carry:
            return steps * (step.run + step.remake + price * step.carry_bytes)
        units = -(-steps // self.leaf)
        run, again = self.evaluations(steps)
        row = price * step.row_bytes(self.store) if self.leaf > 1 else 0
        replay = step.record + row
        if self.store == "carries":
            replay = step.run * (1 - 1 / self.leaf) + step.remake + row
        passes = (run + again - steps) * step.run
        return passes + steps * replay + units * (SEGMENT + price * step.carry_bytes)


Budget = int | str | Bytes | Plan | None


def make_plan(
    budget: Budget, bound: int | None, exact: bool, step: Step, name: str = "while_loop"
) -> Plan:
    """The plan for a loop.

    **Arguments:**

    - `budget`: None, a number of carries, "all", `Bytes`, or a Plan.
    - `bound`: the most steps; `exact` if it takes just that many.
    - `step`: what one step costs.
    """
    step = step._replace(carry_bytes=max(step.carry_bytes, 1))
    loop = Plan(0, bound=bound, exact=exact, step=step)
    if isinstance(budget, Plan):
        return _adapted(budget, loop)
    if budget == "all":
        assert bound is not None, "checked with the arguments"
        return replace(loop, leaf=bound, store="residuals", keeps_all=True)
    if isinstance(budget, Bytes):
        return _cheapest(budget.count, loop, name)
    if isinstance(budget, int):
        return _in_carries(budget, loop)
    return _default(loop)


def _adapted(plan: Plan, loop: Plan) -> Plan:
    """A plan made elsewhere, for this loop."""
    leaf = max(1, loop.bound or 1) if plan.keeps_all else plan.leaf
    if plan.keeps_all and loop.bound is None:
        raise ValueError(
            "loopkit: `checkpoints` can be a plan that stores every step only if the number of "
            f"steps is bounded, got {plan} and max_steps=None. Pass `max_steps`."
        )
    return replace(plan, leaf=leaf, bound=loop.bound, exact=loop.exact, step=loop.step)


def _default(loop: Plan) -> Plan:
    """One extra forward pass, and about the square root of the steps in memory."""
    step, bound = loop.step, loop.bound
    if loop.exact:
        assert bound is not None, "a loop that takes just so many steps has a length"
        candidates = [_balanced(loop, store, bound) for store in ("carries", "residuals")]
        return min(candidates, key=lambda p: p.nanoseconds(bound))
    store = _cheaper_store(loop)
    row = max(step.row_bytes(store) + step.factor_bytes, 1)
    most = min(MANY, max(FEW, SMALL // step.carry_bytes))
    rows = min(MANY, max(FEW // 4, SMALL // row))
    if bound is not None and bound <= 16 * most * rows:
        return _balanced(loop, store, 2 * most)
    return replace(loop, slots=min(most, PLACED), leaf=min(rows, PLACED), store=store, thinned=True)


def _balanced(loop: Plan, store: Store, most: int) -> Plan:
    """A slot for every segment, slots and rows of about the same size."""
    step, bound = loop.step, loop.bound or 0
    row = step.row_bytes(store) + step.factor_bytes
    slots = max(1, min(bound, most, _root(bound * row / step.carry_bytes)))
    leaf = max(1, -(-bound // slots))
    if loop.exact:
        leaf = _near_divisor(bound, leaf)
    return replace(loop, slots=max(1, -(-bound // leaf)), leaf=leaf, store=store)


def _near_divisor(bound: int, leaf: int) -> int:
    """A divisor of `bound` near `leaf`: segments all of one length have a trip count."""
    near = range(max(1, math.ceil(0.7 * leaf)), math.floor(1.4 * leaf) + 1)
    divisors = [k for k in near if bound % k == 0]
    return min(divisors, key=lambda k: abs(k - leaf), default=leaf)


def _cheaper_store(loop: Plan) -> Store:
    """What a long segment had better store."""
    plans = [replace(loop, slots=1, leaf=16, store=s) for s in ("carries", "residuals")]
    return min(plans, key=lambda p: p.nanoseconds(16)).store


def _root(value: float) -> int:
    """The square root, rounded up."""
    return math.isqrt(max(0, math.ceil(value) - 1)) + 1


# ---------------------------------------------------------------- within a budget


def _in_carries(budget: int, loop: Plan) -> Plan:
    """At most `budget` carries, of which a row of a segment is as many as it has the bytes of."""
    bound = loop.bound
    if bound is not None and budget >= bound:
        return replace(loop, slots=max(bound, 1))
    return _cheapest(budget * (loop.step.carry_bytes + 4) + loop.least_bytes, loop, "", budget)


@lru_cache(maxsize=256)
def _cheapest(count: int, loop: Plan, name: str, most: int | None = None) -> Plan:
    """The plan of least predicted time that needs at most `count` bytes, and `most` slots."""
    bound, step = loop.bound, loop.step
    steps = bound
    if steps is None:
        steps = REACH * max(1, min(count // step.carry_bytes, MANY))
    plans = [p for p in _candidates(count, loop, steps, most) if p.peak_bytes <= count]
    if plans:
        return min(plans, key=lambda p: p.nanoseconds(steps))
    least = replace(loop, slots=1)
    if most is not None:
        return least
    raise ValueError(
        f"loopkit.{name}: `memory` must be at least {least.peak_bytes} bytes, got {count} "
        f"bytes. That is a checkpoint of {step.carry_bytes} bytes, and what a gradient needs "
        f"beside it however little is kept. Pass `memory={least.peak_bytes}` or more."
    )


def _candidates(count: int, loop: Plan, steps: int, most: int | None) -> Iterator[Plan]:
    step, bound = loop.step, loop.bound
    if bound is not None:
        yield replace(loop, leaf=max(bound, 1), store="residuals", keeps_all=True)
        for leaf in {1, min(16, bound)} - {0}:
            yield replace(loop, slots=-(-bound // leaf) * leaf, leaf=leaf)
    for store in ("carries", "residuals"):
        for leaf in _leaves(steps, loop.exact):
            units = -(-steps // leaf)
            plan = replace(loop, slots=1, leaf=leaf, store=store)
            left = count - plan.row_bytes - loop.least_bytes
            slots = left // step.carry_bytes
            if slots < units or bound is None:
                slots = min(left // (step.carry_bytes + 4), SPLIT if loop.exact else PLACED)
            slots = min(slots, units)
            if most is not None:
                slots = min(slots, most - (plan.row_bytes > 0))
            if slots >= 1 and not (slots >= steps and leaf > 1):
                yield replace(plan, slots=slots)


def _leaves(steps: int, exact: bool) -> list[int]:
    """Segment lengths to try."""
    leaves, leaf = [], 1.0
    while leaf <= min(steps, 4 * MANY):
        leaves.append(_near_divisor(steps, int(leaf)) if exact and leaf >= 8 else int(leaf))
        leaf = max(leaf + 1, leaf * 1.15)
    return sorted(set(leaves))
