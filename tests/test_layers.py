"""Layers as people train them: mixed precision, kernels with rules, micro-batches, donation.

Each gradient is that of `jax.lax.scan`, or of a Python loop.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from derivatives import assert_close

pytestmark = pytest.mark.slow

LAYERS, WIDTH, LENGTH = 4, 8, 16
X = jnp.sin(jnp.arange(3.0 * LENGTH * WIDTH)).reshape(3, LENGTH, WIDTH)
WAYS = {"default": {}, "memory": {"memory": "40 kB"}, "2 carries": {"checkpoints": 2}}
each_way = pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)


def weights():
    rows = lambda *shape: jnp.cos(jnp.arange(float(np.prod(shape)))).reshape(shape) / 4
    return {"qkv": rows(LAYERS, WIDTH, 3 * WIDTH), "up": rows(LAYERS, WIDTH, WIDTH)}


def attention(q, k, v):
    scores = q @ k.swapaxes(-1, -2) / WIDTH**0.5
    return jax.nn.softmax(scores, axis=-1) @ v


def block(x, w, attend=attention):
    x = x + attend(*jnp.split(x @ w["qkv"], 3, axis=-1))
    return x + jnp.tanh(x @ w["up"]), None


def unrolled(step, w, x=X):
    for i in range(LAYERS):
        x, _ = step(x, jax.tree.map(lambda v, i=i: v[i], w))
    return jnp.mean(x**2)


def scanned(step, w, x=X, **options):
    return jnp.mean(loopkit.scan(step, x, w, **options)[0] ** 2)


@each_way
@pytest.mark.parametrize("prevent_cse", [True, False])
def test_a_layer_in_a_checkpoint_of_the_users_own(prevent_cse, options):
    again = jax.checkpoint(block, prevent_cse=prevent_cse)
    got = jax.jit(jax.grad(lambda w: scanned(again, w, **options)))(weights())
    assert_close(got, jax.grad(lambda w: unrolled(block, w))(weights()))


def test_a_checkpoint_of_the_users_own_takes_no_more_memory():
    """Within a budget, loopkit looks inside it."""

    def temporary(step):
        slope = jax.jit(jax.grad(lambda w: scanned(step, w, memory="40 kB")))
        return slope.lower(weights()).compile().memory_analysis().temp_size_in_bytes

    plain = temporary(block)
    assert temporary(jax.checkpoint(block, prevent_cse=False)) <= plain
    assert temporary(jax.checkpoint(block)) <= plain


@each_way
@pytest.mark.parametrize("unroll", [2, 4])
def test_several_layers_in_an_iteration(unroll, options):
    got = jax.jit(jax.grad(lambda w: scanned(block, w, unroll=unroll, **options)))(weights())
    assert_close(got, jax.grad(lambda w: unrolled(block, w))(weights()))


@each_way
def test_half_precision_between_layers(options):
    """Activations of 16 bits, parameters and their gradients of 32: rounded as in lax."""
    single = jax.tree.map(lambda v: v.astype("float32"), weights())

    def half(x, w):
        return block(x, jax.tree.map(lambda v: v.astype("bfloat16"), w))

    x = X.astype("bfloat16")
    loss = lambda scan, w: jnp.mean(scan(half, x, w)[0].astype("float32") ** 2)
    ours = lambda *given: loopkit.scan(*given, **options)
    got, wanted = (jax.jit(jax.grad(lambda w, s=s: loss(s, w)))(single) for s in (ours, lax.scan))
    exact = jax.grad(lambda w: unrolled(block, w))(weights())
    for g, w, e in zip(*map(jax.tree.leaves, (got, wanted, exact)), strict=True):
        assert g.dtype == "float32"
        g, w, e = (np.asarray(v, "float64") for v in (g, w, e))
        error = np.max(np.abs(w - e))  # of rounding to 16 bits, on the way
        assert np.max(np.abs(g - w)) <= error
    stored = loopkit.explain(lambda w: loopkit.scan(half, x, w, **options)[0], single).plan
    assert stored.step.carry_bytes == x.size * 2


def kernel(q_ref, k_ref, v_ref, out_ref):
    """Attention by blocks of keys, with a running maximum, as in Dao et al. 2022."""
    q, size = q_ref[...], 4

    def add(i, state):
        out, top, total = state
        k, v = (ref[0, pl.ds(i * size, size), :] for ref in (k_ref, v_ref))
        scores = q[0] @ k.T / WIDTH**0.5
        new = jnp.maximum(top, scores.max(-1))
        shares, scale = jnp.exp(scores - new[:, None]), jnp.exp(top - new)
        return out * scale[:, None] + shares @ v, new, total * scale + shares.sum(-1)

    first = jnp.zeros_like(q[0]), jnp.full(LENGTH, -jnp.inf, q.dtype), jnp.zeros(LENGTH, q.dtype)
    out, _, total = lax.fori_loop(0, LENGTH // size, add, first)
    out_ref[...] = (out / total[:, None])[None]


pl = pytest.importorskip("jax.experimental.pallas")


@jax.custom_vjp
def flash(q, k, v):
    part = pl.BlockSpec((1, LENGTH, WIDTH), lambda i: (i, 0, 0))
    result = jax.ShapeDtypeStruct(q.shape, q.dtype)
    how = {"grid": (len(q),), "in_specs": [part] * 3, "out_specs": part, "interpret": True}
    return pl.pallas_call(kernel, out_shape=result, **how)(q, k, v)


flash.defvjp(lambda *of: (flash(*of), of), lambda of, ct: jax.vjp(attention, *of)[1](ct))


@each_way
def test_an_attention_kernel_with_a_rule_of_its_own(options):
    step = lambda x, w: block(x, w, flash)
    got = jax.jit(jax.value_and_grad(lambda w: scanned(step, w, **options)))(weights())
    assert_close(got, jax.value_and_grad(lambda w: unrolled(block, w))(weights()))


@each_way
def test_gradients_of_micro_batches_are_summed_within_one_budget(options):
    """A scan of gradients needs the memory of one micro-batch."""
    batches = jnp.stack([X, X / 2, X + 1, -X])
    slope = jax.grad(lambda w, x: scanned(block, w, x, **options))

    def summed(w):
        add = lambda total, x: (jax.tree.map(jnp.add, total, slope(w, x)), None)
        return lax.scan(add, jax.tree.map(jnp.zeros_like, w), batches)[0]

    whole = lambda w: sum(unrolled(block, w, x) for x in batches)
    compiled = jax.jit(summed).lower(weights()).compile()
    assert_close(compiled(weights()), jax.grad(whole)(weights()))
    alone = jax.jit(slope).lower(weights(), X).compile()
    more = [c.memory_analysis().temp_size_in_bytes for c in (compiled, alone)]
    parameters = sum(v.nbytes for v in jax.tree.leaves(weights()))
    assert more[0] <= more[1] + 2 * parameters + X.nbytes  # the sums, and a batch


@each_way
def test_donated_parameters_are_not_copied(options):
    def update(w, x):
        slope = jax.grad(lambda w: scanned(block, w, x, **options))(w)
        return jax.tree.map(lambda v, s: v - 0.1 * s, w, slope)

    def needed(donated):
        program = jax.jit(update, donate_argnums=donated).lower(weights(), X).compile()
        found = program.memory_analysis()
        used = found.argument_size_in_bytes + found.temp_size_in_bytes
        saved = found.alias_size_in_bytes
        return used + found.output_size_in_bytes - saved, saved

    (before, _), (after, saved) = needed(()), needed((0,))
    assert saved == sum(v.nbytes for v in jax.tree.leaves(weights()))
    assert after <= before  # their gradient is no longer where the new ones will be
