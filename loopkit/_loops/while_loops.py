"""`while_loop` and `fori_loop`: lax's loops that stack nothing, differentiable in every mode.

A `fori_loop` with static bounds is a scan without `xs`; with traced bounds, it is a while loop.
"""

from __future__ import annotations

from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from loopkit import _jax
from loopkit._arguments import errors, validate
from loopkit._arguments.static_leaves import bare
from loopkit._keywords import ForiKw, No, WhileKw, Yes
from loopkit._tracing.axes import NO_INPUTS, Inputs
from loopkit._tracing.run import run_scan, run_while
from loopkit._tracing.spec import LoopInfo, LoopOptions, LoopSpec, Names
from loopkit._types import (
    Body,
    Bound,
    BufferSpec,
    Checkpoints,
    DebugLoop,
    Indexed,
    Lanes,
    Like,
    Memory,
    Predicate,
    Progress,
    T,
    Unroll,
)

WHILE = Names("while_loop", "body_fun", "init_val", "cond_fun", "carry")
FORI = Names("fori_loop", "body_fun", "init_val", "cond_fun", "i, carry", hidden=2)


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

    This replaces `jax.lax.while_loop`. Its cost follows the steps taken, not `max_steps`.

    **Arguments:**

    - `cond_fun`: `T -> bool[]`.
    - `body_fun`: `T -> T`, with the structure, shapes and dtypes of `init_val`. Both are pure:
      loopkit may trace the very same functions only once.
    - `init_val`: a pytree of arrays, the initial carry. Leaves that are not arrays pass through
      unchanged, as in `loopkit.scan`.
    - `max_steps`: the most steps to take, a static int; None for no explicit bound. loopkit still
      finds a bound if `cond_fun` compares a counter in the carry with a number, alone or among
      other tests. The counter has to start at a number, and every step has to add the same number.
    - `checkpoints`: what the backward pass keeps. None: about the square root of n carries for a
      bound of n steps, or 32 to 128 without a bound, at about one extra forward pass; or all
      residuals, if they have at most 1 kB; nothing for a derivative in a single number. An int
      c: at most c carries; fewer carries cost more recomputation. "all": all that the derivative of
      each step reads, without recomputation. That needs a bound, and memory for as many steps, of
      which a CPU touches only the part for steps taken. A policy of `jax.checkpoint`, such as
      `jax.checkpoint_policies.dots_saveable`: what it saves of each step or, together with
      `memory`, what may be kept of a step. A `Plan`: what the plan says.
    - `memory`: a budget in bytes instead, an int or a string such as "64 MB". It limits what the
      backward pass needs beyond the gradient of a single step, which includes the gradient of
      values that the body closes over. A dict such as `{"device": "64 MB", "host": "4 GB"}` keeps
      the checkpoints in the host's memory. Only a policy can be given together with `memory`.
    - `buffers`: which leaves of the carry are read and written in slices: a function of the carry
      that returns them, or a tree of bools that matches it. In the body they are
      `loopkit.Buffer`s, written in place, forward and backward.
    - `unroll`: the steps in one iteration of the compiled loop. `loopkit.best_unroll` measures
      which number takes the least time.
    - `throw`: raise an error at run time if `max_steps` steps were not enough.
    - `return_info`: also return a `LoopInfo`.
    - `lanes`: what lanes do after they have stopped, if `cond_fun` differs between lanes of
      `jax.vmap`. "wait": they take steps that do not count until all have stopped, as in lax.
      "compact": once enough lanes have stopped, the others go on in a loop of fewer lanes, which
      may happen several times. A tuple: decreasing numbers of lanes to go on with; numbers that
      are not smaller than the batch are ignored. "flatten": a lane that has finished an inner loop
      of `body_fun` goes on with its own next step, while others are still inside. If no inner loop
      ends by itself, this does what None does. None: "compact" if it is expected to save more time
      than it adds to compilation, else "wait".
    - `progress`: shows how far the loop is, and how far its gradient is on the way back: "tqdm",
      which has to be installed, "line", or an object with `start(total)`, `update(steps)` and
      `close()`. It does not go together with `lanes="flatten"`. See the guide to progress.
    - `debug`: "finite" raises an error at run time at the first step after which the carry, a row
      of ys, a tangent or a cotangent is no longer finite. The error names the step, the lane, the
      leaf, and the line of the body, and `loopkit.replay` returns the arguments of that step. Each
      step is then an iteration of its own, and lanes wait. "bounds" raises an error if a buffer is
      read at a row that was never written, or is read or written out of bounds. That error names
      buffer, index and step. A tuple of both looks for both. Both are slow. None: what the
      environment variable LOOPKIT_DEBUG says, as `LOOPKIT_DEBUG=finite,bounds`, or nothing.

    **Returns:**

    The final carry; with `return_info`, the pair of it and a `LoopInfo(steps, stopped)`.

    **Raises:**

    `TypeError` if a function returns something of the wrong structure or type, or an argument is of
    the wrong type; `ValueError` if an argument has a wrong value.

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
    throw = validate.check_flag(WHILE.function, "throw", throw)
    validate.check_callable(WHILE.function, "cond_fun", cond_fun)
    most = validate.check_bound(WHILE.function, "max_steps", max_steps)
    spec = LoopSpec.of(WHILE, (body_fun, cond_fun), init_val, NO_INPUTS, most, asked)
    return run_while(spec, throw)


