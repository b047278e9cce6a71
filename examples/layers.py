"""A small GPT learns to write within a budget of memory, on one device and divided over eight.

Its twelve layers are one scan (Radford et al., 2019). It learns the first fifteen chapters of Jane
Austen's *Northanger Abbey* (1818), which lie beside this program, byte by byte. Attention sees how
far back a byte is, not where it is, by a slope of its own for each head (Press et al., 2022).

`lax.scan` would store all that a layer computes, which is most of the memory of training. Here
`memory=` is a budget for that, and loopkit stores what is most expensive to compute again. The
right picture shows steps of training within several budgets, beside what policies of
`jax.checkpoint` store. Each step also needs memory that is in no budget: for the gradient, the
optimiser, the logits, and the one layer that is differentiated.

In the end the program takes the first steps again on eight devices, simulated on the CPU. Each has
a part of the batch, of every parameter, and of the optimiser's state. The losses are the same.

Run `python examples/layers.py`; it needs matplotlib, optax and tqdm, and some minutes. It draws
the losses, and time against memory, in layers.png."""

import argparse
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray, PyTree, UInt8
from tqdm import tqdm

import loopkit
from comparison import Cost, compare

TEXT = np.fromfile(Path(__file__).parent / "northanger_abbey.txt", np.uint8)
BYTES = 256
SLOPES = np.array([2.0, 1.0, 0.5, 0.25], np.float32)  # of the heads: how near each of them looks

Weights = PyTree[Float[Array, "..."]]
Texts = UInt8[Array, "batch length"]


def initial(key: PRNGKeyArray, layers: int, width: int) -> Weights:
    """Return weights with which every layer changes its input a little, and all bytes are equally
    likely."""
    keys = iter(jax.random.split(key, 5))
    normal = lambda *shape, scale: scale * jax.random.normal(next(keys), shape)
    little = (2 * layers) ** -0.5
    return {
        "bytes": normal(BYTES, width, scale=1.0),
        "layers": {
            "qkv": normal(layers, width, 3 * width, scale=width**-0.5),
            "out": normal(layers, width, width, scale=little * width**-0.5),
            "up": normal(layers, width, 4 * width, scale=width**-0.5),
            "down": normal(layers, 4 * width, width, scale=little * (4 * width) ** -0.5),
        },
        "readout": jnp.zeros((width, BYTES)),
    }


def normed(x: Float[Array, "... width"]) -> Float[Array, "... width"]:
    return jax.nn.standardize(x, epsilon=1e-5)


def layer(x: Float[Array, "batch length width"], weights: Weights) -> tuple[Array, None]:
    places = jnp.arange(x.shape[1], dtype=x.dtype)
    nearness = SLOPES[:, None, None] * (places - places[:, None])  # of a byte to those before
    heads = (normed(x) @ weights["qkv"]).reshape(*x.shape[:2], len(SLOPES), -1)
    qkv = jnp.split(heads, 3, axis=-1)
    mixed = jax.nn.dot_product_attention(*qkv, bias=nearness[None], is_causal=True)
    x = x + mixed.reshape(x.shape) @ weights["out"]
    return x + jax.nn.gelu(normed(x) @ weights["up"]) @ weights["down"], None


def predicted(weights: Weights, texts: Texts, scan: Callable) -> Float[Array, "batch length bytes"]:
    """Return logits for the byte after each byte."""
    x, _ = scan(layer, weights["bytes"][texts], weights["layers"])
    return normed(x) @ weights["readout"]


def bits_per_byte(weights: Weights, texts: Texts, scan: Callable) -> Float[Array, ""]:
    logits = predicted(weights, texts[:, :-1], scan)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, texts[:, 1:])
    return jnp.mean(nats) / jnp.log(2.0)


def stretches(step: int, batch: int, length: int) -> Texts:
    """Return the batch of a step: random stretches of the text, with the byte after each."""
    starts = np.random.default_rng(step).integers(len(TEXT) - length, size=batch)
    return np.stack([TEXT[start : start + length + 1] for start in starts])


