"""A writer that attends to what it wrote: its keys and values are cached, a row a step."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from .decoder import Decoder, Past
from .dictionary import PHONES
from .model import SIZE, Memory

HEADS = 4


class Block(eqx.Module):
    """Attends to what was written, then to what was read, then thinks."""

    norms: list[eqx.nn.LayerNorm]
    project: eqx.nn.Linear  # to query, key and value
    merge: eqx.nn.Linear
    ask: eqx.nn.Linear
    widen: eqx.nn.Linear
    narrow: eqx.nn.Linear

    def __init__(self, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 5)
        self.norms = [eqx.nn.LayerNorm(SIZE) for _ in range(3)]
        self.project = eqx.nn.Linear(SIZE, 3 * SIZE, key=keys[0])
        self.merge = eqx.nn.Linear(SIZE, SIZE, key=keys[1])
        self.ask = eqx.nn.Linear(SIZE, SIZE, key=keys[2])
        self.widen = eqx.nn.Linear(SIZE, 2 * SIZE, key=keys[3])
        self.narrow = eqx.nn.Linear(2 * SIZE, SIZE, key=keys[4])

    def query_key_value(self, x: Float[Array, " size"]) -> Float[Array, "3 heads width"]:
        return self.project(self.norms[0](x)).reshape(3, HEADS, -1)

    def finish(self, memory: Memory, x, written: Float[Array, "heads width"]):
        x = x + self.merge(written.ravel())
        x = x + memory.attend(self.ask(self.norms[1](x)))
        return x + self.narrow(jax.nn.gelu(self.widen(self.norms[2](x))))


class Attention(NamedTuple):
    """Attention of a query that sees rows a few at a time (Milakov and Gimelshein, 2018)."""

    highest: Float[Array, " heads"]  # score so far
    total: Float[Array, " heads"]  # of the weights, relative to that of the highest score
    values: Float[Array, "heads width"]  # the sum of those seen, weighted

    @classmethod
    def to_nothing(cls, like: Float[Array, "heads width"]) -> "Attention":
        heads = len(like)
        lowest = jnp.full(heads, jnp.finfo(like.dtype).min, like.dtype)
        return cls(lowest, jnp.zeros(heads, like.dtype), jnp.zeros_like(like))

    def and_to(
        self,
        query: Float[Array, "heads width"],
        keys: Float[Array, "rows heads width"],
        values: Float[Array, "rows heads width"],
        seen: Bool[Array, " rows"],
    ) -> "Attention":
        scores = jnp.einsum("hw,shw->hs", query, keys) * query.shape[1] ** -0.5
        scores = jnp.where(seen, scores, -jnp.inf)
        # It cancels out, so that it has no gradient.
        highest = jax.lax.stop_gradient(jnp.maximum(self.highest, jnp.max(scores, axis=1)))
        before, weights = jnp.exp(self.highest - highest), jnp.exp(scores - highest[:, None])
        return Attention(
            highest,
            before * self.total + jnp.sum(weights, axis=1),
            before[:, None] * self.values + jnp.einsum("hs,shw->hw", weights, values),
        )

    def found(self) -> Float[Array, "heads width"]:
        return self.values / self.total[:, None]


def attend_to_past(
    past: Past,
    layer: int,
    query: Float[Array, "heads width"],
    key: Float[Array, "heads width"],
    value: Float[Array, "heads width"],
) -> Float[Array, "heads width"]:
    """Let one query attend to its own key and value, and to all before."""
    itself = jnp.ones(1, bool)
    attention = Attention.to_nothing(query).and_to(query, key[None], value[None], itself)
    more = lambda attention, rows, own: attention.and_to(query, *rows[layer], own)
    return past.fold(more, attention).found()


def of_place(place: Int[Array, ""]) -> Float[Array, " size"]:
    """Sines and cosines, of any place however far (Vaswani et al., 2017)."""
    angles = place * 1e4 ** -jnp.linspace(0.0, 1.0, SIZE // 2)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)]) / 3


class TransformerWriter(eqx.Module):
    table: Float[Array, "vocab size"]
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    logits: eqx.nn.Linear

    def __init__(self, blocks: int = 2, *, key: PRNGKeyArray):
        keys = jax.random.split(key, blocks + 2)
        self.table = jax.random.normal(keys[0], (len(PHONES), SIZE)) / 4
        self.logits = eqx.nn.Linear(SIZE, len(PHONES), key=keys[1])
        self.blocks = [Block(key=key) for key in keys[2:]]
        self.norm = eqx.nn.LayerNorm(SIZE)

    def embed(self, memory: Memory, phone: Int[Array, ""], place: Int[Array, ""]):
        return self.table[phone] + of_place(place) + memory.summary

    def say(self, x: Float[Array, " size"]) -> Float[Array, " vocab"]:
        return jax.nn.log_softmax(self.logits(self.norm(x)))

    def decoder(self, memory: Memory) -> Decoder:
        """Its state is its place; keys and values are its rows."""

        def step(place, past, phone):
            x, row = self.embed(memory, phone, place), []
            for layer, block in enumerate(self.blocks):
                query, key, value = block.query_key_value(x)
                written = attend_to_past(past, layer, query, key, value)
                x = block.finish(memory, x, written)
                row.append((key, value))
            return place + 1, row, self.say(x)

        zeros = jnp.zeros((HEADS, SIZE // HEADS))
        return Decoder(step, jnp.int32(0), [(zeros, zeros) for _ in self.blocks])

    def log_probs(self, memory, before, real):
        """All steps at once, each attending to those up to it."""
        places = jnp.arange(len(before))
        xs = jax.vmap(self.embed, (None, 0, 0))(memory, before, places)
        seen = places[:, None] >= places
        for block in self.blocks:
            query, key, value = jnp.moveaxis(jax.vmap(block.query_key_value)(xs), 1, 0)
            nothing = Attention.to_nothing(query[0])
            seeing = jax.vmap(nothing.and_to, (0, None, None, 0))
            written = jax.vmap(Attention.found)(seeing(query, key, value, seen))
            xs = jax.vmap(block.finish, (None, 0, 0))(memory, xs, written)
        return jax.vmap(self.say)(xs)
