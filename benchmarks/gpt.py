"""The layers of a GPT as large as those that are trained: 24 of them, in bfloat16."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name as named
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import layers

NAMES = "qkv", "attention", "up", "down"


@lru_cache
def layers_of_gpt(
    batch: int = 2,
    length: int = 2048,
    count: int = 24,
    width: int = 1024,
    heads: int = 16,
    devices: Sequence[Any] = (),
) -> layers.Case:
    """Layers of a GPT in bfloat16, whose softmax is taken in float32.

    Of several devices, each has its part of the batch.
    """
    place = lambda h: h
    if devices:
        place = lambda h: lax.with_sharding_constraint(h, placed(devices, "d"))

    def step(_, h, p):
        h = place(h)
        shape = batch, length, heads, width // heads
        qkv = named(layers.centred(h) @ p["qkv"], "qkv")
        q, k, v = (a.reshape(shape) for a in jnp.split(qkv, 3, -1))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * shape[-1] ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1).astype(h.dtype), v)
        h = h + named(mixed.reshape(h.shape) @ p["out"], "attention")
        up = named(layers.centred(h) @ p["up"], "up")
        return place(h + named(jax.nn.gelu(up) @ p["down"], "down")), None

    sizes = {"qkv": (width, 3 * width), "out": (width, width)}
    sizes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    xs = {
        k: layers.normal(i, count, *size, scale=size[0] ** -0.5).astype(jnp.bfloat16)
        for i, (k, size) in enumerate(sizes.items())
    }
    init = layers.normal(9, batch, length, width).astype(jnp.bfloat16)
    return layers.Case(step, jnp.zeros(()), init, xs, count, NAMES)


def placed(devices: Sequence[Any], *axes: str | None) -> NamedSharding:
    return NamedSharding(Mesh(np.asarray(devices), ("d",)), P(*axes))


def shardings(devices: Sequence[Any]) -> tuple:
    """Return where the arguments go: each device has a part of the batch, and of every weight."""
    weights = placed(devices, None, "d")
    return (
        placed(devices),
        placed(devices, "d"),
        dict.fromkeys(("qkv", "out", "up", "down"), weights),
    )
