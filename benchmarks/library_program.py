"""A gradient through loops of a library, its own way and through `checkpointed`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

import loopkit

OWN, DEFAULT = "own", "default"


class Program(NamedTuple):
    """Gradients that have to agree: the first is what the others are compared with."""

    own: dict[str, Callable]
    """The functions as the library has them: with its adjoint, `jax.lax`, or in forward mode if it
    has neither."""
    ours: dict[str, Callable]
    """Through `checkpointed`, by setting."""
    at: Any
    tolerance: float = 1e-12
    """The tolerance, relative to the largest number of a leaf; a comment gives the reason for a
    larger one."""
    loss: Callable | None = None
    """The function to differentiate, for tests that use forward mode, too."""


def reverse(loss: Callable) -> dict[str, Callable]:
    return {OWN: jax.grad(loss)}


def forward(loss: Callable) -> dict[str, Callable]:
    return {"own, forward mode": jax.jacfwd(loss)}


def through(loss: Callable, *settings: dict) -> dict[str, Callable]:
    """Return the gradient of a loss through `checkpointed`, by default and with other settings."""
    name = lambda how: ", ".join(f"{k}={v!r}" for k, v in how.items()) or DEFAULT
    return {name(how): jax.grad(loopkit.checkpointed(loss, **how)) for how in ({}, *settings)}
