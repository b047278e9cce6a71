"""Scans over layers by flax, equinox, haiku and haliax: their own gradient, within a budget."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit

from .against_forward_mode import import_or_skip

pytestmark = [pytest.mark.programs, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

LAYERS, WIDTH = 8, 4
X = jnp.sin(jnp.arange(64.0 * WIDTH)).reshape(64, WIDTH)
BUDGET = 160_000
"""Bytes for a gradient; a layer has a carry of 2 kB, and residuals of several times that."""
SLACK = 1.1
"""The compiler may lay arrays out less tightly than a plan counts them."""
SPLIT = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}


def linen_block(nn):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            hidden = nn.gelu(nn.Dense(4 * WIDTH, param_dtype=float)(nn.LayerNorm()(x)))
            return x + nn.Dense(WIDTH, param_dtype=float)(hidden)

    return Block


def of_linen(wrap, make):
    """Return a loss of the parameters of a stack, and the parameters."""
    nn = import_or_skip("flax.linen")
    stack = make(nn, wrap(nn, linen_block(nn)))
    weights = stack.init(jax.random.key(0), X)
    return lambda weights: jnp.mean(stack.apply(weights, X) ** 2), weights


def scanned(nn, block):
    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            step = lambda layer, x, _: (layer(x), None)
            return nn.scan(step, length=LAYERS, **SPLIT)(block(), x, None)[0]

    return Stack()


def linen_scan():
    return of_linen(lambda nn, block: block, scanned)


def linen_scan_of_remat():
    return of_linen(lambda nn, block: nn.remat(block, prevent_cse=False), scanned)


def linen_remat_scan():
    return of_linen(
        lambda nn, block: block, lambda nn, block: nn.remat_scan(block, lengths=(2, LAYERS // 2))()
    )


def nnx_layers(nnx):
    class Layer(nnx.Module):
        def __init__(self, rngs):
            how = {"rngs": rngs, "param_dtype": float, "dtype": float}
            self.norm = nnx.LayerNorm(WIDTH, **how)
            self.up, self.down = nnx.Linear(WIDTH, 16, **how), nnx.Linear(16, WIDTH, **how)

        def __call__(self, x):
            return x + self.down(nnx.gelu(self.up(self.norm(x))))

    stacked = nnx.split_rngs(splits=LAYERS)(nnx.vmap(lambda rngs: Layer(rngs)))
    return nnx.split(stacked(nnx.Rngs(0)))


def nnx_scan():
    nnx = import_or_skip("flax.nnx")
    graph, weights = nnx_layers(nnx)
    run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    return lambda weights: jnp.mean(run(X, nnx.merge(graph, weights)) ** 2), weights


def equinox_layers():
    import equinox as eqx

    class Layer(eqx.Module):
        mlp: eqx.nn.MLP
        norm: eqx.nn.LayerNorm
        dropout: eqx.nn.Dropout
        heads: int
        name: str

        def __init__(self, key):
            self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 16, 1, activation=jax.nn.gelu, key=key, dtype=float)
            self.norm, self.dropout = eqx.nn.LayerNorm(WIDTH), eqx.nn.Dropout(0.1, inference=True)
            self.heads, self.name = 2, "layer"

        def __call__(self, x):
            assert (self.heads, self.name, self.dropout.p) == (2, "layer", 0.1)
            return x + self.dropout(self.mlp(self.norm(x)))

    return eqx.filter_vmap(Layer)(jax.random.split(jax.random.key(0), LAYERS))


def equinox_scan():
    """The usual way: arrays are scanned over, and the rest is put to each layer's."""
    import equinox as eqx

    weights, rest = eqx.partition(equinox_layers(), eqx.is_inexact_array)

    def loss(weights):
        arrays, others = eqx.partition(eqx.combine(weights, rest), eqx.is_array)
        step = lambda x, arrays: (jax.vmap(eqx.combine(arrays, others))(x), None)
        return jnp.mean(jax.lax.scan(step, X, arrays)[0] ** 2)

    return loss, weights


