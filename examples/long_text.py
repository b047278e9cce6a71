"""A recurrent network reads a long real text, and its gradient reaches back to the first byte.

The text is the reference pages that come with Python (`pydoc_data.topics`, under Python's own
licence): half a million bytes of English. A network of gated units predicts each byte from those
before. Its units remember for times from one byte to the length of a stretch (after Tallec and
Ollivier, 2018). Stretches are not cut: every gradient goes back through all of one, within a given
budget of memory.

The picture shows the use of a long gradient: how much a prediction at the end depends on a byte
that was read long before, at first and once the network has learnt. The last table is for one
gradient through 50,000 bytes.

Run `python examples/long_text.py`; it needs matplotlib, optax and tqdm, and some minutes. It draws
the losses, and how far the gradient reaches, in long_text.png."""

import argparse
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from pydoc_data import topics
from typing import NamedTuple

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray, UInt8
from tqdm import tqdm

import loopkit
from comparison import compare

TEXT = np.frombuffer("\n".join(topics.topics.values()).encode(), np.uint8)
BYTES = 256

Hidden = Float[Array, "batch size"]
Texts = UInt8[Array, "length batch"]


class Network(NamedTuple):
    table: Float[Array, "bytes two_sizes"]  # from a byte to the gates and to new values
    weight: Float[Array, "size two_sizes"]  # from the memory to the gates and to new values
    bias: Float[Array, " size"]  # biases of the gates: how long a unit remembers
    readout: Float[Array, "size bytes"]


def initial(key: PRNGKeyArray, size: int, longest: int) -> Network:
    """Units that remember for one byte, for `longest`, and for all times between."""
    keys = jax.random.split(key, 3)
    return Network(
        table=jax.random.normal(keys[0], (BYTES, 2 * size)),
        weight=jax.random.normal(keys[1], (size, 2 * size)) / size**0.5,
        bias=-jnp.log(jnp.geomspace(1, longest, size)),
        readout=jax.random.normal(keys[2], (size, BYTES)) / size**0.5,
    )


def read(network: Network, hidden: Hidden, brought: Float[Array, "batch two_sizes"]) -> Hidden:
    gate, new = jnp.split(brought + hidden @ network.weight, 2, axis=-1)
    return hidden + jax.nn.sigmoid(gate + network.bias) * (jnp.tanh(new) - hidden)


def bits_per_byte(network: Network, texts: Texts, scan: Callable) -> Float[Array, ""]:
    """Return the mean over all bytes but the first, each given all before it."""

    def step(hidden, pair):
        seen, following = pair
        hidden = read(network, hidden, network.table[seen])
        logits = hidden @ network.readout
        return hidden, optax.softmax_cross_entropy_with_integer_labels(logits, following)

    hidden = jnp.zeros((texts.shape[1], network.bias.size))
    _, nats = scan(step, hidden, (texts[:-1], texts[1:]))
    return jnp.mean(nats) / jnp.log(2.0)


def reach(network: Network, text: UInt8[Array, " length"]) -> Float[Array, " length-1"]:
    """Return how much the bits of the last byte depend on what each byte before it brought."""

    def last_bits(brought):
        hidden = jnp.zeros((1, network.bias.size))
        step = lambda hidden, x: (read(network, hidden, x[None]), None)
        hidden, _ = loopkit.scan(step, hidden, brought)
        return -jax.nn.log_softmax(hidden[0] @ network.readout)[text[-1]]

    slope = jax.grad(last_bits)(network.table[text[:-1]])
    return jnp.linalg.norm(slope, axis=1)


def stretches(step: int, batch: int, length: int) -> Texts:
    """Return the batch of a step: random stretches of the text."""
    starts = np.random.default_rng(step).integers(len(TEXT) - length, size=batch)
    return np.stack([TEXT[start : start + length] for start in starts], axis=1)


def train(
    network: Network, scan: Callable, *, steps: int, batch: int, length: int
) -> tuple[Network, list[float]]:
    """Returns the network, and the bits a byte of each step."""
    rates = optax.cosine_decay_schedule(1e-2, steps)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rates))
    state = optimiser.init(network)

    @jax.jit
    def update(network, state, texts):
        bits, grad = jax.value_and_grad(bits_per_byte)(network, texts, scan)
        updates, state = optimiser.update(grad, state)
        return optax.apply_updates(network, updates), state, bits

    curve = []
    for step in (progress := tqdm(range(steps), desc=f"{length:,} bytes at a stretch")):
        network, state, bits = update(network, state, stretches(step, batch, length))
        curve.append(float(bits))
        progress.set_postfix(bits=f"{np.mean(curve[-10:]):.3f}", refresh=False)
    return network, curve


def draw(path: Path, curve: list[float], reaches: dict[str, np.ndarray]) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    left.plot(np.arange(len(curve)) + 1, curve)
    left.set(xlabel="steps of training", ylabel="bits a byte", yscale="log")
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("{x:g}")
    for name, norms in reaches.items():
        edges = np.unique(np.geomspace(1, len(norms) + 1, 40).astype(int))
        back = norms[::-1]
        means = [back[a - 1 : b - 1].mean() for a, b in pairwise(edges)]
        right.loglog(edges[:-1], means, label=name)
    right.set(xlabel="bytes back", ylabel="what the last prediction\ndepends on a byte")
    right.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150, help="of training")
    parser.add_argument("--length", type=int, default=2048, help="bytes of a stretch, in training")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=128, help="units")
    parser.add_argument(
        "--whole", type=int, default=50_000, help="bytes of the gradient in the end"
    )
    parser.add_argument("--memory", default="1 MB", help="for a gradient")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plot", type=Path, default=Path("long_text.png"))
    args = parser.parse_args(argv)

    within = lambda *given: loopkit.scan(*given, memory=args.memory)
    network = initial(jax.random.key(0), args.size, args.length)
    sizes = {"steps": args.steps, "batch": args.batch, "length": args.length}
    trained, curve = train(network, within, **sizes)
    print(f"\n{len(TEXT):,} bytes of text; {curve[0]:.2f} bits a byte at first, ", end="")
    print(f"{np.mean(curve[-10:]):.2f} after {args.steps} steps")

    text, far = jnp.asarray(TEXT[: args.whole]), jax.jit(reach)
    reaches = {
        name: np.asarray(far(given, text))
        for name, given in (("at first", network), ("trained", trained))
    }
    kept = {name: norms[: len(norms) // 2].sum() / norms.sum() for name, norms in reaches.items()}
    print("share of the last prediction's slope that is in the first half of the text: ", end="")
    print(", ".join(f"{share:.1e} {name}" for name, share in kept.items()))

    print(f"\nGradient through {args.whole:,} bytes")
    scans = {
        f"loopkit.scan, memory={args.memory!r}": within,
        "equinox.internal.scan": lambda *given: eqxi.scan(*given, kind="checkpointed"),
        "lax.scan": jax.lax.scan,
    }
    slope = lambda scan: jax.grad(lambda network: bits_per_byte(network, text[:, None], scan))
    costs = compare({n: slope(scan) for n, scan in scans.items()}, trained, repeats=args.repeats)
    draw(args.plot, curve, reaches)
    print(f"\ndrawn in {args.plot}")
    return {"curve": curve, "reaches": reaches, "costs": costs}


if __name__ == "__main__":
    main()
