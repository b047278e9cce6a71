"""The only door to JAX's semi-public interfaces.

Everything here works on jax 0.10.2 and on the newest release; where the two differ, the difference
is absorbed in this file. A `Jaxpr` below is always closed and has no constants: what a function
closes over has become leading arguments.
"""

from __future__ import annotations

import functools as ft
import os
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax._src import (
    ad_util,
    callback,
    checkify,
    config,
    core,
    debugging,
    dispatch,
    linear_util,
    tree_util,
)
from jax._src import effects as effects_
from jax._src import source_info_util as source_info
from jax._src.api_util import debug_info
from jax._src.array import ArrayImpl as ArrayImpl
from jax._src.interpreters import ad, batching, mlir, pxla
from jax._src.interpreters import partial_eval as pe
from jax._src.lax.control_flow import loops as lax_loops

DebugInfo = core.DebugInfo
IO_EFFECTS = callback.IOEffect, callback.OrderedIOEffect
JaxprInputEffect = effects_.JaxprInputEffect
Literal = core.Literal
ShapedArray = core.ShapedArray
Zero = ad.Zero
call_jaxpr = core.jaxpr_as_fun
close_jaxpr = pe.close_jaxpr
debug_callback_p = debugging.debug_callback_p
make_jaxpr_effects = pe.make_jaxpr_effects
pvary_p = core.pvary_p
same_type = core.typematch
tree_differences = tree_util.equality_errors_pytreedef

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


def slice_type(aval: ShapedArray, axis: int = 0) -> ShapedArray:
    """The type of one slice along `axis`."""
    return cast(ShapedArray, core.mapped_aval(aval.shape[axis], axis, aval))


def zeros(aval: ShapedArray) -> jax.Array:
    """Zeros of a type, its varying manual axes included; for PRNG keys, keys of zero bits."""
    if not jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return ad_util.zeros_like_aval(aval)
    bits = ad_util.zeros_like_aval(core.physical_aval(aval))
    keys = jax.random.wrap_key_data(bits, impl=aval.dtype._impl.name)
    return core.pvary(keys, tuple(varying(aval)))


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
    host, here = aval is not None and is_on_host(aval), is_on_host(jax.typeof(value))
    if isinstance(value, jax.Array) and not is_tracer(value):
        # What a primitive returns outside jit is on the device, whatever its type says.
        here = value.sharding.memory_kind == "pinned_host"
    if host == here:
        return value
    return jax.device_put(value, jax.memory.Space.Host if host else jax.memory.Space.Device)


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


def concrete_value(tracer: Any) -> Any:
    """The array that Python code may take a tracer for, as `float` does; None if there is none."""
    return core.to_concrete_value(tracer)


def innermost(value: Any) -> Any:
    """What the tracers of `jax.vmap` and of derivatives stand for: a value with all of its rows."""
    while isinstance(value, (batching.BatchTracer, ad.JVPTracer, ad.LinearizeTracer)):
        value = value.val if isinstance(value, batching.BatchTracer) else value.primal
    return value


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


def trace_context() -> Any:
    """What else a trace depends on: precision, x64 mode, mesh and the like."""
    return config.trace_context()


def is_symbolic(size: Any) -> bool:
    """Whether a size is known by name only, as in jax.export."""
    return core.is_symbolic_dim(size)


SYMBOLIC = 16
"""What an axis of symbolic size (jax.export) is taken to be where bytes and steps are weighed."""


def elements(aval: Any) -> int:
    """How many numbers a value of this type has; one, if it is no array."""
    return volume(getattr(aval, "shape", ()))


def volume(axes: Iterable[Any]) -> int:
    return prod(n if isinstance(n, int) else SYMBOLIC for n in axes)


def byte_count(aval: Any) -> int:
    return elements(aval) * getattr(aval.dtype, "itemsize", 8)


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


