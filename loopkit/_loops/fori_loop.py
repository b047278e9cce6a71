"""`fori_loop`: as in lax, and differentiable whatever its bounds."""

from __future__ import annotations

from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from loopkit import _jax
from loopkit._arguments import errors, validate
from loopkit._loops.info import LoopInfo
from loopkit._loops.keywords import ForiKw, No, Yes
from loopkit._loops.request import LoopOptions
from loopkit._loops.scan import run_scan
from loopkit._loops.while_loop import run_while
from loopkit._tracing.axes import Inputs
from loopkit._tracing.trace import Names
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

NAMES = Names("fori_loop", "body_fun", "init_val", "cond_fun", hidden=2)
"""The carry of the loop that runs is ((counters, value), ...): two levels above the user's."""


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

    It takes the place of `jax.lax.fori_loop`. Where `lower` or `upper` is traced it is a while
    loop, and has a gradient all the same.

    **Arguments:**

    - `lower`, `upper`: integers, static or traced.
    - `body_fun`: `(int[], T) -> T`.
    - `init_val`: a pytree of arrays, and of what is none as in `loopkit.scan`.
    - `unroll`: steps to an iteration of the compiled loop; True or 0 for all, if their number is
      known.
    - `max_steps`: the most steps to take, a static int.
    - `checkpoints`, `memory`, `buffers`, `return_info`, `lanes`, `progress`, `debug`: as
      in `loopkit.while_loop`; "all" needs static bounds, or `max_steps` where `lower` or `upper` is
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
    validate.check_callable(name, "body_fun", body_fun)
    max_steps = validate.check_bound(name, "max_steps", max_steps)
    return_info = validate.check_flag(name, "return_info", return_info)
    lower, upper = _bound("lower", lower), _bound("upper", upper)
    several, made_of, inner = 1 if unroll is None else unroll, ((body_fun,), name), buffers
    if buffers is not None:  # of the value, in the carry (counters, value)
        inner = (lambda carry: buffers(carry[1])) if callable(buffers) else (False, buffers)
    asked = LoopOptions(several, checkpoints, memory, inner, return_info, lanes, progress, debug)
    asked = asked._replace(made_of=made_of)
    if isinstance(lower, int) and isinstance(upper, int):
        trips = max(0, upper - lower)
        length = trips if max_steps is None else min(trips, max_steps)

        def step(carry: tuple, _: None) -> tuple[tuple, None]:
            i, val = carry
            return (i + 1, body_fun(i, val)), None

        inputs, asked = Inputs.of(None, 0, length), asked._replace(return_info=True)
        (_, val), _, info = run_scan(NAMES, step, (lower, init_val), inputs, asked)
        info = info._replace(stopped=jnp.array(length == trips))
        return (val, info) if return_info else val
    if validate.unrolls_all(unroll):
        advice = "Pass the number of steps to unroll."
        expected = "can be True or 0 only if the bounds are static ints"
        raise errors.wrong_value(name, "unroll", expected, repr(unroll), advice)
    first, stop = jnp.asarray(lower), jnp.asarray(upper)
    if first.dtype != stop.dtype:  # a weak type is kept, as in lax
        first, stop = (v.astype(jnp.result_type(lower, upper)) for v in (first, stop))

    def goes_on(carry: tuple) -> Any:
        (i, stop), _ = carry
        return i < stop

    def count(carry: tuple) -> tuple:
        (i, stop), val = carry
        return (i + 1, stop), body_fun(i, val)

    start = ((first, stop), init_val)
    out = run_while(NAMES, goes_on, count, start, max_steps, asked)
    return (out[0][1], out[1]) if return_info else out[1]


def _bound(argument: str, value: object) -> Any:
    """A Python int where the bound is known, else a scalar integer array."""
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
