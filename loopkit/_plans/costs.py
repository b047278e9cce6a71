"""What planning has to know of one step of a loop: bytes, and predicted nanoseconds."""

from __future__ import annotations

from typing import Literal, NamedTuple

Store = Literal["carries", "residuals"]


class Row(NamedTuple):
    """One way to store the residuals of a step: some, from which the others are run again."""

    price: float
    """Nanoseconds a byte from which on it is the best; 0 for the one that runs nothing again."""
    bytes: int
    arrays: int
    nanoseconds: float
    """To run again what is not stored, beyond cheap equations."""


class StepCosts(NamedTuple):
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
    product_bytes: int = 0
    """Of these products, which are added up there."""
    log_bytes: int = 0
    """Of what it displaces in buffers, where that is logged so that checkpoints leave them out."""
    buffer_bytes: int = 0
    """Of those buffers."""

    carry_arrays: int = 0
    """How many arrays a checkpoint is."""
    residual_arrays: int = 0
    """How many the residuals are."""
    holds_loops: bool = False
    """Whether it runs loops that are differentiated with it."""
    offloaded_bytes: int = 0
    """Of residuals that a policy puts into the host's memory."""
    smaller_rows: tuple[Row, ...] = ()
    """Ways to store less than all residuals, from more bytes to fewer, at higher prices."""

    @property
    def stores(self) -> tuple[Store, ...]:
        """What is worth storing of the segment at hand.

        From stored carries, buffers are taken back a step at a time, which costs a loop a step.
        """
        if self.buffer_bytes and self.residual_bytes < self.buffer_bytes:
            return ("residuals",)
        return ("carries", "residuals")

    @property
    def rows(self) -> tuple[Row, ...]:
        """The ways to store the residuals of a step, from more bytes to fewer."""
        return Row(0.0, self.residual_bytes, self.residual_arrays, 0.0), *self.smaller_rows

    def row(self, store: Store, price: float = 0.0) -> Row:
        """What a segment stores of a step; of residuals, the best at a price."""
        if store == "carries":
            return Row(0.0, self.carry_bytes, self.carry_arrays, 0.0)
        return [row for row in self.rows if row.price <= price][-1]


UNKNOWN_COSTS = StepCosts(0, 0)
