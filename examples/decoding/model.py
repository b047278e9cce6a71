"""A model of pronunciation: it reads letters in both directions, and a writer says phones."""

from typing import Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

import loopkit

from . import beam, sampling
from .decoder import Decoder
from .dictionary import BLANK, LETTERS, MAX_LENGTH

SIZE = 128  # units in a recurrent state, and in what is read at each letter


class Memory(eqx.Module):
    """The memory of what the model has read."""

    encoded: Float[Array, "letters size"]
    real: Bool[Array, " letters"]  # marks letters that are not padding
    summary: Float[Array, " size"]

    def attend(self, query: Float[Array, " size"]) -> Float[Array, " size"]:
        """Return what the model has read at the letters that the query attends to (Luong et al.,
        2015)."""
        return jax.nn.softmax(self.encoded @ query, where=self.real) @ self.encoded


class Writer(Protocol):
    def decoder(self, memory: Memory) -> Decoder:
        """One phone after another."""
        ...

    def log_probs(
        self, memory: Memory, before: Int[Array, " steps"], real: Bool[Array, " steps"]
    ) -> Float[Array, "steps vocab"]:
        """Those of each phone, given the phones before it: teacher forcing."""
        ...


class GRU(eqx.Module):
    """A gated recurrent unit that reads tokens: what one adds to the gates is a row of a table."""

    table: Float[Array, "vocab gates"]
    weight: Float[Array, "gates size"]
    bias: Float[Array, " size"]

    def __init__(self, vocab: int, size: int, *, key: PRNGKeyArray):
        key_table, key_weight = jax.random.split(key)
        self.table = 0.4 * jax.random.normal(key_table, (vocab, 3 * size))
        limit = size**-0.5
        self.weight = jax.random.uniform(key_weight, (3 * size, size), float, -limit, limit)
        self.bias = jnp.zeros(size)

    def __call__(self, hidden: Float[Array, " size"], token_gates: Float[Array, " gates"]):
        reset, update, candidate = jnp.split(token_gates, 3)
        from_reset, from_update, from_candidate = jnp.split(self.weight @ hidden, 3)
        reset = jax.nn.sigmoid(reset + from_reset)
        update = jax.nn.sigmoid(update + from_update)
        candidate = jnp.tanh(candidate + reset * (from_candidate + self.bias))
        return candidate + update * (hidden - candidate)

    def over(
        self,
        hidden: Float[Array, " size"],
        tokens: Int[Array, " steps"],
        real: Bool[Array, " steps"],
        reverse: bool = False,
    ) -> tuple[Float[Array, " size"], Float[Array, "steps size"]]:
        """Return the last state and all states along a sequence; padding leaves the state alone."""

        def step(hidden, x):
            token_gates, is_real = x
            hidden = jnp.where(is_real, self(hidden, token_gates), hidden)
            return hidden, hidden

        # Words are short: to keep what each step's gradient needs is cheaper than to recompute it.
        xs = self.table[tokens], real
        return loopkit.scan(step, hidden, xs, reverse=reverse, checkpoints="all")


class Pronouncer(eqx.Module):
    ahead: GRU
    back: GRU
    encode: eqx.nn.Linear
    writer: Writer

    def __init__(self, writer: Writer, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        self.ahead = GRU(LETTERS, SIZE, key=keys[0])
        self.back = GRU(LETTERS, SIZE, key=keys[1])
        self.encode = eqx.nn.Linear(2 * SIZE, SIZE, key=keys[2])
        self.writer = writer

    def read(self, letters: Int[Array, " n"]) -> Memory:
        real = letters != BLANK
        zeros = jnp.zeros(SIZE)
        _, ahead = self.ahead.over(zeros, letters, real)
        summary, back = self.back.over(zeros, letters, real, reverse=True)
        return Memory(jax.vmap(self.encode)(jnp.concatenate([ahead, back], 1)), real, summary)

    def log_prob(self, letters: Int[Array, " n"], phones: Int[Array, " m"]) -> tuple[Array, Array]:
        """Return the log-probability of the phones up to their first BLANK, and their number."""
        before = jnp.roll(phones, 1).at[0].set(BLANK)
        real = (before != BLANK).at[0].set(True)
        log_probs = self.writer.log_probs(self.read(letters), before, real)
        chosen = jnp.take_along_axis(log_probs, phones[:, None], axis=1)[:, 0]
        return jnp.sum(chosen, where=real), jnp.sum(real)

    def generate(self, letters: Int[Array, " n"], choose: sampling.Choice, key: PRNGKeyArray):
        """One pronunciation, phone by phone: `sampling.generate`."""
        return sampling.generate(
            self.writer.decoder(self.read(letters)),
            choose,
            key,
            start=BLANK,
            end=BLANK,
            max_length=MAX_LENGTH,
        )

    def search(self, letters: Int[Array, " n"], *, max_length: int = MAX_LENGTH, **options):
        """Return the best pronunciations: `beam.beam_search`. The word is read once."""
        decoder = self.writer.decoder(self.read(letters))
        return beam.beam_search(decoder, start=BLANK, end=BLANK, max_length=max_length, **options)
