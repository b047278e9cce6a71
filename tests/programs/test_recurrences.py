"""Recurrences over tokens: Griffin of recurrentgemma, a selective state space, NNX layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit

from .against_forward_mode import (
    assert_agrees,
    assert_as_without_loopkit,
    assert_leaves_near,
    import_or_skip,
)

pytestmark = [pytest.mark.programs, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def griffin():
    """Return the loss of the next token, and the weights of a recurrent and an attention layer."""
    common, library = (import_or_skip(f"recurrentgemma.{part}") for part in ("common", "jax"))
    kinds = common.TemporalBlockType
    config = common.GriffinConfig(
        vocab_size=11,
        width=8,
        mlp_expanded_width=16,
        num_heads=2,
        block_types=(kinds.RECURRENT, kinds.ATTENTION),
        embeddings_scale_by_sqrt_dim=True,
        attention_window_size=8,
        logits_soft_cap=30.0,
        scan_type=common.ScanType.LINEAR_NATIVE,
    )
    model = library.Griffin(config, dtype=jnp.float64, param_dtype=jnp.float64)
    tokens = (jnp.arange(48).reshape(2, 24) ** 2 + 3) % 11
    places = jnp.tile(jnp.arange(24), (2, 1))
    weights = jax.jit(model.init)(jax.random.key(0), tokens, places)

    def loss(weights):
        logits, _ = model.apply(weights, tokens, places, return_cache=False)
        likely = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.mean(jnp.take_along_axis(likely, tokens[:, 1:, None], -1))

    return loss, weights


@pytest.mark.parametrize("how", [{}, {"checkpoints": "all"}, {"memory": "200 kB"}], ids=str)
def test_griffin(how):
    """Each layer is a `jax.checkpoint`, and its square roots have a rule without a forward mode.

    It carries float32, and its sums are as precise, in whichever order they are taken.
    """
    loss, weights = griffin()
    assert_as_without_loopkit(loss, weights, rtol=1e-6, **how)


CHUNKS, LENGTH, WIDTH, STATES = 4, 8, 3, 2


def in_steps(decay, drive, h):
    step = lambda h, row: (row[0] * h + row[1],) * 2
    return lax.scan(step, h, (decay, drive))[1]


def associative(decay, drive, h):
    joined = lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1])
    decays, sums = lax.associative_scan(joined, (decay, drive))
    return decays * h + sums


def mamba(weights, x, inner):
    """A layer of a selective state space (arXiv:2312.00752), chunk by chunk."""
    u, gate = jnp.split(x @ weights["in"], 2, -1)
    before = jnp.pad(u, ((3, 0), (0, 0)))
    u = jax.nn.silu(sum(before[i : i + len(u)] * weights["conv"][i] for i in range(4)))
    dt = jax.nn.softplus(u @ weights["dt"])
    b, c = jnp.split(u @ weights["bc"], 2, -1)

    def chunk(h, rows):
        u, dt, b, c = rows
        decay = jnp.exp(-dt[..., None] * jnp.exp(weights["log_a"]))
        hs = inner(decay, (dt * u)[..., None] * b[:, None], h)
        return hs[-1], jnp.einsum("lds,ls->ld", hs, c)

    rows = [row.reshape(CHUNKS, LENGTH, -1) for row in (u, dt, b, c)]
    y = lax.scan(jax.checkpoint(chunk), jnp.zeros((WIDTH, STATES)), rows)[1]
    return (y.reshape(u.shape) + weights["skip"] * u) * jax.nn.silu(gate)


@pytest.mark.parametrize("how", [{}, {"checkpoints": "all"}, {"memory": "32 kB"}], ids=str)
@pytest.mark.parametrize("inner", [in_steps, associative])
def test_mamba(inner, how):
    some = lambda seed, *shape: jnp.cos(seed + jnp.arange(float(np.prod(shape))) ** 2).reshape(
        shape
    )
    weights = {
        "in": some(0, WIDTH, 2 * WIDTH),
        "conv": some(1, 4, WIDTH),
        "dt": some(2, WIDTH, WIDTH),
        "bc": some(3, WIDTH, 2 * STATES),
        "log_a": jnp.log1p(jnp.arange(float(WIDTH * STATES))).reshape(WIDTH, STATES),
        "skip": jnp.ones(WIDTH),
    }
    x = some(4, CHUNKS * LENGTH, WIDTH)
    assert_agrees(lambda weights: jnp.mean(mamba(weights, x, inner) ** 2), weights, **how)


def nnx_model():
    nnx = import_or_skip("flax.nnx")

    class Block(nnx.Module):
        def __init__(self, rngs):
            how = {"rngs": rngs, "param_dtype": float, "dtype": float}
            self.cell, self.norm = nnx.GRUCell(4, 4, **how), nnx.BatchNorm(4, **how)

        def __call__(self, x):
            return x + self.norm(self.cell(x, jnp.sin(x))[0])

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.split_rngs(splits=5)(nnx.vmap(Block))(rngs)

        def __call__(self, x):
            run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return run(x, self.blocks)

    return Model(nnx.Rngs(0))


@pytest.mark.parametrize("how", [{}, {"checkpoints": "all"}, {"checkpoints": 1}], ids=str)
def test_nnx_scan_inside_nnx_grad(how):
    """The running means of each layer are updated in the scan, and leave the gradient.

    Batch norm computes in float32.
    """
    nnx = import_or_skip("flax.nnx")
    x = jnp.sin(jnp.arange(24.0)).reshape(6, 4)

    def gradient():
        model = nnx_model()
        before = jax.tree.map(jnp.copy, nnx.state(model, nnx.BatchStat))
        found = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        after = nnx.state(model, nnx.BatchStat)
        assert not np.allclose(jax.tree.leaves(before)[0], jax.tree.leaves(after)[0])
        return found[0], nnx.state(found[1]), after

    wanted = gradient()
    with loopkit.replace_lax_loops(**how):
        assert_leaves_near(gradient(), wanted, 1e-5)
