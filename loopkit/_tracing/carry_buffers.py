"""Find the buffers among the leaves of a carry, and show them to a body."""

from __future__ import annotations

import functools as ft
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path
from jaxtyping import PyTree

from loopkit import _jax
from loopkit._arguments import errors
from loopkit._arguments.static_leaves import bare, is_whole
from loopkit._buffers import indexing, run_time_checks
from loopkit._buffers.buffer import Buffer, Owner, is_buffer, plain
from loopkit._buffers.tensor_array import checked, is_tensor_array
from loopkit._engine.loop import kept

NONE = object()
"""The `buffers` of a loop that takes none, and treats buffers in a tree like any other node."""

ADVICE = (
    "Pass a function of the carry that returns leaves of it, or a tree of bools that matches it."
)


@dataclass(frozen=True)
class Buffers:
    """The buffers of a loop."""

    flags: tuple[bool, ...]
    """Which leaves of the carry are buffers."""
    outer: tuple[Owner | None, ...]
    """For each leaf, its owner if it is a buffer of an outer loop, else None."""

    names: tuple[str, ...] = ()
    """The name of each leaf in errors."""
    step: int | None = None
    """The index of the leaf that counts the steps, if reads and writes are checked. The last leaves
    are then masks of what is written, one for each buffer, in order."""

    @property
    def any(self) -> bool:
        return any(self.flags)

    @property
    def free(self) -> tuple[bool, ...]:
        """Which leaves are not buffers of an outer loop."""
        return tuple(owner is None for owner in self.outer)

    @property
    def hashable(self) -> bool:
        """Whether a trace may be reused; it may not if it reads a mask of an outer loop."""
        return all(owner is None or owner.mask is None for owner in self.outer)

    def first_written(self, init: PyTree[Any]) -> list:
        """Return, for each buffer, a mask of the entries that count as written before the loop."""
        return list(map(run_time_checks.first_written, kept(jax.tree.leaves(init), self.flags)))

    @property
    def masks(self) -> int:
        """The index of the first leaf that masks what is written."""
        return len(self.flags) - sum(self.flags)

    def followed_by(self, count: int, step: int | None) -> Buffers:
        """Return the `Buffers` of a carry with `count` more leaves, none of them a buffer."""
        return replace(
            self,
            flags=(*self.flags, *[False] * count),
            outer=(*self.outer, *[None] * count),
            names=(*self.names, *[""] * count),
            step=step,
        )

    def wrapped(self, leaves: Sequence[Any], flag: int | None) -> tuple[list, list]:
        """Return leaves as a body sees them, and the owners of the buffers among them.

        `flag` is the index of the leaf that says whether the step counts.
        """
        step = None if self.step is None else leaves[self.step]
        masks = iter([] if self.step is None else leaves[self.masks :])
        owners: list[Owner | None] = []
        values = []
        for i, (v, has, outer) in enumerate(zip(leaves, self.flags, self.outer, strict=True)):
            owner = None
            if has:
                masks_of = [*([] if flag is None else [leaves[flag]]), outer and outer.mask]
                some = [m for m in masks_of if m is not None]
                mask = ft.reduce(jnp.logical_and, some) if some else None
                owner = Owner(i, mask, step, self.names[i])
                v = Buffer._of(v, owner, next(masks, None))
            owners.append(owner)
            values.append(v)
        return values, owners

    def unwrapped(
        self, tree: PyTree[Any], owners: Sequence[Owner | None], before: Sequence[Any]
    ) -> Any:
        """Replace the buffers in what a body returned by arrays.

        A leaf that is not an update of the buffer in its place overwrites all of that buffer.
        """
        leaves, shape = jax.tree.flatten(tree, is_leaf=is_buffer)
        if len(leaves) != len(owners):
            return plain(tree)
        out, masks = [], []
        for leaf, owner, old in zip(leaves, owners, before, strict=True):
            if owner is not None and self.step is not None:
                written = leaf._written if is_buffer(leaf) else None
                masks.append(jnp.ones(jnp.shape(old), bool) if written is None else written)
            value = leaf._value if is_buffer(leaf) else leaf
            itself = is_buffer(leaf) and leaf._owner is owner
            if owner is not None and owner.mask is not None and not itself:
                value = _overwritten(old, value, owner)
            out.append(value)
        if self.step is not None:
            out[self.masks :] = masks
        return shape.unflatten(out)

    def returned(self, tree: PyTree[Any]) -> Any:
        """Return the final carry, and turn buffers of an outer loop into buffers again."""
        if not self.any:
            return tree
        leaves, shape = jax.tree.flatten(tree)
        pairs = itertools.zip_longest(leaves, self.outer)
        values = [v if owner is None else Buffer._of(v, owner) for v, owner in pairs]
        return checked(shape.unflatten(values))


