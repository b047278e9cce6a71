"""One hypothesis at a time: greedy decoding, and three ways to sample."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

import loopkit

from .decoder import Decoder, Past, Rows, State, Token, with_row

LogProbs = Float[Array, " vocab"]
Choice = Callable[[PRNGKeyArray, LogProbs], Token]


def greedy(key: PRNGKeyArray, log_probs: LogProbs) -> Token:
    """The most probable token."""
    return jnp.argmax(log_probs)


def ancestral(key: PRNGKeyArray, log_probs: LogProbs) -> Token:
    """A token with the probability that the model gives it."""
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


class Growing(NamedTuple):
    """The carry: one hypothesis."""

    length: Int[Array, ""]
    last: Token
    state: State
    cache: Rows


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

    def grow(carry: Growing, _: None) -> tuple[Growing, tuple[Token, Float[Array, ""]]]:
        length, last, state, cache = carry
        past = Past(cache, length)
        state, row, log_probs = decoder.step(state, past, last)
        # Written once all is read: otherwise the compiler copies the cache first.
        row, log_probs = jax.lax.optimization_barrier((row, log_probs))
        token = choose(jax.random.fold_in(key, length), log_probs).astype(jnp.int32)
        carry = Growing(length + 1, token, state, with_row(past.cache, length, row))
        return carry, (token, log_probs[token])

    last = jnp.asarray(start, jnp.int32)
    init = Growing(jnp.int32(0), last, decoder.state, decoder.cache(max_length))
    _, (tokens, log_probs), info = loopkit.scan(
        grow,
        init,
        length=max_length,
        until=lambda carry, _: carry.last == end,
        buffers=lambda carry: carry.cache,
        return_info=True,
    )
    tokens = jnp.where(jnp.arange(max_length) < info.steps, tokens, end)
    return Sample(tokens, info.steps, jnp.sum(log_probs)), info
