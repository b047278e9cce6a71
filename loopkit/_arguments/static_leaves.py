"""Leaves that are not arrays: functions, strings, settings. They are part of the tree's structure.

The user's functions get them unchanged. Inside loopkit, each is wrapped in a `Static`.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.tree_util import tree_flatten_with_path, tree_map_with_path
from jaxtyping import PyTree

from loopkit import _jax
from loopkit._arguments import errors

NUMBERS = bool, int, float, complex
VALUES = str, bytes, type, np.dtype, enum.Enum, types.BuiltinFunctionType, *NUMBERS
"""Types whose equal values are the same leaf. For other types, only the same object is."""

MISTAKEN = jax.ShapeDtypeStruct, _jax.ShapedArray, np.ndarray, np.generic
"""Types that users pass as arrays, although they are not arrays of JAX."""


@jax.tree_util.register_static
class Static:
    """A leaf that is not an array, as part of the structure of its tree."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is Static and _key(self.value) == _key(other.value)

    def __hash__(self) -> int:
        return hash(_key(self.value))

    def __repr__(self) -> str:
        return repr(self.value)


def _key(value: object) -> Any:
    if isinstance(value, types.MethodType):  # each access makes a new object
        return value.__func__, id(value.__self__)
    return (type(value), value) if isinstance(value, VALUES) else id(value)


def is_static(node: object) -> bool:
    return type(node) is Static


def wrapped(
    function: str, argument: str, tree: PyTree[Any], hidden: int = 0, numbers: bool = False
) -> Any:
    """Wrap the leaves of a tree that are not arrays in `Static`.

    Errors leave out `hidden` levels of a path, which the user does not see. With `numbers`, Python
    numbers are wrapped, too; otherwise they become arrays.
    """
    if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree)):
        return tree

    def wrap(path: jax.tree_util.KeyPath, leaf: object) -> Any:
        if numbers and type(leaf) in NUMBERS:
            return Static(leaf)
        if isinstance(leaf, (str, bytes)):  # NumPy may take it for the name of a dtype
            return Static(leaf)
        try:
            return _jax.as_array(leaf)
        except (TypeError, ValueError):
            if not isinstance(leaf, MISTAKEN):
                return Static(leaf)
        got, advice = errors.shown(leaf), "Pass numbers, such as jnp.zeros of that shape."
        raise errors.wrong_type(
            function, argument, "must be an array", got, advice, path[hidden:]
        ) from None

    return tree_map_with_path(wrap, tree)


def shape_of(tree: PyTree[Any]) -> Any:
    """Return the structure as the user sees it, where a `Static` is a leaf."""
    return jax.tree.structure(tree, is_leaf=is_static)


def is_whole(node: object) -> bool:
    """Return whether a node is a buffer or TensorArray, which rebuilding would change."""
    return getattr(type(node), "_is_whole", False)


def bare(tree: PyTree[Any]) -> Any:
    """Return the tree with every `Static` unwrapped."""
    return jax.tree.map(
        lambda v: v.value if is_static(v) else v,
        tree,
        is_leaf=lambda v: is_static(v) or is_whole(v),
    )


def seen(function: Callable | None) -> Any:
    """Wrap the user's function, if there is one, so that it takes trees with `Static`s."""
    return None if function is None else lambda *args: function(*map(bare, args))


def alike(before: PyTree[Any], after: PyTree[Any]) -> tuple[Any, list[tuple[Any, Any, Any]]]:
    """Return `after`, with each equal `Static` replaced by that of `before`, and the differences.

    A difference is a path, a leaf and the other leaf. Trees of different structures have none.
    """
    old, tree = tree_flatten_with_path(before, is_leaf=is_static)
    new, new_tree = jax.tree.flatten(after, is_leaf=is_static)
    if tree != new_tree or not any(map(is_static, [*new, *(v for _, v in old)])):
        return after, []
    differences = []
    for i, ((path, a), b) in enumerate(zip(old, new, strict=True)):
        if is_static(a) and is_static(b) and _are_equal(a, b):
            new[i] = a
        elif is_static(a) or is_static(b):
            differences.append((path, a, b))
    return tree.unflatten(new), differences


def kept(
    function: str, body: str, init: str, before: PyTree[Any], after: PyTree[Any], hidden: int = 0
) -> Any:
    """Return the result of a step; raise if its `Static` leaves differ from the step's input."""
    after, differences = alike(before, after)
    differing = [(path[hidden:], named(a), named(b)) for path, a, b in differences]
    if differing:
        expected = f"must return the leaves of `{init}` that are not arrays unchanged"
        advice = "Make an array of each leaf that changes."
        raise errors.wrong_carry(function, body, expected, init, differing, advice)
    return after


def _are_equal(a: Static, b: Static) -> bool:
    if a == b:
        return True
    try:
        return type(a.value) is type(b.value) and bool(a.value == b.value)
    except Exception:  # `==` of another library may raise anything
        return False


def named(value: Any) -> str:
    """Return how errors show a leaf, or the type of one."""
    if is_static(value):
        return repr(value.value)
    return errors.short_type(jax.typeof(value) if isinstance(value, jax.Array) else value)
