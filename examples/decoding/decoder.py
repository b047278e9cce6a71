"""The interface of a decoder: what a search may ask of a model that has read its input."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

import loopkit

Token = Int[Array, ""]
State = PyTree[Array]
Rows = PyTree[Array]
T = TypeVar("T")

BLOCK = 40  # rows of a cache that are read at once
FIRST_ROOM, GROWTH = 32, 4  # in rows


class Past:
    """The rows that the steps before left behind, as one hypothesis reads them.

    To read them costs what was written, not the room there is. As reads of a `loopkit.Buffer` do,
    a fold says what comes after it: `cache` is from then on the cache to go on with.
    """

    def __init__(
        self, cache: Rows, length: Int[Array, ""], lineage: Int[Array, " room"] | None = None
    ):
        """`length` rows are written. With a `lineage`, each has a second axis, of a beam: the
        hypothesis's own is at the place that its lineage says."""
        self.cache, self.length, self.lineage = cache, length, lineage

    def fold(self, function: Callable[[T, Rows, Bool[Array, " n"]], T], value: T) -> T:
        """`value = function(value, rows, own)` for n rows after another, from first to last.

        Among the rows are some that are not the hypothesis's own: not written yet, or by a rival.
        To leave them out there is cheaper than to pick the others.
        """
        buffers = jax.tree.leaves(self.cache, is_leaf=is_buffer)
        if not buffers:
            return value
        room = len(buffers[0])

        def with_block(start, cache, value):
            steps = start + jnp.arange(min(BLOCK, room))
            own = steps < self.length
            where = slice(None) if room <= BLOCK else steps
            rows = jax.tree.map(lambda buffer: buffer[where], cache, is_leaf=is_buffer)
            if self.lineage is not None:
                beam = buffers[0].shape[1]
                own = own[:, None] & (self.lineage[steps, None] == jnp.arange(beam))
                rows = jax.tree.map(lambda rows: rows.reshape(-1, *rows.shape[2:]), rows)
            return function(value, rows, own.ravel())

        if room <= BLOCK:
            return with_block(0, self.cache, value)

        def next_block(carry):
            start, cache, value = carry
            value = with_block(start, cache, value)
            return start + BLOCK, cache, value

        _, self.cache, value = loopkit.while_loop(
            lambda carry: carry[0] < self.length,
            next_block,
            (jnp.int32(0), self.cache, value),
            max_steps=-(-room // BLOCK),
        )
        return value


class Decoder(NamedTuple):
    """One step of a decoder, for one hypothesis, and where it starts.

    A decoder remembers in two ways. Its `state` is small, and replaced at every step; when a beam
    search reorders its hypotheses, states move with them. Its `row` is what a step leaves behind
    for all later ones, such as keys and values: rows are written once and never move.
    """

    step: Callable[[State, Past, Token], tuple[State, Rows, Float[Array, " vocab"]]]
    """(state, past, token) -> (state, row, log-probabilities of the next token)."""
    state: State
    row: Any = ()
    """A row, for its structure, shapes and dtypes."""

    def cache(self, *shape: int) -> Rows:
        """Room for rows: before the axes of a row come those of `shape`."""
        return jax.tree.map(lambda leaf: jnp.zeros((*shape, *leaf.shape), leaf.dtype), self.row)


def is_buffer(value: Any) -> bool:
    return isinstance(value, loopkit.Buffer)


def with_row(cache: Rows, step: Int[Array, ""], row: Rows) -> Rows:
    """Return the cache, with the row of a step written in place."""
    write = lambda rows, new: rows.at[step].set(new)
    return jax.tree.map(write, cache, row, is_leaf=is_buffer)


def in_growing_rooms(
    decoder: Decoder,
    max_length: int,
    empty: Callable[[int], T],
    go_on: Callable[[T, int], tuple[T, tuple[Any, loopkit.LoopInfo]]],
) -> tuple[Any, loopkit.LoopInfo]:
    """Runs a search in little room, and what has not ended there in four times as much, and so on.

    So that a cache costs what is written to it, not what might have been: its room is new memory,
    which has to be filled, and so has that of its cotangent. Without a cache there is one room.

    `empty(room)` is a carry whose `history` has room for so many steps; `go_on(carry, steps)` takes
    at most so many, and says what was found.
    """
    rooms, room = [], FIRST_ROOM
    while jax.tree.leaves(decoder.row) and 2 * room < max_length:
        rooms.append(room)
        room *= GROWTH
    rooms.append(max_length)

    def search(carry: T, steps: int, larger: list[int]) -> tuple[Any, loopkit.LoopInfo]:
        carry, found = go_on(carry, steps)
        if not larger:
            return found
        room, *larger = larger
        written = jax.tree.leaves(carry.history)[0].shape[0]

        def search_on(found: Any) -> tuple[Any, loopkit.LoopInfo]:
            # A value that does not depend on the loop would be computed before it, needed or not.
            zero = jnp.minimum(found[1].steps, 0)
            zero, history = jax.lax.optimization_barrier((zero, carry.history))
            more = lambda rows: jnp.pad(rows, [(0, room - written)] + [(0, 0)] * (rows.ndim - 1))
            history = jax.tree.map(more, history)
            later = carry._replace(length=carry.length + zero, history=history)
            return search(later, room - written, larger)

        # An `if` that stays one under vmap: nothing runs if no lane has to go on.
        return loopkit.while_loop(
            lambda found: ~found[1].stopped, search_on, found, max_steps=1, checkpoints=1
        )

    return search(empty(rooms[0]), rooms[0], rooms[1:])
