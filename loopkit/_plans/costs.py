"""The costs that a plan depends on: of one step of a loop, of bytes, and of what goes on beside."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from loopkit._jaxprs.accelerators import LAUNCH, SPEEDUP, Accelerator
from loopkit._jaxprs.kernels import ONE_THREAD, rows_at_a_time

Store = Literal["carries", "residuals"]
Strategy = Literal["every residual", "every carry", "every segment", "schedule"]
"""The steps that the forward pass saves: every step (residuals or carries), or the first of every
segment. With "schedule", it saves carries in as many slots as there are."""


class Row(NamedTuple):
    """One way to store the residuals of a step: store some, and run the others again from them."""

    price: float
    """The price of a byte, in nanoseconds, from which this way is best. 0: it reruns nothing."""
    bytes: int
    arrays: int
    nanoseconds: float
    """The time to run again what is not stored, without cheap equations."""


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
    """The bytes that a step logs of what it displaces in buffers that checkpoints leave out."""
    buffer_bytes: int = 0
    """The bytes of the buffers that are logged."""

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
    """The bytes of the slices of xs and ys of a step, whose arrays are in use all along."""
    largest_carry: int = 0
    """The bytes of the largest array in the carry."""
    largest_residual: int = 0
    """The bytes of the largest array among the residuals of a step."""
    device: Accelerator | None = None
    """The accelerator that takes these times, if it is one."""
    pooled: float = 0.0
    """Nanoseconds that a step takes more if it reads arrays that are too large for one thread."""

    @property
    def array(self) -> float:
        """Return the nanoseconds to write an array and read it again, however small."""
        return ARRAY if self.device is None else self.device.launch

    @property
    def segment(self) -> float:
        """Return the nanoseconds that a segment costs beyond its steps."""
        return SEGMENT if self.device is None else 4 * self.device.launch

    def to_host(self, count: int, steps: int) -> float:
        """Return the nanoseconds to bring bytes to the host and back, beyond those of the steps
        that run meanwhile."""
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
        """Return about the bytes that live while a step is reversed: residuals and cotangents."""
        return 2 * self.residual_bytes

    @property
    def adding(self) -> float:
        """Return the nanoseconds to add the products of a step to those of others."""
        return price_of_byte(self.product_bytes, self.device) * self.product_bytes

    def handing_over(self, rows: int, store: Store, copied: bool = False) -> float:
        """Return what a step takes more to go back if so many rows of it are in one array.

        They may be copied from and to small arrays, a few at a time.
        """
        largest = self.largest_carry if store == "carries" else self.largest_residual
        small = rows * largest <= ONE_THREAD or (copied and self.at_a_time(rows))
        return 0.0 if small else self.pooled

    def at_a_time(self, steps: int) -> int:
        """Return how many steps at a time have their residuals copied; 0 if those of all have."""
        return rows_at_a_time(steps, self.largest_residual) if self.pooled else 0

    def row(self, store: Store, price: float = 0.0) -> Row:
        """Return what a segment stores of a step: its carry, or the best residuals at a price."""
        if store == "carries":
            return Row(0.0, self.carry_bytes, self.carry_arrays, 0.0)
        return [row for row in self.rows if row.price <= price][-1]


UNKNOWN_COSTS = StepCosts(0, 0)

POOLED = 200.0
"""Nanoseconds to hand one kernel of a step, and what goes back over it, to a pool of threads."""

MORE = 1.1
"""The most runs of a step, relative to the same memory with segments of one step."""
WAITING_REACH = 100
"""A loop without a bound is planned for this many steps to each slot."""
SEGMENT = 20.0
"""Nanoseconds that a segment costs beyond its steps."""
SCHEDULED = 300.0
"""Nanoseconds that a segment costs beyond its steps if a schedule says what to save and rerun."""
CACHES = (1 << 20, 0.06), (1 << 25, 0.12), (math.inf, 0.8)
"""Pairs of a number of bytes in use and the nanoseconds to write and read one byte. Each price
holds up to its number of bytes. Memory beyond the last cache is new at every call, and the system
has to clear it first."""

ARRAY = 5.0
"""Nanoseconds to write an array and read it again, however small, in a loop of one kernel."""
IN_PASSING = 0.2
"""The time of a step to add its product, relative to that of a segment that adds up its own."""
TRANSFER = 0.055
"""Nanoseconds to bring a byte to the host and back: 0.029 and 0.026 on an H200, for 64 MB at once.
"""
COUNTERS = 512
"""The bytes of step numbers and other counters."""
TABLES = 384
"""The bytes of tables, beside the counters, that following a schedule needs."""
SPARED = 16
"""The most slots with which the first slot has no memory of its own."""
GPU_STEP = 2 * LAUNCH
"""Nanoseconds to launch the kernels of a small step."""
WAIT = 13_900.0
"""Nanoseconds until the host has read a predicate and the device runs again, on an H200."""


def price_of_byte(count: int, device: Accelerator | None = None, beside: int = 0) -> float:
    """Return the nanoseconds to write and read a byte if `count` bytes are in use.

    The bytes `beside` these pass through the caches, and count only where memory is new.
    """
    if device is not None:
        return device.byte
    cached = [price for size, price in CACHES[:-1] if count <= size]
    return cached[0] if cached and count + beside <= CACHES[-2][0] else CACHES[-1][1]


def price_beyond_caches(count: int, device: Accelerator | None) -> float:
    """Return what a byte takes more than one that a cache holds."""
    return price_of_byte(count, device) - price_of_byte(0, device)
