"""One import changed in an existing sequence model: same numbers, less memory.

The model is examples/language/model.py, a recurrent network that reads bytes and predicts the next
one, written with `jax.lax.scan`. Only the line that imports `lax` changes. Both versions train on
the same English text, the reference pages that come with Python, and print the same losses. Their
gradients need different memory: one stores the residuals of every step, the other about the square
root of as many states. The last column of the second table is the price, in time.

Run `python examples/replace_scan.py`; it needs optax, matplotlib and tqdm, and half a minute. It
draws memory against the length of the sequences in replace_scan.png.
"""

import argparse
import difflib
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data import topics
from statistics import median
from types import ModuleType

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, UInt8
from tqdm import tqdm

SOURCE = Path(__file__).parent / "language" / "model.py"
BEFORE, AFTER = "from jax import lax\n", "import loopkit as lax\n"
NAMES = "jax.lax", "loopkit"


def versions() -> dict[str, ModuleType]:
    """Return the model as it is, and with the import changed."""
    source = SOURCE.read_text()
    if source.count(BEFORE) != 1:
        raise ValueError(f"{SOURCE} must have the line {BEFORE!r} once")
    changed = source.replace(BEFORE, AFTER)
    lines = source.splitlines(True), changed.splitlines(True)
    print("".join(difflib.unified_diff(*lines, *NAMES, n=1)))
    modules = {}
    for name, text in zip(NAMES, (source, changed), strict=True):
        modules[name] = ModuleType(f"model_with_{name}")
        exec(compile(text, str(SOURCE), "exec"), vars(modules[name]))
    return modules


def excerpts(length: int, count: int, seed: int) -> UInt8[Array, "count length+1"]:
    """Random stretches of Python's reference pages, as bytes."""
    text = np.frombuffer("\n".join(topics.topics.values()).encode(), np.uint8)
    starts = np.random.default_rng(seed).integers(len(text) - length, size=count)
    return jnp.asarray(np.stack([text[s : s + length + 1] for s in starts]))


def losses(module: ModuleType, options: argparse.Namespace) -> list[float]:
    """Bits a byte, after each step of training."""
    model = module.Reader(options.width, key=jax.random.key(0))
    optimiser = optax.adam(3e-3)
    state = optimiser.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def update(model, state, text):
        loss, grads = eqx.filter_value_and_grad(module.bits_per_byte)(model, text)
        updates, state = optimiser.update(grads, state)
        return eqx.apply_updates(model, updates), state, loss

    seen = []
    for step in tqdm(range(options.steps), desc=f"training with {module.__name__[11:]}"):
        text = excerpts(options.length, options.batch, step)
        model, state, loss = update(model, state, text)
        seen.append(float(loss))
    return seen


def gradient(module: ModuleType, options: argparse.Namespace, length: int) -> Callable:
    """Return the compiled gradient for sequences of this length, and its arguments."""
    model = module.Reader(options.width, key=jax.random.key(0))
    text = excerpts(length, options.batch, 0)
    compiled = jax.jit(jax.grad(module.bits_per_byte)).lower(model, text).compile()
    return compiled, (model, text)


def seconds(calls: dict[str, tuple], repeats: int = 5) -> dict[str, float]:
    """Medians over rounds in which each runs once."""
    taken = {name: [] for name in calls}
    for _ in range(repeats):
        for name, (compiled, arguments) in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(compiled(*arguments))
            taken[name].append(time.perf_counter() - start)
    return {name: median(times) for name, times in taken.items()}


def draw(path: Path, lengths: list[int], memory: dict[str, list[float]]) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name, megabytes in memory.items():
        axes.loglog(lengths, megabytes, "o-", base=2, label=name)
    axes.set_xlabel("length of the sequences (bytes of text)")
    axes.set_ylabel("temporary memory of a gradient (MB)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="of training")
    parser.add_argument("--length", type=int, default=1024, help="of the sequences trained on")
    parser.add_argument("--longest", type=int, default=4096, help="of those measured")
    parser.add_argument("--halvings", type=int, default=4, help="of that length, measured too")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--plot", type=Path, default=Path("replace_scan.png"))
    options = parser.parse_args(argv)

    modules = versions()
    curves = {name: losses(module, options) for name, module in modules.items()}
    print("\nBits a byte, in training")
    print("  step  " + "".join(f"{name:>10}" for name in NAMES))
    for step in sorted({*range(0, options.steps, max(1, options.steps // 5)), options.steps - 1}):
        print(f"  {step:4}  " + "".join(f"{curves[name][step]:10.5f}" for name in NAMES))
    apart = np.max(np.abs(np.subtract(*curves.values())))
    print(f"  at most {apart:.1e} apart")

    lengths = [options.longest >> k for k in reversed(range(options.halvings + 1))]
    memory = {name: [] for name in NAMES}
    print(f"\nOne gradient, {options.batch} sequences, {options.width} units")
    print("  length" + "".join(f"{name + ' MB':>14}" for name in NAMES) + "  less by  time")
    for length in lengths:
        calls = {name: gradient(module, options, length) for name, module in modules.items()}
        for name, (compiled, _) in calls.items():
            memory[name].append(compiled.memory_analysis().temp_size_in_bytes / 1e6)
        before, after = (memory[name][-1] for name in NAMES)
        taken = seconds(calls)
        ratio = taken[NAMES[1]] / taken[NAMES[0]]
        print(f"  {length:6}{before:14.1f}{after:14.1f}{before / after:8.1f}x {ratio:4.2f}x")
    draw(options.plot, lengths, memory)
    print(f"\ndrawn in {options.plot}")
    return {"curves": curves, "memory": memory}


if __name__ == "__main__":
    main()