@overload
def fori_loop(*args: Any, buffers: BufferSpec, **kw: Any) -> Any: ...
@overload
def fori_loop(
    lower: Bound, upper: Bound, body_fun: Indexed[Array], init_val: float, **kw: Unpack[ForiKw[No]]
) -> Array: ...
@overload
def fori_loop(
    lower: Bound, upper: Bound, body_fun: Indexed[T], init_val: Like[T], **kw: Unpack[ForiKw[No]]
) -> T: ...
@overload
def fori_loop(
    lower: Bound, upper: Bound, body_fun: Indexed[T], init_val: Like[T], **kw: Unpack[ForiKw[Yes]]
) -> tuple[T, LoopInfo]: ...
@overload
def fori_loop(
    lower: Bound, upper: Bound, body_fun: Indexed[T], init_val: Like[T], **kw: Unpack[ForiKw[bool]]
) -> Any: ...
def fori_loop(
    lower: Bound,
    upper: Bound,
    body_fun: Indexed[T],
    init_val: Like[T],
    *,
    unroll: Unroll | None = None,
    max_steps: int | None = None,
    checkpoints: Checkpoints = None,
    memory: Memory = None,
    buffers: BufferSpec | None = None,
    return_info: bool = False,
    lanes: Lanes = None,
    progress: Progress = None,
    debug: DebugLoop = None,
) -> T | tuple[T, LoopInfo]:
    """Repeat `body_fun` for the integers from `lower` to `upper`; differentiable in every mode.

        def fori_loop(lower, upper, body_fun, init_val, *, max_steps=None):
            val = init_val
            for i in range(lower, upper)[:max_steps]:
                val = body_fun(i, val)
            return val

    This replaces `jax.lax.fori_loop`. If `lower` or `upper` is traced, it runs as a while loop, and
    still has a gradient.

    **Arguments:**

    - `lower`, `upper`: integers, static or traced.
    - `body_fun`: `(int[], T) -> T`.
    - `init_val`: a pytree of arrays. Leaves that are not arrays pass through unchanged, as in
      `loopkit.scan`.
    - `unroll`: the steps in one iteration of the compiled loop; True or 0 for all steps, if their
      number is known.
    - `max_steps`: the most steps to take, a static int.
    - `checkpoints`, `memory`, `buffers`, `return_info`, `lanes`, `progress`, `debug`: as
      in `loopkit.while_loop`; "all" needs static bounds, or `max_steps` if `lower` or `upper` is
      traced.

    **Returns:**

    The final value; with `return_info`, the pair of it and a `LoopInfo(steps, stopped)`.

    **Raises:**

    `TypeError` and `ValueError` as `loopkit.while_loop`, and if a bound is not an integer.

    !!! example

        ```python
        import jax
        import loopkit

        def power(x, n):
            return loopkit.fori_loop(0, n, lambda i, y: y * x, 1.0)

        jax.jit(jax.grad(power))(2.0, 3)  # n is traced
        ```
    """
    name = FORI.function
    max_steps = validate.check_bound(name, "max_steps", max_steps)
    return_info = validate.check_flag(name, "return_info", return_info)
    lower, upper = _bound("lower", lower), _bound("upper", upper)
    several, inner = 1 if unroll is None else unroll, buffers
    if buffers is not None:  # they are in the value; the carry is ((i, ...), value)
        inner = (lambda carry: buffers(carry[1])) if callable(buffers) else (False, buffers)
    asked = LoopOptions(several, checkpoints, memory, inner, return_info, lanes, progress, debug)
    if isinstance(lower, int) and isinstance(upper, int):
        trips = max(0, upper - lower)
        length = trips if max_steps is None else min(trips, max_steps)
        inputs, functions, init = Inputs.of(None, 0, length), (body_fun, None), ((lower,), init_val)
        spec = LoopSpec.of(FORI, functions, init, inputs, length, asked)
        (_, val), _, info = run_scan(spec)
        val = bare(val)
        return (val, info._replace(stopped=jnp.array(length == trips))) if return_info else val
    if validate.unrolls_all(unroll):
        advice = "Pass the number of steps in an iteration."
        expected = "can be True or 0 only if the bounds are static ints"
        raise errors.wrong_value(name, "unroll", expected, repr(unroll), advice)
    first, stop = jnp.asarray(lower), jnp.asarray(upper)
    if first.dtype != stop.dtype:  # weak types stay weak, as in lax
        first, stop = (v.astype(_common_type(lower, upper)) for v in (first, stop))
    init = (first, stop), init_val
    spec = LoopSpec.of(FORI, (body_fun, _goes_on), init, NO_INPUTS, max_steps, asked)
    out = run_while(spec)
    return (out[0][1], out[1]) if return_info else out[1]


