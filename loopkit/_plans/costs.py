"""The costs that a plan depends on: those of a step, of bytes, and of everything around a step."""

from __future__ import annotations

from typing import Literal, NamedTuple

from loopkit._jaxprs.accelerators import LAUNCH, SPEEDUP, Accelerator
from loopkit._jaxprs.kernels import ONE_THREAD, rows_at_a_time

Store = Literal["carries", "residuals"]
Strategy = Literal["every residual", "every carry", "every segment", "schedule"]
"""Which steps the forward pass saves: every step (residuals or carries), or the first of every
segment. With "schedule", a schedule decides which carries are in the slots."""


class Row(NamedTuple):
    """One way to store the residuals of a step: store some, and make the others again from them."""

    price: float
    """The price of a byte, in nanoseconds, from which this way is best. 0: it reruns nothing."""
    bytes: int
    arrays: int
    nanoseconds: float
    """The time to make again what is not stored, without cheap equations."""


class StepCosts(NamedTuple):
    """The bytes and predicted times of one step of a loop."""

    carry_bytes: int
    """The bytes of one checkpoint."""
    residual_bytes: int
    """The bytes that the derivative of a step reads, without constants of the loop."""
    run: float = 1.0
    """Nanoseconds to run the step."""
    record: float = 1.0
    """Nanoseconds to run the step and make its residuals."""
    remake: float = 1.0
    """Nanoseconds to make the residuals of the step from its carry."""
    factor_bytes: int = 0
    """The bytes of the factors of deferred products, which a segment multiplies at its end."""
    product_bytes: int = 0
    """The bytes of deferred products, which a segment adds up."""
    log_bytes: int = 0
    """The bytes that a step logs to undo its writes to buffers, which checkpoints leave out."""
    buffer_bytes: int = 0
    """The bytes of the buffers that are undone."""

    carry_arrays: int = 0
    """The number of arrays in a checkpoint."""
    residual_arrays: int = 0
    """The number of arrays in the residuals."""
    holds_loops: bool = False
    """Whether the step runs loops that are differentiated with it."""
    offloaded_bytes: int = 0
    """The bytes of residuals that a policy puts into the host's memory."""
    smaller_rows: tuple[Row, ...] = ()
    """Ways to store fewer bytes than all residuals, from more bytes to fewer, at higher prices."""
    slice_bytes: int = 0
    """The bytes of the slices of xs and ys of a step, whose arrays are in use throughout."""
    largest_carry: int = 0
    """The bytes of the largest array in the carry."""
    largest_residual: int = 0
    """The bytes of the largest array among the residuals of a step."""
    device: Accelerator | None = None
    """The accelerator that takes these times; None for a CPU."""
    pooled: float = 0.0
    """The extra nanoseconds of a step that reads arrays too large for one thread."""

    @property
    def array(self) -> float:
        """Return the nanoseconds to write an array and read it again, however small."""
        return ARRAY if self.device is None else self.device.launch

    @property
    def segment(self) -> float:
        """Return the nanoseconds that a segment costs beyond its steps."""
        return SEGMENT if self.device is None else 4 * self.device.launch

    def to_host(self, count: int, steps: int) -> float:
        """Return the nanoseconds to copy bytes to the host and back that steps do not hide."""
        beside = self.device is not None and self.device.copies_beside
        return max(0.0, TRANSFER * count - 2 * steps * self.run * beside)

    @property
    def on_gpu(self) -> float:
        """Return the nanoseconds to run the step on a GPU, even if it was traced for a CPU."""
        return max(GPU_STEP, self.run if self.device else self.run / SPEEDUP)

    @property
    def stores(self) -> tuple[Store, ...]:
        """Return what is worth storing of each step of a segment.

        If a segment stores carries, writes to buffers are undone one step at a time, which costs a
        loop in each step.
        """
        if self.buffer_bytes and self.residual_bytes < self.buffer_bytes:
            return ("residuals",)
        return ("carries", "residuals")

    @property
    def rows(self) -> tuple[Row, ...]:
        """Return the ways to store the residuals of a step, from more bytes to fewer."""
        return Row(0.0, self.residual_bytes, self.residual_arrays, 0.0), *self.smaller_rows

    @property
    def working_bytes(self) -> int:
        """Return roughly the bytes that live while a step is reversed: residuals and cotangents."""
        return 2 * self.residual_bytes

    @property
    def adding(self) -> float:
        """Return the nanoseconds to add products to their sums."""
        return prices_of_byte(self.product_bytes, self.device)[0] * self.product_bytes

    def handing_over(self, rows: int, store: Store, copied: bool = False) -> float:
        """Return the extra nanoseconds to reverse a step if this many rows are in one array.

        If `copied`, rows may be copied from and to small arrays, a few at a time.
        """
        largest = self.largest_carry if store == "carries" else self.largest_residual
        small = rows * largest <= ONE_THREAD or (copied and self.at_a_time(rows))
        return 0.0 if small else self.pooled

    def at_a_time(self, steps: int) -> int:
        """Return how many steps' residuals are copied at a time; 0 if they are not copied."""
        return rows_at_a_time(steps, self.largest_residual) if self.pooled else 0

    def row(self, store: Store, price: float = 0.0) -> Row:
        """Return what a segment stores of a step: its carry, or the best residuals at a price."""
        if store == "carries":
            return Row(0.0, self.carry_bytes, self.carry_arrays, 0.0)
        return [row for row in self.rows if row.price <= price][-1]


