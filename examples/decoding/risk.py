"""Edit distance by a dynamic programme, and its expectation over an n-best list."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import loopkit

from .beam import Hypotheses


class Table(NamedTuple):
    """The carry of the dynamic programme."""

    row: Int[Array, ""]
    distances: Int[Array, "rows columns"]  # [i, j]: edits from i tokens of one to j of the other


def edit_distance(
    found: Int[Array, " n"],
    found_length: Int[Array, ""],
    wanted: Int[Array, " m"],
    wanted_length: Int[Array, ""],
) -> Int[Array, ""]:
    """Return the fewest insertions, deletions and substitutions (Wagner and Fischer, 1974).

    Rows of the table are filled in turn, and only as many as `found` has tokens.
    """
    columns = jnp.arange(wanted.size + 1, dtype=jnp.int32)

    def fill(table: Table) -> Table:
        i, distances = table
        above = distances[i - 1]
        substituted = above[:-1] + (wanted != found[i - 1])
        best = jnp.minimum(above + 1, jnp.concatenate([i[None], substituted]))
        # distance[j] = min over k <= j of best[k] + (j - k), the insertions: a running minimum.
        best = jax.lax.cummin(best - columns) + columns
        return Table(i + 1, distances.at[i].set(best))

    distances = jnp.zeros((found.size + 1, wanted.size + 1), jnp.int32).at[0].set(columns)
    table = loopkit.while_loop(
        lambda table: table.row <= found_length,
        fill,
        Table(jnp.int32(1), distances),
        max_steps=found.size,
        buffers=lambda table: table.distances,
    )
    return table.distances[found_length, wanted_length]


def expected_edits(
    hypotheses: Hypotheses,
    end: int,
    ways: Int[Array, "ways m"],
    lengths: Int[Array, " ways"],
) -> Float[Array, ""]:
    """Edits to the nearest of several right answers, expected over the n-best list.

    The list's scores say how probable each hypothesis is among those of the list (Prabhavalkar et
    al., 2018). The gradient goes through the scores: edits themselves are integers. Rows of `ways`
    that are no answer have a length of -1.
    """
    said = jnp.sum(hypotheses.tokens != end, axis=1)
    to_ways = jax.vmap(edit_distance, (None, None, 0, 0))
    edits = jax.vmap(to_ways, (0, 0, None, None))(hypotheses.tokens, said, ways, lengths)
    edits = jnp.min(jnp.where(lengths >= 0, edits, jnp.iinfo(edits.dtype).max), axis=1)
    return jnp.sum(jax.nn.softmax(hypotheses.scores) * edits)
