"""Jaxprs: tracing, pruning, differentiating and batching them, with or without references."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax._src import callback, config, core, linear_util
from jax._src import effects as effects_
from jax._src import source_info_util as source_info
from jax._src.api_util import debug_info, fun_sourceinfo
from jax._src.interpreters import ad, batching, mlir
from jax._src.interpreters import partial_eval as pe
from jax._src.named_sharding import UnspecifiedValue
from jax._src.random.prng import PRNGImpl
from jax._src.state.discharge import discharge_state
from jax._src.state.types import AbstractRef, RefEffect

from loopkit._jax.avals import (
    AxisData,
    Equation,
    OpenJaxpr,
    Primitive,
    ShapedArray,
    is_tracer,
    slice_type,
    varying,
)
from loopkit._jax.next_jax import scan_as_primitive
from loopkit._jax.sources import source

call_jaxpr = core.jaxpr_as_fun
close_jaxpr = pe.close_jaxpr
make_jaxpr_effects = pe.make_jaxpr_effects
trace_context = config.trace_context
IO_EFFECTS = callback.IOEffect, callback.OrderedIOEffect
JaxprInputEffect = effects_.JaxprInputEffect

Jaxpr = Any  # core.ClosedJaxpr before jax 0.11, core.Jaxpr since
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
"""Types of immutable parameters that are equal only if they mean the same."""


def open_jaxpr(jaxpr: Jaxpr) -> OpenJaxpr:
    """Return the equations and variables of a closed jaxpr."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def trace(
    fun: Callable,
    avals: Sequence[ShapedArray],
    name: str,
    written: Callable | None = None,
    arguments: Sequence[str] = (),
) -> tuple[Jaxpr, list]:
    """Return the jaxpr of `fun(*values) -> list`, and closed-over values, its first arguments.

    Errors of JAX name the function that the user has written, if it is given, and the arguments.
    """
    try:
        # Inspecting the function of a method takes half the time.
        info = debug_info(name, getattr(fun, "__func__", fun), tuple(avals), {})
    except (TypeError, ValueError):
        info = debug_info(name, lambda *a: fun(*a), tuple(avals), {})
    info = info.with_unknown_names()
    if written is not None:
        info = info._replace(func_src_info=fun_sourceinfo(written), arg_names=tuple(arguments))
    wrapped = linear_util.wrap_init(fun, debug_info=info)
    with scan_as_primitive(), naming_axes(avals):
        jaxpr, _, consts = pe.trace_to_jaxpr_dynamic(wrapped, tuple(avals))
    return without_constants(jaxpr), list(consts)


@contextlib.contextmanager
def naming_axes(avals: Sequence[ShapedArray]) -> Generator[None]:
    """Trace as if inside the `jax.shard_map` over whose axes values of these types vary.

    loopkit traces parts of a program again, outside of it.
    """
    of = next((t for t in avals if varying(t) - core.get_axis_env().axis_sizes.keys()), None)
    if of is None:
        yield
        return
    mesh = of.sharding.mesh
    named = core.extend_axis_env_nd([(name, mesh.shape[name]) for name in mesh.manual_axes])
    with named, jax.sharding.use_abstract_mesh(mesh), config._check_vma(True):
        yield


def without_constants(jaxpr: Any) -> Jaxpr:
    """Return a jaxpr with its constants turned into its first arguments."""
    opened: Any = open_jaxpr(jaxpr)
    opened = opened.replace(debug_info=opened.debug_info.with_unknown_names())
    return pe.close_jaxpr(pe.convert_constvars_jaxpr(opened))


def is_tracing() -> bool:
    """Return whether anything is being traced or transformed."""
    return not core.trace_state_clean()


def is_differentiated(value: Any) -> bool:
    """Return whether a value is a tracer of a derivative, below those of `jax.vmap`."""
    while isinstance(value, batching.BatchTracer):
        value = value.val
    return isinstance(value, (ad.JVPTracer, ad.LinearizeTracer))


@dataclass(frozen=True, eq=False)
class Constant:
    """An array in a program, which a rule for derivatives makes."""

    value: Any


constant_p = core.Primitive("loopkit_constant")
constant_p.def_impl(lambda *, of: of.value)
constant_p.def_abstract_eval(lambda *, of: core.typeof(of.value))

mlir.register_lowering(
    constant_p, mlir.lower_fun(lambda *, of: jnp.asarray(of.value), multiple_results=False)
)


