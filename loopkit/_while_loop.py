"""`while_loop`: as in lax, and differentiable in every mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from loopkit import _arguments, _carried, _checks
from loopkit._budget import check_budget
from loopkit._buffer import plain
from loopkit._cache import remember
from loopkit._capture import Names, scalar_bool, trace_loop, type_key
from loopkit._heard import ErrorIf, heard
from loopkit._in_python import python_while_loop
from loopkit._info import LoopInfo

T = TypeVar("T")

NAMES = Names("while_loop", "body_fun", "init_val", "cond_fun")


def while_loop(
    cond_fun: Callable[[T], Any],
    body_fun: Callable[[T], T],
    init_val: T,
    *,
    max_steps: int | None = None,
    checkpoints: Any = None,
    memory: int | str | dict | None = None,
    buffers: Any = None,
    checks: bool | None = None,
    unroll: int | str = 1,
    throw: bool = False,
    return_info: bool = False,
) -> Any:
    """Repeat `body_fun` while `cond_fun` holds; differentiable, with or without a bound.

        def while_loop(cond_fun, body_fun, init_val, *, max_steps=None):
            val, steps = init_val, 0
            while cond_fun(val) and steps != max_steps:
                val, steps = body_fun(val), steps + 1
            return val

    It takes the place of `jax.lax.while_loop`. Cost and memory follow the steps taken, not
    `max_steps`.

    **Arguments:**

    - `cond_fun`: `T -> bool[]`.
    - `body_fun`: `T -> T`, with the structure, shapes and dtypes of `init_val`. Both are pure: the
      very same functions may be traced only once.
    - `init_val`: a pytree of arrays, the initial carry.
    - `max_steps`: the most steps to take, a static int; None for no bound.
    - `checkpoints`: what the backward pass keeps. None: about the square root of `max_steps` in
      carries, or without it 32 to 128; about one extra forward pass. An int c: at most c carries,
      at the price of more recomputation. "all": what the derivative of every step reads, and no
      recomputation (needs `max_steps`). A `Plan`: what it says.
    - `memory`: the same as a budget in bytes, an int or a string such as "64 MB": what the backward
      pass may need beyond what it needs for a single step. A dict of two, `{"device": "64 MB",
      "host": "4 GB"}`, keeps the checkpoints in the host's memory. Give one of the two.
    - `buffers`: which leaves of the carry are read and written in slices: a function of the carry
      that returns them, or a tree of bools that matches it. In the body they are
      `loopkit.Buffer`s, written in place, forward and backward.
    - `checks`: raise an error at run time where a buffer is read in a row that nothing has been
      written to, or read or written out of bounds: the error names buffer, index and step. Slow.
      None: as the environment variable LOOPKIT_CHECKS says.
    - `unroll`: steps to an iteration of the compiled loop; "auto" for what takes least time,
      compilation included, by a trial that is kept in the user's cache folder.
    - `throw`: raise an error at run time if `max_steps` steps were not enough.
    - `return_info`: also return a `LoopInfo`.

    **Returns:**

    The final carry; with `return_info`, the pair of it and a `LoopInfo(steps, stopped)`.

    **Raises:**

    `TypeError` if a function returns something of another structure or type than it should, or an
    argument is of the wrong type; `ValueError` if it has a wrong value.

    !!! example

        ```python
        import jax
        import loopkit

        def sqrt(a):  # Newton's iteration, as long as it takes
            def improves(x):
                return abs(x * x - a) > 1e-6 * a
            return loopkit.while_loop(improves, lambda x: (x + a / x) / 2, a)

        jax.grad(sqrt)(2.0)
        ```

    The backward pass is checkpointed in the manner of Griewank (1992) and Stumm & Walther (2010).
    """
    return run_while(
        NAMES,
        cond_fun,
        body_fun,
        init_val,
        max_steps=max_steps,
        checkpoints=checkpoints,
        memory=memory,
        buffers=buffers,
        checks=checks,
        unroll=unroll,
        throw=throw,
        return_info=return_info,
    )


def run_while(
    names: Names,
    cond_fun: Callable,
    body_fun: Callable,
    init_val: Any,
    *,
    max_steps: Any,
    checkpoints: Any,
    memory: Any,
    buffers: Any,
    checks: Any,
    unroll: Any,
    throw: bool,
    return_info: bool,
    made_of: tuple = (),
) -> Any:
    """`while_loop`, under the names of the function that the user called.

    `made_of`: the function of the user, and what else, that both functions depend on if they are
    made anew on every call.
    """
    name = names.function
    _arguments.check_callable(name, names.predicate, cond_fun)
    _arguments.check_callable(name, names.body, body_fun)
    max_steps = _arguments.check_max_steps(name, max_steps)
    budget = check_budget(name, checkpoints, memory, max_steps)
    unroll, auto = _arguments.check_unroll(name, unroll)
    throw = _arguments.check_flag(name, "throw", throw)
    return_info = _arguments.check_flag(name, "return_info", return_info)
    init_val = _arguments.as_arrays(name, names.init, init_val)
    carried = _carried.find(names, buffers, init_val)
    checking = _checks.wanted(name, checks) and carried.any
    carried = carried.checked(checking)
    init_val = plain(init_val)

    def finish(val: Any, steps: Any, still_holds: Any) -> Any:
        val = carried.returned(val)
        return _with_info(names, val, steps, still_holds, max_steps, throw, return_info)

    if _arguments.runs_in_python():
        body = carried.by_hand(body_fun)
        ran, result = _arguments.in_python(
            lambda: python_while_loop(cond_fun, body, init_val, max_steps)
        )
        if ran:
            val, steps = result
            return finish(val, steps, lambda: cond_fun(val))
    counting, masking = throw or return_info or checking, carried.any
    # Where writes to buffers are to be masked, the predicate is part of the carry.
    go = scalar_bool(name, names.predicate, cond_fun(init_val)) if masking else None
    masks = carried.first_written(init_val) if checking else []
    state = (init_val, go, jnp.int32(0) if counting else None, masks)
    leaves, tree = jax.tree.flatten(state)

    def step(carry: list, _: list) -> tuple[Any, None]:
        val, go, steps, masks = tree.unflatten(carry)
        new = body_fun(val)
        if masking:
            go = scalar_bool(name, names.predicate, cond_fun(new))
        return (new, go, steps + 1 if counting else None, masks), None

    def predicate(carry: list) -> Any:
        val, go, *_ = tree.unflatten(carry)
        return go if masking else cond_fun(val)

    settings = {
        "length": max_steps,
        "checkpoints": budget,
        "unroll": unroll,
        "auto_unroll": auto,
        "name": name,
    }
    values = len(carried.flags)
    flag = values if masking else None
    step_leaf = values + 1 if checking else None
    found = carried.followed_by(len(leaves) - values, step_leaf) if masking else None
    traced = remember(
        (made_of[:1] or (cond_fun, body_fun)) if carried.hashable else (),
        (
            *(names, tree, type_key(leaves), carried.flags, carried.free, checking),
            *(*settings.values(), made_of[1:]),
        ),
        lambda: trace_loop(names, step, predicate, state, [], settings, found, flag),
    )
    val, go, steps, _ = tree.unflatten(traced.run(leaves, [])[0])
    return finish(val, steps, lambda: go if masking else cond_fun(val))


def _with_info(
    names: Names,
    val: Any,
    steps: Any,
    still_holds: Callable[[], Any],
    max_steps: int | None,
    throw: bool,
    return_info: bool,
) -> Any:
    if not (throw or return_info):
        return val
    goes_on = still_holds()
    result = (val, LoopInfo(steps, jnp.logical_not(goes_on)))
    result = result if return_info else val
    if not throw or max_steps is None:
        return result
    message = (
        f"loopkit.{names.function}: `max_steps` must be enough for `{names.predicate}` to "
        f"become false, got {max_steps} steps after which it still holds. Raise `max_steps`."
    )
    return heard(ErrorIf(message), [jnp.asarray(goes_on)], result)
