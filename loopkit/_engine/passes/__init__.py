"""Passes that rewrite a loop without changing its results. Every loop goes through `PASSES`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loopkit._engine.lanes.flattened import flattened
from loopkit._engine.lanes.predicates import axes_between_lanes, lockstep
from loopkit._engine.lanes.vain_steps import without_vain_checks
from loopkit._engine.loop import Loop, Rewritten
from loopkit._engine.passes.flat_rows import flat_rows
from loopkit._engine.passes.hoist_invariant_carry import hoist_invariant_carry
from loopkit._engine.passes.reads_first import reads_first
from loopkit._engine.passes.varying import varying

PASSES: Sequence[Callable[[Loop], Loop | Rewritten]] = (
    without_vain_checks,  # before a step is cut: its parts know less than the whole
    flattened,  # before any other change to a step
    reads_first,  # while a step is as written: later passes may call it
    lockstep,  # changes the predicate
    varying,  # all that the predicate decides varies as the predicate does
    hoist_invariant_carry,  # later passes work on all remaining leaves
    flat_rows,  # last, since tables that were carried are constants by then
)
"""The passes, in order. A pass that changes neither operands nor results returns just the loop."""


def ready(loop: Loop) -> tuple[Loop, tuple[Rewritten, ...]]:
    """Return the loop as it runs, and the passes that changed its operands or results."""

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
