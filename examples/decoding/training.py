"""Teacher forcing, and how well searches do on words that were held out."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, Int
from tqdm import tqdm

from .dictionary import Dictionary, batches, edits, load, spell, split, without_blanks
from .gru import GRUWriter
from .model import Pronouncer, Writer

BATCH, RATE = 128, 1.2e-2  # words in a batch, learning rate at its highest


def train(
    model: Pronouncer, data: Iterator[tuple], steps: int, rate: float = RATE
) -> tuple[Pronouncer, float]:
    """Fits the model by teacher forcing; returns it and its last loss, in nats a phone.

    The optimiser makes the updates of matrices orthogonal (Muon; Jordan et al., 2024), and needs
    half the steps that Adam does.
    """
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 20 + 1, steps + 1)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.contrib.muon(schedule))
    opt_state = optimiser.init(eqx.filter(model, eqx.is_array))

    def loss_of(model, letters, phones):
        log_probs, lengths = jax.vmap(model.log_prob)(letters, phones)
        return -jnp.sum(log_probs) / jnp.sum(lengths)

    @eqx.filter_jit
    def slope(model, letters, phones):
        return eqx.filter_value_and_grad(loss_of)(model, letters, phones)

    @eqx.filter_jit(donate="all")  # apart, for it need not be compiled for every shape of a batch
    def descend(model, opt_state, grad):
        params = eqx.filter(model, eqx.is_array)
        updates, opt_state = optimiser.update(grad, opt_state, params)
        return eqx.apply_updates(model, updates), opt_state

    losses = []
    for _ in (progress := tqdm(range(steps), desc="training", unit="step", mininterval=1.0)):
        loss, grad = slope(model, *next(data))
        model, opt_state = descend(model, opt_state, grad)
        losses.append(float(loss))
        progress.set_postfix(loss=f"{np.mean(losses[-50:]):.3f}", refresh=False)
    return model, float(np.mean(losses[-50:]))


class Pretrained(NamedTuple):
    model: Pronouncer
    loss: float  # the last, in nats a phone
    words: Dictionary  # the words that it has learned from
    held_out: Dictionary
    rng: np.random.Generator


def pretrained(
    steps: int, held_out: int, seed: int, writer: Callable[..., Writer] = GRUWriter
) -> Pretrained:
    """Return a model trained by teacher forcing on all words but some."""
    rng = np.random.default_rng(seed)
    words, others = split(load(), held_out, rng)
    key, key_writer = jax.random.split(jax.random.key(seed))
    model = Pronouncer(writer(key=key_writer), key=key)
    print(f"{len(words):,} words to learn from, {len(others)} held out.", flush=True)
    return Pretrained(*train(model, batches(words, BATCH, rng), steps), words, others, rng)


class Results(NamedTuple):
    """The results of a search on a list of words; the nearest of its k best counts, for k = 1 to
    n."""

    phone_error_rate: Float[np.ndarray, " n"]  # edits to the nearest pronunciation, to its phones
    exact_words: Float[np.ndarray, " n"]  # the share of words without an edit
    steps: Int[np.ndarray, " words"]  # steps of the decoder, for each word
    ranked: list[list[tuple]]  # for each word, (score, phones) of its hypotheses, best first


def evaluate(model: Pronouncer, words: Dictionary, find: Callable[..., Any]) -> Results:
    """`find(model, letters, key)` returns n tokens and scores of a word, and a LoopInfo."""
    keys = jax.random.split(jax.random.key(0), len(words))
    run = eqx.filter_jit(jax.vmap(find, in_axes=(None, 0, 0)))
    tokens, scores, info = jax.device_get(run(model, spell(list(words)), keys))
    ranked = [
        [(float(score), without_blanks(row)) for score, row in zip(*found, strict=True)]
        for found in zip(scores, tokens, strict=True)
    ]
    nearest = [
        [edits(way, words[word]) for _, way in ways]
        for word, ways in zip(words, ranked, strict=True)
    ]
    wrong, phones = np.moveaxis(np.array(nearest), 2, 0)
    wrong = np.minimum.accumulate(wrong, axis=1)
    rates, exact = wrong.sum(0) / phones[:, 0].sum(), np.mean(wrong == 0, axis=0)
    return Results(rates, exact, info.steps, ranked)


def sampled(choose: Callable) -> Callable[..., Any]:
    """For `evaluate`: one pronunciation, chosen phone by phone."""

    def find(model, letters, key):
        sample, info = model.generate(letters, choose, key)
        return sample.tokens[None], sample.log_prob[None], info

    return find


def searched(**options: Any) -> Callable[..., Any]:
    """For `evaluate`: the n best of a beam search."""

    def find(model, letters, key):
        hypotheses, info = model.search(letters, **options)
        return hypotheses.tokens, hypotheses.scores, info

    return find
