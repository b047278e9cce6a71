"""What a loop says of itself."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Bool, Int32


class LoopInfo(NamedTuple):
    """How far a loop went, and why it ended. Under `jax.vmap`, for each lane."""

    steps: Int32[Array, "*lanes"]
    """Steps taken."""
    stopped: Bool[Array, "*lanes"]
    """True if the predicate (or `until`) ended the loop, False if the bound (or length) did."""
