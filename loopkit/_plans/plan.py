"""A plan: what a loop keeps for its backward pass, and what that is predicted to cost.

Time is cut into segments of `segment` steps. Going forward, the carry at the start of a segment is
saved in one of `slots`; going back, one segment at a time is reached from the last checkpoint
before it, replayed, storing one row a step, and then reversed. With a slot for every step nothing
is replayed; with the residuals of every step stored nothing is computed again.
"""

from __future__ import annotations

import functools as ft
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from loopkit._arguments import errors
from loopkit._arguments.validate import check_flag, check_whole
from loopkit._plans.costs import UNKNOWN_COSTS, Row, StepCosts, Store
from loopkit._plans.waits import for_waiting_hosts
from loopkit.schedules import binomial

SEGMENT = 20.0
"""Nanoseconds that a segment costs beyond its steps."""
SCHEDULED = 300.0
"""The same, where a schedule says what is saved and run again."""
CACHES = (1 << 20, 0.06), (1 << 25, 0.12), (math.inf, 0.8)
"""Up to so many bytes in use, so many nanoseconds to write and read one of them. Beyond the last
cache, memory is new at every call, and has to be cleared by the system first."""

ARRAY = 5.0
"""Nanoseconds to write an array and read it again, however small, in a loop that is one kernel."""
IN_PASSING = 0.2
"""Of the time that a segment takes to add up its products, what a step takes to add its own."""
TRANSFER = 0.1
"""Nanoseconds to bring a byte to the host and back: 0.06 at the 34 GB/s of which XLA takes the PCIe
of an H100 to be, and not all of it is to be had."""
COUNTERS = 512
"""Bytes of step numbers and the like."""
TABLES = 384
"""Bytes that following a schedule takes beside them."""
SPARED = 16
"""Slots up to which the first has no memory."""

Strategy = Literal["every residual", "every carry", "every segment", "schedule"]
"""Of every step, or of the first of every segment; "schedule": in the slots that there are."""


