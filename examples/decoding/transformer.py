"""A writer that attends to what it wrote: its keys and values are cached, a row a step."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from .decoder import Decoder
from .dictionary import MAX_LENGTH, PHONES
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


def attend(
    query: Float[Array, "heads width"],
    keys: Float[Array, "steps heads width"],
    values: Float[Array, "steps heads width"],
    seen: Bool[Array, " steps"],
) -> Float[Array, "heads width"]:
    scores = jnp.einsum("hw,shw->hs", query, keys) * query.shape[1] ** -0.5
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("hs,shw->hw", weights, values)


class TransformerWriter(eqx.Module):
    table: Float[Array, "vocab size"]
    places: Float[Array, "max_length size"]
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    logits: eqx.nn.Linear

    def __init__(self, blocks: int = 2, *, key: PRNGKeyArray):
        keys = jax.random.split(key, blocks + 3)
        self.table = jax.random.normal(keys[0], (len(PHONES), SIZE)) / 4
        self.places = jax.random.normal(keys[1], (MAX_LENGTH, SIZE)) / 4
        self.logits = eqx.nn.Linear(SIZE, len(PHONES), key=keys[2])
        self.blocks = [Block(key=key) for key in keys[3:]]
        self.norm = eqx.nn.LayerNorm(SIZE)

    def embed(self, memory: Memory, phone: Int[Array, ""], place: Int[Array, ""]):
        return self.table[phone] + self.places[place] + memory.summary

    def say(self, x: Float[Array, " size"]) -> Float[Array, " vocab"]:
        return jax.nn.log_softmax(self.logits(self.norm(x)))

    def decoder(self, memory: Memory) -> Decoder:
        """Its state is its place; keys and values are its rows."""

        def step(place, past, phone):
            x, row = self.embed(memory, phone, place), []
            for block, (keys, values) in zip(self.blocks, past, strict=True):
                query, key, value = block.query_key_value(x)
                seen = jnp.arange(len(keys)) <= place
                keys, values = keys.at[place].set(key), values.at[place].set(value)
                x = block.finish(memory, x, attend(query, keys, values, seen))
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
            written = jax.vmap(attend, (0, None, None, 0))(query, key, value, seen)
            xs = jax.vmap(block.finish, (None, 0, 0))(memory, xs, written)
        return jax.vmap(self.say)(xs)
