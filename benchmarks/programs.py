"""Gradients through loops of libraries: their own way, and `loopkit.checkpointed`.

    pip install '.[programs]' && python benchmarks/programs.py [--only diffrax,dynamax] [--list]

Each program is compiled and run the library's own way (its adjoint, or `jax.lax`; forward mode
where there is no gradient), and through `checkpointed` with one or more settings: time, temporary
memory, and what tracing and compiling takes. Numbers have to agree to 1e-8.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import harness
import loopkit

PROGRAMS: dict[str, Callable[[], Any]] = {}


class Program(NamedTuple):
    own: Callable
    """The gradient as the library gives it."""
    ours: dict[str, Callable]
    """Through `checkpointed`, by setting."""
    at: Any
    tolerance: float = 1e-8


def program(make: Callable) -> Callable:
    PROGRAMS[make.__name__.replace("__", ": ").replace("_", " ")] = make
    return make


def through(loss: Callable, *settings: dict) -> dict[str, Callable]:
    """The gradient of a loss through `checkpointed`, by default and with other settings."""
    name = lambda how: ", ".join(f"{k}={v!r}" for k, v in how.items()) or "default"
    return {name(how): jax.grad(loopkit.checkpointed(loss, **how)) for how in ({}, *settings)}


# --- diffrax ---------------------------------------------------------------------------------


def lotka(t, y, rate):
    hares, lynxes = y[0], y[1]
    return jnp.stack([hares * (rate - 0.02 * lynxes), lynxes * (0.01 * hares - 0.4)])


def robertson(t, y, k):
    a, b, c = y[0], y[1], y[2]
    made, lost = -k * a + 1e4 * b * c, 3e7 * b * b
    return jnp.stack([made, -made - lost, lost])


def solved(adjoint: Any, rate: Any, terms: Any = lotka, **how: Any) -> Any:
    import diffrax

    settings = {
        "solver": diffrax.Tsit5(),
        "t0": 0.0,
        "t1": 140.0,
        "dt0": 0.1,
        "y0": jnp.array([10.0, 10.0]),
        "stepsize_controller": diffrax.PIDController(rtol=1e-8, atol=1e-8),
        "max_steps": 4096,
    }
    settings |= how
    return diffrax.diffeqsolve(diffrax.ODETerm(terms), args=rate, adjoint=adjoint, **settings)


def of_diffrax(loss: Callable, at: Any, *settings: dict, **more: Any) -> Program:
    """`loss(adjoint, rate)`, by diffrax's own checkpoints and by ours."""
    import diffrax

    own = jax.grad(lambda rate: loss(diffrax.RecursiveCheckpointAdjoint(), rate))
    ours = lambda rate: loss(diffrax.ForwardMode(), rate)
    return Program(own, through(ours, *settings), at, **more)


def points(count: int) -> Callable:
    def make() -> Program:
        import diffrax

        at = diffrax.SaveAt(ts=jnp.linspace(0.0, 140.0, count))
        loss = lambda adjoint, rate: jnp.mean(solved(adjoint, rate, saveat=at).ys ** 2)
        return of_diffrax(loss, 1.1)

    return make


for count in (200, 5000, 20000):
    PROGRAMS[f"diffrax: Tsit5, {count} points"] = points(count)


@program
def diffrax__Tsit5_adaptive():
    return of_diffrax(lambda adjoint, rate: jnp.sum(solved(adjoint, rate).ys), 1.1)


@program
def diffrax__Kvaerno5_stiff():
    import diffrax

    how = {
        "terms": robertson,
        "solver": diffrax.Kvaerno5(),
        "t1": 1e5,
        "dt0": 1e-4,
        "y0": jnp.array([1.0, 0.0, 0.0]),
        "stepsize_controller": diffrax.PIDController(rtol=1e-8, atol=1e-10),
    }
    return of_diffrax(lambda adjoint, k: jnp.sum(solved(adjoint, k, **how).ys ** 2), 0.04)


@program
def diffrax__64_lanes():
    def loss(adjoint, rate):
        ends = jnp.geomspace(10.0, 400.0, 64)
        return jnp.sum(jax.vmap(lambda t1: solved(adjoint, rate, t1=t1).ys)(ends))

    return of_diffrax(loss, 1.1)


@program
def diffrax__dense():
    import diffrax

    def loss(adjoint, rate):
        found = solved(adjoint, rate, saveat=diffrax.SaveAt(dense=True), max_steps=2048)
        return jnp.sum(jax.vmap(found.evaluate)(jnp.linspace(0.0, 140.0, 100)) ** 2)

    return of_diffrax(loss, 1.1, {"checkpoints": "all", "max_steps": 2048})


