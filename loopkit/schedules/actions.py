"""The actions of a schedule, with types: they act on one live state and on numbered slots.

The *live* state is the one being computed with. A schedule begins with the start of segment 0 live,
or, where it only reverses, with nothing live. Every action prints as it is written, and names the
segment it is about, so that a machine which executes it can check it (`loopkit.schedules.replay`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Advance:
    """Run the segments from `start` up to, not including, `stop`: the start of `stop` is live."""

    start: int
    stop: int


@dataclass(frozen=True)
class _OfSlot:
    segment: int
    slot: int


class Save(_OfSlot):
    """Store the live state, the start of `segment`, in `slot`. The old state is lost."""


class Restore(_OfSlot):
    """Make the start of `segment`, which `slot` holds, the live state. It stays stored."""


@dataclass(frozen=True)
class Discard:
    """Empty `slot`."""

    slot: int


@dataclass(frozen=True)
class Reverse:
    """Replay `segment` from the live state, its start, and run it backward: nothing is live."""

    segment: int


Action = Advance | Save | Restore | Discard | Reverse
