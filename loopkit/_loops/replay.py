"""`replay`: what the body of a loop was given in the step that failed."""

from __future__ import annotations

from typing import Any

from loopkit._arguments import failed_step


def replay() -> tuple[Any, ...]:
    """Return what the body of a loop with `debug="finite"` was given in the step that failed last.

    `body(*loopkit.replay())` takes that step alone: in Python, for a debugger, or under
    `jax.debug_nans`, which finds the operation.

    **Arguments:**

    None.

    **Returns:**

    The arguments of the body, a tuple: `(carry, x)` of a scan, `(carry,)` of a `while_loop`,
    `(i, carry)` of a `fori_loop`. If the loop failed going backward, they are those of the step
    with the first cotangent that is not finite. Under `jax.vmap`, they are those of the first lane
    that failed. For a loop of lax in `loopkit.checkpointed` or `loopkit.replace_lax_loops`, `carry`
    and `x` are lists of leaves. A buffer is not kept at each step; a `jax.ShapeDtypeStruct` takes
    its place.

    **Raises:**

    `RuntimeError` if no loop has failed in this process.

    !!! example

        ```python
        import jax
        import jax.numpy as jnp
        import loopkit

        def step(x, scale):
            return jnp.log(x) * scale, None

        try:
            jax.block_until_ready(loopkit.scan(step, 9.0, jnp.ones(5), debug="finite"))
        except Exception as error:
            print("in step 3" in str(error))  # True

        x, scale = loopkit.replay()
        print(x < 0)  # True
        ```
    """
    found = failed_step.last_arguments()
    if found is None:
        raise RuntimeError(
            'loopkit.replay: a loop with `debug="finite"` must have failed in this process. Pass '
            "that to the loop, and wait for its result with jax.block_until_ready. Got: no failure."
        )
    return found
