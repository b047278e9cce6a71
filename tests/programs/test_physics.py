"""brax, jax_md, exponax: rollouts of bodies, of particles, and of fields."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from .against_forward_mode import assert_agrees, import_or_skip

pytestmark = [pytest.mark.programs, pytest.mark.filterwarnings("ignore")]  # of theirs, as they run


@pytest.mark.parametrize("how", [{}, {"checkpoints": "all"}], ids=str)
def test_a_policy_on_a_pendulum(how):
    """Brax repeats an action in a scan, in the scan over the actions of an episode."""
    envs = import_or_skip("brax.envs")
    acting = import_or_skip("brax.training.acting")
    env = envs.get_environment("inverted_pendulum", backend="spring", n_frames=1)
    env = envs.training.EpisodeWrapper(env, episode_length=100, action_repeat=2)
    start = jax.jit(env.reset)(jax.random.key(0))
    weights = {"gain": 0.3 * jnp.cos(jnp.arange(4.0)), "bias": jnp.asarray(0.1)}

    def loss(weights):
        policy = lambda seen, key: (jnp.tanh(seen @ weights["gain"] + weights["bias"])[None], {})
        key = jax.random.key(1)
        end, path = acting.generate_unroll(env, start, policy, key, unroll_length=4)
        return jnp.mean(path.observation**2) + jnp.mean(end.obs**2)

    assert_agrees(loss, weights, order=1, **how)


BOX, PARTICLES = 4.0, 8
START = BOX * (jnp.cos(jnp.arange(2.0 * PARTICLES) ** 2).reshape(PARTICLES, 2) % 1)
SETTINGS = jnp.array([0.9, 0.8])


def thermostat(settings):
    """Nose-Hoover chains, which are integrated in scans within each step."""
    simulate, energy = import_or_skip("jax_md.simulate"), import_or_skip("jax_md.energy")
    apart, moved = import_or_skip("jax_md.space").periodic(BOX)
    size, heat = settings
    energies = energy.soft_sphere_pair(apart, sigma=size, epsilon=1.0)
    init, step = simulate.nvt_nose_hoover(energies, moved, 5e-3, heat, chain_length=4)
    last = lax.fori_loop(0, 20, lambda _, state: step(state), init(jax.random.key(1), START))
    return jnp.mean(last.momentum**2) + jnp.mean(jnp.sin(last.position))


def minimum(settings):
    """FIRE, until no force is large."""
    minimize, energy = import_or_skip("jax_md.minimize"), import_or_skip("jax_md.energy")
    apart, moved = import_or_skip("jax_md.space").periodic(BOX)
    size, strength = settings
    energies = energy.soft_sphere_pair(apart, sigma=size, epsilon=strength)
    init, step = minimize.fire_descent(energies, moved, 1e-2, 1e-1)
    forced = lambda state: jnp.max(jnp.abs(state.force)) > 0.1
    last = lax.while_loop(forced, step, init(START))
    return energies(last.position) + jnp.mean(last.position**2)


ALL = {"checkpoints": "all"}
PARTICLES_OF = [
    (thermostat, {}),
    (thermostat, ALL),
    (minimum, {}),
    (minimum, ALL | {"max_steps": 1000}),
]


@pytest.mark.parametrize(("simulated", "how"), PARTICLES_OF)
def test_particles(simulated, how):
    import_or_skip("jax_md")
    assert_agrees(simulated, SETTINGS, order=1, **how)


X = 2 * jnp.pi * jnp.arange(32.0) / 32
WAVE = jnp.sin(X)[None] + 0.3 * jnp.cos(2 * X)[None]


def burgers(exponax, state):
    stepper = exponax.stepper.Burgers(1, 1.0, 32, 0.01, diffusivity=0.05 * state["rate"])
    return exponax.rollout(stepper, 40)(state["u"])


def chaos(exponax, state):
    """The coefficients of the integrator are sums around a circle, in scans of their own."""
    settings = {"second_order_scale": state["rate"], "order": 4}
    stepper = exponax.stepper.KuramotoSivashinsky(1, 20.0, 32, 0.1, **settings)
    return exponax.repeat(exponax.RepeatedStepper(stepper, 5), 8)(state["u"])


FIELDS = [(burgers, {}), (burgers, ALL), (burgers, {"memory": "30 kB"}), (chaos, {}), (chaos, ALL)]


@pytest.mark.parametrize(("solved", "how"), FIELDS)
def test_fields(solved, how):
    exponax = import_or_skip("exponax")
    loss = lambda state: jnp.mean(solved(exponax, state) ** 2)
    assert_agrees(loss, {"u": WAVE, "rate": jnp.asarray(1.1)}, order=1 + (solved is burgers), **how)
