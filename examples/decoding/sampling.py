"""One hypothesis at a time: greedy decoding, and three ways to sample."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

import loopkit

from .decoder import Decoder, Past, Rows, State, Token, in_growing_rooms, with_row

LogProbs = Float[Array, " vocab"]
Choice = Callable[[PRNGKeyArray, LogProbs], Token]


def greedy(key: PRNGKeyArray, log_probs: LogProbs) -> Token:
    """Return the most probable token."""
    return jnp.argmax(log_probs)


def ancestral(key: PRNGKeyArray, log_probs: LogProbs) -> Token:
    """Return a token with the probability that the model gives it."""
    return jax.random.categorical(key, log_probs)


def top_k(k: int) -> Choice:
    """Samples among the k most probable tokens (Fan et al., 2018)."""

    def choose(key, log_probs):
        best, tokens = jax.lax.top_k(log_probs, k)
        return tokens[jax.random.categorical(key, best)]

    return choose


def nucleus(p: float) -> Choice:
    """Samples among the fewest tokens that together have probability p (Holtzman et al., 2020)."""

    def choose(key, log_probs):
        sorted_, tokens = jax.lax.top_k(log_probs, log_probs.size)
        before = jnp.cumsum(jnp.exp(sorted_)) - jnp.exp(sorted_)
        # Where those before have p but for rounding, they are enough.
        few = before < p - log_probs.size * jnp.finfo(before.dtype).eps
        few = few.at[0].set(True)
        return tokens[jax.random.categorical(key, jnp.where(few, sorted_, -jnp.inf))]

    return choose


class Sample(NamedTuple):
    tokens: Int[Array, " max_length"]  # `end` closes it and fills the rest
    length: Int[Array, ""]  # tokens, `end` included
    log_prob: Float[Array, ""]


class History(NamedTuple):
    tokens: Int[Array, " room"]
    cache: Rows  # the decoder's rows: leaves with a leading axis `room`


class Growing(NamedTuple):
    """The carry: one hypothesis."""

    length: Int[Array, ""]
    last: Token
    log_prob: Float[Array, ""]
    state: State
    history: History


def generate(
    decoder: Decoder,
    choose: Choice,
    key: PRNGKeyArray,
    *,
    start: int,
    end: int,
    max_length: int,
) -> tuple[Sample, loopkit.LoopInfo]:
    """Lets `choose` take one token after another, until it takes `end`."""

    def empty(room: int) -> Growing:
        last = jnp.asarray(start, jnp.int32)
        history = History(jnp.zeros(room, jnp.int32), decoder.cache(room))
        return Growing(jnp.int32(0), last, jnp.zeros(()), decoder.state, history)

    def goes_on(carry: Growing) -> Bool[Array, ""]:
        return (carry.last != end) | (carry.length == 0)

    def grow(carry: Growing) -> Growing:
        length, last, total, state, (tokens, cache) = carry
        past = Past(cache, length)
        state, row, log_probs = decoder.step(state, past, last)
        # Written once all is read: otherwise the compiler copies the cache first.
        row, log_probs = jax.lax.optimization_barrier((row, log_probs))
        token = choose(jax.random.fold_in(key, length), log_probs).astype(jnp.int32)
        history = History(tokens.at[length].set(token), with_row(past.cache, length, row))
        return Growing(length + 1, token, total + log_probs[token], state, history)

    def go_on(carry: Growing, steps: int):
        carry = loopkit.while_loop(
            goes_on, grow, carry, max_steps=steps, buffers=lambda carry: carry.history
        )
        tokens = carry.history.tokens
        tokens = jnp.pad(tokens, (0, max_length - len(tokens)))
        tokens = jnp.where(jnp.arange(max_length) < carry.length, tokens, end)
        found = Sample(tokens, carry.length, carry.log_prob)
        return carry, (found, loopkit.LoopInfo(carry.length, ~goes_on(carry)))

    return in_growing_rooms(decoder, max_length, empty, go_on)
