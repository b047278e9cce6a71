"""Memory: values on the device or the host, and arrays that are not initialised."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import ad_util, config, core
from jax._src.interpreters import ad, batching, mlir
from jax._src.lax.control_flow import loops as lax_loops

from loopkit._jax.avals import (
    LoweringContext,
    ShapedArray,
    byte_count,
    is_spread,
    is_tracer,
    vary_like,
    varying,
    zeros,
)


def on_host(aval: ShapedArray) -> ShapedArray:
    """Return the type of a value that is kept in the host's memory."""
    _make_room_on_host()
    return aval.update(memory_space=jax.memory.Space.Host)


def on_device(aval: ShapedArray) -> ShapedArray:
    return aval.update(memory_space=jax.memory.Space.Device)


def is_on_host(aval: ShapedArray | None) -> bool:
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def placed(value: jax.Array, aval: ShapedArray | None = None) -> Any:
    """Return `value` in the memory that the type names, or on the device if there is no type."""
    host, here = is_on_host(aval), is_on_host(jax.typeof(value))
    if isinstance(value, jax.Array) and not is_tracer(value):
        # Outside jit a primitive returns values on the device, whatever their types say.
        here = value.sharding.memory_kind == "pinned_host"
    if host == here:
        return value
    return jax.device_put(value, jax.memory.Space.Host if host else jax.memory.Space.Device)


def named_on_host(value: jax.Array) -> Any:
    """Return a value in the host's memory with an equation that names this memory.

    Without such an equation, JAX makes a program return the value in the device's memory, whatever
    its type.
    """
    if is_tracer(value) and is_on_host(jax.typeof(value)):
        return jax.device_put(value, jax.memory.Space.Host)
    return value


def blank(aval: ShapedArray, after: Any = 0) -> jax.Array:
    """Return an array that is not initialised: write each element before you read it.

    Elements that are never written cost no time, and no memory on a CPU. XLA for CPUs allocates an
    array as soon as it can: this one once it has `after`, which `moment` returns.
    """
    return _made(aval, after, None, True)


def written(aval: ShapedArray, after: Any, fill: int = 0) -> jax.Array:
    """Return an array like `blank`, all of whose elements will be written.

    On a CPU it is blank. Compilers for other devices get a filled array, which they optimise
    better. If several arrays are filled with the same number, they may make one, and copy it.
    """
    return _made(aval, after, fill, True)


def zeros_after(aval: ShapedArray, after: Any) -> jax.Array:
    """Return zeros; if they take much memory, they are made only once `after` is there."""
    return _made(aval, after, 0, False) if byte_count(aval) > LITTLE else zeros(aval)


LITTLE = 1 << 12
"""The most bytes of an array of zeros that may exist from the beginning of a program."""


