"""The only door to JAX's semi-public interfaces.

Everything here works on jax 0.10.2 and on the newest release; where the two differ, the difference
is absorbed in this file. A `Jaxpr` below is always closed and has no constants: what a function
closes over has become leading arguments.
"""

from __future__ import annotations

import functools as ft
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import ad_util, config, core, debugging, dispatch, linear_util
from jax._src import effects as effects_
from jax._src.api_util import debug_info
from jax._src.core import (
    AbstractValue,
    ShapedArray,
    jaxpr_as_fun as call_jaxpr,
    typematch as same_type,
    typeof,
)
from jax._src.interpreters import ad, batching, mlir, partial_eval as pe
from jax._src.interpreters.ad import Zero
from jax._src.tree_util import equality_errors_pytreedef as tree_differences

__all__ = [
    "AbstractValue",
    "Jaxpr",
    "ShapedArray",
    "Zero",
    "batch_jaxpr",
    "blank",
    "call_jaxpr",
    "check_effects",
    "dce",
    "define",
    "float0_zero",
    "forwarded",
    "instantiate",
    "is_differentiable",
    "is_tracer",
    "jaxpr_key",
    "jvp_activity",
    "new_equation",
    "same_type",
    "slice_type",
    "stack_type",
    "trace",
    "without_debug_effects",
    "zeros",
]

Jaxpr = Any  # core.ClosedJaxpr before jax 0.11, core.Jaxpr since


def open_jaxpr(jaxpr: Jaxpr) -> Any:
    """The equations and variables of a closed jaxpr."""
    return getattr(jaxpr, "jaxpr", jaxpr)


# ---------------------------------------------------------------- types


def stack_type(aval: ShapedArray, size: int, axis: int = 0) -> ShapedArray:
    """The type of `size` values of type `aval`, stacked."""
    return core.unmapped_aval(size, axis, aval)


def slice_type(aval: ShapedArray, axis: int = 0) -> ShapedArray:
    """The type of one slice along `axis`."""
    return core.mapped_aval(aval.shape[axis], axis, aval)


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


def is_differentiable(aval: ShapedArray) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def is_tracer(value: Any) -> bool:
    return isinstance(value, core.Tracer)


def as_array(value: Any) -> Any:
    """A JAX value as lax would see it: numpy and Python scalars become (weakly typed) arrays."""
    if isinstance(value, (core.Tracer, jax.Array)):
        return value
    return jnp.asarray(value)


def promoted_dtype(a: ShapedArray, b: ShapedArray) -> Any:
    """The dtype that two types have in common; a weak one gives way."""
    scalars = {"b": True, "i": 0, "u": 0, "f": 0.0, "c": 0j}
    return jnp.result_type(*(scalars[t.dtype.kind] if t.weak_type else t.dtype for t in (a, b)))


def trace_context() -> Any:
    """What else a trace depends on: precision, x64 mode, mesh and the like."""
    return config.trace_context()


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


def forwarded(jaxpr: Jaxpr) -> list[int | None]:
    """For each output, the input that it passes on unchanged, if any."""
    j = open_jaxpr(jaxpr)
    place = {v: i for i, v in enumerate(j.invars)}
    return [None if isinstance(v, core.Literal) else place.get(v) for v in j.outvars]


