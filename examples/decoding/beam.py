"""Beam search that stops early, and that can be differentiated.

The search is one `loopkit.while_loop`. It has a generous bound, because nobody knows how long an
output will be, and costs only the steps that it takes. Its scores are differentiable in the model,
which `jax.lax.while_loop` cannot offer: the gradient of a loss of n-best lists is `jax.grad`
through the search."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

import loopkit

from .decoder import Decoder, Past, Rows, State, in_growing_rooms, with_row


class Hypotheses(NamedTuple):
    """The n best, best first. Where fewer than n were found, the rest have a score of -inf."""

    tokens: Int[Array, "n max_length"]  # `end` closes a hypothesis and fills the rest of its row
    lengths: Int[Array, " n"]  # tokens in each, `end` included
    scores: Float[Array, " n"]  # log-probability / length ** length_penalty


class Ended(NamedTuple):
    """Hypotheses that ended, best first: where each left the beam, with which token."""

    scores: Float[Array, " n"]
    lengths: Int[Array, " n"]
    parents: Int[Array, " n"]  # its place in the beam, before its last token
    tokens: Int[Array, " n"]  # its last token


class History(NamedTuple):
    """The record that each step leaves behind."""

    choices: Int[Array, "room beam"]  # token * beam + place of what each grew out of
    lineage: Int[Array, "room beam"] | None  # places in the beam, of those before each
    cache: Rows  # the decoder's rows: leaves with leading axes `room` and `beam`

    @property
    def written_once(self):
        return self.choices, self.cache


class Beam(NamedTuple):
    """The carry of the search: `beam_size` hypotheses that may grow, and as many that ended."""

    length: Int[Array, ""]  # tokens in each live hypothesis: the steps taken
    last: Int[Array, " beam"]  # the last token of each
    log_probs: Float[Array, " beam"]  # most probable first; -inf marks an empty place
    state: State  # the decoder's state after each: leaves with a leading axis `beam`
    ended: Ended
    history: History


def beam_search(
    decoder: Decoder,
    *,
    start: int,
    end: int,
    beam_size: int,
    max_length: int,
    length_penalty: float = 0.0,
    stop: str = "best",
    checkpoints: int | None = 16,
) -> tuple[Hypotheses, loopkit.LoopInfo]:
    """Searches for the most probable outputs of a decoder, keeping the `beam_size` best prefixes.

    `start` is the first token that the decoder is fed. No log-probability may be positive. A
    hypothesis ends with the token `end`, or as it stands once it has `max_length`.

    `stop` is one of
    - "never": go on while anything can grow, in practice to `max_length`;
    - "first": stop when `beam_size` hypotheses have ended. With a beam of 1, greedy search;
    - "best": stop when no live hypothesis can displace an ended one. Loses nothing to "never".

    A gradient keeps the beam at `checkpoints` of its steps, however generous the bound. None keeps
    about the square root of the bound.
    """
    if stop not in ("never", "first", "best"):
        raise ValueError(f'beam_search: `stop` is "{stop}"; pass "never", "first" or "best".')
    places = jnp.arange(beam_size, dtype=jnp.int32)

    def normalise(log_probs, length):
        return log_probs / jnp.asarray(length, log_probs.dtype) ** length_penalty

    def goes_on(beam: Beam) -> Bool[Array, ""]:
        worst_kept = beam.ended.scores[-1]
        if stop == "best":
            # Growing never raises a log-probability, and length ** length_penalty is monotone, so
            # the most a hypothesis can score is to end for free: at once, or at the bound.
            at_once = normalise(beam.log_probs, beam.length + 1)
            at_bound = normalise(beam.log_probs, max_length)
            return jnp.any(jnp.maximum(at_once, at_bound) > worst_kept)
        alive = jnp.any(beam.log_probs > -jnp.inf)
        return alive & (worst_kept == -jnp.inf) if stop == "first" else alive

    def step(beam: Beam) -> tuple[Rows, State, Rows, Array]:
        """Take a step of the decoder for each hypothesis; return the cache that it has read,
        too."""
        _, lineage, cache = beam.history

        def of_one(state, lineage, last):
            past = Past(cache, beam.length, lineage)
            out = decoder.step(state, past, last)
            return past.cache, *out

        return jax.vmap(of_one, (0, 1, 0), out_axes=(None, 0, 0, 0))(beam.state, lineage, beam.last)

    def grow(beam: Beam) -> Beam:
        cache, state, row, log_probs = step(beam)
        # Written once all is read: otherwise the compiler copies the cache first.
        row, log_probs = jax.lax.optimization_barrier((row, log_probs))
        totals = beam.log_probs[:, None] + log_probs
        # A hypothesis can end in one way only, so that at least half of these can go on.
        totals, choice = jax.lax.top_k(totals.ravel(), 2 * beam_size)
        parents, tokens = jnp.divmod(choice.astype(jnp.int32), log_probs.shape[1])
        length = beam.length + 1

        ends = (tokens == end) | (length == max_length)
        # An end counts if it ranks within the beam; otherwise any would do, and "first" stop early.
        ranks = jnp.arange(2 * beam_size) < beam_size
        scores = jnp.where(ends & ranks, normalise(totals, length), -jnp.inf)
        ended = Ended(scores, jnp.full_like(tokens, length), parents, tokens)
        pool = jax.tree.map(lambda *pools: jnp.concatenate(pools), beam.ended, ended)
        _, best = jax.lax.top_k(pool.scores, beam_size)

        live, kept = jax.lax.top_k(jnp.where(ends, -jnp.inf, totals), beam_size)
        parents, tokens = parents[kept], tokens[kept]
        choices, lineage, _ = beam.history
        if lineage is not None:
            lineage = lineage.at[beam.length].set(places)[:, parents]
        return Beam(
            length=length,
            last=tokens,
            log_probs=live,
            state=jax.tree.map(lambda leaf: leaf[parents], state),
            ended=jax.tree.map(lambda leaf: leaf[best], pool),
            history=History(
                choices.at[beam.length].set(tokens * beam_size + parents),
                lineage,
                with_row(cache, beam.length, row),
            ),
        )

    def empty(room: int) -> Beam:
        none = jnp.full(beam_size, -jnp.inf, dtype=float)
        blank = jnp.zeros(beam_size, jnp.int32)
        history = jnp.zeros((room, beam_size), jnp.int32)
        return Beam(
            length=jnp.int32(0),
            last=jnp.full_like(blank, start),
            log_probs=none.at[0].set(0.0),  # one hypothesis, without tokens; other places are empty
            state=jax.tree.map(lambda x: jnp.broadcast_to(x, (beam_size, *x.shape)), decoder.state),
            ended=Ended(none, blank, blank, blank),
            history=History(
                history,
                history if jax.tree.leaves(decoder.row) else None,
                decoder.cache(room, beam_size),
            ),
        )

    def go_on(beam: Beam, steps: int):
        beam = loopkit.while_loop(
            goes_on,
            grow,
            beam,
            max_steps=steps,
            checkpoints=checkpoints,
            buffers=lambda beam: beam.history.written_once,
        )
        tokens = backtrace(beam.ended, beam.history.choices, end, max_length)
        found = Hypotheses(tokens, beam.ended.lengths, beam.ended.scores)
        return beam, (found, loopkit.LoopInfo(beam.length, ~goes_on(beam)))

    return in_growing_rooms(decoder, max_length, empty, go_on)


class Trace(NamedTuple):
    """The carry of the backtrace, from the last token of each hypothesis to its first."""

    step: Int[Array, ""]
    places: Int[Array, " n"]  # of each hypothesis, before this step
    tokens: Int[Array, "n max_length"]


def backtrace(
    ended: Ended, choices: Int[Array, "room beam"], end: int, max_length: int
) -> Int[Array, "n max_length"]:
    """Return the tokens of the hypotheses that ended, by their back-pointers."""
    beam = choices.shape[1]

    def follow(trace: Trace) -> Trace:
        step, places, tokens = trace
        is_last = step == ended.lengths - 1
        token, place = jnp.divmod(choices[step, places], beam)
        token = jnp.where(is_last, ended.tokens, token)
        place = jnp.where(is_last, ended.parents, place)
        within = step < ended.lengths
        return Trace(
            step - 1,
            jnp.where(within, place, 0),
            tokens.at[:, step].set(jnp.where(within, token, end)),
        )

    tokens = jnp.full((len(ended.lengths), max_length), end, jnp.int32)
    trace = Trace(jnp.max(ended.lengths) - 1, jnp.zeros_like(ended.parents), tokens)
    trace = loopkit.while_loop(
        lambda trace: trace.step >= 0, follow, trace, buffers=lambda trace: trace.tokens
    )
    return trace.tokens
