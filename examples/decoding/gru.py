"""A writer with a recurrent state, which is its only memory."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from .decoder import Decoder
from .dictionary import PHONES
from .model import GRU, SIZE, Memory


class GRUWriter(eqx.Module):
    unit: GRU
    combine: eqx.nn.Linear
    logits: eqx.nn.Linear

    def __init__(self, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        self.unit = GRU(len(PHONES), SIZE, key=keys[0])
        self.combine = eqx.nn.Linear(2 * SIZE, SIZE, key=keys[1])
        self.logits = eqx.nn.Linear(SIZE, len(PHONES), key=keys[2])

    def say(self, memory: Memory, hidden: Float[Array, " size"]) -> Float[Array, " vocab"]:
        combined = self.combine(jnp.concatenate([hidden, memory.attend(hidden)]))
        return jax.nn.log_softmax(self.logits(jnp.tanh(combined)))

    def decoder(self, memory: Memory) -> Decoder:
        def step(hidden, past, phone):
            hidden = self.unit(hidden, self.unit.table[phone])
            return hidden, (), self.say(memory, hidden)

        return Decoder(step, memory.summary)

    def log_probs(self, memory, before, real):
        _, hiddens = self.unit.over(memory.summary, before, real)
        return jax.vmap(self.say, in_axes=(None, 0))(memory, hiddens)
