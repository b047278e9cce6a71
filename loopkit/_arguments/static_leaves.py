"""Leaves that are no arrays: functions, strings, settings. They are part of the tree's structure.

Functions of the user see them as they are; between those, each stands in its tree as a `Static`.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path, tree_map_with_path
from jaxtyping import PyTree

from loopkit import _jax
from loopkit._arguments import errors

NUMBERS = bool, int, float, complex
VALUES = str, bytes, type, np.dtype, enum.Enum, types.BuiltinFunctionType, *NUMBERS
"""Types of which what is equal is the same. Of others, only the very same object is known to be."""

MISTAKEN = jax.ShapeDtypeStruct, _jax.ShapedArray, np.ndarray, np.generic
"""Types that are meant as arrays, and are none of JAX's."""


@jax.tree_util.register_static
class Static:
    """The place of a leaf that is no array."""

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
    if isinstance(value, types.MethodType):  # a new object every time
        return value.__func__, id(value.__self__)
    return (type(value), value) if isinstance(value, VALUES) else id(value)


def is_static(node: object) -> bool:
    return type(node) is Static


def wrapped(
    function: str, argument: str, tree: PyTree[Any], hidden: int = 0, numbers: bool = False
) -> Any:
    """The tree of arrays, and of `Static` for what is none. `hidden` levels are not the user's.

    `numbers`: whether those of Python stay what they are.
    """
    if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree)):
        return tree

    def wrap(path: jax.tree_util.KeyPath, leaf: object) -> Any:
        if numbers and type(leaf) in NUMBERS:
            return Static(leaf)
        if isinstance(leaf, (str, bytes)):  # which NumPy may take for the name of a dtype
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
    """The structure as the user knows it, in which what is no array is a leaf."""
    return jax.tree.structure(tree, is_leaf=is_static)


def _is_whole(node: object) -> bool:
    """A leaf that is no array, or a buffer: made anew, it would not know what was written."""
    return is_static(node) or getattr(type(node), "_is_whole", False)


def bare(tree: PyTree[Any]) -> Any:
    """The tree with every leaf as the user knows it."""
    return jax.tree.map(lambda v: v.value if is_static(v) else v, tree, is_leaf=_is_whole)


def seen(function: Callable | None) -> Any:
    """A function of the user's, if there is one, of trees that hold `Static`s."""
    return None if function is None else lambda *args: function(*map(bare, args))


def alike(before: PyTree[Any], after: PyTree[Any]) -> tuple[Any, list[tuple[Any, Any, Any]]]:
    """Return `after` with leaves of `before` that are no arrays in the place of their equals.

    Return what differs from those, too: path, leaf and the other; nothing in trees of another
    structure.
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
    """Return what a step returned, if its leaves that are no arrays are those that it was given."""
    after, differences = alike(before, after)
    lines = [
        f"`{init}{keystr(path[hidden:])}` is {named(a)}, but `{body}` returns {named(b)}"
        for path, a, b in differences
    ]
    if lines:
        expected = f"very leaves of `{init}` where they are no arrays, got"
        advice = f"Return them unchanged from `{body}`; what changes has to be an array."
        raise errors.wrong_carry(function, body, expected, lines, advice)
    return after


def _are_equal(a: Static, b: Static) -> bool:
    if a == b:
        return True
    try:
        return type(a.value) is type(b.value) and bool(a.value == b.value)
    except Exception:  # what `==` of another library's does is its own affair
        return False


def named(value: Any) -> str:
    """A leaf, or the type of one, as errors speak of it."""
    if is_static(value):
        return repr(value.value)
    return errors.short_type(jax.typeof(value) if isinstance(value, jax.Array) else value)