def trace_closed(fun: Callable, avals: Sequence[ShapedArray], name: str) -> Jaxpr:
    """Return the jaxpr of a function that closes over no tracers, with arrays as constants."""
    jaxpr, made = trace(fun, avals, name)
    if not made:
        return jaxpr
    if any(map(is_tracer, made)):
        raise jax.errors.UnexpectedTracerError(
            "loopkit: a differentiated function must not close over values of another trace. Pass "
            f"the values as arguments. Got: a custom derivative whose rule does, in {name}."
        )
    held = list(map(Constant, made))
    values = lambda: [constant_p.bind(of=h) for h in held]
    return trace(lambda *args: call_jaxpr(jaxpr)(*values(), *args), avals, name)[0]


def dce(
    jaxpr: Jaxpr, used_outputs: Sequence[bool], keep: Sequence[bool]
) -> tuple[Jaxpr, list[bool]]:
    """Return the part of a jaxpr that the used outputs need, and which inputs it takes."""
    small, used = pe.dce_jaxpr(cast(Any, open_jaxpr(jaxpr)), list(used_outputs), list(keep))
    return pe.close_jaxpr(small), list(used)


def used_inputs(jaxpr: Jaxpr, used_outputs: Sequence[bool]) -> list[bool]:
    """Mark the inputs that the used outputs need."""
    keep = [False] * len(jaxpr.in_avals)
    # On jax 0.10, a jaxpr may hold constants of a rule, and what is left of it cannot be closed.
    return list(pe.dce_jaxpr(cast(Any, open_jaxpr(jaxpr)), list(used_outputs), keep)[1])


def unknown_outputs(jaxpr: Jaxpr, unknown: Sequence[bool]) -> list[bool]:
    """Mark the outputs that depend on inputs that are not known yet."""
    return list(pe.partial_eval_jaxpr_nounits(jaxpr, list(unknown), False)[2])


def with_outputs(jaxpr: Jaxpr, outputs: Sequence[Any], keep: Sequence[bool]) -> Jaxpr:
    """Return a jaxpr with other variables as outputs, without equations that these do not need."""
    j = open_jaxpr(jaxpr)
    other = j.replace(outvars=list(outputs), debug_info=j.debug_info.with_unknown_names())
    return dce(other, [True] * len(outputs), keep)[0]


def with_equations(jaxpr: OpenJaxpr, eqns: Sequence[Equation], **changes: Any) -> Any:
    """Return a jaxpr with other equations, marked as high if JAX has to rewrite one of them.

    JAX marks a jaxpr when it traces it. A loop of loopkit hides the marks of its steps.
    """
    high = (e.primitive.is_high(*(v.aval for v in e.invars), **e.params) for e in eqns)
    return jaxpr.replace(eqns=eqns, is_high=jaxpr.is_high or any(high), **changes)


def new_equation(
    eqn: Equation, primitive: Primitive, invars: Sequence[Any], outvars: Sequence[Any], params: dict
) -> Any:
    """Return an equation with another primitive, operands and results, in the context of `eqn`."""
    _, effects = primitive.abstract_eval(*[v.aval for v in invars], **params)
    return pe.new_jaxpr_eqn(invars, outvars, primitive, params, effects, eqn.source_info, eqn.ctx)


def is_laid_out(eqn: Equation) -> bool:
    """Return whether a call fixes the sharding of operands or results, or donates operands."""
    named = (s for key in ("in_shardings", "out_shardings") for s in eqn.params.get(key, ()))
    placed = any(not isinstance(s, UnspecifiedValue) for s in named)
    return placed or any(eqn.params.get("donated_invars", ()))


def like(v: Any) -> Any:
    """Return a new variable of the same type; a dropped result stays dropped."""
    return v if isinstance(v, core.DropVar) else core.Var(v.aval)


def is_dropped(v: Any) -> bool:
    """Return whether nothing reads a result."""
    return isinstance(v, core.DropVar)


def rearranged(jaxpr: Jaxpr, inputs: Sequence[int], outputs: Sequence[int]) -> Jaxpr:
    """Return the jaxpr with the inputs and outputs at these indices, in this order."""
    j = open_jaxpr(jaxpr)
    invars, outvars = [j.invars[i] for i in inputs], [j.outvars[i] for i in outputs]
    info = j.debug_info.with_unknown_names()
    return pe.close_jaxpr(j.replace(invars=invars, outvars=outvars, debug_info=info))


def jvp_jaxpr(jaxpr: Jaxpr, nonzero: Sequence[bool]) -> tuple[Jaxpr, list[bool]]:
    """Return the JVP of a jaxpr, without zero tangents, and which outputs have tangents."""
    with scan_as_primitive():
        dual, moved = ad.jvp_jaxpr(jaxpr, list(nonzero), False)
    return dual, list(moved)


def moved_outputs(jaxpr: Jaxpr, nonzero: Sequence[bool]) -> list[bool]:
    """Mark the outputs that have a tangent if the marked inputs have one."""
    return jvp_jaxpr(jaxpr, nonzero)[1]


