"""What a search may ask of a model, once the model has read its input."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

import loopkit

Token = Int[Array, ""]
State = PyTree[Array]
Rows = PyTree[Array]


class Decoder(NamedTuple):
    """One step of a decoder, for one hypothesis, and where it starts.

    A decoder remembers in two ways. Its `state` is small, and replaced at every step; when a beam
    search reorders its hypotheses, states move with them. Its `row` is what a step leaves behind
    for all later ones, such as keys and values: rows are written once and never move.
    """

    step: Callable[[State, Rows, Token], tuple[State, Rows, Float[Array, " vocab"]]]
    """(state, rows, token) -> (state, row, log-probabilities of the next token). `rows` are those
    of the steps before, zeros where none is written yet."""
    state: State
    row: Any = ()
    """A row, for its structure, shapes and dtypes."""

    def cache(self, *shape: int) -> Rows:
        """Room for rows: before the axes of a row come those of `shape`."""
        return jax.tree.map(lambda leaf: jnp.zeros((*shape, *leaf.shape), leaf.dtype), self.row)


def is_buffer(value: Any) -> bool:
    return isinstance(value, loopkit.Buffer)


def with_row(cache: Rows, step: Int[Array, ""], row: Rows) -> Rows:
    """The cache, with the row of a step written in place."""
    write = lambda rows, new: rows.at[step].set(new)
    return jax.tree.map(write, cache, row, is_leaf=is_buffer)