def haiku_layer_stack():
    hk = import_or_skip("haiku")

    def block(x):
        hidden = jax.nn.gelu(hk.Linear(16)(hk.LayerNorm(-1, True, True)(x)))
        return x + hk.Linear(WIDTH)(hidden)

    run = hk.without_apply_rng(hk.transform(hk.experimental.layer_stack(LAYERS)(block)))
    weights = run.init(jax.random.key(0), X)
    return lambda weights: jnp.mean(run.apply(weights, X) ** 2), weights


def haliax_fold():
    hax = import_or_skip("haliax")
    import equinox as eqx

    width, rows = hax.Axis("width", WIDTH), hax.Axis("rows", len(X))

    class Layer(eqx.Module):
        w: hax.NamedArray
        rate: float

        @staticmethod
        def init(key):
            return Layer(hax.random.normal(key, (width,)), 0.5)

        def __call__(self, x):
            y = hax.tanh(hax.sin(x * self.w))
            for _ in range(3):
                y = hax.tanh(hax.sin(y) * y)
            return x + self.rate * y * hax.sum(hax.cos(x), width)

    axis, keys = hax.Axis("layer", LAYERS), jax.random.split(jax.random.key(0), LAYERS)
    stack = hax.nn.Stacked.init(axis, Layer)(key=keys)
    weights, rest = eqx.partition(stack, eqx.is_inexact_array)
    x = hax.named(X, (rows, width))
    return lambda w: hax.mean(eqx.combine(w, rest).fold(x) ** 2).scalar(), weights


STACKS = [linen_scan, linen_scan_of_remat, linen_remat_scan, nnx_scan, equinox_scan]
STACKS += [haiku_layer_stack, haliax_fold]


def assert_near(got, wanted):
    leaves = jax.tree.leaves(got), jax.tree.leaves(wanted)
    for g, w in zip(*leaves, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-11, atol=1e-13)


def temporary(loss, weights):
    compiled = jax.jit(jax.grad(loss)).lower(weights).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.__name__)
def test_gradients_are_the_librarys_own(stack):
    loss, weights = stack()
    own = jax.jit(jax.value_and_grad(loss))(weights)
    for options in ({}, {"memory": BUDGET}, {"checkpoints": 2}):
        ours = loopkit.checkpointed(loss, **options)
        assert_near(jax.jit(jax.value_and_grad(ours))(weights), own)


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.__name__)
def test_memory_is_within_the_budget(stack):
    """Beside what a single layer needs, which does not depend on the budget."""
    loss, weights = stack()

    def counted(memory):
        within = loopkit.checkpointed(loss, memory=memory)
        peak = sum(loop.plan.peak_bytes for loop in loopkit.explain(within, weights))
        assert peak <= memory
        return peak, temporary(within, weights)

    small, large = counted(BUDGET // 2), counted(BUDGET)
    assert small[0] < large[0]
    assert large[1] - small[1] <= SLACK * (large[0] - small[0]) + X.nbytes
    assert large[1] < temporary(loss, weights) / 2 or stack is linen_scan_of_remat


def test_modules_of_equinox_are_scanned_over_as_they_are():
    import equinox as eqx

    layers = equinox_layers()
    step = lambda x, layer: (jax.vmap(layer)(x), None)
    ours = lambda layers: jnp.mean(loopkit.scan(step, X, layers, memory=BUDGET)[0] ** 2)
    loss, weights = equinox_scan()
    value, slope = eqx.filter_jit(eqx.filter_value_and_grad(ours))(layers)
    own_value, own_slope = jax.value_and_grad(loss)(weights)
    assert_near((value, eqx.filter(slope, eqx.is_array)), (own_value, own_slope))


def test_modules_of_nnx_are_scanned_over_as_they_are():
    nnx = import_or_skip("flax.nnx")
    loss, weights = nnx_scan()
    layers = nnx.merge(nnx_layers(nnx)[0], weights)
    step = lambda x, layer: (layer(x), None)
    ours = lambda layers: jnp.mean(loopkit.scan(step, X, layers, memory=BUDGET)[0] ** 2)
    value, slope = nnx.jit(nnx.value_and_grad(ours))(layers)
    own_value, own_slope = jax.value_and_grad(loss)(weights)
    assert_near((value, nnx.state(slope)), (own_value, own_slope))