def dce(
    jaxpr: Jaxpr, used_outputs: Sequence[bool], keep: Sequence[bool]
) -> tuple[Jaxpr, list[bool]]:
    """The part of a jaxpr that the used outputs need, and which inputs it takes."""
    small, used = pe.dce_jaxpr(open_jaxpr(jaxpr), list(used_outputs), list(keep))
    return pe.close_jaxpr(small), list(used)


def with_outputs(jaxpr: Jaxpr, outputs: Sequence[Any], keep: Sequence[bool]) -> Jaxpr:
    """A jaxpr that returns other variables of its own, without the equations these do not need."""
    j = open_jaxpr(jaxpr)
    other = j.replace(outvars=list(outputs), debug_info=j.debug_info.with_unknown_names())
    return dce(other, [True] * len(outputs), keep)[0]


def jvp_activity(jaxpr: Jaxpr, nonzero: Sequence[bool]) -> list[bool]:
    """Which outputs have a tangent that is not symbolically zero."""
    return list(ad.jvp_jaxpr(jaxpr, list(nonzero), False)[1])


def batch_jaxpr(
    jaxpr: Jaxpr, axis: Any, in_axes: Sequence[int | None], out_axes: Sequence[int | str | None]
) -> tuple[Jaxpr, list[bool]]:
    """vmap of a jaxpr; an output axis "free" is 0 where batched, else unbatched."""
    free = batching.zero_if_mapped
    places = tuple(free if a == "free" else a for a in out_axes)
    batched, flags = batching.batch_jaxpr_axes(jaxpr, axis, tuple(in_axes), places)
    return batched, list(flags)


