"""A beam search of words by a recurrent network or by a transformer, and loops to run it by."""

import sys
from pathlib import Path
from types import SimpleNamespace

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jax import lax

import loopkit

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))  # not decoding.py here
from decoding import beam
from decoding.decoder import Decoder
from decoding.model import Memory
from decoding.transformer import TransformerWriter

sys.path.pop(0)  # where there are a lanes.py and a progress.py, too

VOCAB, SIZE, WORDS, BEAM = 40, 128, 32, 5
ROOM = 24  # tokens that every word fits in


def parameters():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (VOCAB, 3 * SIZE), (3 * SIZE, SIZE), (VOCAB, SIZE)
    return [jax.random.normal(k, s) / SIZE**0.5 for k, s in zip(keys, shapes, strict=True)]


def decoder(params, hidden, last_step) -> Decoder:
    """Return a GRU whose words end at about `last_step`."""
    tokens, recurrent, readout = params

    def step(state, past, token):
        hidden, place = state
        gates, more = tokens[token], recurrent @ hidden
        reset, update = jnp.split(jax.nn.sigmoid(gates[: 2 * SIZE] + more[: 2 * SIZE]), 2)
        candidate = jnp.tanh(gates[2 * SIZE :] + reset * more[2 * SIZE :])
        hidden = candidate + update * (hidden - candidate)
        ending = jnp.where(place >= last_step - 3, 8.0, -8.0)
        logits = (readout @ hidden).at[0].add(ending)
        return (hidden, place + 1), (), jax.nn.log_softmax(logits)

    return Decoder(step, (hidden, jnp.int32(0)))


def search_one(made: Decoder, max_length: int):
    options = {"start": 0, "end": 0, "beam_size": BEAM, "max_length": max_length}
    hypotheses, _ = beam.beam_search(made, stop="first", **options)
    return hypotheses.scores, hypotheses.tokens[:, :ROOM]


def search_of(max_length: int):
    def search(params, hiddens, last_steps):
        def one(hidden, last_step):
            return search_one(decoder(params, hidden, last_step), max_length)

        return jax.vmap(one)(hiddens, last_steps)

    return search


def slope_of(search):
    def risk(params, hiddens, last_steps):
        scores, tokens = search(params, hiddens, last_steps)
        lengths = jnp.sum(tokens != 0, axis=-1)
        return jnp.sum(jax.nn.softmax(scores) * lengths) + jnp.sum(scores)

    return jax.grad(risk, argnums=(0, 1))


def words(last: int):
    hiddens = jax.random.normal(jax.random.key(1), (WORDS, SIZE))
    return parameters(), hiddens, jnp.full(WORDS, last, jnp.int32) - jnp.arange(WORDS) % 4


# --- other loops in place of loopkit.while_loop --------------------------------------------


def by_scan(cond, body, init, *, max_steps=None, checkpoints=None, buffers=None):
    """A fixed length, with what happens after the end discarded."""
    if max_steps is None:  # the backtrace, which no one differentiates
        return lax.while_loop(cond, body, init)

    def step(val, _):
        go = cond(val)
        return jax.tree.map(lambda n, o: jnp.where(go, n, o), body(val), val), None

    return lax.scan(step, init, None, length=max_steps)[0]


def by_equinox(cond, body, init, *, max_steps=None, checkpoints=None, buffers=None):
    if max_steps is None:
        return lax.while_loop(cond, body, init)
    settings = {"max_steps": max_steps, "checkpoints": checkpoints}
    return eqxi.while_loop(cond, body, init, kind="checkpointed", **settings)


def with_loop(while_loop, function):
    """`function`, whose beam search loops by `while_loop` while it is traced."""

    def run(*args):
        beam.loopkit = SimpleNamespace(while_loop=while_loop, LoopInfo=loopkit.LoopInfo)
        try:
            return function(*args)
        finally:
            beam.loopkit = loopkit

    return run


class Loop(Exception):
    """The arguments that a beam search passes to its loop, taken out of it."""


def by_python(limit: int):
    """Jitted steps of all words, until the host sees that none goes on."""

    def loop_of(params, hidden, last_step):
        def taken_out(*loop, **_):
            raise Loop(*loop)

        try:
            made = decoder(params, hidden, last_step)
            with_loop(taken_out, search_one)(made, limit)
        except Loop as loop:
            return loop.args

    def begin(params, hidden, last_step):
        return loop_of(params, hidden, last_step)[2]

    def step(params, hidden, last_step, val):
        cond, body, _ = loop_of(params, hidden, last_step)
        go = cond(val)
        val = jax.tree.map(lambda new, old: jnp.where(go, new, old), body(val), val)
        return val, cond(val)

    lanes = (None, 0, 0)

    def finish(val):
        return val.ended.scores, beam.backtrace(val.ended, val.history.choices, 0, limit)[:, :ROOM]

    begin = jax.jit(jax.vmap(begin, lanes))
    step = jax.jit(jax.vmap(step, (*lanes, 0)))
    finish = jax.jit(jax.vmap(finish))

    def search(*args):
        val, go = begin(*args), True
        while go:
            val, goes_on = step(*args, val)
            go = bool(jnp.any(goes_on))
        return finish(val)

    return search


# --- a transformer --------------------------------------------------------------------------


def attending(max_length: int):
    """Return the search of the examples' transformer, untrained, whose words end at about step
    18."""

    def scores(writer, memories):
        def one(memory):
            made = writer.decoder(memory)

            def step(state, past, token):
                place, inner = state
                inner, row, log_probs = made.step(inner, past, token)
                ending = jnp.where(place >= 17, 30.0, -30.0)
                log_probs = jax.nn.log_softmax(log_probs.at[0].add(ending))
                return (place + 1, inner), row, log_probs

            return search_one(Decoder(step, (jnp.int32(0), made.state), made.row), max_length)

        return jax.vmap(one)(memories)

    return scores


def transformer():
    """Return the transformer of the examples, and its memory of eight words."""
    keys = jax.random.split(jax.random.key(0), 2)
    encoded = jax.random.normal(keys[1], (8, 14, SIZE))
    memories = jax.vmap(lambda x: Memory(x, jnp.ones(14, bool), x[0]))(encoded)
    return TransformerWriter(key=keys[0]), memories