# --- dynamax ---------------------------------------------------------------------------------

BUDGETS = [{"memory": size} for size in ("256 kB", "1 MB", "4 MB")]


@program
def dynamax__Kalman():
    from dynamax.linear_gaussian_ssm import LinearGaussianSSM

    model = LinearGaussianSSM(state_dim=4, emission_dim=2)
    params, _ = model.initialize(jax.random.key(0))
    _, seen = model.sample(params, jax.random.key(1), 10000)

    def loss(weights):
        dynamics = params.dynamics._replace(weights=weights)
        return -model.marginal_log_prob(params._replace(dynamics=dynamics), seen)

    return Program(jax.grad(loss), through(loss, *BUDGETS), params.dynamics.weights)


@program
def dynamax__HMM():
    from dynamax.hidden_markov_model import GaussianHMM

    model = GaussianHMM(5, 2)
    params, _ = model.initialize(jax.random.key(0))
    _, seen = model.sample(params, jax.random.key(1), 10000)

    def loss(means):
        emissions = params.emissions._replace(means=means)
        return -model.marginal_log_prob(params._replace(emissions=emissions), seen)

    return Program(jax.grad(loss), through(loss, *BUDGETS), params.emissions.means)


# --- torax -----------------------------------------------------------------------------------


@program
def torax__10_steps():
    import torax
    from torax.examples.basic_config import CONFIG

    step = torax.experimental.make_step_fn(torax.ToraxConfig.from_dict(CONFIG))

    def loss(multiplier):
        changed = {"sources.ei_exchange.Qei_multiplier": multiplier}
        provider = step.runtime_params_provider.update_provider_from_mapping(changed)
        states, _, last = torax.experimental.run_loop_jit(step, 10, provider)
        return jnp.mean(states.core_profiles.T_e.value[last])

    return Program(jax.grad(loss), through(loss), jnp.asarray(1.0))


# --- without a gradient of their own ---------------------------------------------------------


@program
def optax__LBFGS():
    import optax

    def fitted(target):
        loss = lambda x: jnp.sum((x - target) ** 2) + 0.1 * jnp.sum(x**4)
        optimiser = optax.lbfgs(memory_size=5)
        value_and_grad = optax.value_and_grad_from_state(loss)

        def step(carry, _):
            x, state = carry
            value, grad = value_and_grad(x, state=state)
            updates, state = optimiser.update(grad, state, x, value=value, grad=grad, value_fn=loss)
            return (optax.apply_updates(x, updates), state), None

        x = jnp.array([0.3, 0.1])
        (x, _), _ = jax.lax.scan(step, (x, optimiser.init(x)), length=4)
        return x.sum()

    return Program(jax.jacfwd(fitted), through(fitted), jnp.array([1.0, 2.0]), 1e-6)


@program
def blackjax__NUTS():
    import blackjax

    def moved(step_size):
        sampler = blackjax.nuts(lambda x: -jnp.sum(x**2), step_size, jnp.ones(2))
        state = sampler.init(jnp.array([1.0, -0.5]))
        return sampler.step(jax.random.key(1), state)[0].position.sum()

    return Program(jax.jacfwd(moved), through(moved), 0.3, 1e-6)


# --- what is printed -------------------------------------------------------------------------


def differs(want: Any, got: Any) -> float:
    pairs = zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True)
    return max(float(np.max(np.abs(a - b)) / np.max(np.abs(a))) for a, b in pairs)


def measured(name: str, made: Program, repeats: int) -> Iterator[str]:
    functions = {"own": made.own, **made.ours}
    results = harness.measure(functions, (made.at,), repeats, rtol=made.tolerance)
    own = results["own"]
    for how, found in results.items():
        ratio = harness.ratio(found.seconds, own.seconds)
        yield (
            f"| {name} | {how} | {(found.temp_bytes or 0) / 1e6:.3f} | "
            f"{1e3 * np.median(found.seconds):.2f} | {ratio} | {found.compile_seconds:.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="programs whose names contain one of these")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    if options.list:
        print(*PROGRAMS, sep="\n")
        return
    print("| program | setting | temporary MB | ms | of the library's own | compile s |")
    print("| --- | --- | --- | --- | --- | --- |")
    wanted = options.only.split(",")
    for name, make in PROGRAMS.items():
        if any(part in name for part in wanted):
            for row in measured(name, make(), options.repeats):
                print(row, flush=True)


if __name__ == "__main__":
    main()
