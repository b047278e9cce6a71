"""Loops made of loops: the same results by other steps. Every loop takes those in `PASSES`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loopkit._engine.lanes.flattened import flattened
from loopkit._engine.lanes.predicates import axes_between_lanes, lockstep
from loopkit._engine.loop import Loop, Rewritten
from loopkit._engine.passes.flat_rows import flat_rows
from loopkit._engine.passes.hoist_invariant_carry import hoist_invariant_carry
from loopkit._engine.passes.reads_first import reads_first
from loopkit._engine.passes.varying import varying

PASSES: Sequence[Callable[[Loop], Loop | Rewritten]] = (
    flattened,  # before all that is done to a step
    reads_first,  # while a step is as it was written: what follows may call it
    lockstep,  # makes another predicate
    varying,  # all that the predicate decides varies as it does
    hoist_invariant_carry,  # of what is left, every later part works on all
    flat_rows,  # after that, since tables that were carried are constants then
)
"""In this order. A pass that leaves operands and results as they are returns just the loop."""


def ready(loop: Loop) -> tuple[Loop, tuple[Rewritten, ...]]:
    """The loop as it runs, and what was done to it."""

    def make() -> tuple[Loop, tuple[Rewritten, ...]]:
        last, done = loop, []
        for rewrite in PASSES:
            new = rewrite(last)
            if isinstance(new, Rewritten):
                done.append(new)
                new = new.loop
            last = new
        return last, tuple(done)

    return loop.derived(("ready", axes_between_lanes(loop)), make)
