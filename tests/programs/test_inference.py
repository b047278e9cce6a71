"""dynamax, numpyro, blackjax: likelihoods of 10,000 steps, and samplers that draw the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit

from .against_forward_mode import assert_agrees, import_or_skip, of_benchmarks

pytestmark = [pytest.mark.programs, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

STEPS = 10_000


@pytest.mark.parametrize("how", [{}, {"memory": "256 kB"}], ids=["default", "256 kB"])
def test_kalman_filter(how):
    import_or_skip("dynamax")
    from dynamax.linear_gaussian_ssm import LinearGaussianSSM

    model = LinearGaussianSSM(state_dim=2, emission_dim=1)
    params, _ = model.initialize(jax.random.key(0))
    _, seen = model.sample(params, jax.random.key(1), STEPS)

    def loss(weights):
        dynamics = params.dynamics._replace(weights=weights)
        return model.marginal_log_prob(params._replace(dynamics=dynamics), seen)

    assert_agrees(loss, params.dynamics.weights, **how)


def test_hidden_markov_model():
    import_or_skip("dynamax")
    from dynamax.hidden_markov_model import GaussianHMM

    model = GaussianHMM(3, 2)
    params, _ = model.initialize(jax.random.key(0))
    _, seen = model.sample(params, jax.random.key(1), STEPS)

    def loss(means):
        emissions = params.emissions._replace(means=means)
        return model.marginal_log_prob(params._replace(emissions=emissions), seen)

    assert_agrees(loss, params.emissions.means)


def log_density(values):
    import_or_skip("numpyro")
    density = of_benchmarks("library_models").log_density_of_scan
    return density(values, jnp.sin(jnp.arange(1.0 * STEPS)))


@pytest.mark.parametrize("checkpoints", [None, "all"])
def test_log_density_of_a_scan(checkpoints):
    values = {"drift": jnp.asarray(0.2), "shock": jnp.cos(jnp.arange(1.0 * STEPS) ** 2)}
    assert_agrees(log_density, values, checkpoints=checkpoints)


def draws_of_numpyro():
    import_or_skip("numpyro")
    import numpyro
    from numpyro import distributions as dist

    def model():
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        with numpyro.plate("rows", 3):
            numpyro.sample("x", dist.Normal(0.0, scale))

    sampler = numpyro.infer.MCMC(
        numpyro.infer.NUTS(model), num_warmup=20, num_samples=20, progress_bar=False
    )
    sampler.run(jax.random.key(0))
    return sampler.get_samples()


def draws_of_blackjax():
    blackjax = import_or_skip("blackjax")
    density = lambda x: -jnp.sum(x**2 + 0.3 * x**4)
    adapt = blackjax.window_adaptation(blackjax.nuts, density)
    (state, found), _ = adapt.run(jax.random.key(0), jnp.array([1.0, -0.5]), 20)
    sampler = blackjax.nuts(density, **found)

    def step(state, key):
        state, _ = sampler.step(key, state)
        return state, state.position

    return jax.lax.scan(step, state, jax.random.split(jax.random.key(1), 20))[1]


@pytest.mark.parametrize("draws", [draws_of_numpyro, draws_of_blackjax])
def test_draws_are_the_same(draws):
    """The very same: chaos would make much of a rounding."""
    wanted = draws()
    with loopkit.replace_lax_loops():
        got = draws()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_move_of_nuts():
    """Its length depends on what is drawn, and so on the step size."""
    blackjax = import_or_skip("blackjax")

    def moved(step_size):
        sampler = blackjax.nuts(lambda x: -jnp.sum(x**2 + 0.3 * x**4), step_size, jnp.ones(2))
        state = sampler.init(jnp.array([1.0, -0.5]))
        return sampler.step(jax.random.key(1), state)[0].position.sum()

    assert_agrees(moved, jnp.asarray(0.3))
