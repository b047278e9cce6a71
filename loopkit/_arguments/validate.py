"""Check the arguments that several functions share."""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves_with_path
from jaxtyping import PyTree

from loopkit import _jax
from loopkit._arguments import errors

STATIC = ", which becomes part of the compiled program."


def check_callable(function: str, argument: str, value: object) -> None:
    if not callable(value):
        expected, advice = "must be a function", "Pass a callable."
        raise errors.wrong_type(function, argument, expected, errors.shown(value), advice)


def check_flag(function: str, argument: str, value: object) -> bool:
    """Check a flag, a Python or NumPy bool, 0 or 1, and return it as a bool."""
    if isinstance(value, (int, np.bool_, np.integer)) and value in (0, 1):
        return bool(value)
    got, advice = errors.shown(value), f"Pass True or False{STATIC}"
    raise errors.wrong_type(function, argument, "must be a bool", got, advice)


BOUNDS = {
    "max_steps": (0, "an int >= 0 or None (no bound)"),
    "truncate": (1, "an int >= 1 (steps) or None"),
    "every": (1, "an int >= 1 (steps) or None"),
    "block": (1, "an int >= 1 (rows) or None"),
    "max_segments": (1, "an int >= 1 or None (no bound)"),
}


def check_bound(function: str, argument: str, value: object) -> int | None:
    """Check one of `BOUNDS`: an int, or None."""
    return None if value is None else check_whole(function, argument, value, *BOUNDS[argument])


def unrolls_all(unroll: object) -> bool:
    """Return whether the value asks to unroll all steps, as True or 0 do in lax."""
    if isinstance(unroll, (bool, np.bool_)):
        return bool(unroll)
    return isinstance(unroll, (int, np.integer)) and unroll == 0


def check_unroll(function: str, unroll: object, length: int | None = None) -> int:
    """Check `unroll`, and return the steps in an iteration. With a known length, it may be all."""
    if isinstance(unroll, (bool, np.bool_)) and not unroll:
        return 1
    if length is None:
        expected = "an int >= 1 (steps in an iteration)"
        return check_whole(function, "unroll", unroll, 1, expected)
    expected = "an int >= 0 (steps in an iteration, 0 for all) or a bool"
    steps = 0 if unrolls_all(unroll) else check_whole(function, "unroll", unroll, 0, expected)
    return max(1, min(steps or length, length))


def check_whole(function: str, argument: str, value: Any, least: int, expected: str) -> int:
    if type(value) is int and value >= least:
        return value
    whole = None
    with contextlib.suppress(TypeError, jax.errors.JAXTypeError):
        whole = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    if whole is not None and whole >= least:
        return whole
    wrong, advice = errors.wrong_value, f"Pass at least {least}."
    if whole is None:
        wrong, advice = errors.wrong_type, f"Pass an int that is not traced{STATIC}"
    raise wrong(function, argument, f"must be {expected}", errors.shown(value), advice)


DEBUGGED = "finite", "bounds"
VARIABLE = "LOOPKIT_DEBUG"
"""The environment variable that says what to look for if the argument `debug` is None."""


def check_debug(function: str, debug: Any, kinds: Sequence[str] = DEBUGGED[:1]) -> frozenset[str]:
    """Check `debug`, and return the mistakes to look for, a subset of `kinds`."""
    if debug is None:
        asked = [word.strip() for word in os.environ.get(VARIABLE, "").split(",")]
        asked = [word for word in asked if word]
        if set(asked) <= set(DEBUGGED):
            return frozenset(asked) & frozenset(kinds)
        expected = f'can be None only if {VARIABLE} is empty, "finite", "bounds" or both'
        advice = "Separate the two words with a comma."
        raise errors.wrong_value(function, "debug", expected, repr(",".join(asked)), advice)
    asked = debug if isinstance(debug, (tuple, list, set, frozenset)) else [debug]
    if all(isinstance(word, str) and word in kinds for word in asked):
        return frozenset(asked)
    wrong = errors.wrong_value if isinstance(debug, str) else errors.wrong_type
    words = " or ".join(["None", *(f'"{kind}"' for kind in kinds)])
    expected = f"must be {words}" + (", or a tuple of them" if len(kinds) > 1 else "")
    advice = 'Pass "finite" to find the step that makes a NaN.'
    raise wrong(function, "debug", expected, errors.shown(debug), advice)


