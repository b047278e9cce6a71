"""What is said when an argument is not what it should be.

Every message names the function, the argument, the place in its tree, what was expected, what was
given, and what to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.tree_util import keystr


def wrong_value(function: str, argument: str, *what: Any) -> ValueError:
    return ValueError(wrong(function, argument, *what))


def wrong_type(function: str, argument: str, *what: Any) -> TypeError:
    return TypeError(wrong(function, argument, *what))


def wrong(
    function: str, argument: str, expected: str, got: str, advice: str, path: Any = ()
) -> str:
    """One message, for any argument."""
    return f"loopkit.{function}: `{argument}{keystr(path)}` {expected}, got {got}. {advice}"


def shown(value: Any) -> str:
    """A value that is not what it should be."""
    return f"{value!r} of type {type(value).__name__}"


def short_type(aval: Any) -> str:
    """A type as users write it: float32[3,4]; a weak type is marked."""
    weak = ", weak_type" if getattr(aval, "weak_type", False) else ""
    axes = getattr(getattr(aval, "manual_axis_type", None), "varying", ())
    varying = f", varying over {', '.join(sorted(axes))}" if axes else ""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]{weak}{varying}"


def carry_types(
    function: str, argument: str, differences: Sequence[tuple[Any, Any, Any]], init: str
) -> str:
    """The carry that comes out of a step is of another type than the one that went in."""
    lines = [
        f"  `{init}{keystr(path)}` is {short_type(before)}, "
        f"but `{argument}` returns {short_type(after)}"
        for path, before, after in differences
    ]
    return (
        f"loopkit.{function}: `{argument}` must return a carry of the types of `{init}`, got\n"
        + "\n".join(lines)
        + f"\nCast in `{argument}` (for instance with .astype), or start from an `{init}` of the "
        "type that a step returns."
    )


def carry_structure(
    function: str, argument: str, differences: Sequence[tuple[Any, str, str, str]], init: str
) -> str:
    """The carry that comes out of a step is another tree than the one that went in."""
    lines = [
        f"  at `{init}{keystr(tuple(path))}`: expected {before}, got {after}, so {why}"
        for path, before, after, why in differences
    ]
    return (
        f"loopkit.{function}: `{argument}` must return a carry of the structure of `{init}`, "
        "but they differ:\n"
        + "\n".join(lines)
        + f"\nReturn from `{argument}` the same tree as `{init}`."
    )


def size(count: float, unit: str = "B") -> str:
    """So many bytes; the unit is that of a few."""
    for larger, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:,.3g} {larger}"
    return f"{count} {unit}"
