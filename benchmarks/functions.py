"""Functions without loops: a budget for the gradient, and jax.checkpoint by hand.

    python benchmarks/run.py --only functions

| function    | what it does                                                    |
| ----------- | --------------------------------------------------------------- |
| residual    | 12 blocks of two convolutions, 16 channels, 8 images of 32 x 32 |
| transformer | 8 layers, 128 wide, 4 heads, 4 sequences of 128                 |
| recurrent   | 64 steps of a gated unit in a Python loop, width 64, batch 128  |
| skips       | 12 layers; the last ones read what the first ones made          |

By hand, each layer is put under jax.checkpoint, with and without a policy. loopkit gets what that
needs, by the compiler's account, as a measured budget, and parts of what is needed if everything is
kept, as one that is predicted.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import layers
import loopkit
from harness import measure, ratio, recorded, temp_bytes
from layers import normal
from report import Report

TITLE = "Functions without loops"
PARTS = 0.2, 0.4, 0.7
"""Parts of the memory of a gradient that keeps everything."""
LIMIT = 1.03
"""The most time, relative to that of jax.checkpoint by hand in the same memory."""
BY_HAND = {
    "a checkpoint for each layer": jax.checkpoint,
    "the same, dots_saveable": partial(
        jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable
    ),
}


def in_python(case: layers.Case) -> tuple[Callable, tuple]:
    """Return `f(weights, init, wrap)`, whose steps are called as `wrap(step)`, and its operands."""

    def function(operands, init, wrap):
        params, xs = operands
        carry = init
        for k in range(case.length):
            x = jax.tree.map(lambda a, k=k: a[k], xs)
            carry = wrap(lambda *a: case.step(*a)[0])(params, carry, x)
        return (carry**2).mean()

    return function, ((case.params, case.xs), case.init)


def residual(blocks: int = 12, channels: int = 16) -> layers.Case:
    def convolved(x, w):
        layout = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=layout)
        y = y - y.mean((0, 1, 2))
        return y * lax.rsqrt((y * y).mean((0, 1, 2)) + 1e-5)

    def step(_, x, w):
        return jax.nn.relu(x + convolved(jax.nn.relu(convolved(x, w[0])), w[1])), None

    xs = normal(1, blocks, 2, 3, 3, channels, channels, scale=0.1)
    return layers.Case(step, jnp.zeros(()), normal(2, 8, 32, 32, channels), xs, blocks, ())


def skips(count: int = 12, width: int = 64, batch: int = 2048) -> tuple[Callable, tuple]:
    def layer(x, w):
        return x + jax.nn.gelu(jnp.tanh(x @ w[0]) @ w[1])

    def function(weights, x, wrap):
        met = []
        for w in weights[: count // 2]:
            met.append(x)
            x = wrap(layer)(x, w)
        for w in weights[count // 2 :]:
            x = wrap(layer)(x, w) * jnp.cos(met.pop())
        return (x**2).mean()

    ups = normal(1, count, width, 2 * width, scale=0.1)
    downs = normal(2, count, 2 * width, width, scale=0.1)
    return function, (list(zip(ups, downs, strict=True)), normal(3, batch, width))


FUNCTIONS: dict[str, Callable[[], tuple[Callable, tuple]]] = {
    "residual": lambda: in_python(residual()),
    "transformer": lambda: in_python(layers.transformer(4, 128, 8, 128)),
    "recurrent": lambda: in_python(layers.gru(128, 64, 64)),
    "skips": skips,
}


def compare(report: Report, repeats: int) -> None:
    for name, make in FUNCTIONS.items():
        _compare(report, repeats, name, *make())


def _compare(report: Report, repeats: int, name: str, function: Callable, args: tuple) -> None:
    gradient = lambda wrap: jax.grad(partial(function, wrap=wrap))
    contenders: dict[str, Callable[..., Any]] = {"everything kept": gradient(lambda f: f)}
    contenders |= {hand: gradient(wrap) for hand, wrap in BY_HAND.items()}
    needed = {
        hand: temp_bytes(jax.jit(f).lower(*args).compile()) or 0 for hand, f in contenders.items()
    }
    budgets = {f"loopkit, in the memory of {hand}": needed[hand] for hand in BY_HAND}
    budgets |= {f"loopkit, {p:.0%}": int(p * needed["everything kept"]) for p in PARTS}
    for label, budget in budgets.items():
        plain = partial(function, wrap=lambda f: f)
        measured = label.startswith("loopkit, in the memory of")
        within = jax.grad(loopkit.checkpointed(plain, memory=budget, measure=measured))
        try:
            jax.eval_shape(within, *args)
        except ValueError as refused:
            report.note(f"{name}: {label}: {refused}")
        else:
            contenders[label] = within
    results = measure(contenders, args, repeats, rtol=2e-2, afresh=True)
    report.measured(recorded(name, results, "everything kept"))
    for hand in BY_HAND:
        ours = results.get(f"loopkit, in the memory of {hand}")
        if ours is not None:
            over = ratio(ours.seconds, results[hand].seconds)
            report.target(f"{name}: in the memory of {hand}", over, LIMIT)
