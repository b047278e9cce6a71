"""Layers whose parameters are divided between devices: what a gradient sends, and where it keeps
checkpoints, beside lax with the same policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import loopkit
from collectives import sent
from derivatives import assert_close

pytestmark = pytest.mark.slow

LAYERS, WIDTH, BATCH = 6, 64, 32
POLICIES = jax.checkpoint_policies
WAYS = {
    "nothing": ({"checkpoints": POLICIES.nothing_saveable}, POLICIES.nothing_saveable),
    "dots": ({"checkpoints": POLICIES.dots_saveable}, POLICIES.dots_saveable),
    "all": ({"checkpoints": "all"}, POLICIES.everything_saveable),
    "default": ({}, POLICIES.nothing_saveable),
    "memory": ({"memory": "4 MB"}, POLICIES.nothing_saveable),
}
"""Options of loopkit, and a policy of lax that stores as much, or as little."""
DIVIDED = P(None, None, "d")
"""A part of the last axis of each layer's parameters is on each device."""


def layer(x, w):
    return x + jnp.tanh(jnp.tanh(x @ w["up"]) @ w["down"]), None


def gathered(x, w):
    return layer(x, {k: lax.all_gather(v, "d", axis=1, tiled=True) for k, v in w.items()})


def arguments():
    rows = lambda *shape: jnp.sin(jnp.arange(float(np.prod(shape)))).reshape(shape) / 9
    weights = {"up": rows(LAYERS, WIDTH, 4 * WIDTH), "down": rows(LAYERS, 4 * WIDTH, WIDTH)}
    return weights, rows(BATCH, 16, WIDTH)


def gradient(step, options, policy, mesh, by):
    """Return the compiled gradient by loopkit, or by lax if there are no options."""
    if options is None:
        again = (
            step
            if policy is POLICIES.everything_saveable
            else jax.checkpoint(step, policy=policy, prevent_cse=False)
        )
        final = lambda w, x: lax.scan(again, x, w)[0]
    else:
        final = lambda w, x: loopkit.scan(step, x, w, **options)[0]
    loss = whole = lambda w, x: jnp.mean(final(w, x) ** 2)
    if by == "shard_map":
        local = lambda w, x: lax.pmean(whole(w, x), "d")
        loss = jax.shard_map(local, mesh=mesh, in_specs=(DIVIDED, P("d")), out_specs=P())
    weights, x = jax.eval_shape(arguments)
    places = jax.tree.map(lambda _: NamedSharding(mesh, DIVIDED), weights)
    program = jax.jit(
        jax.grad(loss), in_shardings=(places, NamedSharding(mesh, P("d"))), out_shardings=places
    )
    return program.lower(weights, x).compile()


@pytest.mark.every_case
@pytest.mark.parametrize("by", ["jit", "shard_map"])
@pytest.mark.parametrize("way", WAYS)
def test_no_more_is_sent_than_in_lax(way, by):
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("d",))
    options, policy = WAYS[way]
    if by == "shard_map" and way == "memory":
        options = {"memory": "1 MB"}  # a budget of each device, not of all
    step = gathered if by == "shard_map" else layer
    ours, theirs = (gradient(step, of, policy, mesh, by) for of in (options, None))
    (counts, sizes), (most, largest) = sent(ours.as_text()), sent(theirs.as_text())
    assert counts["all-gather"] <= 2 * 2 * LAYERS  # of two matrices, forward and once back
    assert set(counts) == set(most)
    assert all(counts[kind] <= most[kind] and sizes[kind] <= largest[kind] for kind in counts)
    kept = [p.memory_analysis().temp_size_in_bytes for p in (ours, theirs)]
    weights, x = arguments()
    assert kept[0] <= kept[1] + LAYERS * x.nbytes / 2  # carries of the whole batch are twice that
    alone = jax.grad(lambda w: jnp.mean(lax.scan(layer, x, w)[0] ** 2))(weights)
    assert_close(ours(weights, x), alone)
    assert_close(theirs(weights, x), alone)
