"""A step whose values, tangents and cotangents must stay finite; an error at run time names it.

watch (report, values, levels before) -> values, levels

A level says how bad a leaf is: 0 if it is finite, 1 if it holds an infinity, 2 if it holds a NaN.
At the start of a step, `watch` returns the levels of its carry. At the end, it compares these with
the levels of the next carry, and reports a leaf that has become worse. The transpose of each is the
other: it returns the level of a cotangent at the end of the step, and compares at the start. So one
primitive serves all derivatives, and a leaf that was not finite from the start is no error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from loopkit import _jax
from loopkit._arguments import failed_step
from loopkit._arguments.error_on_use import if_taken

watch_p = _jax.declare("loopkit_watch")

LEVEL = jnp.float32
"""The dtype of levels. It has tangents, so derivatives pass levels on as well."""


class WatchedLeaf(NamedTuple):
    """A value, or a tangent or cotangent of it."""

    name: str
    emits_level: bool = False
    """Whether its level is a result."""
    takes_level: bool = False
    """Whether a level is an operand, which the leaf must not exceed."""
    forward: bool = False
    """Whether the leaf is checked."""
    backward: bool = False
    """Whether its cotangent is checked."""

    @property
    def is_heard_alone(self) -> bool:
        """Whether it is not checked itself, but other leaves may be as bad as its level says."""
        return self.takes_level and not (self.forward or self.backward)

    @property
    def transposed(self) -> WatchedLeaf:
        return WatchedLeaf(
            self.name, self.takes_level, self.emits_level, self.backward, self.forward
        )


@dataclass(frozen=True)
class WatchParams:
    """The leaves that are watched, and which operands have the lanes of `jax.vmap` in front."""

    loop: failed_step.Watched
    carry: int
    x: int
    """The numbers of leaves of the carry and of x that are reported."""
    leaves: tuple[WatchedLeaf, ...]
    kinds: tuple[str, ...] = ()
    """Empty for values; else "tangent" or "cotangent" for each derivative, the last one last."""
    lanes: tuple[int, ...] = ()
    """The sizes of the axes of vmap, the outermost first."""
    axes: tuple[tuple[bool, ...], ...] = ()
    """For each operand, which of the axes of vmap it has."""

    @property
    def reported(self) -> int:
        """The number of reported operands: whether the step counts, its number, carry, x."""
        return 2 + self.carry + self.x

    @property
    def checks(self) -> bool:
        return any(leaf.forward for leaf in self.leaves)

    def apart(self, operands: Sequence[Any]) -> tuple[list, list, list]:
        """Split operands into what is reported, values, and the level before for each, or None."""
        n, count = self.reported, len(self.leaves)
        told = iter(operands[n + count :])
        before = [next(told) if leaf.takes_level else None for leaf in self.leaves]
        return list(operands[:n]), list(operands[n : n + count]), before

    def results(self, outs: Sequence[Any]) -> tuple[list, list]:
        """Split results into values and, for each leaf, its level, or None."""
        told = iter(outs[len(self.leaves) :])
        levels = [next(told) if leaf.emits_level else None for leaf in self.leaves]
        return list(outs[: len(self.leaves)]), levels


def watch(
    loop: failed_step.Watched,
    report: tuple[Any, Sequence[Any], Sequence[Any]],
    leaves: Sequence[WatchedLeaf],
    values: Sequence[Any],
    before: Sequence[Any],
) -> tuple[list, list]:
    """Return the values, and for each leaf its level, or None.

    `report` has the number of the step, its carry and x. `before` has levels, or None.
    """
    step, carry, x = report
    how = WatchParams(loop, len(carry), len(x), tuple(leaves))
    how = replace(how, axes=((),) * (how.reported + len(leaves) + len([*_given(before)])))
    return _bind(how, [if_taken(jnp.bool_(True)), step, *carry, *x], values, before)


def _given(values: Sequence[Any]) -> list:
    return [v for v in values if v is not None]


def _bind(
    how: WatchParams, report: Sequence, values: Sequence, before: Sequence
) -> tuple[list, list]:
    if not how.leaves:
        return [], []
    return how.results(watch_p.bind(*report, *values, *_given(before), how=how))


def _some(
    how: WatchParams, keep: Sequence[WatchedLeaf | None], kinds: tuple[str, ...]
) -> WatchParams:
    """Keep the leaves that are not None, which may return and take fewer levels."""
    n, count = how.reported, len(how.leaves)
    at = list(how.axes)
    of_levels = iter(at[n + count :])
    level_axes = [next(of_levels) if leaf.takes_level else None for leaf in how.leaves]
    chosen = [(i, leaf) for i, leaf in enumerate(keep) if leaf is not None]
    axes = [*at[:n], *(at[n + i] for i, _ in chosen)]
    # A level has the lanes of its leaf.
    axes += [level_axes[i] or at[n + i] for i, leaf in chosen if leaf.takes_level]
    leaves = tuple(leaf for leaf in keep if leaf is not None)
    return replace(how, leaves=leaves, kinds=kinds, axes=tuple(axes))


def _in_front(value: jax.Array, flags: Sequence[bool], lanes: Sequence[int]) -> Any:
    """Return the value with an axis for each of the lanes, of size 1 if it lacks that axis."""
    front = [n if has else 1 for n, has in zip(lanes, flags, strict=True)]
    return value.reshape((*front, *value.shape[sum(flags) :]))


def _level(value: jax.Array, lanes: int) -> Any:
    axes = tuple(range(lanes, value.ndim))
    bad, nan = ~jnp.isfinite(value), jnp.isnan(value)
    return bad.any(axes).astype(LEVEL) + nan.any(axes).astype(LEVEL)


def _levels(how: WatchParams, values: Sequence[Any]) -> list:
    """Return the levels of the leaves that return theirs."""
    flags = how.axes[how.reported : how.reported + len(values)]
    triples = zip(how.leaves, values, flags, strict=True)
    return [_level(v, sum(has)) for leaf, v, has in triples if leaf.emits_level]


def _evaluate(*operands: jax.Array, how: WatchParams) -> list:
    report, values, before = how.apart(operands)
    told = _levels(how, values)
    if not how.checks:
        return [*values, *told]
    n, lanes = how.reported, len(how.lanes)
    keys = tuple(None if _is_number(v) else str(jax.random.key_impl(v)) for v in report)
    report = [v if k is None else jax.random.key_data(v) for v, k in zip(report, keys, strict=True)]
    fronted = [_in_front(v, f, how.lanes) for v, f in zip(report, how.axes, strict=False)]
    of_levels = iter(how.axes[n + len(values) :])
    heard = [None if b is None else _in_front(b, next(of_levels), how.lanes) for b in before]
    worst = 0
    for level in _given(heard):
        worst = jnp.maximum(worst, level)
    checked, failed = [], []
    for leaf, v, flags, level in zip(how.leaves, values, how.axes[n:], heard, strict=False):
        if leaf.forward:
            v = _in_front(v, flags, how.lanes)
            # A leaf without a level before may be as bad as the worst that the step was given.
            bad = _level(v, lanes) > (worst if level is None else level)
            checked.append(v)
            failed.append(bad & fronted[0])
    done = _reported(how, keys[2:], failed, checked, fronted)
    # The values depend on the call. Otherwise the compiler would remove it.
    return [*(jnp.where(done, v, _jax.zeros(jax.typeof(v))) for v in values), *told]


def _is_number(value: jax.Array) -> bool:
    return not jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _reported(how: WatchParams, keys: tuple, failed: list, checked: list, report: list) -> Any:
    """Return True, once nothing is left to report."""
    found = jnp.bool_(False)
    for bad in failed:
        found = found | bad.any()
    operands = [*failed, *checked, *report]
    if not any(map(_jax.is_tracer, operands)):
        if found:
            _raise(how, keys, *operands)
        return True
    types = list(map(jax.typeof, operands))
    same = lambda v: _jax.vary_like(v, types)

    def call(*operands: jax.Array) -> Any:
        out = jax.ShapeDtypeStruct((), jnp.bool_)
        return same(jax.pure_callback(lambda *v: _raise(how, keys, *v), out, *operands))

    return lax.cond(found, call, lambda *_: same(jnp.bool_(True)), *operands)


def _raise(how: WatchParams, keys: tuple, *given: jax.Array) -> Any:
    operands = list(map(np.asarray, given))
    names = [leaf.name for leaf in how.leaves if leaf.forward]
    count = len(names)
    failed = [np.broadcast_to(v, np.broadcast_shapes(v.shape, how.lanes)) for v in operands[:count]]
    bad = list(map(failed_step.Bad, names, failed, operands[count : 2 * count]))
    _, step, *rest = operands[2 * count :]
    text, lane = failed_step.describe(how.loop, how.kinds, bad, step)
    failed_step.keep(how.loop, keys, lane, rest[: how.carry], rest[how.carry :])
    raise FloatingPointError(text)


def _types(*types: _jax.ShapedArray, how: WatchParams) -> tuple[list, Any]:
    n, count = how.reported, len(how.leaves)
    values = types[n : n + count]
    level = lambda t, has: _jax.ShapedArray(t.shape[: sum(has)], LEVEL)
    triples = zip(how.leaves, values, how.axes[n : n + count], strict=True)
    levels = [level(t, has) for leaf, t, has in triples if leaf.emits_level]
    decide = types if how.checks else ()
    told = [_jax.type_like(t, values) for t in levels]
    return [*(_jax.type_like(t, decide) for t in values), *told], set()


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, how: WatchParams) -> tuple[list, list]:
    report, values, _ = how.apart(primals)
    outs = watch_p.bind(*primals, how=how)
    _, moved, moved_before = how.apart(tangents)
    none = lambda t: t is None or type(t) is _jax.Zero
    keep = [
        None if none(t) else leaf._replace(takes_level=not none(b))
        for leaf, t, b in zip(how.leaves, moved, moved_before, strict=True)
    ]
    some = _some(how, keep, (*how.kinds, "tangent"))
    flowing = [t for t in moved if not none(t)]
    levels = [b for b, leaf in zip(moved_before, keep, strict=True) if leaf and leaf.takes_level]
    found, told = map(iter, _bind(some, report, flowing, levels))
    out_t = [
        _zero_of(v) if leaf is None else next(found) for v, leaf in zip(values, keep, strict=True)
    ]
    of_levels = [next(told) if leaf is not None else None for leaf in keep]
    _, primal_levels = how.results(outs)
    pairs = zip(primal_levels, of_levels, strict=True)
    out_t += [_zero_of(p) if t is None else t for p, t in pairs if p is not None]
    return outs, out_t


def _zero_of(value: Any) -> Any:
    return _jax.float0_zero(jax.typeof(value))


def _transpose(cts: Sequence[Any], *operands: Any, how: WatchParams) -> list:
    report, values, before = how.apart(operands)
    ct_values, ct_levels = how.results(cts)
    flows = lambda c: c is not None and type(c) is not _jax.Zero
    linear = _jax.is_undefined
    keep = [
        leaf.transposed._replace(emits_level=b is not None and linear(b), takes_level=flows(level))
        if flows(c) and linear(v)
        else None
        for leaf, v, b, c, level in zip(
            how.leaves, values, before, ct_values, ct_levels, strict=True
        )
    ]
    kind = {"tangent": "cotangent", "cotangent": "tangent"}[how.kinds[-1]]
    some = _some(how, keep, (*how.kinds[:-1], kind))
    given = [c for c, leaf in zip(ct_values, keep, strict=True) if leaf is not None]
    levels = [c for c, leaf in zip(ct_levels, keep, strict=True) if leaf and leaf.takes_level]
    found, told = map(iter, _bind(some, report, given, levels))
    out: list[Any] = [None] * how.reported
    for leaf, v in zip(keep, values, strict=True):
        out.append(next(found) if leaf is not None else _none_of(v))
    for leaf, b in zip(keep, before, strict=True):
        level = None if leaf is None else next(told)
        if b is not None:
            out.append(_none_of(b) if level is None else level)
    return out


def _none_of(operand: Any) -> Any:
    return _jax.float0_zero(operand.aval) if _jax.is_undefined(operand) else None


def _batched(
    axis: _jax.AxisData, args: Sequence[Any], dims: Sequence[Any], *, how: WatchParams
) -> tuple:
    operands = [a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(args, dims, strict=True)]
    has = [d is not None for d in dims]
    level = how.reported + len(how.leaves)
    for i, leaf in enumerate(how.leaves, how.reported):
        if leaf.takes_level:  # a leaf and its level have the same lanes
            for one, other in ((i, level), (level, i)):
                if has[one] and not has[other]:
                    shape = (axis.size, *operands[other].shape)
                    operands[other], has[other] = jnp.broadcast_to(operands[other], shape), True
            level += 1
    axes = tuple((h, *old) for h, old in zip(has, how.axes, strict=True))
    how = replace(how, lanes=(axis.size, *how.lanes), axes=axes)
    n, count = how.reported, len(how.leaves)
    values = has[n : n + count]
    told = [h for h, leaf in zip(values, how.leaves, strict=True) if leaf.emits_level]
    return watch_p.bind(*operands, how=how), [0 if h else None for h in (*values, *told)]


def _dce(used: list[bool], eqn: _jax.Equation) -> tuple[list[bool], Any]:
    """Keep all checks of a step if anything that it returns is used."""
    how, count = eqn.params["how"], len(eqn.invars)
    if not any(used):
        return [False] * count, None
    if how.checks and not how.kinds:
        return [True] * count, eqn
    values, levels = how.results(used)
    keep = [
        leaf._replace(emits_level=bool(told)) if value or told or leaf.is_heard_alone else None
        for leaf, value, told in zip(how.leaves, values, levels, strict=True)
    ]
    some = _some(how, keep, how.kinds)
    report, _, before = how.apart([True] * count)
    needed = [leaf is not None for leaf in keep]
    needed = [*report, *needed, *(n for n, b in zip(needed, before, strict=True) if b)]
    wanted = [
        *needed[how.reported : how.reported + len(keep)],
        *(told for told in levels if told is not None),
    ]
    return needed, _jax.part_of(eqn, needed, wanted, {"how": some})


def _alone(_: object, evaluate: Callable[..., Any], *operands: jax.Array, how: WatchParams) -> list:
    """Evaluate outside jit, so that the error is raised where the step is taken."""
    return evaluate(*operands, how=how)


_jax.define(watch_p, _evaluate, _types, jvp=_jvp, transpose=_transpose, dce=_dce, run=_alone)
_jax.register_batching(watch_p, _batched)
