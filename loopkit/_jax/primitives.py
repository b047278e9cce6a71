"""Primitives: running, batching, transposing, and splitting into known and unknown values."""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
from jax._src import checkify, core, dispatch
from jax._src.interpreters import ad, batching
from jax._src.interpreters import partial_eval as pe

from loopkit._jax.avals import AxisData, Equation, Primitive, is_tracer, same_type
from loopkit._jax.devices import lower_by
from loopkit._jax.jaxprs import new_equation, trace
from loopkit._jax.memory import filled_where_it_shows, is_on_host, named_on_host
from loopkit._jax.policies import may_save
from loopkit._jax.taylor import SeriesPrimitive


def declare(name: str) -> SeriesPrimitive:
    """Return a primitive with several results, to be completed by `define`."""
    primitive = SeriesPrimitive(name)
    primitive.multiple_results = True
    return primitive


def define(
    primitive: SeriesPrimitive,
    evaluate: Callable,
    types: Callable,
    *,
    jvp: Callable | None = None,
    taylor: Callable | None = None,
    transpose: Callable | None = None,
    dce: Callable | None = None,
    run: Callable | None = None,
    on_cpu: Callable | None = None,
) -> None:
    """Lower a primitive through `evaluate(*args, **params)`, which `evaluations` then holds.

    Outside jit it is compiled, or left to `run(compiled, evaluate, *args, **params)`. `evaluate`
    may mix ranks and types, whatever the user allows in their own code. `types(*avals, **params)`
    returns result types and effects. `dce(used, equation)` returns which operands are used, and
    the remaining equation or None. For a single CPU, `on_cpu(evaluate)` is lowered instead.
    """

    def evaluate_as_written(*args: jax.Array, **params: Any) -> Any:
        lenient = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
        with lenient[0], lenient[1]:
            return evaluate(*args, **params)

    def functionalized(*args: Any, **params: Any) -> Any:
        context, error, enabled, operands = _checkified(args)
        if params.get("loop") is not None:
            # Without unrolling, only stopped lanes discard steps; their indices may be anything.
            loop = params["loop"] = params["loop"].unrolled(1)
            enabled = enabled - {checkify.OOBError} if loop.lanes else enabled
        fun = ft.partial(evaluate_as_written, **params)
        jaxpr, closed_over = trace(fun, list(map(jax.typeof, operands)), primitive.name)
        return checkify.checkify_jaxpr(*context, jaxpr, enabled, error, *closed_over, *operands)

    def alone(*operands: jax.typing.ArrayLike, **params: Any) -> Any:
        if any(map(is_on_host, types(*map(jax.typeof, operands), **params)[0])):
            with jax.disable_jit(False):  # else it would come back here
                return named_results(primitive, tuple(params.items()), *operands)
        return dispatch.apply_primitive(primitive, *operands, **params)

    outside = alone if run is None else ft.partial(run, alone, evaluate_as_written)
    primitive.def_impl(ft.partial(filled_where_it_shows, outside))
    primitive.def_effectful_abstract_eval(types)
    checkify.error_checks[primitive] = functionalized
    vars(primitive)["to_lojax"] = evaluate_as_written  # of steps under `jax_remat3` and the like
    for platform in (None, "gpu"):
        lower_by(primitive, evaluate_as_written, platform=platform)
    if on_cpu is not None:
        lower_by(primitive, evaluate_as_written, on_cpu(evaluate_as_written), "cpu")
    if jvp is not None:
        ad.primitive_jvps[primitive] = jvp
    primitive.taylor = taylor
    if transpose is not None:
        ad.primitive_transposes[primitive] = transpose
    if dce is not None:
        # The newest release passes the live inputs between the two.
        pe.dce_rules[primitive] = lambda used, *rest: dce(list(used), rest[-1])
    evaluations[primitive] = evaluate_as_written


evaluations: dict[core.Primitive, Callable] = {}
"""The function that computes each primitive: the `evaluate` of `define`, free to mix types."""


@ft.partial(jax.jit, static_argnums=(0, 1))
def named_results(
    primitive: core.Primitive, params: tuple, *operands: jax.typing.ArrayLike
) -> list:
    """Evaluate a primitive, with results in the memory that their types name, outside jit too."""
    return list(map(named_on_host, primitive.bind(*operands, **dict(params))))


def _checkified(args: Sequence[Any]) -> tuple:
    """Split a checkify rule's arguments: context (from jax 0.11 on), error, kinds, operands."""
    at = next(i for i, a in enumerate(args) if isinstance(a, checkify.Error))
    return args[:at], args[at], args[at + 1], args[at + 2 :]


