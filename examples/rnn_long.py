"""The copy task over 20,000 steps, learnt within a few megabytes.

A recurrent network reads five symbols, then 20,000 blanks, and then has to say the five symbols
(Hochreiter and Schmidhuber, 1997). The gradient crosses every step between. The states of all steps
fill hundreds of megabytes. With a budget in bytes, the loop stores what fits, and computes the rest
again.

The network forgets through gates, one for each unit and symbol; those of the blank start nearly
closed (after Tallec and Ollivier, 2018). It learns to copy over a hundred blanks. Over 20,000
blanks it then forgets some of that, and training on the whole length teaches it to remember.

Run `python examples/rnn_long.py`; it needs matplotlib, optax and tqdm, and a minute. It draws
the share of symbols copied in rnn_long.png.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from tqdm import tqdm

import loopkit
from comparison import compare

SYMBOLS, COPIED, SIZE = 8, 5, 64
BLANK, SAY = SYMBOLS, SYMBOLS + 1  # the inputs while waiting, and while answering

Hidden = Float[Array, "batch size"]
Tokens = Int[Array, "steps batch"]


class Network(NamedTuple):
    table: Float[Array, "tokens size"]
    gates: Float[Array, "tokens size"]  # before the sigmoid: how much of a unit stays
    weight: Float[Array, "size size"]
    readout: Float[Array, "size symbols"]


def initial(key: PRNGKeyArray, memory: int) -> Network:
    """Return a network that remembers for about `memory` blanks."""
    keys = jax.random.split(key, 3)
    weight, _ = jnp.linalg.qr(jax.random.normal(keys[1], (SIZE, SIZE)))
    return Network(
        table=jax.random.normal(keys[0], (SYMBOLS + 2, SIZE)),
        gates=jnp.zeros((SYMBOLS + 2, SIZE)).at[BLANK].set(jnp.log(memory)),
        weight=weight,
        readout=jax.random.normal(keys[2], (SIZE, SYMBOLS)) / SIZE**0.5,
    )


def read(network: Network, hidden: Hidden, token: Int[Array, " batch"]) -> Hidden:
    stays = jax.nn.sigmoid(network.gates[token])
    new = jnp.tanh(hidden @ network.weight + network.table[token])
    return new + stays * (hidden - new)


def answer(network: Network, symbols: Tokens, blanks: int, scan: Callable):
    """Return the nats that a copied symbol costs, and the share of them that are right."""
    waiting = jnp.full((blanks, symbols.shape[1]), BLANK)
    tokens = jnp.concatenate([symbols, waiting, jnp.full_like(symbols, SAY)])

    def step(hidden, token):
        hidden = read(network, hidden, token)
        return hidden, None

    def say(hidden, token):
        hidden = read(network, hidden, token)
        return hidden, hidden @ network.readout

    hidden = jnp.zeros((symbols.shape[1], SIZE))
    hidden, _ = scan(step, hidden, tokens[:-COPIED])
    _, logits = loopkit.scan(say, hidden, tokens[-COPIED:])
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, symbols)
    return jnp.mean(nats), jnp.mean(jnp.argmax(logits, -1) == symbols)


def draw_symbols(key: PRNGKeyArray, batch: int) -> Tokens:
    return jax.random.randint(key, (COPIED, batch), 0, SYMBOLS)


def train(
    network: Network,
    key: PRNGKeyArray,
    scan: Callable,
    *,
    blanks: int,
    steps: int,
    batch: int,
    rate: float,
) -> tuple[Network, list[float]]:
    """Returns the network and the share of symbols it got right at each step."""
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    state = optimiser.init(network)

    @jax.jit
    def update(network, state, key):
        slope = jax.value_and_grad(answer, has_aux=True)
        (nats, right), grad = slope(network, draw_symbols(key, batch), blanks, scan)
        updates, state = optimiser.update(grad, state)
        return optax.apply_updates(network, updates), state, nats, right

    shares = []
    progress = tqdm(jax.random.split(key, steps), desc=f"{blanks:,} blanks", unit="step")
    for key in progress:
        network, state, nats, right = update(network, state, key)
        shares.append(float(right))
        progress.set_postfix(
            nats=f"{nats:.3f}", right=f"{np.mean(shares[-20:]):.0%}", refresh=False
        )
    return network, shares


def draw(path: Path, first: list[float], then: list[float], args: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True, layout="constrained")
    for axis, shares, blanks in zip(axes, (first, then), (args.short, args.long), strict=True):
        window = max(1, len(shares) // 15)
        smooth = np.convolve(shares, np.ones(window) / window, mode="valid")
        steps = np.arange(1, len(shares) + 1)
        axis.plot(steps, 100 * np.array(shares), color="C0", alpha=0.3, linewidth=0.8)
        axis.plot(steps[window - 1 :], 100 * smooth, color="C0")
        axis.axhline(100 / SYMBOLS, color="gray", linestyle=":", label="guessing")
        axis.set(title=f"over {blanks:,} blanks", xlabel="steps of training", ylim=(0, 102))
    axes[0].set_ylabel("symbols copied (%)")
    axes[0].legend()
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", type=int, default=100, help="blanks to learn with")
    parser.add_argument("--long", type=int, default=20_000, help="blanks to go on with")
    parser.add_argument("--steps", type=int, nargs=2, default=(600, 100), help="of training each")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--memory", default="2 MB", help="for the backward pass")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plot", type=Path, default=Path("rnn_long.png"))
    args = parser.parse_args(argv)

    def within(step, hidden, tokens):
        return loopkit.scan(step, hidden, tokens, memory=args.memory)

    def by_equinox(step, hidden, tokens):
        return eqxi.scan(step, hidden, tokens, kind="checkpointed")

    keys = jax.random.split(jax.random.key(0), 4)
    network = initial(keys[0], args.long)
    short = {"blanks": args.short, "steps": args.steps[0], "batch": 4 * args.batch, "rate": 1e-2}
    network, first = train(network, keys[1], within, **short)

    @jax.jit
    def share(network):
        return answer(network, draw_symbols(keys[2], 10 * args.batch), args.long, within)[1]

    before = float(share(network))
    long = {"blanks": args.long, "steps": args.steps[1], "batch": args.batch, "rate": 2e-3}
    trained, then = train(network, keys[3], within, **long)
    after = float(share(trained))
    print(
        f"\nCopied over {args.long:,} blanks: {before:.1%} before training on them, "
        f"{after:.1%} after"
    )

    print(f"\nGradient over {args.long:,} steps")
    scans = {
        f"loopkit.scan, memory={args.memory!r}": within,
        "equinox.internal.scan": by_equinox,
        "lax.scan": jax.lax.scan,
    }
    symbols = draw_symbols(keys[2], args.batch)
    slope = lambda scan: jax.grad(lambda network: answer(network, symbols, args.long, scan)[0])
    costs = compare(
        {name: slope(scan) for name, scan in scans.items()}, trained, repeats=args.repeats
    )
    draw(args.plot, first, then, args)
    print(f"\ndrawn in {args.plot}")
    return {"copied": first, "before": before, "after": after, "costs": costs}


if __name__ == "__main__":
    main()
