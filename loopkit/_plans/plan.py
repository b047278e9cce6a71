"""A plan: what a loop keeps for its backward pass, and the predicted cost.

A plan cuts the steps into segments of `segment` steps. Going forward, the loop saves the carry at
the start of a segment in one of `slots`. Going back, it takes one segment at a time. It runs from
the last checkpoint to the start of the segment, replays the segment, storing one row for each step,
and reverses it. With a slot for every step, it replays nothing. If it stores the residuals of every
step, it computes nothing again.
"""

from __future__ import annotations

import functools as ft
import math
from dataclasses import dataclass, replace
from typing import Any, get_args

from loopkit._arguments import errors
from loopkit._arguments.validate import check_flag, check_whole
from loopkit._jaxprs.kernels import summed_at_once
from loopkit._plans import costs
from loopkit._plans.costs import UNKNOWN_COSTS, Row, StepCosts, Store, Strategy
from loopkit._plans.waiting_hosts import for_waiting_hosts
from loopkit.schedules import binomial


@dataclass(frozen=True)
class Plan:
    """A choice of what the backward pass of a loop keeps; pass it as `checkpoints`.

    `Plan(slots=8, segment=16)` keeps 8 carries, and the carries of the 16 steps that are being
    reversed. loopkit fills in `bound`, `exact` and `step` for the loop that uses the plan.
    """

    slots: int
    """The number of carries saved at the starts of segments, including the initial one. With as
    many slots as steps, the loop saves each carry and replays nothing."""
    segment: int = 1
    """The number of steps in a segment."""
    store: Store = "carries"
    """Whether a loop stores the carries or the residuals of the segment that it reverses."""
    price: float = 0.0
    """The nanoseconds that a stored byte of residuals is worth. The loop does not store what it can
    run again for less. With 0 it stores all that cheap, elementwise equations do not make."""
    keeps_all: bool = False
    """Whether the forward pass itself stores the residuals of every step."""
    keeps_last: int = 0
    """The number of last segments whose residuals the forward pass itself stores."""
    thinned: bool = False
    """Whether checkpoints are thinned evenly. Otherwise the one that costs least is dropped."""
    host: bool = False
    """Whether the host's memory holds what the forward pass saves."""
    room: int | None = None
    """The bytes on the device in a budget for device and host. None for any other budget."""
    bound: int | None = None
    """The most steps that the loop can take; None if nothing bounds it."""
    exact: bool = False
    """Whether the loop takes exactly `bound` steps."""
    step: StepCosts = UNKNOWN_COSTS
    """The costs of one step of the loop."""

    def __post_init__(self) -> None:
        put = ft.partial(object.__setattr__, self)
        for name in ("keeps_all", "thinned", "host", "exact"):
            put(name, check_flag("Plan", name, getattr(self, name)))
        for name, what in (("bound", "steps"), ("room", "bytes")):
            if getattr(self, name) is not None:
                expected = f"an int >= 0 ({what}) or None"
                put(name, check_whole("Plan", name, getattr(self, name), 0, expected))
        few = int(not self.keeps_all and self.bound != 0)
        whole = ("slots", few, "carries to keep"), ("segment", 1, "steps")
        for name, least, what in (*whole, ("keeps_last", 0, "segments")):
            expected = f"an int >= {least} ({what})"
            put(name, check_whole("Plan", name, getattr(self, name), least, expected))
        if self.store not in get_args(Store):
            expected = f"must be one of {', '.join(map(repr, get_args(Store)))}"
            advice = "Pass the word for what the plan stores of each step in a segment."
            raise errors.wrong_value("Plan", "store", expected, repr(self.store), advice)
        is_number = isinstance(self.price, (int, float)) and not isinstance(self.price, bool)
        if not is_number or not 0 <= self.price < math.inf:
            expected = "must be a finite number >= 0 (nanoseconds a byte)"
            advice = "Pass 0 to store all residuals that no cheap equation makes from others."
            raise errors.wrong_value("Plan", "price", expected, repr(self.price), advice)
        if not isinstance(self.step, StepCosts):
            advice = "Leave it out: loopkit fills it in for the loop."
            raise errors.wrong_type("Plan", "step", "must be StepCosts", repr(self.step), advice)

    @ft.cached_property
    def strategy(self) -> Strategy:
        """The steps that the forward pass saves, which decides how both passes run."""
        if self.keeps_all:
            return "every residual"
        if self.bound is None or (self.slots + self.keeps_last) * self.segment < self.bound:
            return "schedule"
        carries = self.store == "carries" and self.slots >= self.bound
        return "every carry" if carries else "every segment"

    @property
    def on_gpu(self) -> Plan:
        """The plan that a GPU follows, in the same memory.

        On a GPU, the host waits once for each segment between two kept carries. So longer segments
        may be worth a few more runs of the step.
        """
        return for_waiting_hosts(self)

    @property
    def segments(self) -> int | None:
        """The number of segments in the bound; None without a bound."""
        return None if self.bound is None else -(-self.bound // self.segment)

    @property
    def stores_rows(self) -> bool:
        """Whether the forward pass stores the residuals of some steps."""
        return self.keeps_all or self.keeps_last > 0

    @property
    def rerun(self) -> int:
        """The number of steps that run again, before those whose residuals are stored."""
        segments = 0 if self.keeps_all else (self.segments or 0) - self.keeps_last
        return max(0, segments) * self.segment

    @property
    def spared(self) -> int:
        """1 if the first slot has no memory, because the initial carry is there anyway; else 0.

        The choice between the initial carry and the other slots takes time to compile. With many
        slots, it saves too little.
        """
        return int(self.slots <= costs.SPARED and self.strategy != "every carry")

    @property
    def rows(self) -> int:
        """The number of slots that have memory."""
        return self.slots - self.spared

    @ft.cached_property
    def slot_bytes(self) -> int:
        """The bytes that the forward pass saves for the backward pass."""
        if self.strategy == "every residual":
            return (self.bound or 0) * self.row.bytes
        segments = 4 * self.slots if self.strategy == "schedule" else 0
        rows = 2 if self.host and self.rows == 1 else self.rows  # GPU compilers need two
        last = self.keeps_last * self.segment * self.row.bytes
        return rows * self.step.carry_bytes + segments + last

    @ft.cached_property
    def row(self) -> Row:
        """The part of a step that is stored, by the forward pass or while a segment is reversed."""
        return self.step.row(self.store, self.price)

    @property
    def summed(self) -> int:
        """The number of steps whose deferred products are summed at once; 0 if none are."""
        if self.strategy != "every residual":
            return self.segment if self.segment > 1 else 0
        step = self.step
        if not self.exact or self.host or step.offloaded_bytes or step.device is not None:
            return 0
        return summed_at_once(self.bound or 0) if step.factor_bytes else 0

    @property
    def row_bytes(self) -> int:
        """The bytes stored for a segment, or copied for some steps, while it is reversed."""
        if self.strategy == "every residual":
            copied = max(self.exact * self.step.at_a_time(self.bound or 0), self.summed)
            return copied * self.row.bytes + self.summed * self.step.factor_bytes
        row = 0 if self.strategy == "every carry" else self.row.bytes
        return 0 if self.segment == 1 else self.segment * (row + self.step.factor_bytes)

    @ft.cached_property
    def peak_bytes(self) -> int:
        """The predicted bytes on the device, beyond the gradient of a single step."""
        if self.bound is not None and self.bound <= 1:
            return 0
        return self.slot_bytes - self.host_bytes + self.row_bytes + self.least_bytes

    @property
    def host_bytes(self) -> int:
        """The bytes that are kept in the host's memory."""
        if self.host:
            return self.slot_bytes
        return (self.bound or 0) * self.step.offloaded_bytes if self.keeps_all else 0

    @property
    def least_bytes(self) -> int:
        """The bytes that any plan needs: the current carry with its buffers, logs, counters."""
        counters = {"every segment": costs.COUNTERS, "schedule": costs.COUNTERS + costs.TABLES}
        log = 0 if self.keeps_all else (self.bound or 0) * self.step.log_bytes
        carry = self.step.carry_bytes + self.step.buffer_bytes
        return carry + log + counters.get(self.strategy, 0)

    def evaluations(self, steps: int | None = None) -> tuple[int, int]:
        """Predict the runs of the body, forward and backward, for a loop of `steps` steps.

        The number of steps is the bound by default. If the loop does not know it beforehand, the
        backward count is that of the best placement, which online placement comes close to.
        """
        steps = self._steps("evaluations", steps)
        if self.strategy == "every residual":
            return steps, 0
        if self.keeps_last:
            return steps, min(steps, self.rerun)
        if steps == 0 or self.strategy != "schedule":
            return steps, steps
        segments = -(-steps // self.segment)
        climbed = binomial.evaluations(segments, self.slots) - segments
        return steps, steps + climbed * self.segment

    @property
    def stored(self) -> str:
        """A description, in words, of what is stored."""
        where = " on the host" if self.host else ""
        if self.strategy in ("every residual", "every carry"):
            what = self._row_words if self.keeps_all else "the carry"
            return f"{what} of every step{where}"
        words = f"{self.slots} {'carry' if self.slots == 1 else 'carries'}{where}"
        if self.keeps_last:
            words += f" and {self._row_words} of the last {(self.bound or 0) - self.rerun} steps"
        if self.segment > 1:
            words += f", then {self._row_words} of {self.segment} steps at a time"
        return words

    @property
    def _row_words(self) -> str:
        if not self.price or self.step is UNKNOWN_COSTS:
            return "the residuals" if self.keeps_all else f"the {self.store}"
        return f"{errors.size(self.row.bytes)} of the {self.store}"

    def __str__(self) -> str:
        lines = [f"stores     {self.stored}"]
        if self.step is not UNKNOWN_COSTS:
            of_step = self.step.carry_bytes, self.step.residual_bytes
            lines.append("of a step  {:,} bytes of carry, {:,} of residuals".format(*of_step))
            lines.append(f"peak       {self.peak_bytes:,} bytes")
            if self.host_bytes:
                lines.append(f"host       {self.host_bytes:,} bytes")
        if self.bound is not None:
            run, again = self.evaluations()
            lines.append(f"steps      {'' if self.exact else 'at most '}{self.bound:,}")
            lines.append(f"runs       {run:,} forward, {again:,} backward")
        if self.on_gpu != self:
            lines.append(f"on a GPU   {self.on_gpu.stored}")
            if self.bound is not None:
                run, again = self.on_gpu.evaluations()
                lines.append(f"           {run:,} forward, {again:,} backward")
        return "\n".join(["Plan", *(f"  {line}" for line in lines)])

    def plot(self, steps: int | None = None, ax: Any = None) -> Any:
        """Draw the schedule: the current step over time, and below it the bytes in use.

        **Arguments:**

        - `steps`: how many steps the loop takes; its bound by default.
        - `ax`: a pair of matplotlib axes; new ones by default.

        **Returns:**

        The matplotlib figure. Needs matplotlib, which the extra `plot` brings.
        """
        from loopkit._plans.plot import draw

        return draw(self, self._steps("plot", steps), ax)

    def _steps(self, method: str, steps: object) -> int:
        """Return how many steps a loop takes: `steps`, or its bound if that is None."""
        steps = self.bound if steps is None else steps
        if steps is None:
            expected = "must be given for a loop without a bound"
            advice = "Pass the number of steps that the loop takes."
            raise errors.wrong_value(f"Plan.{method}", "steps", expected, "None", advice)
        return check_whole(f"Plan.{method}", "steps", steps, 0, "an int >= 0 (steps of the loop)")

    def _written(self, steps: int) -> float:
        """Return the bytes on the device to which these steps write, each counted once."""
        every = {"every residual": self.bound or 0, "every carry": self.slots}.get(self.strategy)
        parts = -(-steps // self.segment) if every is None else steps
        filled = min(1.0, parts / max(1, self.slots if every is None else every))
        return filled * (self.slot_bytes - self.host_bytes) + self.row_bytes

    def nanoseconds(self, steps: int) -> float:
        """Predict the time beyond what every plan takes to reverse the steps, to compare plans."""
        step, steps = self.step, self._steps("nanoseconds", steps)
        in_use = self.peak_bytes + step.working_bytes
        beside = (self.bound or 0) * step.slice_bytes
        price, first = costs.prices_of_byte(in_use, step.device, beside)
        new = first * self._written(steps)
        save = step.to_host if self.host else lambda count, _: price * count
        row = step.array * self.row.arrays + self.row.nanoseconds
        if self.strategy == "every residual":
            row += save(self.row.bytes, 1) + step.record
            row += step.adding * (1 / self.summed if self.summed else costs.IN_PASSING)
            return new + steps * (row + step.handing_over(steps, "residuals", copied=self.exact))
        slot = step.array * step.carry_arrays + save(step.carry_bytes, self.segment)
        segments = -(-steps // self.segment)
        beside = new + steps * price * 2 * step.log_bytes
        beside += step.adding * (segments if self.summed else costs.IN_PASSING * steps)
        if self.strategy == "every carry":
            slot += step.handing_over(steps, "carries")
            return beside + steps * (step.run + step.remake + slot)
        run, again = self.evaluations(steps)
        row = row + price * self.row.bytes if self.segment > 1 or self.keeps_last else 0
        replay = step.record + row
        if self.store == "carries":
            replay = step.run * (1 - 1 / self.segment) + step.remake + row
        passes = (run + again - steps) * step.run
        each = costs.SCHEDULED if self.strategy == "schedule" else step.segment
        replay += step.handing_over(self.segment if self.segment > 1 else self.slots, self.store)
        return beside + passes + steps * replay + segments * (each + slot)


def keeping_all(plan: Plan, price: float = 0.0) -> Plan:
    """Return the plan with the residuals of every step stored, at a price of their bytes."""
    segment = max(plan.bound or 0, 1)
    return replace(plan, segment=segment, store="residuals", price=price, keeps_all=True)
