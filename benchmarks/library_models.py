"""Programs of libraries that model: dynamax, numpyro, blackjax, tfp, flax, jaxley, mjx, torax."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from library_program import Program, forward, reverse, through

BUDGETS = [{"memory": size} for size in ("3.5 MB", "4 MB")]
FROM_LITTLE_TO_MUCH = [{"memory": f"{2**k} kB"} for k in range(8, 15)]

# --- likelihoods and samplers ----------------------------------------------------------------


def kalman() -> Program:
    from dynamax.linear_gaussian_ssm import LinearGaussianSSM

    model = LinearGaussianSSM(state_dim=4, emission_dim=2)
    params, _ = model.initialize(jax.random.key(0))
    _, seen = model.sample(params, jax.random.key(1), 10000)

    def loss(weights):
        dynamics = params.dynamics._replace(weights=weights)
        return -model.marginal_log_prob(params._replace(dynamics=dynamics), seen)

    return Program(
        reverse(loss), through(loss, *FROM_LITTLE_TO_MUCH), params.dynamics.weights, loss=loss
    )


def hidden_markov() -> Program:
    from dynamax.hidden_markov_model import GaussianHMM

    model = GaussianHMM(5, 2)
    params, _ = model.initialize(jax.random.key(0))
    _, seen = model.sample(params, jax.random.key(1), 10000)

    def loss(means):
        emissions = params.emissions._replace(means=means)
        return -model.marginal_log_prob(params._replace(emissions=emissions), seen)

    return Program(reverse(loss), through(loss, *BUDGETS), params.emissions.means, loss=loss)


def log_density_of_scan(values, seen):
    import numpyro
    from numpyro import distributions as dist
    from numpyro.contrib.control_flow import scan
    from numpyro.infer.util import log_density

    def model():
        drift = numpyro.sample("drift", dist.Normal(0.0, 1.0))

        def transition(x, y):
            shock = numpyro.sample("shock", dist.Normal(0.0, 1.0))
            x = jnp.tanh(0.9 * x + drift + 0.3 * shock)
            numpyro.sample("y", dist.StudentT(3.0, x, 0.5), obs=y)
            return x, None

        scan(transition, 0.0, seen)

    return log_density(model, (), {}, values)[0]


def log_density_of_numpyro() -> Program:
    values = {"drift": jnp.asarray(0.2), "shock": jnp.cos(jnp.arange(10000.0) ** 2)}
    loss = lambda values: log_density_of_scan(values, jnp.sin(jnp.arange(10000.0)))
    return Program(reverse(loss), through(loss, {"checkpoints": "all"}), values, loss=loss)


def nuts_of_blackjax() -> Program:
    import blackjax

    def moved(step_size):
        sampler = blackjax.nuts(lambda x: -jnp.sum(x**2), step_size, jnp.ones(2))
        state = sampler.init(jnp.array([1.0, -0.5]))
        return sampler.step(jax.random.key(1), state)[0].position.sum()

    return Program(forward(moved), through(moved), 0.3)


def nuts_of_tfp() -> Program:
    from tensorflow_probability.substrates.jax import mcmc

    def moved(step_size):
        sampler = mcmc.NoUTurnSampler(lambda x: -0.5 * jnp.sum(x**2), step_size)
        start = jnp.array([1.0, -0.5])
        before = sampler.bootstrap_results(start)
        return sampler.one_step(start, before, seed=jax.random.key(1))[0].sum()

    return Program(forward(moved), through(moved), 0.3)


def hmc_of_tfp() -> Program:
    from tensorflow_probability.substrates.jax import mcmc

    def moved(step_size):
        target = lambda x: -0.5 * jnp.sum(x**2)
        sampler = mcmc.HamiltonianMonteCarlo(target, step_size, num_leapfrog_steps=5)
        chain = {"num_results": 10, "current_state": jnp.array([1.0, -0.5]), "kernel": sampler}
        return mcmc.sample_chain(**chain, trace_fn=None, seed=jax.random.key(1)).sum()

    return Program(forward(moved), through(moved), 0.3)


# --- recurrent layers ------------------------------------------------------------------------


def rnn_of_linen() -> Program:
    from flax import linen as nn

    sequences = jax.random.normal(jax.random.key(0), (4, 1000, 8))
    layer = nn.RNN(nn.GRUCell(32, param_dtype=float, dtype=float))
    loss = lambda weights: jnp.mean(layer.apply(weights, sequences) ** 2)
    weights = layer.init(jax.random.key(1), sequences)
    return Program(reverse(loss), through(loss), weights, loss=loss)


def rnn_of_nnx() -> Program:
    from flax import nnx

    sequences = jax.random.normal(jax.random.key(0), (4, 1000, 8))
    cell = nnx.GRUCell(8, 32, rngs=nnx.Rngs(0), param_dtype=float, dtype=float)
    graph, weights, rest = nnx.split(nnx.RNN(cell), nnx.Param, ...)
    start = jnp.zeros((4, 32))

    def loss(weights):
        return jnp.mean(nnx.merge(graph, weights, rest)(sequences, initial_carry=start) ** 2)

    return Program(reverse(loss), through(loss), weights, loss=loss)


# --- simulators ------------------------------------------------------------------------------


def voltage_of_jaxley() -> Program:
    import jaxley
    from jaxley.channels import HH

    cell = jaxley.Cell(jaxley.Branch(jaxley.Compartment(), ncomp=4), parents=[-1, 0, 0])
    cell.insert(HH())
    current = jaxley.step_current(1.0, 5.0, 0.2, 0.025, 25.0)
    cell.branch(0).comp(0).stimulate(current, verbose=False)
    cell.branch(2).comp(3).record(verbose=False)
    cell.make_trainable("HH_gNa", verbose=False)
    parameters = cell.get_parameters()

    def loss(parameters, **how):
        voltages = jaxley.integrate(cell, parameters, delta_t=0.025, **how)
        return jnp.mean((voltages + 60.0) ** 2)

    nested = jax.grad(partial(loss, checkpoint_lengths=[32, 32]))
    own = reverse(loss) | {"own, checkpoint_lengths=[32, 32]": nested}
    return Program(own, through(loss, {"checkpoints": "all"}), parameters, loss=loss)


BALL = """
<geom type="plane" size="5 5 0.1"/>
<body pos="0 0 0.15"><freejoint/><geom type="sphere" size="0.1"/></body>
"""
ARM = """
<body>
  <joint type="hinge" axis="0 1 0" limited="true" range="-20 20"/>
  <geom type="capsule" fromto="0 0 0 0.5 0 0" size="0.03" contype="0" conaffinity="0"/>
