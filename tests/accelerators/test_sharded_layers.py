"""Layers whose parameters are divided between eight devices, compiled for a GPU and a TPU."""

import re
from functools import cache

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from collectives import sent
from test_sharded_layers import BATCH, LAYERS, WAYS, arguments, gathered, gradient, layer

from .machines import TARGETS, compilers, devices

__all__ = ["compilers"]

pytestmark = pytest.mark.accelerators

WHOLE = re.compile(rf"\[(\d+,)*({BATCH},16|{16 * BATCH}),\d+\]")
"""The type of an activation of the whole batch."""


@cache
def program(target, by, way=None, policy=None):
    """Compile the gradient by loopkit, or by lax with a policy."""
    mesh = Mesh(np.asarray(devices(target, 8)), ("d",))
    step, options = gathered if by == "shard_map" else layer, way and WAYS[way][0]
    return gradient(step, options, policy, mesh, by).as_text()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("way", "by"),
    [*((way, "jit") for way in ("default", "all", "dots", "memory")), ("dots", "shard_map")],
)
def test_layers_are_gathered_once_each_way_and_activations_never(way, by, target):
    ours, theirs = program(target, by, way), program(target, by, policy=WAYS[way][1])
    (counts, sizes), (most, largest) = sent(ours), sent(theirs)
    weights, _ = jax.eval_shape(arguments)
    once = len(weights) * LAYERS
    assert 0 < counts["all-gather"] <= 2 * once
    assert sizes["all-gather"] <= 2 * sum(w.size * 4 for w in weights.values())  # several at a time
    assert 0 < counts["reduce-scatter"] + counts["all-reduce"] <= once
    assert set(counts) == set(most)
    assert all(counts[kind] <= most[kind] and sizes[kind] <= largest[kind] for kind in counts)
    assert not WHOLE.search(ours)