def bind_equation(eqn: Any, values: Sequence[Any]) -> list:
    """The results of an equation on other operands, in the context that it was written in."""
    found = eqn.primitive.get_bind_params(eqn.params)
    subfuns, params = found if isinstance(found, tuple) else ([], found)
    names = source_info.current_name_stack() + eqn.source_info.name_stack
    with source_info.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        out = eqn.primitive.bind(*subfuns, *values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def check_effects(effects: Any) -> list[Any]:
    """The effects that a loop cannot carry."""
    return list(effects_.control_flow_allowed_effects.filter_not_in(effects))


# ---------------------------------------------------------------- tangents


def instantiate(tangent: Any) -> Any:
    return ad.instantiate_zeros(tangent)


def is_undefined(value: Any) -> bool:
    """Whether to transpose in this operand."""
    return isinstance(value, ad.UndefinedPrimal)


def float0_zero(aval: ShapedArray) -> Zero:
    """The symbolic zero in the tangent space of `aval`."""
    return Zero(aval.to_tangent_aval())


# ---------------------------------------------------------------- primitives


def declare(name: str) -> core.Primitive:
    """A primitive with several results, to be completed by `define`."""
    primitive = core.Primitive(name)
    primitive.multiple_results = True
    return primitive


def define(primitive: core.Primitive, evaluate: Callable, types: Callable) -> None:
    """Lower and run a primitive through `evaluate(*args, **params)`.

    `types(*avals, **params)` gives the result types and the effects. However strict the user is
    with promotion in what they write, step numbers and masks may be mixed.
    """

    def evaluate_as_written(*args: Any, **params: Any) -> Any:
        lenient = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
        with lenient[0], lenient[1]:
            return evaluate(*args, **params)

    def functionalized(*args: Any, **params: Any) -> Any:
        # From jax 0.11 on the rule is given a context first.
        error = next(i for i, a in enumerate(args) if isinstance(a, checkify.Error))
        enabled, operands = args[error + 1], args[error + 2 :]
        fun = ft.partial(evaluate_as_written, **params)
        jaxpr, closed_over = trace(fun, list(map(jax.typeof, operands)), primitive.name)
        before = (*args[:error], jaxpr, enabled, args[error])
        return checkify.checkify_jaxpr(*before, *closed_over, *operands)

    primitive.def_impl(ft.partial(dispatch.apply_primitive, primitive))
    primitive.def_effectful_abstract_eval(types)
    checkify.error_checks[primitive] = functionalized
    mlir.register_lowering(primitive, mlir.lower_fun(evaluate_as_written, multiple_results=True))


def register_jvp(primitive: core.Primitive, rule: Callable) -> None:
    ad.primitive_jvps[primitive] = rule


def register_transpose(primitive: core.Primitive, rule: Callable) -> None:
    ad.primitive_transposes[primitive] = rule


def register_batching(primitive: core.Primitive, rule: Callable) -> None:
    """`rule(axis_data, args, dims, **params) -> (results, dims)`, for operands some of which have
    the axis.
    """

    def batched(axis: Any, args: Any, dims: Any, **params: Any) -> tuple:
        if all(d is None for d in dims):
            results = primitive.bind(*args, **params)
            return results, [None] * len(results)
        return rule(axis, args, dims, **params)

    batching.fancy_primitive_batchers[primitive] = batched


def register_dce(primitive: core.Primitive, rule: Callable) -> None:
    """`rule(used_outputs, eqn) -> (used_inputs, equation or None)`."""
    # The newest release says between the two which inputs are live.
    pe.dce_rules[primitive] = lambda used, *rest: rule(list(used), rest[-1])


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

    def staged(saveable: Any, unknown: Any, instantiated: Any, eqn: Any) -> tuple:
        primals, results = eqn.params["loop"].primal_counts
        count = len(eqn.outvars)
        residuals = [
            v
            for v, there in zip(eqn.invars, instantiated, strict=True)
            if not there and isinstance(v, core.Var)
        ]
        if not any(unknown):
            return eqn, None, [False] * count, [False] * count, []
        if any(unknown[:primals]):
            return None, eqn, [True] * count, [True] * count, residuals
        known_part = known_equation(eqn)
        tangents_unknown = [False] * results + [True] * (count - results)
        return known_part, eqn, tangents_unknown, [True] * count, residuals

    pe.custom_partial_eval_rules[primitive] = eager
    pe.partial_eval_jaxpr_custom_rules[primitive] = staged


def new_equation(eqn: Any, primitive: Any, invars: Any, outvars: Any, params: dict) -> Any:
    """`eqn` with another primitive, operands and results; its source and context are kept."""
    _, effects = primitive.abstract_eval(*[v.aval for v in invars], **params)
    return pe.new_jaxpr_eqn(invars, outvars, primitive, params, effects, eqn.source_info, eqn.ctx)


def has_effects(eqn: Any) -> bool:
    return bool(eqn.effects)


def axis(size: int) -> Any:
    """A batch axis without a name."""
    return batching.AxisData(core.no_axis_name, size, None, None)


def add_tangents(a: Any, b: Any) -> Any:
    return ad.add_tangents(a, b)


# ---------------------------------------------------------------- the loops of lax

lax_scan_p = lax_loops.scan_p
lax_while_p = lax_loops.while_p

replacing = jax.make_user_context(None)
"""What this thread puts in the place of lax's loops, part of every cache's key, or None."""

_lower = mlir.lower_jaxpr_to_module


def _lower_as_written(*args: Any, **kwargs: Any) -> Any:
    with replacing(None):
        return _lower(*args, **kwargs)


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


def source_of(eqn: Any | None, skipped: str) -> tuple[str, int, str] | None:
    """File, line and function outside jax and the folder `skipped` that made an equation.

    Without one, of the code being traced; of a loop inside one of jax's own, jax's function.
    """
    info = source_info.current() if eqn is None else eqn.source_info
    for frame in source_info.user_frames(info.traceback):
        if not frame.file_name.startswith(skipped):
            return frame.file_name, frame.start_line, frame.function_name
    for frame in [] if info.traceback is None else info.traceback.frames:
        if not any(part in frame.file_name for part in (skipped, *INNER)):
            return frame.file_name, frame.line_num, frame.function_name
    return None


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
