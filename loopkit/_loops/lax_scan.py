"""A scan that stores the residuals of every step: that of lax."""

from __future__ import annotations

import functools as ft
from typing import Any

import jax

from loopkit._engine import steps
from loopkit._engine.loop import Loop
from loopkit._engine.trials.unrolling import settled
from loopkit._tracing.trace import Traced


def run_stored(traced: Traced, init: list, xs: list, split_transpose: bool) -> tuple[list, list]:
    """A scan that stores every step is lax.scan, of the step as it was traced."""
    return traced.run(init, xs, ft.partial(_stored_scan, split_transpose=split_transpose))


@ft.partial(jax.jit, static_argnames=("loop", "split_transpose"), inline=True)
def _stored_scan(*operands: Any, loop: Loop, split_transpose: bool) -> list:
    return steps.scan(loop.unrolled(settled(loop)), loop.split(operands)[0], split_transpose)
