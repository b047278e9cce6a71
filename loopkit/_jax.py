"""The only door to JAX's semi-public interfaces.

Everything here works on jax 0.10.2 and on the newest release; where the two differ, the difference
is absorbed in this file. A `Jaxpr` below is always closed and has no constants: what a function
closes over has become leading arguments.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools as ft
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax._src import ad_util, callback, checkify, config, core, dispatch, linear_util
from jax._src import effects as effects_
from jax._src import source_info_util as source_info
from jax._src.api_util import debug_info
from jax._src.array import ArrayImpl as ArrayImpl
from jax._src.debugging import debug_callback_p as debug_callback_p
from jax._src.interpreters import ad, batching, mlir, pxla
from jax._src.interpreters import partial_eval as pe
from jax._src.lax.control_flow import loops as lax_loops
from jax._src.literals import TypedNdArray as TypedNdArray
from jax._src.named_sharding import UnspecifiedValue
from jax._src.random.prng import PRNGImpl
from jax._src.tree_util import broadcast_prefix as broadcast_prefix
from jax._src.tree_util import equality_errors_pytreedef as equality_errors_pytreedef

IO_EFFECTS = callback.IOEffect, callback.OrderedIOEffect
JaxprInputEffect = effects_.JaxprInputEffect
Literal = core.Literal
ShapedArray = core.ShapedArray
Zero = ad.Zero
add_tangents = ad.add_tangents
call_jaxpr = core.jaxpr_as_fun
close_jaxpr = pe.close_jaxpr
instantiate = ad.instantiate_zeros
is_symbolic = core.is_symbolic_dim
is_undefined = ad.is_undefined_primal
make_jaxpr_effects = pe.make_jaxpr_effects
pvary_p = core.pvary_p
same_type = core.typematch
trace_context = config.trace_context

COMPARED = (
    core.AbstractValue,
    core.Primitive,
    jax.sharding.AbstractMesh,
    jax.sharding.Mesh,
    jax.sharding.PartitionSpec,
    jax.sharding.Sharding,
    PRNGImpl,
    UnspecifiedValue,
    *([pe.__dict__["ft"].FlatTree] if jax.__version_info__ >= (0, 11) else []),
)
"""Types of parameters that never change, and are equal only if they mean the same."""

PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
"""The folder of this library: what users wrote is outside."""

KEEPS_BARRIERS = jax.__version_info__ >= (0, 11)
"""Whether the compiler for CPUs keeps lax.optimization_barrier until it has fused operations."""

Jaxpr = Any  # core.ClosedJaxpr before jax 0.11, core.Jaxpr since


def open_jaxpr(jaxpr: Jaxpr) -> Any:
    """The equations and variables of a closed jaxpr."""
    return getattr(jaxpr, "jaxpr", jaxpr)


# ---------------------------------------------------------------- types


def stack_type(aval: ShapedArray, size: int, axis: int = 0) -> ShapedArray:
    """The type of `size` values of type `aval`, stacked."""
    return cast(ShapedArray, core.unmapped_aval(size, axis, aval))


def stack_types(avals: Sequence[ShapedArray], size: int | None) -> list[ShapedArray]:
    """The types, with a leading axis of this size if there is one."""
    return [t if size is None else stack_type(t, size) for t in avals]


def slice_type(aval: ShapedArray, axis: int = 0) -> ShapedArray:
    """The type of one slice along `axis`."""
    return cast(ShapedArray, core.mapped_aval(aval.shape[axis], axis, aval))


def zeros(aval: ShapedArray) -> jax.Array:
    """Zeros of a type, its varying manual axes included; for PRNG keys, keys of zero bits."""
    if is_spread(aval) and jax.sharding.get_abstract_mesh().empty:
        with jax.sharding.use_abstract_mesh(aval.sharding.mesh):  # else the layout is dropped
            return zeros(aval)
    if not jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return ad.zeros_like_aval(aval)
    bits = ad.zeros_like_aval(core.physical_aval(aval))
    keys = jax.random.wrap_key_data(bits, impl=aval.dtype._impl.name)
    return core.pvary(keys, tuple(varying(aval)))


def blank(aval: ShapedArray) -> jax.Array:
    """An array whose elements are written before they are read.

    Its memory is taken as it is found, so that what is never written costs no time; on a CPU, no
    memory either.
    """
    laid_out = is_spread(aval) or bool(varying(aval))
    known_size = all(isinstance(n, int) for n in aval.shape)
    if laid_out or not known_size or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return zeros(aval)
    return blank_p.bind(jnp.int32(0), shape=aval.shape, dtype=aval.dtype, host=False)


def blank_on_host(aval: ShapedArray) -> jax.Array:
    """The same in the host's memory. Compilers make zeros on the device, and may then move them."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return placed(zeros(on_device(aval)), aval)
    made = blank_p.bind(jnp.int32(0), shape=aval.shape, dtype=aval.dtype, host=True)
    return placed(vary_like(made, [aval]), aval)