UNKNOWN_COSTS = StepCosts(0, 0)

POOLED = 200.0
"""Nanoseconds to hand one kernel of a step, and what reverses it, to a pool of threads."""

MORE = 1.1
"""The most runs of a step, relative to those with segments of one step in the same memory."""
WAITING_REACH = 100
"""A loop without a bound is planned for this many steps per slot."""
SEGMENT = 20.0
"""Nanoseconds that a segment costs beyond its steps."""
SCHEDULED = 300.0
"""Nanoseconds that a segment costs beyond its steps if a schedule says what to save and rerun."""
CACHES = (1 << 20, 0.06), (1 << 25, 0.12)
"""Pairs of a number of bytes in use and the nanoseconds to write and read one byte. Each price
holds up to its number of bytes, and the last one also beyond."""
NEW = 0.5
"""The extra nanoseconds of the first write to a byte beyond the last cache. Memory of that size is
new at every call, and the system must clear it: 0.33 on an AMD EPYC, up to 0.7 elsewhere."""

ARRAY = 5.0
"""Nanoseconds to write an array and read it again, however small, in a loop of one kernel."""
IN_PASSING = 0.5
"""The time to add a product to its sum in each step, relative to doing so once per segment."""
TRANSFER = 0.055
"""Nanoseconds to copy a byte to the host and back: 0.029 and 0.026 on an H200, for 64 MB at once.
"""
COUNTERS = 512
"""The bytes of step numbers and other counters."""
TABLES = 384
"""The bytes of tables, besides the counters, that following a schedule needs."""
SPARED = 16
"""The most slots of which the first needs no memory of its own."""
GPU_STEP = 2 * LAUNCH
"""Nanoseconds to launch the kernels of a small step."""
WAIT = 13_900.0
"""Nanoseconds until the host has read a predicate and the device runs again, on an H200."""


def prices_of_byte(
    count: int, device: Accelerator | None = None, beside: int = 0
) -> tuple[float, float]:
    """Return the nanoseconds to write and read a byte if `count` bytes are in use.

    The second number is what the first write to it takes besides. The bytes `beside` these only
    pass through the caches. They count only toward the last cache.
    """
    if device is not None:
        return device.byte, 0.0
    (near, price), (last, beyond) = CACHES
    fits = count + beside <= last
    return price if fits and count <= near else beyond, 0.0 if fits else NEW


def price_beyond_caches(count: int, device: Accelerator | None) -> float:
    """Return the extra nanoseconds of a byte, compared with one in the nearest cache."""
    return sum(prices_of_byte(count, device)) - sum(prices_of_byte(0, device))