def _common_type(lower: Any, upper: Any) -> Any:
    """Return a type of integers that holds both bounds, at least one of which is traced."""
    typed = [jax.typeof(v) for v in (lower, upper) if not isinstance(v, int)]
    if len(typed) == 1:
        known, limits = lower if isinstance(lower, int) else upper, jnp.iinfo(typed[0].dtype)
        if limits.min <= known <= limits.max:
            return typed[0].dtype
    elif len({jnp.issubdtype(t.dtype, jnp.signedinteger) for t in typed}) == 1:
        return jnp.result_type(lower, upper)
    show = lambda v: str(v) if isinstance(v, int) else errors.short_type(jax.typeof(v))
    expected = "must fit in one integer type, that of a traced bound"
    advice = "Convert one of them, for instance by `.astype(jnp.int32)`."
    got = f"{show(lower)} and {show(upper)}"
    raise errors.wrong_type(FORI.function, "lower` and `upper", expected, got, advice)


def _goes_on(carry: tuple) -> Any:
    (i, stop), _ = carry
    return i < stop


def _bound(argument: str, value: object) -> Any:
    """Return a Python int if the bound is known, else a scalar integer array."""
    if _jax.is_symbolic(value):
        return jnp.asarray(value)
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    is_array = isinstance(value, (jax.Array, np.ndarray))
    if is_array and value.shape == () and jnp.issubdtype(value.dtype, jnp.integer):
        return value if _jax.is_tracer(value) else int(value)
    got = errors.short_type(jax.typeof(value)) if is_array else errors.shown(value)
    raise errors.wrong_type(
        FORI.function, argument, "must be a scalar integer", got, "Pass an int."
    )
