"""Rows: what a scan returns of a leaf of y, from its values in the order of the steps taken."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def ys_of(
    like: Any,
    taken: list[Any],
    word: str | None,
    axis: int | None,
    length: int,
    every: int | None,
    reverse: bool,
) -> Any:
    """`like`: of the leaf's type, for what no step writes. All ys are those of every first step."""
    if word is not None and every is None:
        return come_to(taken, word) if taken else blank(like, word)
    if axis is None:
        return taken[-1] if taken else like
    every = every or 1
    ends = range(every, len(taken) + 1, every)
    rows = [come_to(taken[end - every : end], word) for end in ends]
    rows += [blank(like, word)] * (length // every - len(rows))
    if rows:
        return jnp.stack(rows[::-1] if reverse else rows, axis)
    axis %= like.ndim + 1
    return jnp.stack([blank(like, word)], axis)[(slice(None),) * axis + (slice(0),)]


def come_to(window: list[Any], word: str | None) -> Any:
    if word in (None, "last"):
        return window[-1]
    return {"sum": jnp.sum, "mean": jnp.mean}[word](jnp.stack(window), axis=0)


def blank(like: Any, word: str | None) -> Any:
    return like if is_key(like) else jnp.zeros_like(come_to([jnp.zeros_like(like)], word))


def is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