def optimiser_for(steps: int) -> optax.GradientTransformation:
    rates = optax.warmup_cosine_decay_schedule(0.0, 3e-3, max(1, steps // 20), steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rates, b2=0.99))


def update_by(scan: Callable, optimiser: optax.GradientTransformation) -> Callable:
    """Return a step of training: weights, state and texts to new weights, state and the loss."""

    def update(weights: Weights, state: optax.OptState, texts: Texts) -> tuple:
        bits, slope = jax.value_and_grad(bits_per_byte)(weights, texts, scan)
        change, state = optimiser.update(slope, state)
        return optax.apply_updates(weights, change), state, bits

    return update


def divided(arrays: PyTree, mesh: Mesh) -> PyTree[NamedSharding]:
    """Return where arrays are: each device has a part of the last axis of every one."""
    last = lambda a: P(*[None] * (a.ndim - 1), "d") if a.ndim else P()
    return jax.tree.map(lambda a: NamedSharding(mesh, last(a)), arrays)


def train(
    weights: Weights,
    update: Callable,
    optimiser: optax.GradientTransformation,
    batches: Sequence[Texts],
    devices: Sequence[jax.Device],
) -> tuple[Weights, list[float]]:
    """Returns the weights, divided between devices, and the bits a byte of each step."""
    mesh = Mesh(np.asarray(devices), ("d",))
    state = optimiser.init(weights)
    places = divided(weights, mesh), divided(state, mesh)
    weights, state = jax.device_put((weights, state), places)
    update = jax.jit(update, out_shardings=(*places, None))
    curve = []
    name = f"training on {len(devices)} device{'s' * (len(devices) > 1)}"
    for texts in (progress := tqdm(batches, desc=name)):
        texts = jax.device_put(texts, NamedSharding(mesh, P("d")))
        weights, state, bits = update(weights, state, texts)
        curve.append(float(bits))
        progress.set_postfix(bits=f"{np.mean(curve[-10:]):.3f}", refresh=False)
    return weights, curve


def written(weights: Weights, seen: UInt8[Array, " length"], count: int, scan: Callable) -> str:
    """Return what the network writes after `seen`, a byte at a time."""

    def step(seen: Array, key: PRNGKeyArray) -> tuple[Array, Array]:
        logits = predicted(weights, seen[None], scan)[0, -1]
        new = jax.random.categorical(key, logits / 0.7).astype(seen.dtype)
        return jnp.append(seen[1:], new), new

    _, new = jax.jit(jax.lax.scan, static_argnums=0)(
        step, jnp.asarray(seen), jax.random.split(jax.random.key(1), count)
    )
    return bytes(np.asarray(new)).decode(errors="replace")


def contenders(budgets: list[str]) -> dict[str, Callable]:
    """Return scans by lax, with policies of `jax.checkpoint`, and by loopkit within budgets."""
    found = {"lax.scan": jax.lax.scan}
    for name in ("dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable"):
        options = {"policy": getattr(jax.checkpoint_policies, name), "prevent_cse": False}
        found[name] = lambda f, *given, o=options: jax.lax.scan(jax.checkpoint(f, **o), *given)
    for memory in budgets:
        found[f"memory={memory!r}"] = partial(loopkit.scan, memory=memory)
    return found


def draw(path: Path, curve: list[float], costs: dict[str, Cost]) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    width = max(1, len(curve) // 50)
    left.plot(np.arange(len(curve)) + 1, curve, color="C0", alpha=0.3)
    smooth = np.convolve(curve, np.ones(width) / width, "valid")
    left.plot(np.arange(len(smooth)) + (width + 1) / 2, smooth, color="C0")
    left.set(xlabel="step of training", ylabel="bits a byte", ylim=(0, None))
    kinds = ("loopkit, by budget", "o", (0, -11), "center"), ("lax, by policy", "s", (4, 5), "left")
    for who, style, shift, side in kinds:
        ours = {k: c for k, c in costs.items() if ("memory=" in k) == ("loopkit" in who)}
        points = [((c.bytes or 0) / 1e6, 1e3 * c.seconds) for c in ours.values()]
        right.plot(*zip(*points, strict=True), style, label=who)
        for name, point in zip(ours, points, strict=True):
            text = name.removeprefix("memory=").strip("'").replace("_", " ")
            small = {"textcoords": "offset points", "fontsize": 7, "ha": side}
            right.annotate(text, point, shift, **small)
    right.set(xlabel="temporary memory of a step, MB", xscale="log", ylabel="ms")
    right.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    right.xaxis.set_major_formatter("{x:g}")
    right.minorticks_off()
    right.margins(0.2, 0.1)
    right.set_ylim(bottom=0)
    right.legend(frameon=False, loc="lower left")
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--steps", type=int, default=1000, help="of training")
    add("--layers", type=int, default=12)
    add("--width", type=int, default=64)
    add("--length", type=int, default=64, help="bytes of a stretch")
    add("--batch", type=int, default=8, help="stretches in a step of training")
    add("--memory", default="4 MB", help="for the gradient, in training")
    add("--written", type=int, default=300, help="bytes that the network writes")
    add("--compared", type=int, default=32, help="stretches in a step whose cost is compared")
    add("--budgets", nargs="+", default=["2 MB", "4 MB", "8 MB", "16 MB", "32 MB"])
    add("--repeats", type=int, default=7)
    add("--devices", type=int, default=8, help="simulated on the CPU")
    add("--again", type=int, default=10, help="steps that are taken again on these")
    add("--plot", type=Path, default=Path("layers.png"))
    args = parser.parse_args(argv)

    jax.config.update("jax_num_cpu_devices", args.devices)
    scan = partial(loopkit.scan, memory=args.memory)
    weights = initial(jax.random.key(0), args.layers, args.width)
    optimiser = optimiser_for(args.steps)
    batches = [stretches(step, args.batch, args.length) for step in range(args.steps)]
    count = sum(w.size for w in jax.tree.leaves(weights))
    print(f"{count:,} parameters in {args.layers} layers, {len(TEXT):,} bytes of text")
    print(f"The gradient of a step, memory={args.memory!r}:")
    print(loopkit.explain(lambda w: bits_per_byte(w, batches[0], scan), weights), end="\n\n")

    learn = partial(train, weights, update_by(scan, optimiser), optimiser)
    trained, curve = learn(batches, jax.devices()[:1])
    print(f"{curve[0]:.2f} bits a byte at first, {np.mean(curve[-25:]):.2f} after ", end="")
    print(f"{args.steps} steps. It writes:\n")
    text = written(trained, batches[-1][0, 1:], args.written, scan)
    print(textwrap.indent(text, "    "), end="\n\n")

    print(f"A step of training on {args.compared} stretches")
    steps = {n: update_by(s, optimiser) for n, s in contenders(args.budgets).items()}
    texts = stretches(0, args.compared, args.length)
    costs = compare(steps, weights, optimiser.init(weights), texts, repeats=args.repeats)

    first = batches[: args.again]
    (_, one), (parts, many) = (learn(first, jax.devices("cpu")[:n]) for n in (1, args.devices))
    np.testing.assert_allclose(many, one, rtol=1e-5)
    gap = np.max(np.abs(np.subtract(many, one)))
    share = sum(w.addressable_shards[0].data.size for w in jax.tree.leaves(parts)) / count
    print(f"\nOn {args.devices} devices, each with {share:.1%} of the parameters, ", end="")
    print(f"the losses of {args.again} steps differ by at most {gap:.0e} bits a byte")
    draw(args.plot, curve, costs)
    print(f"\ndrawn in {args.plot}")
    return {"curve": curve, "text": text, "costs": costs, "share": share, "gap": gap}


if __name__ == "__main__":
    main()
