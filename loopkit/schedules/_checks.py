"""Arguments of the schedules: integers of at least some size, or an error with advice."""

from __future__ import annotations

import operator
from typing import SupportsIndex, TypeAlias

Whole: TypeAlias = SupportsIndex
"""A Python int, or a type that converts to one without loss, such as numpy's integers."""

COUNT_SEGMENTS = "count the segments to be reversed"
SLOTS = "count the initial state as one slot"


def integer(where: str, argument: str, value: Whole, minimum: int, advice: str) -> int:
    """Return `value` as a Python int of at least `minimum`, or raise an error.

    `where` names the function as users import it, and `advice` says what to change.
    """
    advice = advice[0].upper() + advice[1:]
    try:
        result = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        result = None
    if result is None:
        raise TypeError(
            f"loopkit.schedules.{where}: `{argument}` must be an int >= {minimum}. {advice}. Got: "
            f"{value!r} of type {type(value).__name__}."
        )
    if result < minimum:
        raise ValueError(
            f"loopkit.schedules.{where}: `{argument}` must be an int >= {minimum}. {advice}. Got: "
            f"{result}."
        )
    return result
