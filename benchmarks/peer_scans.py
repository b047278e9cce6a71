"""Scans with inputs and outputs: loopkit, lax, equinox, and scans nested by hand.

Each is a function `run(step, init, xs, length, n) -> (carry, ys)`.
"""

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jax import lax

import loopkit


def lax_scan(step, init, xs, length, n):
    return lax.scan(step, init, xs, length)


def checkpointed_scan(step, init, xs, length, n):
    return lax.scan(jax.checkpoint(step), init, xs, length)


def nested_scans(levels: int):
    """Scans within scans, all but the innermost of `jax.checkpoint`."""

    def run(step, init, xs, length, n):
        sizes, left = [], length
        for level in range(levels, 1, -1):
            goal = round(left ** (1 / level))
            size = min(
                (k for k in range(1, left + 1) if left % k == 0), key=lambda k: abs(k - goal)
            )
            sizes.append(size)
            left //= size
        sizes.append(left)

        def nest(sizes):
            if not sizes:
                return step
            inner = nest(sizes[1:])
            body = jax.checkpoint(inner) if len(sizes) > 1 else inner
            return lambda carry, x: lax.scan(body, carry, x, sizes[0])

        rows = jax.tree.map(lambda x: x.reshape(*sizes, *x.shape[1:]), xs)
        carry, ys = nest(sizes)(init, rows)
        return carry, jax.tree.map(lambda y: y.reshape(length, *y.shape[levels:]), ys)

    return run


def equinox(setting):
    """Run the checkpointed scan; "bounded" is a while loop, which has neither xs nor ys of its
    own."""

    def scan(step, init, xs, length, n):
        kept = {"default": None, "all": "all"}.get(setting, setting)
        return eqxi.scan(step, init, xs, length, kind="checkpointed", checkpoints=kept)

    def bounded(step, init, xs, length, n):
        def body(state):
            i, carry, total = state
            x = jax.tree.map(lambda x: x[i], xs)
            carry, y = step(carry, x)
            return i + 1, carry, total if y is None else total + jnp.sum(y**2)

        start = jnp.int32(0), init, jnp.float32(0)
        _, carry, total = eqxi.while_loop(
            lambda s: s[0] < n, body, start, max_steps=length, kind="bounded"
        )
        return carry, None if xs is None else jnp.sqrt(total)

    return bounded if setting == "bounded" else scan


def loopkit_scan(**options):
    return lambda step, init, xs, length, n: loopkit.scan(step, init, xs, length, **options)


def loopkit_until(**options):
    """Scan with `until`: the number of steps is not known until the loop ends."""

    def run(step, init, xs, length, n):
        def counted(state, x):
            carry, y = step(state[1], x)
            return (state[0] + 1, carry), y

        (_, carry), ys = loopkit.scan(
            counted, (jnp.int32(0), init), xs, length, until=lambda s, _: s[0] >= n, **options
        )
        return carry, ys

    return run