filled = jax.make_user_context(False)
"""Whether blank arrays are filled with zeros, part of every cache's key."""
host_waits = jax.make_user_context(False)
"""Whether the host waits in each iteration of a loop of unknown length, as that of a GPU does."""

blank_p = core.Primitive("loopkit_blank")
blank_p.def_impl(lambda _, shape, dtype, host: ad.zeros_like_aval(ShapedArray(shape, dtype)))
blank_p.def_abstract_eval(lambda _, shape, dtype, host: ShapedArray(shape, dtype))


def looks_for_nans() -> bool:
    """Whether all that a program returns is read, what was never written included."""
    return config.debug_nans.value or config.debug_infs.value


def _filled_where_it_shows(run: Callable, *args: Any, **params: Any) -> Any:
    if not looks_for_nans():
        return run(*args, **params)
    with filled(True):
        return run(*args, **params)


def _lower_zeros(ctx: Any, _: Any, **of: Any) -> Any:
    fill = lambda _: ad.zeros_like_aval(ShapedArray(of["shape"], of["dtype"]))
    return mlir.lower_fun(fill, multiple_results=False)(ctx, _)


def _is_filled(ctx: Any, alone: bool = True) -> bool:
    """Whether memory is not taken as it is found; `alone`: only in a program for one device."""
    kept = ctx.module_context.lowering_parameters.for_export
    return filled.value or looks_for_nans() or kept or (alone and not _is_alone(ctx))


def _is_alone(ctx: Any) -> bool:
    """Whether a program is for a single device."""
    return getattr(ctx.module_context.axis_context, "num_devices", 0) == 1


def _is_divided(ctx: Any) -> bool:
    """Whether a program says itself what each device does, if there are several."""
    context = ctx.module_context.axis_context
    named = getattr(getattr(context, "mesh", None), "axis_names", None)
    return _is_alone(ctx) or (named is not None and set(named) == set(context.manual_axes))


def check_spread_on_host() -> None:
    if jax.__version_info__ < (0, 12):
        raise NotImplementedError(
            "loopkit: `memory`, or a plan with host=True, can keep checkpoints on the host in a "
            "program that the compiler divides between several devices only with jax 0.12 or "
            f"newer, got jax {jax.__version__}, which makes room for them on the devices first. "
            "Divide it by `jax.shard_map`, or give `memory` as one number."
        )


def _lower_blank(ctx: Any, operand: Any, **of: Any) -> Any:
    if _is_filled(ctx) or not _leaves_as_found():
        return _lower_zeros(ctx, operand, **of)
    # With a side effect it stays in the loop that it is in: outside, it would have to be copied.
    return jax.ffi.ffi_lowering(UNTOUCHED, has_side_effect=True)(ctx, operand)


UNTOUCHED = "dce_sink"
"""A call that jaxlib has for CPUs, and that does nothing."""


@ft.cache
def _leaves_as_found() -> bool:
    """Whether there is such a call, and it may have a result."""
    call = jax.ffi.ffi_call(UNTOUCHED, jax.ShapeDtypeStruct((1,), jnp.int32))
    try:
        with jax.ensure_compile_time_eval():
            jax.block_until_ready(jax.jit(call).lower(jnp.int32(0)).compile()(jnp.int32(0)))
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _lower_empty(ctx: Any, operand: Any, **of: Any) -> Any:
    if of["host"] and not _is_divided(ctx):
        check_spread_on_host()
    if _is_filled(ctx, alone=not (of["host"] and _is_divided(ctx))):
        return _lower_zeros(ctx, operand, **of)
    make = lambda _: jax.lax.empty(of["shape"], of["dtype"])
    return mlir.lower_fun(make, multiple_results=False)(ctx, operand)


mlir.register_lowering(blank_p, _lower_zeros)
mlir.register_lowering(blank_p, _lower_empty, platform="gpu")
mlir.register_lowering(blank_p, _lower_empty, platform="tpu")
mlir.register_lowering(blank_p, _lower_blank, platform="cpu")


def varying(aval: ShapedArray) -> frozenset[str]:
    """The manual mesh axes over which a value of this type differs between devices."""
    return frozenset(aval.manual_axis_type.varying)


def is_spread(aval: ShapedArray) -> bool:
    """Whether the type says how values are laid out over devices."""
    sharding = getattr(aval, "sharding", None)
    return sharding is not None and not sharding.mesh.empty


