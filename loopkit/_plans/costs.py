"""The costs of one step of a loop that a plan depends on: bytes and predicted nanoseconds."""

from __future__ import annotations

from typing import Literal, NamedTuple

Store = Literal["carries", "residuals"]


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

    def row(self, store: Store, price: float = 0.0) -> Row:
        """Return what a segment stores of a step: its carry, or the best residuals at a price."""
        if store == "carries":
            return Row(0.0, self.carry_bytes, self.carry_arrays, 0.0)
        return [row for row in self.rows if row.price <= price][-1]


UNKNOWN_COSTS = StepCosts(0, 0)
