"""`while_loop`: as in lax, and differentiable in every mode."""

from __future__ import annotations

from typing import Any, Unpack, overload

from jaxtyping import Array

from loopkit._arguments import validate
from loopkit._keywords import No, WhileKw, Yes
from loopkit._tracing.axes import NO_INPUTS
from loopkit._tracing.run import run_while
from loopkit._tracing.spec import LoopInfo, LoopOptions, LoopSpec, Names
from loopkit._types import (
    Body,
    BufferSpec,
    Checkpoints,
    DebugLoop,
    Lanes,
    Like,
    Memory,
    Predicate,
    Progress,
    T,
    Unroll,
)

NAMES = Names("while_loop", "body_fun", "init_val", "cond_fun", "carry")


@overload
def while_loop(*args: Any, buffers: BufferSpec, **kw: Any) -> Any: ...
@overload
def while_loop(
    cond_fun: Predicate[Array], body_fun: Body[Array], init_val: float, **kw: Unpack[WhileKw[No]]
) -> Array: ...
@overload
def while_loop(
    cond_fun: Predicate[T], body_fun: Body[T], init_val: Like[T], **kw: Unpack[WhileKw[No]]
) -> T: ...
@overload
def while_loop(
    cond_fun: Predicate[T], body_fun: Body[T], init_val: Like[T], **kw: Unpack[WhileKw[Yes]]
) -> tuple[T, LoopInfo]: ...
@overload
def while_loop(
    cond_fun: Predicate[T], body_fun: Body[T], init_val: Like[T], **kw: Unpack[WhileKw[bool]]
) -> Any: ...
def while_loop(
    cond_fun: Predicate[T],
    body_fun: Body[T],
    init_val: Like[T],
    *,
    max_steps: int | None = None,
    checkpoints: Checkpoints = None,
    memory: Memory = None,
    buffers: BufferSpec | None = None,
    unroll: Unroll = 1,
    throw: bool = False,
    return_info: bool = False,
    lanes: Lanes = None,
    progress: Progress = None,
    debug: DebugLoop = None,
) -> T | tuple[T, LoopInfo]:
    """Repeat `body_fun` while `cond_fun` holds; differentiable, with or without a bound.

        def while_loop(cond_fun, body_fun, init_val, *, max_steps=None):
            val, steps = init_val, 0
            while cond_fun(val) and steps != max_steps:
                val, steps = body_fun(val), steps + 1
            return val

    It takes the place of `jax.lax.while_loop`. Its cost follows the steps taken, not `max_steps`.

    **Arguments:**

    - `cond_fun`: `T -> bool[]`.
    - `body_fun`: `T -> T`, with the structure, shapes and dtypes of `init_val`. Both are pure: the
      very same functions may be traced only once.
    - `init_val`: a pytree of arrays, the initial carry, and of what is none as in `loopkit.scan`.
    - `max_steps`: the most steps to take, a static int; None for no bound but that of `cond_fun`.
      That has one where it compares, perhaps among other tests, a counter of the carry whose first
      value is a number, and to which every step adds the same number, with a number.
    - `checkpoints`: what the backward pass keeps. None: about the square root of the bound in
      carries, or without one 32 to 128, at about one extra forward pass; all residuals if they have
      1 kB at most. An int c: at most c carries, at the price of more recomputation. "all": what the
      derivative of every step reads, and no recomputation; it needs a bound, and room for as many
      steps, of which a CPU touches what is taken. A policy of `jax.checkpoint`, such as
      `jax.checkpoint_policies.dots_saveable`: what it keeps, of every step; beside `memory`, what
      may be kept of a step at all. A `Plan`: what it says.
    - `memory`: the same as a budget in bytes, an int or a string such as "64 MB": what the backward
      pass may need beyond what it needs for a single step, which has the gradient of what the body
      closes over. A dict of two, `{"device": "64 MB", "host": "4 GB"}`, keeps the checkpoints in
      the host's memory. Give one of the two.
    - `buffers`: which leaves of the carry are read and written in slices: a function of the carry
      that returns them, or a tree of bools that matches it. In the body they are
      `loopkit.Buffer`s, written in place, forward and backward.
    - `unroll`: steps to an iteration of the compiled loop. `loopkit.best_unroll` measures which
      number takes least time.
    - `throw`: raise an error at run time if `max_steps` steps were not enough.
    - `return_info`: also return a `LoopInfo`.
    - `lanes`: what becomes of lanes that have stopped, where `cond_fun` differs between lanes of
      `jax.vmap`. "wait": they take steps that count for nothing until all have stopped, as in lax.
      "compact": once a part of them is left, those are gathered, and go on in a loop of fewer, and
      so on. A tuple: the widths to go on with, each less than the one before; those are left out
      that are no fewer than the lanes. None: "compact" where that is believed to gain more than it
      takes longer to compile, else "wait". "flatten": where loops in `body_fun` end by themselves,
      a lane that is through with one goes on with its own next step, while others are still inside;
      with no such loop in it, the same as None.
    - `progress`: shows how far the loop is, and how far its gradient is on the way back: "tqdm" or
      "rich", which have to be installed, "line", or an object with `start(total)`, `update(steps)`
      and `close()`. Not with `lanes="flatten"`. See the guide to progress.
    - `debug`: "finite" raises an error at run time at the first step after which the carry, a row
      of ys, a tangent or a cotangent is no longer finite, with the step, the lane, the leaf, and
      the line of the body; `loopkit.replay` returns what that step was given. Steps are then
      taken one to an iteration, and lanes wait. "bounds" raises one where a buffer is read in a row
      that nothing has been written to, or read or written out of bounds: the error names buffer,
      index and step. A tuple of both looks for both. They are slow. None: what the environment
      variable LOOPKIT_DEBUG says, as `LOOPKIT_DEBUG=finite,bounds`; nothing if it is not set.

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
    asked = LoopOptions(unroll, checkpoints, memory, buffers, return_info, lanes, progress, debug)
    throw = validate.check_flag(NAMES.function, "throw", throw)
    validate.check_callable(NAMES.function, "cond_fun", cond_fun)
    most = validate.check_bound(NAMES.function, "max_steps", max_steps)
    spec = LoopSpec.of(NAMES, (body_fun, cond_fun), init_val, NO_INPUTS, most, asked)
    return run_while(spec, throw)
