"""`replace_lax_loops`: loopkit's loops in the place of lax's, in code that one cannot edit.

`jax.lax.scan`, `while_loop` and `fori_loop` all end in one of two primitives. While a thread is
inside the context, binding one of those runs loopkit's loop instead; so it does not matter by
which name, or when, a library imported the function that it calls. The context is part of the key
of JAX's caches: what `jit` traced outside is traced anew inside, and not used outside again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from loopkit import _jax
from loopkit._arguments import validate
from loopkit._foreign import lax_loop
from loopkit._foreign.lax_loop import LoopSite, Settings
from loopkit._plans.budget import check_budget
from loopkit._types import Checkpoints, Memory

_lock = threading.Lock()
_users = 0
"""Threads, and nested contexts of them, for which the primitives are diverted."""

DIVERTED = {_jax.lax_scan_p: lax_loop.scan, _jax.lax_while_p: lax_loop.while_loop}


@contextmanager
def replace_lax_loops(
    *,
    max_steps: int | None = None,
    checkpoints: Checkpoints = None,
    memory: Memory = None,
    only: Callable[[LoopSite], Any] | None = None,
) -> Generator[None, None, None]:
    """Replace every `jax.lax` loop that is traced inside the `with` block by loopkit's.

        with loopkit.replace_lax_loops():
            jax.grad(program)(x)

    As `loopkit.checkpointed`, for a whole program: loops keep their values, and gain a gradient
    in every mode and a choice of what it keeps in memory. Functions that were compiled before are
    traced again inside; outside, nothing changes. Only the thread that enters is affected, and
    contexts nest, the innermost counting.

    **Arguments:**

    - `max_steps`, `checkpoints`, `only`: as in `loopkit.checkpointed`.
    - `memory`: as there, but each loop has the whole budget: how many there are is not known.

    **Returns:**

    A context manager.

    **Raises:**

    `TypeError` and `ValueError` as `loopkit.checkpointed`.

    !!! example

        ```python
        import jax
        import loopkit

        def halvings(x):
            return jax.lax.while_loop(lambda x: x > 1.0, lambda x: x / 2, x)

        with loopkit.replace_lax_loops():
            print(jax.grad(halvings)(10.0))  # 0.0625
        ```
    """
    with replacing(settings_of("replace_lax_loops", max_steps, checkpoints, memory, only)):
        yield


def settings_of(
    function: str, max_steps: Any, checkpoints: Any, memory: Any, only: Any
) -> Settings:
    max_steps = validate.check_bound(function, "max_steps", max_steps)
    budget = check_budget(function, checkpoints, memory)
    if only is not None:
        validate.check_callable(function, "only", only)
    return Settings(function, max_steps, budget, only, id(only))


@contextmanager
def replacing(settings: Settings) -> Generator[None, None, None]:
    """Loops of lax that this thread traces inside are replaced."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            for primitive, describe in DIVERTED.items():
                primitive.bind = _diverted(primitive.bind, describe)
            _jax.lower_as_written(True)
    try:
        with _jax.replacing(settings):
            yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                for primitive in DIVERTED:
                    del primitive.bind
                _jax.lower_as_written(False)


def _diverted(bind: Callable, describe: Callable) -> Callable:
    def diverted(*operands: Any, **params: Any) -> Any:
        settings = _jax.replacing.value
        if settings is None:
            return bind(*operands, **params)
        loop, only = describe(operands, params), settings.only
        # A scan that stores every step is lax's own.
        stored = loop.kind == "scan" and settings.budget == "all"
        if stored or not loop.replaceable or not (only is None or only(loop.site)):
            return bind(*operands, **params)
        return loop.run(settings)

    return diverted