def moment(arrays: Sequence[Any]) -> Any:
    """Return a zero that XLA for CPUs cannot compute before it has the arrays."""
    some = list(filter(_has_a_number, arrays))
    some = some if len(some) <= AWAITED else [*some[: AWAITED // 2], *some[-AWAITED // 2 :]]
    return moment_p.bind(*some) if some else 0


AWAITED = 4
"""The most arrays that a moment waits for: the first and the last of them."""


def _has_a_number(value: Any) -> bool:
    """Return whether a traced value has a number to read, on a single device."""
    if not is_tracer(value) or not jnp.issubdtype(value.dtype, jnp.number):
        return False
    known = all(isinstance(n, int) and n for n in value.shape)
    aval = jax.typeof(value)
    return known and not is_on_host(aval) and not is_spread(aval) and not varying(aval)


def _made(aval: ShapedArray, after: Any, fill: int | None, found: bool) -> jax.Array:
    """Return an array that is filled with `fill` or 0, unless its memory may be left as `found`."""
    explicit = jax.sharding.get_abstract_mesh().explicit_axes  # zeros take these on
    laid_out = is_spread(aval) or bool(varying(aval) or explicit)
    known_size = all(isinstance(n, int) for n in aval.shape)
    if laid_out or not known_size or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return zeros(aval) + fill if fill else zeros(aval)
    after = after if is_tracer(after) else jnp.int32(0)
    how = {"host": False, "fill": fill, "found": found}
    return blank_p.bind(after, shape=aval.shape, dtype=aval.dtype, **how)


def blank_on_host(aval: ShapedArray) -> jax.Array:
    """Return a blank array on the host. Compilers make zeros on the device, and may move them."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return placed(zeros(on_device(aval)), aval)
    made = blank_p.bind(
        jnp.int32(0), shape=aval.shape, dtype=aval.dtype, host=True, fill=None, found=True
    )
    return placed(vary_like(made, [aval]), aval)


filled = jax.make_user_context(False)
"""Whether blank arrays are filled with zeros. It is part of every cache's key."""

blank_p = core.Primitive("loopkit_blank")
blank_p.def_impl(lambda _, shape, dtype, **__: ad.zeros_like_aval(ShapedArray(shape, dtype)))
blank_p.def_abstract_eval(lambda _, shape, dtype, **__: ShapedArray(shape, dtype))
moment_p = core.Primitive("loopkit_moment")
moment_p.def_impl(lambda *_: jnp.int32(0))
moment_p.def_abstract_eval(lambda *_: ShapedArray((), jnp.dtype("int32")))
ad.primitive_jvps[moment_p] = lambda arrays, _: _no_tangent(moment_p.bind(*arrays))
batching.primitive_batchers[moment_p] = lambda arrays, _: (moment_p.bind(*arrays), None)


def _no_tangent(value: jax.Array) -> tuple[jax.Array, Any]:
    return value, ad.Zero(jax.typeof(value).to_tangent_aval())


def looks_for_nans() -> bool:
    """Return whether JAX checks whole results for NaNs, elements included that nobody wrote."""
    return config.debug_nans.value or config.debug_infs.value


def filled_where_it_shows(run: Callable, *args: Any, **params: Any) -> Any:
    if not looks_for_nans():
        return run(*args, **params)
    with filled(True):
        return run(*args, **params)


def _lower_filled(ctx: LoweringContext, after: Any, **of: Any) -> Any:
    fill = lambda _: jnp.full(of["shape"], of["fill"] or 0, of["dtype"])
    return mlir.lower_fun(fill, multiple_results=False)(ctx, after)


def _lower_zeros_after(ctx: LoweringContext, after: Any, **of: Any) -> Any:
    fill = lambda after: lax.broadcast(after.astype(of["dtype"]), of["shape"])
    return mlir.lower_fun(fill, multiple_results=False)(ctx, after)


def _lower_moment(ctx: LoweringContext, *arrays: Any) -> Any:
    if _is_filled(ctx):
        return _lower_no_moment(ctx, *arrays)
    return mlir.lower_fun(_when_there, multiple_results=False)(ctx, *arrays)


def _when_there(*arrays: jax.Array) -> jax.Array:
    """Return whether the first number of any array is both 0 and 1: never."""
    never = []
    for array in arrays:
        number = lax.slice(array, (0,) * array.ndim, (1,) * array.ndim).reshape(())
        zero, one = (lax.eq(number, np.asarray(n, array.dtype)) for n in (0, 1))
        never.append(lax.bitwise_and(zero, one))
    return lax.convert_element_type(ft.reduce(lax.bitwise_or, never), np.int32)


def _lower_no_moment(ctx: LoweringContext, *arrays: Any) -> Any:
    return mlir.lower_fun(lambda *_: jnp.int32(0), multiple_results=False)(ctx, *arrays)


def _is_filled(ctx: LoweringContext, alone: bool = True) -> bool:
    """Return whether blank arrays must be filled; with `alone`, they must be in a program for
    several devices."""
    kept = ctx.module_context.lowering_parameters.for_export
    return filled.value or looks_for_nans() or kept or (alone and not is_alone(ctx))


def is_alone(ctx: LoweringContext) -> bool:
    """Return whether a program is for a single device."""
    return getattr(ctx.module_context.axis_context, "num_devices", 0) == 1


def _is_divided(ctx: Any) -> bool:
    """Return whether a program is for one device, or itself says what each device does."""
    context = ctx.module_context.axis_context
    named = getattr(getattr(context, "mesh", None), "axis_names", None)
    return is_alone(ctx) or (named is not None and set(named) == set(context.manual_axes))


def check_spread_on_host() -> None:
    if jax.__version_info__ < (0, 12):
        raise NotImplementedError(
            "loopkit: checkpoints on the host need jax 0.12 or newer in a program that the "
            "compiler divides between several devices. Divide the program with `jax.shard_map`, or "
            f"pass `memory` as one number. Got: jax {jax.__version__}."
        )


def _lower_blank(ctx: LoweringContext, after: Any, **of: Any) -> Any:
    small = byte_count(ShapedArray(of["shape"], of["dtype"])) <= ZEROED_BYTES
    if _is_filled(ctx):
        return _lower_filled(ctx, after, **of)
    if small or not of["found"] or not _leaves_as_found():
        return _lower_zeros_after(ctx, after, **of)
    # A side effect keeps the call in its loop. Outside, its result would have to be copied.
    return jax.ffi.ffi_lowering(UNTOUCHED, has_side_effect=True)(ctx, after)


ZEROED_BYTES = 1 << 16
"""The most bytes for which filling with zeros costs less than a call in the loop around.

XLA does not compile a loop with a call in its step as one kernel.
"""
UNTOUCHED = "dce_sink"
"""A custom call of jaxlib for CPUs that does nothing."""


@ft.cache
def _leaves_as_found() -> bool:
    """Return whether jaxlib has the call `UNTOUCHED`, and lets it have a result."""
    call = jax.ffi.ffi_call(UNTOUCHED, jax.ShapeDtypeStruct((1,), jnp.int32))
    try:
        with jax.ensure_compile_time_eval():
            jax.block_until_ready(jax.jit(call).lower(jnp.int32(0)).compile()(jnp.int32(0)))
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _lower_empty(ctx: LoweringContext, after: Any, **of: Any) -> Any:
    if of["host"] and not _is_divided(ctx):
        check_spread_on_host()
    told = of["fill"] is not None
    if told or _is_filled(ctx, alone=not (of["host"] and _is_divided(ctx))):
        return _lower_filled(ctx, after, **of)
    make = lambda _: lax.empty(of["shape"], of["dtype"])
    return mlir.lower_fun(make, multiple_results=False)(ctx, after)


mlir.register_lowering(moment_p, _lower_no_moment)
mlir.register_lowering(moment_p, _lower_moment, platform="cpu")
mlir.register_lowering(blank_p, _lower_filled)
mlir.register_lowering(blank_p, _lower_empty, platform="gpu")
mlir.register_lowering(blank_p, _lower_empty, platform="tpu")
mlir.register_lowering(blank_p, _lower_blank, platform="cpu")


@ft.cache
def _make_room_on_host() -> None:
    """Make JAX allocate empty arrays with a type of the host's memory in that memory.

    JAX only gives such an array the type, and compilers refuse to copy from the host's memory to
    it. This concerns the stacked results of a scan of lax around a loop, and the residuals of a
    branch that is not taken. JAX makes both without a primitive, before it lowers anything. So this
    changes two functions of JAX, once a type of the host's memory is asked for.
    """

    def really(empty: Callable) -> Callable:
        def made(*of: Any) -> Any:
            array = empty(*of)
            aval = jax.typeof(array)
            return blank_on_host(aval) if is_on_host(aval) else array

        return made

    cast(Any, lax_loops)._empty_array = really(cast(Any, lax_loops)._empty_array)
    ad_util.aval_empty_likers[ShapedArray] = really(ad_util.aval_empty_likers[ShapedArray])
