"""flax NNX and Equinox: training loops, differentiated in the rate of learning and in the data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit

from .against_forward_mode import assert_agrees, import_or_skip

pytestmark = [pytest.mark.programs, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

XS = jnp.sin(jnp.arange(24.0)).reshape(8, 3)
YS = jnp.cos(jnp.arange(8.0))


def trained(loss, weights, settings, eps_root=1e-8):
    """The loss after some steps of Adam."""
    optax = import_or_skip("optax")
    rate, scale = settings
    optimiser = optax.adam(rate, eps_root=eps_root)

    def step(carry, row):
        weights, state = carry
        x, y = row
        updates, state = optimiser.update(jax.grad(loss)(weights, x, scale * y), state)
        return (optax.apply_updates(weights, updates), state), None

    (weights, _), _ = jax.lax.scan(step, (weights, optimiser.init(weights)), (XS, YS))
    return jax.vmap(loss, (None, 0, 0))(weights, XS, YS).mean()


def with_nnx(settings):
    nnx = import_or_skip("flax.nnx")

    class Network(nnx.Module):
        def __init__(self, rngs):
            how = {"rngs": rngs, "param_dtype": float, "dtype": float}
            self.first, self.last = nnx.Linear(3, 4, **how), nnx.Linear(4, 1, **how)

        def __call__(self, x):
            return self.last(jnp.tanh(self.first(x)))[0]

    graph, weights = nnx.split(Network(nnx.Rngs(0)))
    loss = lambda weights, x, y: (nnx.merge(graph, weights)(x) - y) ** 2
    return trained(loss, weights, settings)


def with_equinox(settings):
    import equinox as eqx

    network = eqx.nn.MLP(3, "scalar", 4, 1, activation=jnp.tanh, key=jax.random.key(0))
    weights, rest = eqx.partition(network, eqx.is_inexact_array)
    loss = lambda weights, x, y: (eqx.combine(weights, rest)(x) - y) ** 2
    return trained(loss, weights, settings)


@pytest.mark.parametrize("checkpoints", [None, "all"])
@pytest.mark.parametrize("train", [with_nnx, with_equinox], ids=lambda train: train.__name__)
def test_derivatives(train, checkpoints):
    assert_agrees(train, jnp.array([0.05, 1.3]), checkpoints=checkpoints)


def test_a_nan_of_the_programs_own():
    """Adam takes a root of the mean square of a gradient, which has no slope at zero."""

    def without_eps_root(settings):
        loss = lambda weight, x, y: (weight * x[0] - y) ** 2  # the first x[0] is 0
        return trained(loss, jnp.asarray(0.3), settings, eps_root=0.0)

    settings = jnp.array([0.05, 1.3])
    assert jnp.isnan(jax.jvp(jnp.sqrt, (0.0,), (0.0,))[1])
    by_scale = jax.jvp(without_eps_root, (settings,), (jnp.array([0.0, 1.0]),))[1]
    own = jax.grad(without_eps_root)(settings)
    assert jnp.isnan(jnp.stack([by_scale, own[1]])).all()
    ours = jax.grad(loopkit.checkpointed(without_eps_root))(settings)
    np.testing.assert_allclose(ours, own, rtol=1e-12)  # NaN where that is, and nowhere else


@pytest.mark.parametrize("in_place", [False, True])
def test_an_nnx_module_is_a_carry(in_place):
    nnx = import_or_skip("flax.nnx")
    how = {"rngs": nnx.Rngs(0), "param_dtype": float, "dtype": float}
    model = nnx.Linear(3, 1, **how)
    batches = jax.random.normal(jax.random.key(1), (20, 8, 3))
    error = lambda model, x: jnp.mean((model(x)[:, 0] - x.sum(-1)) ** 2)

    def of_module(rate):
        def update(model, x):
            loss, slope = nnx.value_and_grad(error)(model, x)
            graph, weights = nnx.split(model)
            weights = jax.tree.map(lambda w, g: w - rate * g, weights, nnx.state(slope))
            if in_place:
                nnx.update(model, weights)
                return model, loss
            return nnx.merge(graph, weights), loss

        return loopkit.scan(update, model, batches)[1].sum()

    def in_python(rate):
        graph, weights = nnx.split(model)
        total = 0.0
        for x in batches:
            of = lambda weights, x=x: error(nnx.merge(graph, weights), x)
            loss, slope = jax.value_and_grad(of)(weights)
            weights = jax.tree.map(lambda w, g: w - rate * g, weights, slope)
            total += loss
        return total

    for got, want in [
        (of_module, in_python),
        (jax.grad(of_module), jax.grad(in_python)),
        (jax.grad(jax.grad(of_module)), jax.grad(jax.grad(in_python))),
    ]:
        np.testing.assert_allclose(got(0.1), want(0.1), rtol=1e-10)