def batch_jaxpr(
    jaxpr: Jaxpr,
    axis: AxisData,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | str | None],
) -> tuple[Jaxpr, list[bool]]:
    """Return a batched jaxpr, and which outputs have the axis; "free" ones only if they need it."""
    free = batching.zero_if_mapped
    places = tuple(free if a == "free" else a for a in out_axes)
    batched, flags = batching.batch_jaxpr_axes(jaxpr, axis, tuple(in_axes), places)
    if batched.consts:  # made by the rule of a custom_vmap
        batched = trace_closed(call_jaxpr(batched), batched.in_avals, "batched")
    return batched, list(flags)


def batched_call(
    fun: Callable, axis: AxisData, args: Sequence[Any], dims: Sequence[Any]
) -> tuple[list, list]:
    """Return the results of `jax.vmap` of `fun(*values) -> list`, and their batch axes."""
    pairs = zip(map(jax.typeof, args), dims, strict=True)
    types = [t if d is None else slice_type(t, d) for t, d in pairs]
    jaxpr, closed_over = trace(fun, types, "batched")
    assert not closed_over, "it is a function of its arguments"
    batched, has = batch_jaxpr(jaxpr, axis, dims, ["free"] * len(jaxpr.out_avals))
    return call_jaxpr(batched)(*args), [0 if h else None for h in has]


def bind_equation(eqn: Equation, values: Sequence[Any]) -> list:
    """Return the results of an equation for other operands, in its own context."""
    found = eqn.primitive.get_bind_params(eqn.params)
    subfuns, params = found if isinstance(found, tuple) else ([], found)
    with context_of(eqn):
        out = eqn.primitive.bind(*subfuns, *values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


@contextlib.contextmanager
def context_of(eqn: Equation) -> Any:
    """Enter the context in which an equation was written, for whatever takes its place."""
    names = source_info.current_name_stack() + eqn.source_info.name_stack
    with source_info.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        yield


def vmapped_axes() -> set:
    """Return the names of the axes of `jax.vmap` around what is being traced."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return set(core.get_axis_env().axis_sizes).difference(manual)


def axis(size: int) -> Any:
    """Return a batch axis without a name."""
    return batching.AxisData(core.no_axis_name, size, None, None)


def acts(effects: Iterable[Any]) -> bool:
    """Return whether effects do more than name the axes over which devices exchange values."""
    return not all(isinstance(e, core.NamedAxisEffect) for e in effects)


def free_axes(effects: Iterable[Any]) -> list[str]:
    """Return the names of axes around a program over which it exchanges values."""
    return sorted(str(e.name) for e in effects if isinstance(e, core.NamedAxisEffect))


def check_effects(effects: Iterable[Any]) -> list[Any]:
    """Return the effects that a loop must not have."""
    return list(effects_.control_flow_allowed_effects.filter_not_in(effects))


def jvp_in_moving(fun: Callable, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple:
    """Return `jax.jvp` of `fun(*primals) -> list`. Tangents may be None, results symbolic zeros."""
    with core.take_current_trace() as around, source_info.transform_name_stack("jvp"):
        trace = ad.JVPTrace(around, core.TraceTag())
        pairs = zip(primals, tangents, strict=True)
        moved = [v if t is None else ad.maybe_jvp_tracer(trace, v, t) for v, t in pairs]
        with core.set_current_trace(trace):
            outs = fun(*moved)
        pairs = list(map(trace.to_primal_tangent_pair, outs))
    return [v for v, _ in pairs], [t for _, t in pairs]


def jit_is_disabled() -> bool:
    """Return whether this thread is under jax.disable_jit."""
    return config.disable_jit.value


_EFFECTS = RefEffect, core.InternalMutableArrayEffect


def is_reference(value: object) -> bool:
    return isinstance(core.typeof(value), AbstractRef)


def type_in(reference: Any) -> ShapedArray:
    """Return the type of the value that a reference holds."""
    return core.typeof(reference).inner_aval


def has_references(jaxpr: Jaxpr) -> bool:
    """Return whether a jaxpr makes, reads or writes references."""
    return any(isinstance(e, _EFFECTS) for e in jaxpr.effects)


def of_values(jaxpr: Jaxpr) -> Jaxpr:
    """Replace references by values: they are operands, and final values follow the results."""
    try:
        return discharge_state(jaxpr)
    except NotImplementedError as error:
        if "call_hi_primitive" not in str(error):
            raise
        raise NotImplementedError(
            "loopkit: a step must not run a scan that was traced under `jax_scan3`. Trace it in "
            f"the step, or without the flag. Got: such a scan in the loop at {source()}."
        ) from error
