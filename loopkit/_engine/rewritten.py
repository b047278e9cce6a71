"""A loop in another's place: what every pass makes of a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from loopkit._engine.loop import Loop


@dataclass(frozen=True)
class Rewritten:
    """A loop that computes what another does, of other operands."""

    loop: Loop
    map_operands: Callable[..., list]
    """The operands of that other loop, or one value for each, to those of this."""
    map_results: Callable[..., list]
    """The results of this loop to that other's; some of its operands, given second, may be some."""


def run(
    bind: Callable[..., Sequence[Any]], passes: Sequence[Rewritten], operands: Sequence[Any]
) -> list:
    """The results of the loop that the passes began with; `bind` runs the one they end with."""
    given = []
    for done in passes:
        given.append(operands)
        operands = done.map_operands(operands)
    results = list(bind(*operands))
    for done, before in zip(reversed(passes), reversed(given), strict=True):
        results = done.map_results(results, before)
    return results
