"""A recurrent network that predicts the next byte of a text, as one finds it in many projects."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8


class Reader(eqx.Module):
    """Two layers of gated recurrent units."""

    embedding: eqx.nn.Embedding
    cells: list[eqx.nn.GRUCell]
    readout: eqx.nn.Linear

    def __init__(self, width: int, *, key: Array):
        first, second, third, last = jax.random.split(key, 4)
        self.embedding = eqx.nn.Embedding(256, width, key=first)
        self.cells = [eqx.nn.GRUCell(width, width, key=k) for k in (second, third)]
        self.readout = eqx.nn.Linear(width, 256, key=last)

    def __call__(self, text: UInt8[Array, " length+1"]) -> Float[Array, " length"]:
        """Return the log-probability of each byte but the first, given those before it."""

        def read(states, pair):
            seen, following = pair
            x, new = self.embedding(seen), []
            for cell, state in zip(self.cells, states, strict=True):
                x = cell(x, state)
                new.append(x)
            return new, jax.nn.log_softmax(self.readout(x))[following]

        states = [jnp.zeros(cell.hidden_size) for cell in self.cells]
        return lax.scan(read, states, (text[:-1], text[1:]))[1]


def bits_per_byte(model: Reader, texts: UInt8[Array, "count length+1"]) -> Float[Array, ""]:
    return -jnp.mean(jax.vmap(model)(texts)) / jnp.log(2.0)