def vary_like(value: Any, avals: Sequence[ShapedArray]) -> Any:
    """`value` made to vary over every manual axis over which one of `avals` does."""
    axes = frozenset().union(*map(varying, avals)) - varying(jax.typeof(value))
    return core.pvary(value, tuple(sorted(axes))) if axes else value


def type_like(aval: ShapedArray, avals: Sequence[ShapedArray]) -> ShapedArray:
    """`aval`, varying over every manual axis over which one of `avals` does."""
    for other in avals:
        if varying(other) - varying(aval):
            if aval.sharding.mesh.empty:
                spec = jax.sharding.PartitionSpec(*[None] * aval.ndim)
                aval = aval.update(sharding=other.sharding.update(spec=spec))
            manual = aval.manual_axis_type
            axes = manual.varying | varying(other)
            aval = aval.update(manual_axis_type=manual.update(varying=axes))
    return aval


def on_host(aval: ShapedArray) -> ShapedArray:
    """The type of a value that is kept in the host's memory."""
    return aval.update(memory_space=jax.memory.Space.Host)


def on_device(aval: ShapedArray) -> ShapedArray:
    return aval.update(memory_space=jax.memory.Space.Device)


def is_on_host(aval: Any) -> bool:
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def placed(value: Any, aval: ShapedArray | None = None) -> Any:
    """`value` in the memory that the type says, the device's if there is none."""
    host, here = is_on_host(aval), is_on_host(jax.typeof(value))
    if isinstance(value, jax.Array) and not is_tracer(value):
        # What a primitive returns outside jit is on the device, whatever its type says.
        here = value.sharding.memory_kind == "pinned_host"
    if host == here:
        return value
    return jax.device_put(value, jax.memory.Space.Host if host else jax.memory.Space.Device)


def named_on_host(value: Any) -> Any:
    """A value of the host's memory, with an equation that says so, where JAX looks for one.

    Without any, it has a program return it in the device's memory, whatever its type.
    """
    if is_tracer(value) and is_on_host(jax.typeof(value)):
        return jax.device_put(value, jax.memory.Space.Host)
    return value


def _unwritten_on_host(empty: Callable) -> Callable:
    """What JAX makes of a type before it is written to; of the host's memory, really there.

    JAX gives it the type alone, and compilers refuse to copy from the host's memory to such an
    array: the stacked results of a scan, and what a branch that is not taken would have saved.
    """

    def made(*of: Any) -> Any:
        array = empty(*of)
        aval = jax.typeof(array)
        return blank_on_host(aval) if is_on_host(aval) else array

    return made


cast(Any, lax_loops)._empty_array = _unwritten_on_host(cast(Any, lax_loops)._empty_array)
ad_util.aval_empty_likers[ShapedArray] = _unwritten_on_host(ad_util.aval_empty_likers[ShapedArray])


def known_on(meshes: Sequence[Any], values: list) -> list:
    """The values, laid out anyhow over the mesh: what loops name is hidden from `jax.jit`."""
    if not meshes or not values or not jax.sharding.get_abstract_mesh().empty:
        return values
    anyhow = [jax.sharding.PartitionSpec.UNCONSTRAINED] * jnp.ndim(values[0])
    sharding = jax.sharding.NamedSharding(meshes[0], jax.sharding.PartitionSpec(*anyhow))
    return [jax.lax.with_sharding_constraint(values[0], sharding), *values[1:]]


@ft.lru_cache(256)
def of_shape(aval: ShapedArray, shape: tuple[int, ...]) -> ShapedArray:
    return aval.update(shape=shape)


def put_beside(rows: Any, other: jax.Array) -> jax.Array:
    """Rows on the device of another array: `jax.device_put` in a third of the time."""
    aval = of_shape(jax.typeof(other), rows.shape)
    return pxla.batched_device_put(aval, other.sharding, [rows], [other.device], other.committed)


def is_differentiable(aval: ShapedArray) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def is_tracer(value: Any) -> bool:
    return isinstance(value, core.Tracer)


def innermost(value: Any) -> Any:
    """What the tracers of `jax.vmap` and of derivatives stand for: a value with all of its rows."""
    while isinstance(value, (batching.BatchTracer, ad.JVPTracer, ad.LinearizeTracer)):
        value = value.val if isinstance(value, batching.BatchTracer) else value.primal
    return value


def known(value: Any) -> Any:
    """A value that is no tracer, or that a tracer is known to stand for; else None."""
    if is_tracer(value):
        value = getattr(value, "val", None)
        return value.val if isinstance(value, Literal) else None
    return None if is_symbolic(value) else value


def as_array(value: Any) -> Any:
    """A JAX value as lax would see it: numpy and Python scalars become (weakly typed) arrays."""
    if isinstance(value, (core.Tracer, jax.Array)):
        return value
    return jnp.asarray(value)