def register_bounds(primitive: core.Primitive, outside: Callable) -> None:
    """Register `outside(*operands, **params) -> (bad, starts, axes)`: accesses out of bounds."""

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
    """Register `rule(axis_data, args, dims, **params) -> (results, dims)` for batching.

    It is called if an operand has the axis, or if the steps of a loop name it.
    """

    def batched(axis: AxisData, args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple:
        named = "loop" in params and axis.name in params["loop"].axis_names
        if all(d is None for d in dims) and not named:
            results = primitive.bind(*args, **params)
            return results, [None] * len(results)
        return rule(axis, args, dims, **params)

    batching.fancy_primitive_batchers[primitive] = batched


def _register_partial_eval(primitive: Primitive, eager: Callable, known_part: Callable) -> None:
    """Register `eager`, and a rule for jax.checkpoint that leaves all of an equation for later.

    `known_part(unknown, eqn)` returns the equation of the part that is computed now, too, and
    which results it has; or None.
    """

    def rule(
        policy: Callable,
        unknown: Sequence[bool],
        instantiated: Sequence[bool],
        eqn: Any,
    ) -> tuple:
        count = len(eqn.outvars)
        if not any(unknown) and (eqn.effects or may_save(policy, eqn)):
            return eqn, None, [False] * count, [False] * count, []
        pairs = zip(eqn.invars, instantiated, strict=True)
        residuals = [v for v, there in pairs if not there and isinstance(v, core.Var)]
        known, results = eqn, [True] * count
        if any(unknown):
            known, results = known_part(list(unknown), eqn) or (None, [False] * count)
        if known is not None and hasattr(eqn.params["loop"], "unshown"):
            # The steps that run later have shown their progress already.
            again = {"loop": eqn.params["loop"].unshown(backward=False)}
            eqn = eqn.replace(params=eqn.params | again)
        return known, eqn, [not k for k in results], [True] * count, residuals

    pe.custom_partial_eval_rules[primitive] = eager
    pe.partial_eval_jaxpr_custom_rules[primitive] = rule


def register_split(
    primitive: core.Primitive, splits: Callable, apart: Callable, known_equation: Callable
) -> None:
    """Register how other primitives compute this one if some of its operands are unknown.

    `splits(unknown, **params)` says how many results `apart(*operands, **params)` then knows, or
    None if it cannot. For jax.checkpoint, `known_equation(eqn)` returns the equation of these
    results alone, which reads the first operands.
    """

    def eager(trace: Any, *tracers: Any, **params: Any) -> list:
        unknown = [not t.is_known() for t in tracers]
        known = splits(unknown, **params) if any(unknown) else None
        if known is None:
            return trace.default_process_primitive(primitive, tracers, params)
        with core.set_current_trace(trace):
            outs = list(map(trace.to_jaxpr_tracer, apart(*tracers, **params)))
        # A zero tangent is known, too, but jax.checkpoint returns no known ones when transposed.
        return [*outs[:known], *map(trace.instantiate_const, outs[known:])]

    def known_part(unknown: list[bool], eqn: Equation) -> tuple | None:
        if splits(unknown, **eqn.params) is None:
            return None
        known = known_equation(eqn)
        if any(unknown[: len(known.invars)]):
            return None
        return known, [i < len(known.outvars) for i in range(len(eqn.outvars))]

    _register_partial_eval(primitive, eager, known_part)


def register_known_part(primitive: core.Primitive, part: Callable) -> None:
    """Register how a primitive is evaluated in part if only some of its operands are known.

    `part(unknown, **params)` returns which operands and which results are known, and the parameters
    with which the primitive computes these; or None. All results are left for later as well.
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

    def known_part(unknown: list[bool], eqn: Equation) -> tuple | None:
        found = part(unknown, **eqn.params)
        if found is None:
            return None
        operands, results, known_params = found
        return part_of(eqn, operands, results, known_params), results

    _register_partial_eval(primitive, eager, known_part)


def part_of(eqn: Equation, ins: Sequence[bool], outs: Sequence[bool], params: dict) -> Any:
    """Return `eqn` with only the flagged operands and results, and other parameters."""
    invars = [v for v, keep in zip(eqn.invars, ins, strict=True) if keep]
    outvars = [v for v, keep in zip(eqn.outvars, outs, strict=True) if keep]
    return new_equation(eqn, eqn.primitive, invars, outvars, params)


def transpose_onto_references(primitive: Primitive) -> None:
    """Make the transpose of a primitive add cotangents to references.

    Its rule takes `sums`: for each operand, the value of its reference, or None. For operands with
    a sum it returns the cotangent plus the sum, or a symbolic zero; for others, the cotangent.
    """
    transpose = ad.primitive_transposes[primitive]

    def rule(cts: Sequence[Any], *operands: Any, **params: Any) -> None:
        sums = _sums(operands)
        linear = [isinstance(v, ad.GradAccum) for v in operands]
        pairs = list(zip(operands, linear, strict=True))
        values = [ad.UndefinedPrimal(v.aval) if is_linear else v for v, is_linear in pairs]
        results = transpose(cts, *values, sums=sums, **params)
        for (v, is_linear), before, ct in zip(pairs, sums, results, strict=True):
            if before is not None and type(ct) is not ad.Zero:
                v.ref[...] = ct
            elif is_linear:
                v.accum(ct)

    ad.fancy_transposes[primitive] = rule


def _sums(operands: Sequence[Any]) -> list:
    """Return the value of each reference, but only once: others add their cotangents afterwards.

    Outside jit, return none: the value would be a copy, which takes as much memory as a cotangent.
    """
    seen: set[int] = set()

    def held(v: Any) -> Any:
        ref = v.ref if isinstance(v, ad.RefAccum) else None
        at = id(core.get_referent(ref))
        if ref is None or not is_tracer(ref) or at in seen:
            return None
        seen.add(at)
        return ref[...] if same_type(jax.typeof(ref).inner_aval, v.aval) else None

    return list(map(held, operands))
