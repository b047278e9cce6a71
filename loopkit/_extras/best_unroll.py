"""`best_unroll`: measure which number of steps in an iteration is fastest."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from loopkit import _jax
from loopkit._arguments import errors, validate
from loopkit._arguments.static_leaves import bare, wrapped
from loopkit._tracing.axes import Inputs
from loopkit._tracing.run import run_scan
from loopkit._tracing.spec import LoopOptions, LoopSpec, Names
from loopkit._types import Checkpoints

COUNTS = 1, 2, 4, 8, 16
ROUNDS = 7
NOISE = 1.05
"""The factor by which more steps in an iteration must be faster than fewer."""
FUNCTION = "best_unroll"
NAMES = Names(FUNCTION, "f", "init", "until", "carry, x")


def best_unroll(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    gradient: bool = False,
    checkpoints: Checkpoints = None,
    uses: int = 1000,
) -> int:
    """Measure which `unroll` makes a scan fastest.

    More steps in an iteration need less bookkeeping, but take longer to compile. Which number wins
    depends on the step and on the device. This function compiles
    `loopkit.scan(f, init, xs, length, unroll=n)` with 1, 2, 4, 8 and 16 steps in an iteration, and
    runs each eight times on the given values. It adds the time to compile to that of `uses` runs.
    It stops if compiling alone takes longer than the best so far. Call it once, outside `jax.jit`,
    and write the number that it returns into the program.

    **Arguments:**

    - `f`, `init`, `xs`, `length`, `checkpoints`: as in `loopkit.scan`. `f` is called, with all its
      side effects. For a while loop, pass `lambda carry, _: (body(carry), None)` and about as many
      steps as the loop takes.
    - `gradient`: whether to time the gradient of the sum of all results with respect to `init` and
      `xs`, rather than the results.
    - `uses`: how often you expect the compiled program to run.

    **Returns:**

    An int, for the argument `unroll` of any loop.

    **Raises:**

    - `TypeError` if `init` or `xs` is traced, as inside `jax.jit`.
    - `TypeError` and `ValueError` as `loopkit.scan`.

    !!! example

        ```python
        import jax.numpy as jnp
        import loopkit

        def step(x, _):
            return jnp.sin(x) + 0.1, None

        print(loopkit.best_unroll(step, 0.5, length=1000) in (1, 2, 4, 8, 16))  # True
        ```
    """
    gradient = validate.check_flag(FUNCTION, "gradient", gradient)
    uses = validate.check_whole(FUNCTION, "uses", uses, 1, "an int >= 1 (runs)")
    for name, tree in (("init", init), ("xs", xs)):
        if any(map(_jax.is_tracer, jax.tree.leaves(tree))):
            expected, got = "must hold values to measure with", "traced values"
            advice = "Call best_unroll outside jax.jit, and pass what it returns to the loop."
            raise errors.wrong_type(FUNCTION, name, expected, got, advice)
    given = wrapped(FUNCTION, "init", init), wrapped(FUNCTION, "xs", xs, numbers=True)
    best, least = 1, float("inf")
    for count in COUNTS:
        asked = LoopOptions(unroll=count, checkpoints=checkpoints)

        def run(init: PyTree[Any], xs: PyTree[Any], asked: LoopOptions = asked) -> Any:
            inputs = Inputs.of(xs, 0, length, FUNCTION)
            spec = LoopSpec.of(NAMES, (f, None), bare(init), inputs, inputs.length, asked)
            return run_scan(spec)[:2]

        to_compile, seconds = _measured(_gradient(run) if gradient else run, *given)
        total = to_compile + uses * seconds
        if total * NOISE < least:
            best, least = count, total
        if to_compile > least:
            break
    return best


def _gradient(run: Callable) -> Callable:
    """Return the gradient of the sum of all results, for all arguments that have one."""
    import equinox as eqx  # which takes longer to import than loopkit

    def total(both: tuple) -> Any:
        outs = map(jnp.asarray, jax.tree.leaves(run(*both)))
        sums = [jnp.sum(v).real for v in outs if _jax.is_differentiable(jax.typeof(v))]
        return sum(sums, jnp.zeros(()))

    return lambda *both: eqx.filter_grad(total)(both)


def _measured(run: Callable, init: PyTree[Any], xs: PyTree[Any]) -> tuple[float, float]:
    """Return the seconds to trace and compile, and the seconds to run."""
    begin = time.perf_counter()
    compiled = jax.jit(run).lower(init, xs).compile()
    to_compile, seconds = time.perf_counter() - begin, []
    jax.block_until_ready(compiled(init, xs))
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(init, xs))
        seconds.append(time.perf_counter() - begin)
    return to_compile, median(seconds)