def _overwritten(old: jax.Array, value: jax.Array, owner: Owner) -> Any:
    value = jnp.asarray(value)
    buffer = Buffer._of(old, owner)
    if value.shape != buffer.shape or value.dtype != buffer.dtype:
        return value  # a later check of the carry's types raises the error
    return buffer._write(indexing.place(buffer.shape, ...), value, None)._value


def find(names: Any, buffers: PyTree[Any], init: PyTree[Any]) -> Buffers:
    """Find the buffers in `init`, the initial carry; errors call it as `names` does.

    They are the leaves that `buffers` names, buffers of an outer loop, and arrays in TensorArrays.
    """
    nodes = jax.tree.leaves(init, is_leaf=is_whole)
    if buffers is NONE or (buffers is None and not any(map(is_whole, nodes))):
        count = len(jax.tree.leaves(init))
        return Buffers((False,) * count, (None,) * count)
    leaves = jax.tree.leaves(init, is_leaf=is_buffer)
    outer = tuple(v._owner if is_buffer(v) else None for v in leaves)
    flags = []
    for node in nodes:
        # A TensorArray's last leaf is its size.
        holds = is_tensor_array(node)
        flags += [True] * (len(jax.tree.leaves(node)) - 1) + [False] if holds else [is_buffer(node)]
    named = _named(names, buffers, plain(init))
    paths = tree_leaves_with_path(init, is_leaf=is_buffer)
    called = tuple(names.init + keystr(path[names.hidden - 1 :]) for path, _ in paths)
    return Buffers(tuple(a or b for a, b in zip(flags, named, strict=True)), outer, called)


def _named(names: Any, buffers: PyTree[Any], init: PyTree[Any]) -> list[bool]:
    function = names.function
    leaves, tree = jax.tree.flatten(init)
    if buffers is None:
        return [False] * len(leaves)
    if callable(buffers):
        tokens = [jax.ShapeDtypeStruct(jnp.shape(v), jnp.result_type(v)) for v in leaves]
        expected = "must return leaves of the carry that it is given"
        try:
            chosen = jax.tree.leaves(buffers(bare(tree.unflatten(tokens))))
        except (TypeError, AttributeError, LookupError) as error:
            got = f"{type(error).__name__}: {error}"
            raise errors.wrong_type(function, "buffers", expected, got, ADVICE) from error
        known, named = set(map(id, tokens)), set(map(id, chosen))
        others = [v for v in chosen if id(v) not in known]
        if others:
            raise errors.wrong_type(function, "buffers", expected, errors.shown(others[0]), ADVICE)
        return [id(t) in named for t in tokens]
    try:
        flags = _jax.broadcast_prefix(buffers, init)
    except ValueError as error:
        expected = "must be a prefix of the tree of the carry"
        for _ in range(names.hidden - 1):  # the caller put these before the user's carry
            (_, buffers), (_, init) = buffers, init
        got = f"{jax.tree.structure(buffers)} for a carry of structure {jax.tree.structure(init)}"
        raise errors.wrong_value(function, "buffers", expected, got, ADVICE) from error
    for flag in jax.tree.leaves(buffers):
        if not isinstance(flag, (bool, np.bool_)):
            expected = "must be a function or a tree of bools"
            raise errors.wrong_type(function, "buffers", expected, errors.shown(flag), ADVICE)
    return list(map(bool, flags))