def same_trace(a: Any, b: Any) -> bool:
    """Whether two values belong to the same trace, so that one may take the other's place."""
    return getattr(a, "_trace", None) is getattr(b, "_trace", None)


def jit_is_disabled() -> bool:
    """Whether this thread is under jax.disable_jit."""
    return config.disable_jit.value


SYMBOLIC = 16
"""What an axis of symbolic size (jax.export) is taken to be where bytes and steps are weighed."""


def elements(aval: Any) -> int:
    """How many numbers a value of this type has; one, if it is no array."""
    return volume(getattr(aval, "shape", ()))


def volume(axes: Iterable[Any]) -> int:
    return prod(n if isinstance(n, int) else SYMBOLIC for n in axes)


def byte_count(*avals: Any) -> int:
    return sum(elements(t) * getattr(t.dtype, "itemsize", 8) for t in avals)


# ---------------------------------------------------------------- jaxprs


def trace(fun: Callable, avals: Sequence[ShapedArray], name: str) -> tuple[Jaxpr, list]:
    """The jaxpr of `fun(*values) -> list`, and what it closes over (the first arguments)."""
    try:
        info = debug_info(name, fun, tuple(avals), {})
    except (TypeError, ValueError):
        info = debug_info(name, lambda *a: fun(*a), tuple(avals), {})
    wrapped = linear_util.wrap_init(fun, debug_info=info.with_unknown_names())
    jaxpr, _, consts = pe.trace_to_jaxpr_dynamic(wrapped, tuple(avals))
    return pe.close_jaxpr(pe.convert_constvars_jaxpr(jaxpr)), list(consts)


@dataclass(frozen=True, eq=False)
class Constant:
    """An array that a rule for derivatives makes, part of a program."""

    value: Any


constant_p = core.Primitive("loopkit_constant")
constant_p.def_impl(lambda *, of: of.value)
constant_p.def_abstract_eval(lambda *, of: core.typeof(of.value))
mlir.register_lowering(
    constant_p, mlir.lower_fun(lambda *, of: jnp.asarray(of.value), multiple_results=False)
)


def trace_closed(fun: Callable, avals: Sequence[ShapedArray], name: str) -> Jaxpr:
    """The jaxpr of a function that closes over no tracers; arrays it makes are constants of it."""
    jaxpr, made = trace(fun, avals, name)
    if not made:
        return jaxpr
    if any(map(is_tracer, made)):
        raise jax.errors.UnexpectedTracerError(
            f"loopkit: what is differentiated ({name}) must not close over values of another trace "
            "than its own, got a custom derivative whose rule does. Pass them as arguments."
        )
    held = list(map(Constant, made))
    values = lambda: [constant_p.bind(of=h) for h in held]
    return trace(lambda *args: call_jaxpr(jaxpr)(*values(), *args), avals, name)[0]


def dce(
    jaxpr: Jaxpr, used_outputs: Sequence[bool], keep: Sequence[bool]
) -> tuple[Jaxpr, list[bool]]:
    """The part of a jaxpr that the used outputs need, and which inputs it takes."""
    small, used = pe.dce_jaxpr(open_jaxpr(jaxpr), list(used_outputs), list(keep))
    return pe.close_jaxpr(small), list(used)


def used_inputs(jaxpr: Jaxpr, used_outputs: Sequence[bool]) -> list[bool]:
    """Which inputs the used outputs need."""
    keep = [False] * len(jaxpr.in_avals)
    return list(pe.dce_jaxpr(open_jaxpr(jaxpr), list(used_outputs), keep)[1])


def unknown_outputs(jaxpr: Jaxpr, unknown: Sequence[bool]) -> list[bool]:
    """Which outputs depend on inputs that are not known yet."""
    return list(pe.partial_eval_jaxpr_nounits(jaxpr, list(unknown), False)[2])


def with_outputs(jaxpr: Jaxpr, outputs: Sequence[Any], keep: Sequence[bool]) -> Jaxpr:
    """A jaxpr that returns other variables of its own, without the equations these do not need."""
    j = open_jaxpr(jaxpr)
    other = j.replace(outvars=list(outputs), debug_info=j.debug_info.with_unknown_names())
    return dce(other, [True] * len(outputs), keep)[0]


def rearranged(jaxpr: Jaxpr, inputs: Sequence[int], outputs: Sequence[int]) -> Jaxpr:
    """The same equations, with the inputs in another order and some of the outputs."""
    j = open_jaxpr(jaxpr)
    invars, outvars = [j.invars[i] for i in inputs], [j.outvars[i] for i in outputs]
    info = j.debug_info.with_unknown_names()
    return pe.close_jaxpr(j.replace(invars=invars, outvars=outvars, debug_info=info))