</body>
"""


def steps_of_mjx(
    bodies: str, iterations: int, how: Callable, steps: int = 100, solver: str = "Newton"
) -> Program:
    """Return the gradient in the forces on what falls: a ball on the floor, or an arm to its
    limit."""
    import mujoco
    from mujoco import mjx

    model = mjx.put_model(
        mujoco.MjModel.from_xml_string(f"""
        <mujoco>
          <option timestep="0.005" solver="{solver}" iterations="{iterations}" ls_iterations="8"/>
          <worldbody>{bodies}</worldbody>
        </mujoco>""")
    )

    def loss(forces):
        def step(data, force):
            data = mjx.step(model, data.replace(qfrc_applied=force))
            return data, data.qpos

        return jnp.mean(jax.lax.scan(step, mjx.make_data(model), forces)[1] ** 2)

    forces = 0.1 * jax.random.normal(jax.random.key(0), (steps, model.nv))
    return Program(how(loss), through(loss), forces, loss=loss if how is reverse else None)


def tokamak_of_torax() -> Program:
    import torax
    from torax.examples.basic_config import CONFIG

    step = torax.experimental.make_step_fn(torax.ToraxConfig.from_dict(CONFIG))

    def loss(multiplier):
        changed = {"sources.ei_exchange.Qei_multiplier": multiplier}
        provider = step.runtime_params_provider.update_provider_from_mapping(changed)
        states, _, last = torax.experimental.run_loop_jit(step, 10, provider)
        return jnp.mean(states.core_profiles.T_e.value[last])

    return Program(reverse(loss), through(loss), jnp.asarray(1.0), loss=loss)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "dynamax: Kalman": kalman,
    "dynamax: HMM": hidden_markov,
    "numpyro: log density of a scan": log_density_of_numpyro,
    "blackjax: NUTS": nuts_of_blackjax,
    "tfp: NUTS": nuts_of_tfp,
    "tfp: HMC, 10 moves": hmc_of_tfp,
    "flax: linen RNN": rnn_of_linen,
    "flax: NNX RNN": rnn_of_nnx,
    "jaxley: voltage of a cell": voltage_of_jaxley,
    "mjx: contact": partial(steps_of_mjx, BALL, 1, reverse),
    "mjx: joint limit, while loops": partial(steps_of_mjx, ARM, 8, forward),
    "torax: 10 steps": tokamak_of_torax,
}
