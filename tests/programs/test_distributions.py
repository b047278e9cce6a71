"""distrax and TensorFlow Probability on JAX: likelihoods, and a sampler."""

import jax
import jax.numpy as jnp
import pytest

from .against_forward_mode import assert_agrees, import_or_skip

pytestmark = [pytest.mark.programs, pytest.mark.filterwarnings("ignore")]  # of theirs, as they run

STEPS = 60
SEEN = 2 * jnp.sin(jnp.arange(1.0 * STEPS) ** 1.3)
ALL = {"checkpoints": "all"}
BOUNDED = ALL | {"max_steps": 16}  # leapfrog steps are in a while loop


def hidden(weights):
    distrax = import_or_skip("distrax")
    return distrax.HMM(
        distrax.Categorical(logits=jnp.array([0.1, 0.2, -0.1])),
        distrax.Categorical(logits=weights["moves"]),
        distrax.Normal(weights["means"], jnp.ones(3)),
    )


def likelihood(weights):
    """Sequences have different lengths, side by side."""
    lengths = jnp.array([15, 3, 1, 9])
    one = lambda seen, length: hidden(weights).forward(seen, length)[0]
    return jnp.sum(jax.vmap(one)(SEEN.reshape(4, 15), lengths))


def posterior(weights):
    _, _, probable, found = hidden(weights).forward_backward(SEEN)
    return found + jnp.sum(probable[:, 0] * jnp.cos(jnp.arange(1.0 * STEPS)))


DISTRAX = [(likelihood, {}), (likelihood, ALL), (posterior, {}), (posterior, {"memory": "16 kB"})]


@pytest.mark.parametrize(("loss", "how"), DISTRAX)
def test_hidden_markov_models(loss, how):
    weights = {"moves": jnp.cos(jnp.arange(9.0)).reshape(3, 3), "means": jnp.array([-1, 0, 1.5])}
    assert_agrees(loss, weights, **how)


def kalman(probability, settings):
    normal = lambda scale, n: probability.distributions.MultivariateNormalDiag(
        jnp.zeros(n), scale * jnp.ones(n)
    )
    model = probability.distributions.LinearGaussianStateSpaceModel(
        num_timesteps=20,
        transition_matrix=jnp.array([[1.0, 1.0], [0.0, 1.0]]) * settings[0],
        transition_noise=normal(settings[1], 2),
        observation_matrix=jnp.array([[1.0, 0.0]]),
        observation_noise=normal(1.0, 1),
        initial_state_prior=normal(1.0, 2),
    )
    return model.log_prob(SEEN[:20, None])


def chain(probability, settings):
    """Hamiltonian Monte Carlo, whose step size adapts."""
    mcmc = probability.mcmc
    density = lambda x: -0.5 * settings[0] * jnp.sum(x**2)
    kernel = mcmc.HamiltonianMonteCarlo(density, 0.3 * settings[1], num_leapfrog_steps=3)
    kernel = mcmc.DualAveragingStepSizeAdaptation(kernel, num_adaptation_steps=4)
    begun = {"num_results": 5, "current_state": jnp.array([1.0, -0.5]), "kernel": kernel}
    return jnp.sum(mcmc.sample_chain(**begun, trace_fn=None, seed=jax.random.key(1)))


TENSORFLOW = [(kalman, {}), (kalman, ALL), (chain, {}), (chain, BOUNDED)]


@pytest.mark.parametrize(("loss", "how"), TENSORFLOW)
def test_tensorflow_probability(loss, how):
    probability = import_or_skip("tensorflow_probability.substrates.jax")
    assert_agrees(lambda settings: loss(probability, settings), jnp.array([0.9, 1.1]), 1, **how)