def jvp_jaxpr(jaxpr: Jaxpr, nonzero: Sequence[bool]) -> tuple[Jaxpr, list[bool]]:
    """(inputs, nonzero tangents) -> (outputs, nonzero tangents), and which outputs have those."""
    dual, moved = ad.jvp_jaxpr(jaxpr, list(nonzero), False)
    return dual, list(moved)


def batch_jaxpr(
    jaxpr: Jaxpr, axis: Any, in_axes: Sequence[int | None], out_axes: Sequence[int | str | None]
) -> tuple[Jaxpr, list[bool]]:
    """vmap of a jaxpr; an output axis "free" is 0 where batched, else unbatched."""
    free = batching.zero_if_mapped
    places = tuple(free if a == "free" else a for a in out_axes)
    batched, flags = batching.batch_jaxpr_axes(jaxpr, axis, tuple(in_axes), places)
    if batched.consts:  # made by the rule of a custom_vmap
        batched = trace_closed(call_jaxpr(batched), batched.in_avals, "batched")
    return batched, list(flags)


def bind_equation(eqn: Any, values: Sequence[Any]) -> list:
    """The results of an equation on other operands, in the context that it was written in."""
    found = eqn.primitive.get_bind_params(eqn.params)
    subfuns, params = found if isinstance(found, tuple) else ([], found)
    with context_of(eqn):
        out = eqn.primitive.bind(*subfuns, *values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


@contextlib.contextmanager
def context_of(eqn: Any) -> Any:
    """What an equation was written in, for what takes its place."""
    names = source_info.current_name_stack() + eqn.source_info.name_stack
    with source_info.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        yield


def vmapped_axes() -> set:
    """The names of the axes of `jax.vmap` around what is being traced."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return set(core.get_axis_env().axis_sizes).difference(manual)


def check_effects(effects: Any) -> list[Any]:
    """The effects that a loop cannot carry."""
    return list(effects_.control_flow_allowed_effects.filter_not_in(effects))


def jvp_in_moving(fun: Callable, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple:
    """`jax.jvp` of `fun(*primals)`, in the operands whose tangents are not symbolically zero."""
    places = [i for i, t in enumerate(tangents) if t is not None and type(t) is not Zero]
    known = dict(enumerate(primals))
    at = lambda *moved: fun(*(known | dict(zip(places, moved, strict=True))).values())
    return jax.jvp(at, [primals[i] for i in places], [tangents[i] for i in places])


def nonzero(tangents: Sequence[Any]) -> list[bool]:
    """Which are not symbolically zero."""
    return [type(t) is not Zero for t in tangents]


def float0_zero(aval: ShapedArray) -> Zero:
    """The symbolic zero in the tangent space of `aval`."""
    return Zero(aval.to_tangent_aval())


# ---------------------------------------------------------------- primitives


def declare(name: str) -> core.Primitive:
    """A primitive with several results, to be completed by `define`."""
    primitive = core.Primitive(name)
    primitive.multiple_results = True
    return primitive


def define(
    primitive: core.Primitive,
    evaluate: Callable,
    types: Callable,
    *,
    jvp: Callable | None = None,
    transpose: Callable | None = None,
    dce: Callable | None = None,
    run: Callable | None = None,
    on_tpu: Callable | None = None,
) -> Callable:
    """Lower a primitive through `evaluate(*args, **params)`, which is returned as it is run.

    Outside jit it is compiled, or left to `run(compiled, evaluate, *args, **params)`. However
    strict the user is with promotion in what they write, step numbers and masks may be mixed.
    `types(*avals, **params)` gives result types and effects. `dce(used, equation)`
    says which operands are used, and gives the equation that is left, or None. For a single TPU,
    `on_tpu(evaluate)` is lowered.
    """

    def evaluate_as_written(*args: Any, **params: Any) -> Any:
        lenient = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
        with lenient[0], lenient[1]:
            return evaluate(*args, **params)

    def functionalized(*args: Any, **params: Any) -> Any:
        context, error, enabled, operands = _checkified(args)
        if params.get("loop") is not None:
            # No step is taken to be thrown away, but for those of lanes: they may be anywhere.
            loop = params["loop"] = params["loop"].unrolled(1)
            enabled = enabled - {checkify.OOBError} if loop.lanes else enabled
        fun = ft.partial(evaluate_as_written, **params)
        jaxpr, closed_over = trace(fun, list(map(jax.typeof, operands)), primitive.name)
        return checkify.checkify_jaxpr(*context, jaxpr, enabled, error, *closed_over, *operands)

    def alone(*operands: Any, **params: Any) -> Any:
        if any(map(is_on_host, types(*map(jax.typeof, operands), **params)[0])):
            return named_results(primitive, tuple(params.items()), *operands)
        return dispatch.apply_primitive(primitive, *operands, **params)

    outside = alone if run is None else ft.partial(run, alone, evaluate_as_written)
    primitive.def_impl(ft.partial(_filled_where_it_shows, outside))
    primitive.def_effectful_abstract_eval(types)
    checkify.error_checks[primitive] = functionalized
    for platform in (None, "gpu"):
        lower_by(primitive, evaluate_as_written, platform=platform)
    if on_tpu is not None:
        lower_by(primitive, evaluate_as_written, on_tpu(evaluate_as_written), "tpu")
    if jvp is not None:
        ad.primitive_jvps[primitive] = jvp
    if transpose is not None:
        ad.primitive_transposes[primitive] = transpose
    if dce is not None:
        # The newest release says between the two which inputs are live.
        pe.dce_rules[primitive] = lambda used, *rest: dce(list(used), rest[-1])
    return evaluate_as_written


@ft.partial(jax.jit, static_argnums=(0, 1))
def named_results(primitive: core.Primitive, params: tuple, *operands: Any) -> list:
    """What a primitive returns, in the memory that its types say, also outside jit."""
    return list(map(named_on_host, primitive.bind(*operands, **dict(params))))


def lower_by(
    primitive: core.Primitive,
    evaluate: Callable,
    alone: Callable | None = None,
    platform: str | None = None,
) -> None:
    """Lower what a function does, with the memory that it names; on a single device, `alone`.

    JAX looks for such names in the equations that a program is made of, not in what they become,
    and drops them all where it finds none.
    """
    spread, alone = (
        mlir.lower_fun(f, multiple_results=True) for f in (evaluate, alone or evaluate)
    )

    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        ctx.module_context = ctx.module_context.replace(all_default_mem_kind=False)
        token = _targets.set(tuple(ctx.platforms or ctx.module_context.platforms))
        try:
            with host_waits(True) if platform == "gpu" else contextlib.nullcontext():
                return (alone if _is_alone(ctx) else spread)(ctx, *operands, **params)
        finally:
            _targets.reset(token)

    mlir.register_lowering(primitive, rule, platform=platform)


_targets: contextvars.ContextVar[tuple[str, ...] | None] = contextvars.ContextVar("targets")
"""The platforms that a program is being lowered for."""


def target_device() -> Any:
    """A device of this process like the one that the program being lowered is for, if it has one.

    Where none is being lowered, the default device.
    """
    platforms = _targets.get(None)
    if platforms is None:
        default = config.default_device.value
        return default if isinstance(default, jax.Device) else jax.local_devices()[0]
    for platform in platforms:
        with contextlib.suppress(RuntimeError):  # no such devices here
            return jax.local_devices(backend=platform)[0]
    return None


def _checkified(args: Any) -> tuple:
    """What checkify calls a rule with: a context from jax 0.11 on, error, kinds and operands."""
    at = next(i for i, a in enumerate(args) if isinstance(a, checkify.Error))
    return args[:at], args[at], args[at + 1], args[at + 2 :]


def register_bounds(primitive: core.Primitive, outside: Callable) -> None:
    """`outside(*operands, **params) -> (bad, starts, axes)`: what checkify is to call an error."""

    def rule(*args: Any, **params: Any) -> Any:
        context, error, enabled, operands = _checkified(args)
        out, shape = primitive.bind(*operands, **params), operands[0].shape
        if checkify.OOBError in enabled and params.get("value", True) and params["window"].axes:
            bad, starts, axes = outside(*operands, **params)
            payload = checkify.oob_payload(bad, starts, axes, shape)
            kind = checkify.OOBError(checkify.get_traceback(), primitive.name, shape, payload)
            error = cast(Any, checkify).assert_func(*context, error, bad.any(), kind)
        if params.get("add"):
            error = cast(Any, checkify).check_nans(primitive, *context, error, enabled, out)
        return error, out

    checkify.error_checks[primitive] = rule


def register_batching(primitive: core.Primitive, rule: Callable) -> None:
    """`rule(axis_data, args, dims, **params) -> (results, dims)`, for operands some of which have
    the axis, or a loop whose steps ask for it by name.
    """

    def batched(axis: Any, args: Any, dims: Any, **params: Any) -> tuple:
        named = "loop" in params and axis.name in params["loop"].axis_names
        if all(d is None for d in dims) and not named:
            results = primitive.bind(*args, **params)
            return results, [None] * len(results)
        return rule(axis, args, dims, **params)

    batching.fancy_primitive_batchers[primitive] = batched


def register_partial_eval(
    primitive: core.Primitive, known: Callable, known_equation: Callable
) -> None:
    """How a primitive splits where its primals are known and its tangents are not.

    `known(values, **params)`, for primals that are known, gives the primal results, the constants
    of the linear part, and that part's primitive and parameters. `known_equation(eqn)` gives, for
    jax.checkpoint, the equation of the primal results alone. `params["split"]` says how many
    operands and results are primal.
    """

    def eager(trace: Any, *tracers: Any, **params: Any) -> list:
        primals, _ = params["loop"].primal_counts
        if not all(t.is_known() for t in tracers[:primals]):
            return trace.default_process_primitive(primitive, tracers, params)
        values = [t.pval.get_known() for t in tracers[:primals]]
        with core.set_current_trace(trace.parent_trace):
            outs, residuals, linear, linear_params = known(values, **params)
        operands = [*map(trace.new_const, residuals), *tracers[primals:]]
        tangents = trace.default_process_primitive(linear, operands, linear_params)
        return [*map(trace.new_const, outs), *tangents]

    def known_part(unknown: list[bool], eqn: Any) -> tuple | None:
        primals, results = eqn.params["loop"].primal_counts
        if any(unknown[:primals]):
            return None
        return known_equation(eqn), [i < results for i in range(len(eqn.outvars))]

    _register_partial_eval(primitive, eager, known_part)


def _register_partial_eval(primitive: Any, eager: Callable, known_part: Callable) -> None:
    """Under jax.checkpoint all of an equation is left for later, and what is known is known.

    `known_part(unknown, eqn)` is None, or the equation of that part and which results it has.
    """

    def rule(saveable: Any, unknown: Any, instantiated: Any, eqn: Any) -> tuple:
        count = len(eqn.outvars)
        if not any(unknown):
            return eqn, None, [False] * count, [False] * count, []
        pairs = zip(eqn.invars, instantiated, strict=True)
        residuals = [v for v, there in pairs if not there and isinstance(v, core.Var)]
        known, results = known_part(list(unknown), eqn) or (None, [False] * count)
        return known, eqn, [not k for k in results], [True] * count, residuals

    pe.custom_partial_eval_rules[primitive] = eager
    pe.partial_eval_jaxpr_custom_rules[primitive] = rule


def register_known_part(primitive: core.Primitive, part: Callable) -> None:
    """How a primitive is evaluated in part where some of its operands are known.

    `part(unknown, **params)` is None, or says which operands and which results are known, and the
    parameters with which the primitive computes those. All of it is left for later as well.
    """

    def eager(trace: Any, *tracers: Any, **params: Any) -> list:
        found = part([not t.is_known() for t in tracers], **params)
        later = trace.default_process_primitive(primitive, tracers, params)
        if found is None:
            return later
        operands, results, known_params = found
        values = [t.pval.get_known() for t, k in zip(tracers, operands, strict=True) if k]
        with core.set_current_trace(trace.parent_trace):
            known = iter(primitive.bind(*values, **known_params))
        return [
            trace.new_const(next(known)) if k else t for t, k in zip(later, results, strict=True)
        ]

    def known_part(unknown: list[bool], eqn: Any) -> tuple | None:
        found = part(unknown, **eqn.params)
        if found is None:
            return None
        operands, results, known_params = found
        invars = [v for v, k in zip(eqn.invars, operands, strict=True) if k]
        outvars = [v for v, k in zip(eqn.outvars, results, strict=True) if k]
        return new_equation(eqn, primitive, invars, outvars, known_params), results

    _register_partial_eval(primitive, eager, known_part)


def new_equation(eqn: Any, primitive: Any, invars: Any, outvars: Any, params: dict) -> Any:
    """`eqn` with another primitive, operands and results; its source and context are kept."""
    _, effects = primitive.abstract_eval(*[v.aval for v in invars], **params)
    return pe.new_jaxpr_eqn(invars, outvars, primitive, params, effects, eqn.source_info, eqn.ctx)


def axis(size: int) -> Any:
    """A batch axis without a name."""
    return batching.AxisData(core.no_axis_name, size, None, None)


# ---------------------------------------------------------------- the loops of lax

lax_scan_p = lax_loops.scan_p
lax_while_p = lax_loops.while_p

replacing = jax.make_user_context(None)
"""What this thread puts in the place of lax's loops, part of every cache's key, or None."""

_lower = mlir.lower_jaxpr_to_module


def _lower_as_written(*args: Any, **kwargs: Any) -> Any:
    with replacing(None):
        return _lower(*args, **kwargs)


def trace_bodies_within(context: Callable | None) -> None:
    """Have lax trace the functions of a loop within `context(kind, carry types, length)`."""

    def trace_to_jaxpr(fun: Any, avals: Any, *rest: Any, **params: Any) -> Any:
        trace, caller = ft.partial(pe.trace_to_jaxpr, fun, avals, *rest, **params), sys._getframe(2)
        kind = caller.f_code.co_name
        if context is None or kind not in ("scan", "while_loop"):
            return trace()
        (carry, *_), _ = avals.unflatten()
        with context(kind, jax.tree.leaves(carry), caller.f_locals.get("length")):
            return trace()

    other = SimpleNamespace(**{**vars(pe), "trace_to_jaxpr": trace_to_jaxpr})
    cast(Any, lax_loops).pe = pe if context is None else other


def is_settled() -> bool:
    """Whether the loop that is being bound is one of this library's own, or what a rule of lax's
    makes of another loop: nobody wrote it.
    """
    frame: Any = sys._getframe(1)
    while (code := frame.f_code).co_filename.endswith(MACHINERY):
        derived = code.co_name.startswith(("_scan", "_while")) or code.co_name == "tangent_fun"
        if derived and not code.co_name.endswith(("discharge_rule", "lojax")):
            return True
        frame = frame.f_back
    return code.co_filename.startswith(os.path.join(PACKAGE, "_engine"))


def steps_of(params: dict[str, Any]) -> Jaxpr:
    """The body of a loop of lax."""
    return params["jaxpr"] if "jaxpr" in params else params["body_jaxpr"]


def lower_as_written(on: bool) -> None:
    """Lower programs without replacing loops: what a scan is lowered to is a while loop of lax."""
    mlir.lower_jaxpr_to_module = _lower_as_written if on else _lower


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a lax scan are constants, and how many are the initial carry."""
    if "ft_in" in params:  # since jax 0.11
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


INNER = tuple(
    os.path.join("jax", "_src", name)
    for name in ("lax", "core.py", "source_info_util.py", "traceback_util.py")
)
"""Files that every loop goes through."""
_TOOLS = ft.__file__, contextlib.__file__, "<"  # generated code
WITHIN = PACKAGE, os.path.join(os.path.dirname(jax.__file__), ""), *_TOOLS
"""Where the code of jax and loopkit is, and what runs it."""
_BETWEEN = {
    "jax/_src": (
        "core",
        "linear_util",
        "traceback_util",
        "api_util",
        "pjit",
        "profiler",
        "util",
        "dispatch",
    ),
    "interpreters": ("ad", "batching", "partial_eval", "remat", "mlir", "pxla"),
    "control_flow": ("loops", "common"),
    "loopkit": ("_jax", "_foreign/replace"),
    "": ("contextlib",),
}
MACHINERY = tuple(
    os.path.join(*folder.split("/"), *f"{name}.py".split("/"))
    for folder, names in _BETWEEN.items()
    for name in names
)
"""Files of what stands between a loop that someone calls, or a rule makes, and its primitive."""


def source_of(eqn: Any | None) -> tuple[str, int, str] | None:
    """File, line and function outside jax and loopkit that made an equation.

    Without one, of the code being traced; of a loop inside one of jax's own, jax's function.
    """
    info = source_info.current() if eqn is None else eqn.source_info
    for frame in source_info.user_frames(info.traceback):
        if not frame.file_name.startswith(PACKAGE):
            return frame.file_name, frame.start_line, frame.function_name
    for frame in [] if info.traceback is None else info.traceback.frames:
        inner = any(part in frame.file_name for part in (PACKAGE, *INNER))
        if not inner and not frame.file_name.endswith(MACHINERY):
            return frame.file_name, frame.line_num, frame.function_name
    return None if eqn is not None else _caller()


def _caller() -> tuple[str, int, str] | None:
    """Who called jax or loopkit, where a traceback of jax begins further in."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(WITHIN):
        frame = frame.f_back
    return frame and (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def source() -> str:
    """`file:line (function)` of the code being traced, outside jax and loopkit."""
    found = source_of(None)
    return "{}:{} ({})".format(*found) if found else "unknown"


def is_raised_within(error: Exception) -> bool:
    """Whether jax or loopkit raises an error by itself, in no function of anyone else's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(WITHIN):
        trace = trace.tb_next
    return trace is None


def name_stack() -> str:
    return str(source_info.current_name_stack())


def with_custom_rules(eqn: Any, within: Callable[[Callable], Callable]) -> Any:
    """A call with a custom derivative, whose rules run as `within(rule)`; any other equation."""
    rules = [k for k in ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd") if k in eqn.params]
    if not rules or not eqn.primitive.name.startswith("custom_"):
        return eqn
    params = dict(eqn.params)
    for name in rules:
        rule = params[name]
        wrapped = within(rule.call_wrapped)
        params[name] = linear_util.wrap_init(wrapped, debug_info=rule.debug_info)
    return eqn.replace(params=params)
