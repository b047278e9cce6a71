"""`replace_lax_loops`: replace lax's loops with loopkit's, in code that you cannot edit.

`jax.lax.scan`, `while_loop` and `fori_loop` all bind one of two primitives. While a thread is
inside the context, binding one of them runs loopkit's loop instead. So it does not matter when, or
by which name, a library imported the function that it calls. The context is part of the key of
JAX's caches: `jit` traces a function again inside the context, and does not use that trace outside.
"""

from __future__ import annotations

import functools as ft
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import jax

from loopkit import _jax
from loopkit._arguments import errors, validate
from loopkit._foreign import lax_loop
from loopkit._foreign.lax_loop import LeftLoop, LoopSite, Settings, asked, site_of
from loopkit._jaxprs import equations
from loopkit._plans.budget import check_budget
from loopkit._progress.progress import check_progress
from loopkit._types import Checkpoints, Debug, Lanes, Memory, Progress

_lock = threading.Lock()
_users = 0
"""The number of contexts, in all threads, for which the primitives are diverted."""

_left: weakref.WeakKeyDictionary[Any, Settings] = weakref.WeakKeyDictionary()
"""Steps of loops that were left to lax, with the settings that decided so. If lax rewrites such a
loop, the result is left to lax too."""


@contextmanager
def replace_lax_loops(
    *,
    max_steps: int | None = None,
    checkpoints: Checkpoints = None,
    memory: Memory = None,
    only: Callable[[LoopSite], Any] | None = None,
    strict: bool | None = None,
    lanes: Lanes = None,
    progress: Progress = None,
    debug: Debug = None,
) -> Generator[None, None, None]:
    """Replace every `jax.lax` loop that is traced inside the `with` block by loopkit's.

    The context does for a whole program what `loopkit.checkpointed` does for a function. Loops keep
    their values, and gain a gradient in every mode and a choice of what it keeps in memory.
    Functions that were compiled before are traced again inside. Outside, nothing changes. Only the
    thread that enters the context is affected. If contexts are nested, the innermost one counts.

    **Arguments:**

    - `max_steps`, `checkpoints`, `only`, `lanes`, `progress`, `debug`: as in
      `loopkit.checkpointed`.
    - `strict`: as in `loopkit.checkpointed`, but there may be no loop at all. The block ends with
      the error if `only` chooses none.
    - `memory`: as in `loopkit.checkpointed`, but each loop has the whole budget, because the number
      of loops is not known.

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
    given: dict[str, Any] = {"max_steps": max_steps, "checkpoints": checkpoints, "memory": memory}
    given |= {"only": only, "strict": strict}
    given |= {"lanes": lanes, "progress": progress, "debug": debug}
    settings = settings_of("replace_lax_loops", given)
    with replacing(settings):
        yield
    settings.check_chosen()


def settings_of(function: str, given: dict[str, Any]) -> Settings:
    """Check all settings that were given."""
    only, progress, strict = given["only"], given["progress"], given["strict"]
    max_steps = validate.check_bound(function, "max_steps", given["max_steps"])
    budget = check_budget(function, given["checkpoints"], given["memory"])
    if only is not None:
        validate.check_callable(function, "only", only)
    if strict is not None:
        strict = validate.check_flag(function, "strict", strict)
    lanes = validate.check_lanes(function, given["lanes"])
    shown = check_progress(function, progress)
    finite = "finite" in validate.check_debug(function, given["debug"])
    lanes = "wait" if finite else lanes
    validate.check_beside_flat(function, lanes, progress)
    chosen = only, id(only), asked(only), strict
    return Settings(function, max_steps, budget, *chosen, lanes, shown, finite)


@contextmanager
def replacing(settings: Settings) -> Generator[None, None, None]:
    """Replace the loops of lax that this thread traces inside the context."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            for primitive, diverted in DIVERTED.items():
                primitive.bind = diverted(primitive.bind)
            _jax.lower_as_written(True)
            _jax.trace_bodies_within(_inside)
    try:
        with _jax.replacing(settings), _jax.scan_as_primitive():
            yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                for primitive in DIVERTED:
                    del primitive.bind
                _jax.lower_as_written(False)
                _jax.trace_bodies_within(None)


def _inside(kind: Any, carry: Sequence[Any], length: int | None) -> Any:
    """Return the context in which the steps of a loop of lax are traced."""
    settings = _jax.replacing.value
    if settings is None or not settings.asks_where:
        return nullcontext()
    outer = site_of(kind, length, carry, settings.outer)
    return _jax.replacing(replace(settings, outer=outer))


def _diverted(describe: Callable, bind: Callable) -> Callable:
    def diverted(*operands: jax.typing.ArrayLike, **params: Any) -> Any:
        settings = _jax.replacing.value
        if settings is None:
            return bind(*operands, **params)
        steps, decided = _jax.steps_of(params), replace(settings, outer=None)
        if not _jax.is_settled() and _left.get(steps) != decided:
            loop = describe(operands, params)
            if settings.asks_where:
                inside = replace(settings, outer=loop.site(settings.outer))
                params = {k: _within(v, inside) for k, v in params.items()}
                loop = describe(operands, params)
            if not (why := settings.why_left(loop)):
                return loop.run(settings)
            if (notes := _jax.noting.value) is not None:
                notes.left[LeftLoop(loop.site(settings.outer), why)] = None
        _left[_jax.steps_of(params)] = decided
        return bind(*operands, **params)

    return diverted


def _refused(bind: Callable) -> Callable:
    def refused(*operands: jax.typing.ArrayLike, **params: Any) -> Any:
        settings = _jax.replacing.value
        if settings is not None and _jax.is_scan3(params):
            problem = "a scan that was traced under `jax_scan3` cannot be replaced"
            advice = f"Trace it inside `{settings.function}`, or without the flag."
            got = f"the loop at {_jax.source()}"
            raise NotImplementedError(errors.message(settings.function, problem, got, advice))
        return bind(*operands, **params)

    return refused


DIVERTED = {
    _jax.lax_scan_p: ft.partial(_diverted, lax_loop.scan),
    _jax.lax_while_p: ft.partial(_diverted, lax_loop.while_loop),
    _jax.hi_primitive_p: _refused,
}
"""For each primitive that a loop of lax binds, the function that makes its other `bind`."""


def _within(param: Any, settings: Settings) -> Any:
    return with_rules(param, settings) if hasattr(param, "eqns") else param


def with_rules(jaxpr: _jax.Jaxpr, settings: Settings) -> Any:
    """Replace loops in custom derivatives too; JAX traces those when it differentiates."""

    def within(rule: Callable) -> Callable:
        def run(*args: jax.typing.ArrayLike) -> Any:
            with replacing(settings):
                return rule(*args)

        return run

    return equations.map_equations(jaxpr, lambda eqn: _jax.with_custom_rules(eqn, within))
