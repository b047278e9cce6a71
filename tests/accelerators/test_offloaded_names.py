"""Values of layers that a policy of `jax.checkpoint` puts on the host, by their names."""

from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name as named

import loopkit

from .machines import TARGETS, compiled, meanwhile

pytestmark = pytest.mark.accelerators

LAYERS, ROWS, WIDTH = 8, 1024, 1024
NAMES = ["hidden", "mixed"]
CARRY = ROWS * WIDTH * 4
ROW = len(NAMES) * CARRY
"""Bytes of the named values of a layer."""
WEIGHTS = {k: jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32) for k in ("up", "down")}
BATCHES = jax.ShapeDtypeStruct((4, ROWS, WIDTH), jnp.float32)
SAVED = jax.checkpoint_policies.save_only_these_names(*NAMES)
OFFLOADED = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=NAMES,
    offload_src="device",
    offload_dst="pinned_host",
)


def layer(x, w):
    hidden = named(jnp.tanh(x @ w["up"]), "hidden")
    return x + jnp.sin(named(jnp.tanh(hidden @ w["down"]), "mixed")), None


def final(x, w, policy):
    return loopkit.scan(layer, x, w, checkpoints=policy)[0]


def of_layers(policy):
    return jax.grad(lambda w, x: jnp.mean(final(x[0], w, policy) ** 2))


def accumulated(policy):
    """The gradient of each of several batches, in a loop of lax."""
    slope = jax.grad(lambda w, x: jnp.mean(final(x, w, policy) ** 2))

    def total(w, xs):
        add = lambda total, x: (jax.tree.map(jnp.add, total, slope(w, x)), None)
        return lax.scan(add, jax.tree.map(jnp.zeros_like, w), xs)[0]

    return total


def of_groups(policy):
    """The gradient of a loop over groups of four layers."""

    def loss(w, xs):
        groups = jax.tree.map(lambda w: w.reshape(2, LAYERS // 2, *w.shape[1:]), w)
        group = lambda x, w: (final(x, w, policy), None)
        return jnp.mean(loopkit.scan(group, xs[0], groups)[0] ** 2)

    return jax.grad(loss)


PROGRAMS = {of_layers: LAYERS, accumulated: LAYERS, of_groups: LAYERS // 2}
"""Each with the number of layers whose values are there at a time."""


@cache
def made(target, program, policy):
    return compiled(target, program(policy), WEIGHTS, BATCHES)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_named_values_are_on_the_host(program, target):
    """The device holds those of the next layer as well: they arrive while a layer is reversed."""
    there = made(target, program, OFFLOADED)
    assert there.host_bytes == PROGRAMS[program] * ROW
    if target == "gpu":
        rest = made(target, program, SAVED).device_bytes - there.host_bytes
    else:  # which keeps much else in the memory beside the processor, and does not count it
        rest = PROGRAMS[program] * CARRY
    assert there.device_bytes <= rest + 2 * ROW


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_named_values_travel_while_layers_are_multiplied(program, target):
    """A TPU waits for what it writes to the host, as it does in lax."""
    copies = meanwhile(made(target, program, OFFLOADED).text, "dot_general")
    assert sum(map(bool, copies)) >= {"gpu": 2, "tpu": 1}[target] * len(NAMES)