def outputs_depending(jaxpr: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Which outputs depend in any way on the marked inputs."""
    j = open_jaxpr(jaxpr)
    reached = {v for v, marked in zip(j.invars, inputs, strict=True) if marked}
    for eqn in j.eqns:
        if any(not isinstance(v, core.Literal) and v in reached for v in eqn.invars):
            reached.update(eqn.outvars)
    return [not isinstance(v, core.Literal) and v in reached for v in j.outvars]


def distinct_outputs(jaxpr: Jaxpr) -> list[int]:
    """For each output, the index of the first output that is the same variable."""
    first: dict[Any, int] = {}
    outs = open_jaxpr(jaxpr).outvars
    return [
        i if isinstance(v, core.Literal) else first.setdefault(v, i) for i, v in enumerate(outs)
    ]


def jvp_activity(jaxpr: Jaxpr, nonzero: Sequence[bool]) -> list[bool]:
    """Which outputs have a tangent that is not symbolically zero."""
    return list(ad.jvp_jaxpr(jaxpr, list(nonzero), False)[1])


def batch_jaxpr(
    jaxpr: Jaxpr, axis: Any, in_axes: Sequence[int | None], out_axes: Sequence[int | None | str]
) -> tuple[Jaxpr, list[bool]]:
    """vmap of a jaxpr; an output axis "free" is 0 where batched, else unbatched."""
    free = batching.zero_if_mapped
    places = tuple(free if a == "free" else a for a in out_axes)
    batched, flags = batching.batch_jaxpr_axes(jaxpr, axis, tuple(in_axes), places)
    return batched, list(flags)


def without_debug_effects(jaxpr: Jaxpr) -> Jaxpr:
    """A jaxpr that no longer prints or calls back for debugging.

    Recomputation runs a step again; what a step reports must be reported once.
    """
    return pe.close_jaxpr(_without_debug_effects(open_jaxpr(jaxpr)))


def _without_debug_effects(jaxpr: Any) -> Any:
    if not jaxpr.effects:
        return jaxpr
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is debugging.debug_callback_p:
            continue
        if eqn.primitive.name == "debug_print":
            continue
        if not eqn.effects:
            eqns.append(eqn)
            continue
        params = {k: _quiet_parameter(v) for k, v in eqn.params.items()}
        inner = _parameter_effects(params)
        effects = eqn.effects if inner is None else inner
        eqns.append(eqn.replace(params=params, effects=effects))
    effects = pe.make_jaxpr_effects(jaxpr.constvars, jaxpr.invars, jaxpr.outvars, eqns)
    return jaxpr.replace(eqns=eqns, effects=effects)


def _quiet_parameter(value: Any) -> Any:
    if hasattr(value, "without_debug_effects"):
        return value.without_debug_effects()
    if hasattr(value, "eqns"):
        quiet = _without_debug_effects(open_jaxpr(value))
        return quiet if type(quiet) is type(value) else pe.close_jaxpr(quiet)
    if isinstance(value, tuple) and any(hasattr(v, "eqns") for v in value):
        return tuple(map(_quiet_parameter, value))
    return value


def _parameter_effects(params: dict[str, Any]) -> Any:
    found = [
        v
        for value in params.values()
        for v in (value if isinstance(value, tuple) else (value,))
        if hasattr(v, "eqns") or hasattr(v, "without_debug_effects")
    ]
    if not found or any(isinstance(e, effects_.JaxprInputEffect) for v in found for e in v.effects):
        return None
    return core.no_effects.union(*(v.effects for v in found))


def vary_inputs(jaxpr: Jaxpr, marked: Sequence[bool], like: Sequence[ShapedArray]) -> Jaxpr:
    """A jaxpr whose marked inputs vary over the manual axes over which `like` does.

    What a jaxpr makes varying inside, its transpose sums over the devices inside: in a loop, once
    a step, which deadlocks if devices take different numbers of steps.
    """
    j = open_jaxpr(jaxpr)
    types = [
        type_like(v.aval, like) if mark else v.aval for v, mark in zip(j.invars, marked, strict=True)
    ]
    changed = [t != v.aval for t, v in zip(types, j.invars, strict=True)]
    if not any(changed):
        return jaxpr
    new, _ = trace(lambda *values: _evaluate_varying(j, values, changed, like), types, "varying")
    return new


def _evaluate_varying(
    j: Any, values: Sequence[Any], changed: Sequence[bool], like: Sequence[ShapedArray]
) -> list:
    env = dict(zip(j.invars, values, strict=True))
    moved = {v for v, c in zip(j.invars, changed, strict=True) if c}

    def read(v: Any) -> Any:
        return v.val if isinstance(v, core.Literal) else env[v]

    for eqn in j.eqns:
        ins = [read(v) for v in eqn.invars]
        touched = [not isinstance(v, core.Literal) and v in moved for v in eqn.invars]
        inner = eqn.params.get("jaxpr")
        if not any(touched):
            outs = _bind(eqn, ins)
        elif eqn.primitive is core.pvary_p:
            outs = [vary_like(ins[0], [v.aval for v in eqn.outvars])]
        elif eqn.primitive.name in ("jit", "pjit") and hasattr(inner, "eqns"):
            outs = _evaluate_varying(open_jaxpr(inner), ins, touched, like)
        else:
            outs = _bind(eqn, [vary_like(x, like) for x in ins])
        for v, out in zip(eqn.outvars, outs, strict=True):
            env[v] = out
            if typeof(out) != v.aval:
                moved.add(v)
    return [read(v) for v in j.outvars]


def _bind(eqn: Any, values: Sequence[Any]) -> list:
    found = eqn.primitive.get_bind_params(eqn.params)
    subfuns, params = found if isinstance(found, tuple) else ([], found)
    out = eqn.primitive.bind(*subfuns, *values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def holds_custom_vjp(jaxpr: Jaxpr) -> bool:
    """Whether a function with a custom VJP, and so without a JVP, is called anywhere inside."""

    def inside(value: Any) -> bool:
        if hasattr(value, "eqns"):
            return holds_custom_vjp(value)
        if isinstance(value, tuple):
            return any(map(inside, value))
        return bool(getattr(value, "holds_custom_vjp", False))

    return any(
        eqn.primitive.name.startswith("custom_vjp_call") or any(map(inside, eqn.params.values()))
        for eqn in open_jaxpr(jaxpr).eqns
    )


def check_effects(effects: Any) -> list[Any]:
    """The effects that a loop cannot carry."""
    return list(effects_.control_flow_allowed_effects.filter_not_in(effects))


def jaxpr_key(jaxpr: Jaxpr) -> Any:
    """A hashable key, equal for jaxprs that compute the same thing with the same equations."""
    j = open_jaxpr(jaxpr)
    names: dict[Any, int] = {}

    def atom(v: Any) -> Any:
        if isinstance(v, core.Literal):
            value = v.val
            content = value.tobytes() if hasattr(value, "tobytes") else repr(value)
            return ("literal", content, _type_key(v.aval))
        return names.setdefault(v, len(names))

    def parameter(value: Any) -> Any:
        if hasattr(value, "eqns"):
            return jaxpr_key(value)
        if isinstance(value, (tuple, list)):
            return tuple(map(parameter, value))
        if isinstance(value, dict):
            return tuple((k, parameter(v)) for k, v in sorted(value.items()))
        if isinstance(value, core.DebugInfo):
            return None
        hash(value)
        return value

    head = tuple((atom(v), _type_key(v.aval)) for v in j.invars)
    eqns = tuple(
        (
            eqn.primitive,
            tuple(map(atom, eqn.invars)),
            tuple((atom(v), _type_key(v.aval)) for v in eqn.outvars),
            tuple((k, parameter(v)) for k, v in sorted(eqn.params.items())),
        )
        for eqn in j.eqns
    )
    return head, eqns, tuple(map(atom, j.outvars))


def _type_key(aval: Any) -> Any:
    return aval, getattr(aval, "weak_type", False)


# ---------------------------------------------------------------- tangents


def instantiate(tangent: Any) -> Any:
    return ad.instantiate_zeros(tangent)


def float0_zero(aval: ShapedArray) -> Zero:
    """The symbolic zero in the tangent space of `aval`."""
    return Zero(aval.to_tangent_aval())


def is_linear_input(value: Any) -> bool:
    """Whether a transpose rule is to give this operand's cotangent."""
    return ad.is_undefined_primal(value)


# ---------------------------------------------------------------- primitives


def declare(name: str) -> core.Primitive:
    """A primitive with several results, to be completed by `define`."""
    primitive = core.Primitive(name)
    primitive.multiple_results = True
    return primitive


def define(primitive: core.Primitive, evaluate: Callable, types: Callable) -> None:
    """Lower and run a primitive through `evaluate(*args, **params)`.

    `types(*avals, **params)` gives the result types and the effects.
    """
    primitive.def_impl(ft.partial(dispatch.apply_primitive, primitive))
    primitive.def_effectful_abstract_eval(types)
    mlir.register_lowering(primitive, mlir.lower_fun(evaluate, multiple_results=True))


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
    if len(inspect.signature(pe._default_dce_rule).parameters) == 2:
        pe.dce_rules[primitive] = lambda used, eqn: rule(list(used), eqn)
    else:
        pe.dce_rules[primitive] = lambda used, live, eqn: rule(list(used), eqn)


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
        primals, results = params["loop"].primal_counts
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
    return pe.new_jaxpr_eqn(
        invars, outvars, primitive, params, effects, eqn.source_info, eqn.ctx
    )


def has_effects(eqn: Any) -> bool:
    return bool(eqn.effects)


def axis(size: int) -> Any:
    """A batch axis without a name."""
    return batching.AxisData(core.no_axis_name, size, None, None)


def add_tangents(a: Any, b: Any) -> Any:
    return ad.add_tangents(a, b)
