"""The loops that compete: loopkit's, and what a user of JAX would write instead.

Every one is a function `run(body, params, init, n, bound) -> x` that applies `body` `n` times.
`bound` is a Python int. Loops over a known length read only `bound`. Loops that test a predicate
read `n`, which the benchmarks pass as an argument of the compiled function: the compiler does not
know it, so no loop gains a static trip count that the others lack.
"""

import math

import equinox.internal as eqxi
import jax
from jax import lax

import loopkit
from workloads import Run

# --- what others offer ---------------------------------------------------------------------


def lax_scan(body, params, init, n, bound):
    return lax.scan(lambda x, _: (body(params, x), None), init, None, length=bound)[0]


def lax_while_loop(body, params, init, n, bound):
    return lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, body(params, s[1])), (0, init))[
        1
    ]


def checkpointed_scan(body, params, init, n, bound):
    """Scan with `jax.checkpoint`: every carry is stored, and no residuals."""
    step = jax.checkpoint(lambda x, _: (body(params, x), None))
    return lax.scan(step, init, None, length=bound)[0]


def nested_scans(body, params, init, n, bound):
    """Two levels by hand: about `sqrt(bound)` carries, one more forward pass."""
    inner = next(k for k in range(math.isqrt(bound), 0, -1) if bound % k == 0)

    @jax.checkpoint
    def block(x, _):
        return lax.scan(lambda x, _: (body(params, x), None), x, None, length=inner)[0], None

    return lax.scan(block, init, None, length=bound // inner)[0]


def equinox_while_loop(kind: str = "checkpointed", checkpoints: int | str | None = None) -> Run:
    def run(body, params, init, n, bound):
        kept = bound if checkpoints == "all" else checkpoints
        return eqxi.while_loop(
            lambda s: s[0] < n,
            lambda s: (s[0] + 1, body(params, s[1])),
            (0, init),
            max_steps=bound,
            kind=kind,
            checkpoints=kept,
        )[1]

    return run


def equinox_scan(checkpoints: int | str | None = None) -> Run:
    def run(body, params, init, n, bound):
        return eqxi.scan(
            lambda x, _: (body(params, x), None),
            init,
            None,
            length=bound,
            kind="checkpointed",
            checkpoints=checkpoints,
        )[0]

    return run


# --- loopkit -------------------------------------------------------------------------------


def while_loop(checkpoints: int | str | None = None, bounded: bool = True) -> Run:
    def run(body, params, init, n, bound):
        return loopkit.while_loop(
            lambda s: s[0] < n,
            lambda s: (s[0] + 1, body(params, s[1])),
            (0, init),
            max_steps=bound if bounded else None,
            checkpoints=checkpoints,
        )[1]

    return run


def scan(checkpoints: int | str | None = None) -> Run:
    def run(body, params, init, n, bound):
        return loopkit.scan(
            lambda x, _: (body(params, x), None), init, None, length=bound, checkpoints=checkpoints
        )[0]

    return run


def fori_loop(checkpoints: int | str | None = None) -> Run:
    def run(body, params, init, n, bound):
        return loopkit.fori_loop(
            0, bound, lambda _, x: body(params, x), init, checkpoints=checkpoints
        )

    return run
