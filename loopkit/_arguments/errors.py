"""Errors about wrong arguments.

Every message names the function, the argument and the place in its tree. Its first sentence says
what is wrong, the next one or two say what to do, and the last one shows the values.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.tree_util import keystr


def wrong_value(function: str, argument: str, *what: Any) -> ValueError:
    return ValueError(wrong(function, argument, *what))


def wrong_type(function: str, argument: str, *what: Any) -> TypeError:
    return TypeError(wrong(function, argument, *what))


def wrong(
    function: str,
    argument: str,
    expected: str,
    got: str,
    advice: str,
    path: jax.tree_util.KeyPath = (),
) -> str:
    """Return the message about an argument."""
    return message(function, f"`{argument}{keystr(path)}` {expected}", got, advice)


def message(function: str, problem: str, got: str, advice: str) -> str:
    return f"loopkit.{function}: {problem}. {advice} Got: {got}."


def shown(value: object) -> str:
    """Return how errors show a wrong value."""
    return f"{value!r} of type {type(value).__name__}"


def short_type(aval: Any) -> str:
    """Return a type as users write it, such as float32[3,4]; a weak type is marked."""
    weak = ", weak_type" if getattr(aval, "weak_type", False) else ""
    axes = getattr(getattr(aval, "manual_axis_type", None), "varying", ())
    varying = f", varying over {', '.join(sorted(axes))}" if axes else ""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]{weak}{varying}"


def wrong_carry(
    function: str, argument: str, expected: str, init: str, differences: list[tuple], advice: str
) -> TypeError:
    """Make the error about a step that returns a carry unlike the one that it takes.

    Each difference has a path in `init`, what is there, and what the step returns.
    """
    lines = [f"\n  `{init}{keystr(path)}`: expected {a}, got {b}" for path, a, b in differences]
    return TypeError(f"loopkit.{function}: `{argument}` {expected}. {advice} Got:{''.join(lines)}")


def size(count: float, unit: str = "B") -> str:
    """Format a number of bytes; `unit` is the unit below 1 kB."""
    for larger, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:,.3g} {larger}"
    return f"{count} {unit}"
