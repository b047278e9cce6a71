"""`fori_loop`: the loop of lax, differentiable with static and with traced bounds."""

from __future__ import annotations

from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from loopkit import _jax
from loopkit._arguments import errors, validate
from loopkit._arguments.static_leaves import bare
from loopkit._keywords import ForiKw, No, Yes
from loopkit._tracing.axes import NO_INPUTS, Inputs
from loopkit._tracing.run import run_scan, run_while
from loopkit._tracing.spec import LoopInfo, LoopOptions, LoopSpec, Names
from loopkit._types import (
    Bound,
    BufferSpec,
    Checkpoints,
    DebugLoop,
    Indexed,
    Lanes,
    Like,
    Memory,
    Progress,
    T,
    Unroll,
)

NAMES = Names("fori_loop", "body_fun", "init_val", "cond_fun", "i, carry", hidden=2)


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
    name = NAMES.function
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
        spec = LoopSpec.of(NAMES, functions, init, inputs, length, asked, length)
        (_, val), _, info = run_scan(spec)
        val = bare(val)
        return (val, info._replace(stopped=jnp.array(length == trips))) if return_info else val
    if validate.unrolls_all(unroll):
        advice = "Pass the number of steps in an iteration."
        expected = "can be True or 0 only if the bounds are static ints"
        raise errors.wrong_value(name, "unroll", expected, repr(unroll), advice)
    first, stop = jnp.asarray(lower), jnp.asarray(upper)
    if first.dtype != stop.dtype:  # weak types stay weak, as in lax
        first, stop = (v.astype(jnp.result_type(lower, upper)) for v in (first, stop))
    init = (first, stop), init_val
    spec = LoopSpec.of(NAMES, (body_fun, _goes_on), init, NO_INPUTS, max_steps, asked)
    out = run_while(spec)
    return (out[0][1], out[1]) if return_info else out[1]


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
        NAMES.function, argument, "must be a scalar integer", got, "Pass an int."
    )