def check_lanes(function: str, lanes: object) -> Any:
    """Return None, "wait", "compact", "flatten", or widths as a tuple of ints."""
    if lanes is None or (isinstance(lanes, str) and lanes in ("wait", "compact", "flatten")):
        return lanes
    expected = 'must be None, "wait", "compact", "flatten" or a tuple of ints >= 1, each less than '
    expected += "the last"
    advice = "Pass numbers of lanes that shrink, as in (64, 16)."
    if not isinstance(lanes, (tuple, list)):
        wrong = errors.wrong_value if isinstance(lanes, str) else errors.wrong_type
        raise wrong(function, "lanes", expected, errors.shown(lanes), advice)
    widths = tuple(check_whole(function, "lanes", n, 1, expected[8:]) for n in lanes)
    if not widths or any(b >= a for a, b in itertools.pairwise(widths)):
        raise errors.wrong_value(function, "lanes", expected, str(widths), advice)
    return widths


def check_beside_flat(function: str, lanes: object, progress: object) -> None:
    """Raise if `progress` is given for flattened lanes, which are in different steps."""
    if lanes == "flatten" and progress is not None:
        expected = 'must be None if `lanes` is "flatten", since lanes are then in different steps'
        advice = 'Leave it out, or pass `lanes="wait"`.'
        raise errors.wrong_value(function, "progress", expected, errors.shown(progress), advice)


def as_array(
    function: str,
    argument: str,
    value: object,
    path: jax.tree_util.KeyPath = (),
    advice: str = "Pass numbers.",
) -> Any:
    """Return the array that jax.numpy makes of a value."""
    try:
        return _jax.as_array(value)
    except (TypeError, ValueError):
        got = errors.shown(value)
        raise errors.wrong_type(function, argument, "must be an array", got, advice, path) from None


def as_arrays(function: str, argument: str, tree: PyTree[Any]) -> Any:
    """Return the tree with every leaf an array."""
    if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree)):
        return tree

    advice = "Close over the value, or make it a static field of a pytree node."
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: as_array(function, argument, leaf, path, advice), tree
    )


def from_prefix(
    function: str, argument: str, prefix: PyTree[Any], tree: PyTree[Any], of: str, advice: str
) -> list:
    """Expand `prefix` to an entry for each leaf of a tree, which `of` names in errors."""
    try:
        return _jax.broadcast_prefix(prefix, tree, is_leaf=lambda v: v is None)
    except ValueError:
        expected = f"must be a tree prefix of {of}"
        got = f"{prefix!r} for {jax.tree.structure(tree)}"
        raise errors.wrong_value(function, argument, expected, got, advice) from None


def is_traced(leaf: object) -> bool:
    """Return whether a leaf is an array of a kind that JAX has."""
    numpy = isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind not in "OSTUMm"
    return isinstance(leaf, jax.Array) or numpy


def are_traced(args: tuple, kwargs: dict[str, Any]) -> list[bool]:
    """Return which leaves tracing a whole function makes abstract; others stay as they are.

    A Python float or complex number is abstract if it is an argument itself. In a tree, it may be
    a setting of a model.
    """
    leaves = tree_leaves_with_path((args, kwargs))
    number = lambda path, v: len(path) == 2 and isinstance(v, (float, complex))
    return [is_traced(v) or number(path, v) for path, v in leaves]


def type_of(value: Any) -> Any:
    """Return `jax.typeof(value)`, but without its microsecond for arrays on one device."""
    if type(value) is _jax.ArrayImpl and type(value.sharding) is jax.sharding.SingleDeviceSharding:
        return value.aval
    return jax.typeof(value)


def in_python(function: Callable[[], Any]) -> Any:
    """Run a loop in Python if jit is disabled and values are known; otherwise return None."""
    with contextlib.suppress(jax.errors.ConcretizationTypeError):
        return function() if _jax.jit_is_disabled() else None


def holds(dtype: np.dtype[Any], value: jax.Array) -> bool:
    """Return whether a dtype holds a value without loss. JAX has no common type for random keys."""
    if any(jnp.issubdtype(d, jax.dtypes.extended) for d in (dtype, value.dtype)):
        return value.dtype == dtype
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(value, dtype) == dtype
