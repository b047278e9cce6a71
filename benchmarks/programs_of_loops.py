"""Programs of several loops of `jax.lax`, with code between them: losses, and their arguments."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from layers import centred, normal

Made = tuple[Callable, tuple]


def gru(w, h, x):
    both = jnp.concatenate([h, x], -1)
    update, reset = jnp.split(jax.nn.sigmoid(both @ w["gates"]), 2, -1)
    new = jnp.tanh(jnp.concatenate([reset * h, x], -1) @ w["new"])
    return (1 - update) * h + update * new


def weights_of_gru(seed: int, width: int, inputs: int) -> dict[str, jax.Array]:
    size = width + inputs
    return {
        "gates": normal(seed, size, 2 * width, scale=size**-0.5),
        "new": normal(seed + 1, size, width, scale=size**-0.5),
    }


def three_loops() -> Made:
    """Loops of 200, 300 and 100 small layers, with products and softmax between them."""

    def loss(w, x):
        h, _ = lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=200)
        h = jax.nn.softmax(h @ w) * h
        h, sums = lax.scan(lambda h, _: (0.5 * jnp.sin(h @ w) + 0.4 * h, h.mean()), h, length=300)
        h = jnp.exp(-(h**2)) @ w
        h, _ = lax.scan(lambda h, _: (h - 0.1 * jnp.tanh(h @ w.T), None), h, length=100)
        return jnp.sum(h**2) + jnp.sum(sums)

    return loss, (normal(0, 64, 64, scale=1 / 8), normal(1, 32, 64))


def encoder_and_decoder() -> Made:
    """A recurrent encoder, attention over all its states from a decoder, and a loss in chunks."""

    def loss(encoder, decoder, readout, xs):
        start = jnp.zeros((16, 64))
        _, states = lax.scan(lambda h, x: (gru(encoder, h, x), gru(encoder, h, x)), start, xs)

        def decode(h, x):
            read = jax.nn.softmax(jnp.einsum("bw,tbw->bt", h, states) / 8)
            h = gru(decoder, h, jnp.concatenate([jnp.einsum("bt,tbw->bw", read, states), x], -1))
            return h, h

        _, out = lax.scan(decode, start, xs[:100])
        chunks = out.reshape(10, 160, 64)
        chunk = lambda total, h: (total + jax.nn.logsumexp(h @ readout, -1).sum(), None)
        return lax.scan(chunk, 0.0, chunks)[0] / 1600

    readout = normal(4, 64, 1000, scale=1 / 8)
    args = weights_of_gru(0, 64, 32), weights_of_gru(2, 64, 96), readout, normal(5, 200, 16, 32)
    return loss, args


def gpt_with_a_loss_in_chunks() -> Made:
    """Six layers, then logits of 2,000 words for 128 places at a time."""

    def layer(h, w):
        q, k, v = jnp.split(centred(h) @ w["qkv"], 3, -1)
        scores = jnp.einsum("bqd,bkd->bqk", q, k) / 11.3
        h = h + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v) @ w["out"]
        return h + jax.nn.gelu(centred(h) @ w["up"]) @ w["down"], None

    def loss(stacked, words, h):
        h, _ = lax.scan(layer, h, stacked)
        chunk = lambda total, h: (total + jax.nn.logsumexp(h @ words, -1).sum(), None)
        total, _ = lax.scan(chunk, 0.0, h.reshape(-1, 128, 128))
        return total / h.size

    shapes = {"qkv": (128, 384), "out": (128, 128), "up": (128, 512), "down": (512, 128)}
    stacked = {
        k: normal(i, 6, *size, scale=size[0] ** -0.5) for i, (k, size) in enumerate(shapes.items())
    }
    return loss, (stacked, normal(5, 128, 2000, scale=0.1), normal(6, 8, 128, 128))


def unrolled_optimiser() -> Made:
    """300 steps of gradient descent with momentum, differentiated in their rates."""

    def loss(rates, w, x):
        inner = lambda w: jnp.mean((jnp.tanh(x @ w) @ w - x) ** 2)

        def step(state, rate):
            w, momentum = state
            momentum = 0.9 * momentum + jax.grad(inner)(w)
            return (w - rate * momentum, momentum), None

        (w, _), _ = lax.scan(step, (w, jnp.zeros_like(w)), rates)
        return inner(w)

    return loss, (jnp.full(300, 0.1), normal(0, 48, 48, scale=1 / 7), normal(1, 64, 48))


def solver_then_filter() -> Made:
    """A wave on a ring of points, then a recurrent filter of what was seen of it, then a sum."""

    def loss(speed, w, u):
        def move(state, _):
            u, v = state
            force = jnp.roll(u, 1, -1) + jnp.roll(u, -1, -1) - 2 * u - 0.1 * jnp.sin(u)
            v = v + 0.1 * speed * force
            return (u + 0.1 * v, v), u[:, ::8]

        _, seen = lax.scan(move, (u, jnp.zeros_like(u)), length=400)
        _, states = lax.scan(lambda h, x: (gru(w, h, x), h), jnp.zeros((8, 64)), seen)
        decay = lambda c, h: (0.99 * c + h**2, jnp.sum(c))
        return jnp.mean(lax.scan(decay, jnp.zeros((8, 64)), states, reverse=True)[1])

    return loss, (jnp.ones(512), weights_of_gru(0, 64, 64), normal(2, 8, 512))


def loop_in_a_loop() -> Made:
    """40 blocks of 16 steps."""

    def loss(w, x):
        inner = lambda h, _: (0.5 * jnp.tanh(h @ w) + 0.4 * h, None)
        outer = lambda h, x: (lax.scan(inner, h, None, 16)[0] + x, None)
        return jnp.mean(lax.scan(outer, jnp.ones((32, 64)), x)[0] ** 2)

    return loss, (normal(0, 64, 64, scale=1 / 8), normal(1, 40, 32, 64))


def branches() -> Made:
    """One of two loops, and then a third."""

    def loss(w, x):
        one = lambda h: lax.scan(lambda h, _: (jnp.tanh(h @ w), None), h, length=200)[0]
        other = lambda h: lax.scan(
            lambda h, _: (0.5 * jnp.sin(h @ w) + 0.4 * h, None), h, length=100
        )[0]
        h = lax.cond(x[0, 0] > -9, one, other, x)
        return jnp.mean(lax.scan(lambda h, _: (jnp.cos(h @ w.T), None), h, length=200)[0] ** 2)

    return loss, (normal(0, 64, 64, scale=1 / 8), normal(1, 64, 64))


def series() -> Made:
    """Each of 32 series by itself under `vmap`, then all together."""

    def loss(w, xs):
        cell = lambda h, x: (jnp.tanh(h @ w + x), h)
        each = jax.vmap(lambda x: lax.scan(cell, jnp.zeros(32), x)[1])(xs)
        mixed = jnp.swapaxes(each, 0, 1) * jax.nn.softmax(jnp.swapaxes(each, 0, 1), 1)
        return jnp.mean(lax.scan(lambda c, h: (0.9 * c + jnp.sin(h), c), mixed[0], mixed)[1] ** 2)

    return loss, (normal(0, 32, 32, scale=1 / 6), normal(1, 32, 300, 32))


def flow() -> Made:
    """Eight blocks in Python, each with a loop of 20 steps of a network."""

    def block(z, w):
        def step(z, _):
            a, b = jnp.split(z, 2, -1)
            return jnp.concatenate([b + 0.1 * jnp.tanh(a @ w[0]) @ w[1], a], -1), None

        return lax.scan(step, z, length=20)[0]

    def loss(ws, z):
        for w in zip(*ws, strict=True):
            z = block(centred(z), w)
        return jnp.mean(z**2)

    return loss, (
        (normal(0, 8, 32, 128, scale=0.2), normal(1, 8, 128, 32, scale=0.1)),
        normal(2, 128, 64),
    )


def state_space_layers() -> Made:
    """Four layers in Python, each a recurrence over 500 places, with a network between them."""

    def layer(x, w):
        gate, value = jnp.split(x @ w["in"], 2, -1)
        decay = jax.nn.sigmoid(gate)
        step = lambda h, s: (s[0] * h + (1 - s[0]) * s[1],) * 2
        _, states = lax.scan(step, jnp.zeros(value.shape[1:]), (decay, value))
        return x + jax.nn.gelu(centred(states)) @ w["out"]

    def loss(ws, x):
        for w in ws:
            x = layer(x, w)
        return jnp.mean(x**2)

    ws = [
        {"in": normal(i, 64, 128, scale=1 / 8), "out": normal(9 + i, 64, 64, scale=1 / 8)}
        for i in range(4)
    ]
    return loss, (ws, normal(20, 500, 8, 64))


def diffusion() -> Made:
    """50 steps of denoising by a network."""

    def loss(w, x):
        def step(x, t):
            hidden = jax.nn.gelu(centred(x) @ w[0] + jnp.sin(t))
            return x - 0.02 * jax.nn.gelu(hidden @ w[1]) @ w[2], None

        return jnp.mean(lax.scan(step, x, jnp.arange(50.0))[0] ** 2)

    ws = (
        normal(0, 64, 256, scale=0.1),
        normal(1, 256, 256, scale=0.06),
        normal(2, 256, 64, scale=0.06),
    )
    return loss, (ws, normal(3, 256, 64))


def unet_without_loops() -> Made:
    """Convolutions down and up again, in Python."""
    how = {"window_strides": (1, 1), "padding": "SAME"}
    convolved = partial(lax.conv_general_dilated, **how, dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss(ws, x):
        met = []
        for w in ws["down"]:
            x = jax.nn.gelu(convolved(x, w))
            met.append(x)
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        for w in ws["up"]:
            x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
            x = jax.nn.gelu(convolved(jnp.concatenate([x, met.pop()], -1), w))
        return jnp.mean(x**2)

    ws = {
        "down": [normal(i, 3, 3, 8, 8, scale=0.1) for i in range(3)],
        "up": [normal(5 + i, 3, 3, 16, 8, scale=0.1) for i in range(3)],
    }
    return loss, (ws, normal(9, 4, 64, 64, 8))


PROGRAMS: dict[str, Callable[[], Made]] = {
    "three loops": three_loops,
    "encoder and decoder": encoder_and_decoder,
    "GPT, loss in chunks": gpt_with_a_loss_in_chunks,
    "unrolled optimiser": unrolled_optimiser,
    "solver, then a filter": solver_then_filter,
    "loop in a loop": loop_in_a_loop,
    "loops in branches": branches,
    "series under vmap": series,
    "flow": flow,
    "state space layers": state_space_layers,
    "diffusion": diffusion,
    "unet, no loops": unet_without_loops,
}