@dataclass(frozen=True)
class Plan:
    """What the backward pass of a loop keeps: accepted by `checkpoints`.

    `Plan(slots=8, segment=16)` keeps 8 carries, and those of the 16 steps being reversed.
    `bound`, `exact` and `step` are filled in for the loop that it is used for.
    """

    slots: int
    """Carries saved at the starts of segments, the initial one among them; as many as steps: one
    for each, and no replay."""
    segment: int = 1
    """Steps in a segment, the segment of checkpointing."""
    store: Store = "carries"
    """What is stored of each step of the segment at hand."""
    price: float = 0.0
    """Nanoseconds that a stored byte of residuals is worth: what is run again for less is not
    stored. 0 stores all that is not made by cheap, elementwise equations."""
    keeps_all: bool = False
    """Whether the forward pass itself stores the residuals of every step."""
    thinned: bool = False
    """Whether checkpoints are thinned evenly; else the one that costs least is dropped."""
    host: bool = False
    """Whether what the forward pass saves is kept in the host's memory."""
    room: int | None = None
    """Bytes of the device that were given beside those of the host; None if none were."""
    bound: int | None = None
    """The most steps the loop can take; None if nothing bounds it."""
    exact: bool = False
    """Whether it takes just that many."""
    step: StepCosts = UNKNOWN_COSTS
    """The loop's step."""

    def __post_init__(self) -> None:
        put = ft.partial(object.__setattr__, self)
        for name in ("keeps_all", "thinned", "host", "exact"):
            put(name, check_flag("Plan", name, getattr(self, name)))
        for name, what in (("bound", "steps"), ("room", "bytes")):
            if getattr(self, name) is not None:
                expected = f"an int >= 0, {what}, or None"
                put(name, check_whole("Plan", name, getattr(self, name), 0, expected))
        few = int(not self.keeps_all and self.bound != 0)
        for name, least, what in (("slots", few, "carries to keep"), ("segment", 1, "steps")):
            expected = f"an int >= {least}, {what}"
            put(name, check_whole("Plan", name, getattr(self, name), least, expected))
        if self.store not in get_args(Store):
            expected = f"must be one of {', '.join(map(repr, get_args(Store)))}"
            advice = "It says what is stored of each step of the segment at hand."
            raise errors.wrong_value("Plan", "store", expected, repr(self.store), advice)
        is_number = isinstance(self.price, (int, float)) and not isinstance(self.price, bool)
        if not is_number or not 0 <= self.price < math.inf:
            expected = "must be a finite number >= 0, nanoseconds a byte"
            advice = "0 stores all residuals that do not follow from others by cheap equations."
            raise errors.wrong_value("Plan", "price", expected, repr(self.price), advice)
        if not isinstance(self.step, StepCosts):
            advice = "Leave it out: it is filled in for the loop."
            raise errors.wrong_type("Plan", "step", "must be a Step", repr(self.step), advice)

    @property
    def strategy(self) -> Strategy:
        """What the forward pass saves, which decides how both passes go."""
        if self.keeps_all:
            return "every residual"
        if self.bound is None or self.slots * self.segment < self.bound:
            return "schedule"
        carries = self.store == "carries" and self.slots >= self.bound
        return "every carry" if carries else "every segment"

    @property
    def on_gpu(self) -> Plan:
        """The plan that is followed on a GPU, in the same memory.

        To get from a kept carry to another the host waits there, once a segment. Longer segments
        may be worth a few more runs of the step.
        """
        return for_waiting_hosts(self)

    @property
    def segments(self) -> int | None:
        """How many segments the bound comes to; None without a bound."""
        return None if self.bound is None else -(-self.bound // self.segment)

    @property
    def spared(self) -> int:
        """1 if the first slot has no memory: the initial carry is at hand anyway. Else 0.

        To choose between that and the others takes compile time, for little where they are many.
        """
        return int(self.slots <= SPARED and self.strategy != "every carry")

    @property
    def rows(self) -> int:
        """Slots that have memory."""
        return self.slots - self.spared

    @property
    def slot_bytes(self) -> int:
        """Of what the forward pass hands on to the backward pass."""
        if self.strategy == "every residual":
            return (self.bound or 0) * self.row.bytes
        segments = 4 * self.slots if self.strategy == "schedule" else 0
        return self.rows * self.step.carry_bytes + segments

    @property
    def row(self) -> Row:
        """What is stored of a step, by the forward pass or in the segment at hand."""
        return self.step.row(self.store, self.price)

    @property
    def factor_bytes(self) -> int:
        """Of the factors of products that a segment puts off, for a step."""
        return 0 if self.price else self.step.factor_bytes

    @property
    def row_bytes(self) -> int:
        """Of what is stored of the segment at hand."""
        if self.segment == 1 or self.strategy == "every residual":
            return 0
        row = 0 if self.strategy == "every carry" else self.row.bytes
        return self.segment * (row + self.factor_bytes)

    @property
    def peak_bytes(self) -> int:
        """Predicted: what the gradient needs of the device beyond that of a single step."""
        if self.bound is not None and self.bound <= 1:
            return 0
        return self.slot_bytes - self.host_bytes + self.row_bytes + self.least_bytes

    @property
    def host_bytes(self) -> int:
        """Of what is kept in the host's memory."""
        if self.host:
            return self.slot_bytes
        return (self.bound or 0) * self.step.offloaded_bytes if self.keeps_all else 0

    @property
    def least_bytes(self) -> int:
        """What any plan needs: the carry on its way, the sums, a few counters."""
        counters = {"every segment": COUNTERS, "schedule": COUNTERS + TABLES}
        log = 0 if self.keeps_all else (self.bound or 0) * self.step.log_bytes
        carry = self.step.carry_bytes + self.step.buffer_bytes
        return carry + log + counters.get(self.strategy, 0)

    def evaluations(self, steps: int | None = None) -> tuple[int, int]:
        """Predicted runs of the body, forward and backward, for a loop of `steps` steps.

        The number of steps is the bound by default. Where it is not known beforehand the backward
        count is that of the best placement, which online placement comes close to.
        """
        steps = self._steps("evaluations", steps)
        if self.strategy == "every residual":
            return steps, 0
        if steps == 0 or self.strategy != "schedule":
            return steps, steps
        segments = -(-steps // self.segment)
        climbed = binomial.evaluations(segments, self.slots) - segments
        return steps, steps + climbed * self.segment

    @property
    def stored(self) -> str:
        """What is stored, in words."""
        where = " on the host" if self.host else ""
        if self.strategy in ("every residual", "every carry"):
            what = self._row_words if self.keeps_all else "the carry"
            return f"{what} of every step{where}"
        words = f"{self.slots} {'carry' if self.slots == 1 else 'carries'}{where}"
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
            at_most = "" if self.exact else "at most "
            lines.append(f"steps      {at_most}{self.bound:,}")
            lines.append(f"runs       {run:,} forward, {again:,} backward")
        if self.on_gpu != self:
            lines.append(f"on a GPU   {self.on_gpu.stored}")
            if self.bound is not None:
                run, again = self.on_gpu.evaluations()
                lines.append(f"           {run:,} forward, {again:,} backward")
        return "\n".join(["Plan", *(f"  {line}" for line in lines)])

    def plot(self, steps: int | None = None, ax: Any = None) -> Any:
        """Draw the schedule: the step at hand over time, and below it the bytes in use.

        **Arguments:**

        - `steps`: how many steps the loop takes; its bound by default.
        - `ax`: a pair of matplotlib axes; new ones by default.

        **Returns:**

        The matplotlib figure. Needs matplotlib, which the extra `plot` brings.
        """
        from loopkit._plans.plot import draw

        return draw(self, self._steps("plot", steps), ax)

    def _steps(self, method: str, steps: object) -> int:
        """How many steps a loop takes, by default its bound."""
        steps = self.bound if steps is None else steps
        if steps is None:
            raise ValueError(
                f"loopkit.Plan.{method}: `steps` must be given for a loop without a bound, got "
                "None. Pass the number of steps that the loop takes."
            )
        return check_whole(f"Plan.{method}", "steps", steps, 0, "an int >= 0, steps of the loop")

    def nanoseconds(self, steps: int) -> float:
        """Predicted time, less that of the steps' reversal proper: for comparing plans."""
        step, steps = self.step, self._steps("nanoseconds", steps)
        in_use = self.peak_bytes
        price = _price(in_use)
        save = TRANSFER if self.host else price
        if self.strategy == "every residual":
            row = ARRAY * self.row.arrays + save * self.row.bytes + self.row.nanoseconds
            adding = IN_PASSING * _price(step.product_bytes) * step.product_bytes
            return steps * (step.record + row + adding)
        slot = ARRAY * step.carry_arrays + save * step.carry_bytes
        segments = -(-steps // self.segment)
        beside = steps * price * 2 * step.log_bytes
        adding = _price(step.product_bytes) * step.product_bytes
        put_off = self.segment > 1 and not self.price
        beside += adding * (segments if put_off else IN_PASSING * steps)
        if self.strategy == "every carry":
            return beside + steps * (step.run + step.remake + slot)
        run, again = self.evaluations(steps)
        row = ARRAY * self.row.arrays + price * self.row.bytes + self.row.nanoseconds
        row = row if self.segment > 1 else 0
        replay = step.record + row
        if self.store == "carries":
            replay = step.run * (1 - 1 / self.segment) + step.remake + row
        passes = (run + again - steps) * step.run
        each = SCHEDULED if self.strategy == "schedule" else SEGMENT
        return beside + passes + steps * replay + segments * (each + slot)


def _price(count: int) -> float:
    """Nanoseconds to write and read a byte of so many."""
    return next(price for size, price in CACHES if count <= size)
