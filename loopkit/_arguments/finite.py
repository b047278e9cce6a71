"""Raise an error at run time at the first step whose values or derivatives are not finite.

watch (report, values, levels before) -> values, levels

A level says how bad a leaf is: 0 if it is finite, 1 if it holds an infinity, 2 if it holds a NaN.
At the start of a step, `watch` returns the levels of its carry. At the end, it compares these with
the levels of the next carry, and reports a leaf that has become worse. The transpose of each is the
other: it returns the level of a cotangent at the end of the step, and compares at the start. So one
primitive serves all derivatives, and a leaf that was not finite from the start is no error.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from loopkit import _jax
from loopkit._arguments import failed_step
from loopkit._arguments.error_on_use import call_if, evaluate_alone, if_taken

watch_p = _jax.declare("loopkit_watch")

LEVEL = jnp.float32
"""The dtype of levels. It has tangents, so derivatives pass levels on as well."""


class WatchedLeaf(NamedTuple):
    """A value, or a tangent or cotangent of it."""

    name: str
    takes_level: bool = False
    """Whether the leaf must not exceed its own level before, instead of the worst of all."""
    forward: bool = False
    """Whether the leaf is checked."""
    backward: bool = False
    """Whether its cotangent is checked."""
    is_carried: bool = False
    """Whether it enters a step in the carry."""

    @property
    def is_heard_alone(self) -> bool:
        """Whether the leaf is not checked, but its level says how bad other leaves may be."""
        return self.takes_level and not (self.forward or self.backward)


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
    """For each reported operand and leaf, which axes of vmap it has. So has the leaf's level."""

    @property
    def reported(self) -> int:
        """The number of reported operands: whether the step counts, its number, carry, x."""
        return 2 + self.carry + self.x

    @property
    def checks(self) -> bool:
        return any(leaf.forward for leaf in self.leaves)

    def apart(self, operands: Sequence[Any]) -> tuple[list, list, list]:
        """Split operands into what is reported, values, and the levels before."""
        n, count = self.reported, len(self.leaves)
        return list(operands[:n]), list(operands[n : n + count]), list(operands[n + count :])


def watch(
    loop: failed_step.Watched,
    report: tuple[Any, Sequence[Any], Sequence[Any]],
    leaves: Sequence[WatchedLeaf | None],
    values: Sequence[Any],
    before: Sequence[Any],
) -> tuple[list, list]:
    """Return the values, and their levels; None is the level of a value whose leaf is None.

    `report` is the number of the step, its carry and x. `before` has levels, or None.
    """
    step, carry, x = report
    reported = [if_taken(jnp.bool_(True)), step, *carry, *x]
    axes = ((),) * (len(reported) + len(leaves))
    how = WatchParams(loop, len(carry), len(x), (), axes=axes)
    found, levels = _bind(how, leaves, reported, values, before)
    return [v if f is None else f for v, f in zip(values, found, strict=True)], levels


def _bind(
    how: WatchParams,
    leaves: Sequence[WatchedLeaf | None],
    report: Sequence,
    values: Sequence,
    before: Sequence,
) -> tuple[list, list]:
    """Watch the leaves that are not None; return values and levels, with None for the others."""
    some = [leaf is not None for leaf in leaves]
    pick = lambda of: [v for v, has in zip(of, some, strict=True) if has]
    how, watched = _with_leaves(how, leaves), pick(values)
    types = map(_level_type, map(jax.typeof, watched), how.axes[how.reported :])
    levels = [
        level if leaf.takes_level else _jax.zeros(of)
        for leaf, level, of in zip(how.leaves, pick(before), types, strict=True)
    ]
    outs = iter(watch_p.bind(*report, *watched, *levels, how=how) if watched else ())
    found, levels = ([next(outs) if has else None for has in some] for _ in range(2))
    return found, levels


def _with_leaves(how: WatchParams, leaves: Sequence[WatchedLeaf | None]) -> WatchParams:
    """Return the parameters with only the leaves that are not None."""
    n = how.reported
    axes = [at for at, leaf in zip(how.axes[n:], leaves, strict=True) if leaf is not None]
    some = tuple(leaf for leaf in leaves if leaf is not None)
    return replace(how, leaves=some, axes=(*how.axes[:n], *axes))


def _level_type(value: Any, has: Sequence[bool]) -> Any:
    """Return the type of the level of a value: one for each of its lanes."""
    return _jax.type_like(_jax.ShapedArray(value.shape[: sum(has)], LEVEL), [value])


def _in_front(value: jax.Array, flags: Sequence[bool], lanes: Sequence[int]) -> Any:
    """Return the value with an axis for each of the lanes, of size 1 if it lacks that axis."""
    front = [n if has else 1 for n, has in zip(lanes, flags, strict=True)]
    return value.reshape((*front, *value.shape[sum(flags) :]))


def _level(value: jax.Array, lanes: int) -> Any:
    axes = tuple(range(lanes, value.ndim))
    bad, nan = ~jnp.isfinite(value), jnp.isnan(value)
    return bad.any(axes).astype(LEVEL) + nan.any(axes).astype(LEVEL)


def _evaluate(*operands: jax.Array, how: WatchParams) -> list:
    report, values, before = how.apart(operands)
    n, lanes = how.reported, len(how.lanes)
    told = [_level(v, sum(has)) for v, has in zip(values, how.axes[n:], strict=True)]
    if not how.checks:
        return [*values, *told]
    keys = tuple(None if _is_number(v) else str(jax.random.key_impl(v)) for v in report)
    report = [v if k is None else jax.random.key_data(v) for v, k in zip(report, keys, strict=True)]
    fronted = [_in_front(v, f, how.lanes) for v, f in zip(report, how.axes, strict=False)]
    before = [_in_front(v, f, how.lanes) for v, f in zip(before, how.axes[n:], strict=True)]
    worst = 0
    for leaf, level in zip(how.leaves, before, strict=True):
        worst = jnp.maximum(worst, level) if leaf.takes_level else worst
    checked, failed = [], []
    for leaf, v, flags, level in zip(how.leaves, values, how.axes[n:], before, strict=True):
        if leaf.forward:
            v = _in_front(v, flags, how.lanes)
            # A leaf without a level before may be as bad as the worst that the step was given.
            bad = _level(v, lanes) > (level if leaf.takes_level else worst)
            checked.append(v)
            failed.append(bad & fronted[0])
    found = ft.reduce(jnp.logical_or, [bad.any() for bad in failed])
    report = ft.partial(_raise, how, keys[2:])
    return [*call_if(found, report, [*failed, *checked, *fronted], values), *told]


def _is_number(value: jax.Array) -> bool:
    return not jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _raise(how: WatchParams, keys: tuple, *given: jax.Array) -> None:
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
    _, values, _ = how.apart(types)
    decide = types if how.checks else ()
    told = map(_level_type, values, how.axes[how.reported :])
    return [*(_jax.type_like(t, decide) for t in values), *told], set()


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, how: WatchParams) -> tuple[list, list]:
    report, values, _ = how.apart(primals)
    outs = watch_p.bind(*primals, how=how)
    # What a step stores of constants and xs is free if it is what the loop was given. Of the carry
    # it stores what passed the check, so that the next derivative is checked at the same place.
    given = [not how.checks and not leaf.is_carried for leaf in how.leaves]
    seen = [v if g else out for v, out, g in zip(values, outs, given, strict=False)]
    outs = [*seen, *outs[len(values) :]]
    passed = dict(zip(map(id, values), seen, strict=True))
    report = [passed.get(id(v), v) for v in report]  # else a step would store both
    _, moved, moved_before = how.apart(tangents)
    keep = [
        leaf._replace(takes_level=_flows(b)) if _flows(t) else None
        for leaf, t, b in zip(how.leaves, moved, moved_before, strict=True)
    ]
    of_tangents = replace(how, kinds=(*how.kinds, "tangent"))
    found, levels = _bind(of_tangents, keep, report, moved, moved_before)
    pairs = zip(outs, [*found, *levels], strict=True)
    return outs, [_jax.float0_zero(jax.typeof(v)) if t is None else t for v, t in pairs]


def _flows(derivative: Any) -> bool:
    return derivative is not None and type(derivative) is not _jax.Zero


def _transpose(cts: Sequence[Any], *operands: Any, how: WatchParams) -> list:
    report, values, before = how.apart(operands)
    ct_values, ct_levels = cts[: len(values)], cts[len(values) :]
    keep = [
        WatchedLeaf(leaf.name, _flows(level), leaf.backward, leaf.forward)
        if _flows(ct) and _jax.is_undefined(v)
        else None
        for leaf, v, ct, level in zip(how.leaves, values, ct_values, ct_levels, strict=True)
    ]
    kind = {"tangent": "cotangent", "cotangent": "tangent"}[how.kinds[-1]]
    turned = replace(how, kinds=(*how.kinds[:-1], kind))
    found, levels = _bind(turned, keep, report, ct_values, ct_levels)
    pairs = zip([*values, *before], [*found, *levels], strict=True)
    return [*[None] * how.reported, *(_cotangent_of(v, ct) for v, ct in pairs)]


def _cotangent_of(operand: Any, found: Any) -> Any:
    if not _jax.is_undefined(operand):
        return None
    return _jax.float0_zero(operand.aval) if found is None else found


def _batched(
    axis: _jax.AxisData, args: Sequence[Any], dims: Sequence[Any], *, how: WatchParams
) -> tuple:
    operands = [a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(args, dims, strict=True)]
    has, count = [d is not None for d in dims], len(how.leaves)
    for i in range(how.reported, how.reported + count):
        # A leaf and its level have the same lanes.
        for one, other in ((i, i + count), (i + count, i)):
            if has[one] and not has[other]:
                shape = (axis.size, *operands[other].shape)
                operands[other], has[other] = jnp.broadcast_to(operands[other], shape), True
    axes = tuple((h, *old) for h, old in zip(has, how.axes, strict=False))
    how = replace(how, lanes=(axis.size, *how.lanes), axes=axes)
    return watch_p.bind(*operands, how=how), [0 if h else None for h in has[how.reported :]]


def _dce(used: list[bool], eqn: _jax.Equation) -> tuple[list[bool], Any]:
    """Keep all checks of a step if anything that it returns is used."""
    how, n = eqn.params["how"], len(eqn.invars)
    if not any(used):
        return [False] * n, None
    if how.checks and not how.kinds:
        return [True] * n, eqn
    pairs = zip(used, used[len(how.leaves) :], strict=False)
    keep = [
        leaf if value or level or leaf.is_heard_alone else None
        for leaf, (value, level) in zip(how.leaves, pairs, strict=True)
    ]
    wanted = [leaf is not None for leaf in keep] * 2
    needed = [True] * how.reported + wanted
    return needed, _jax.part_of(eqn, needed, wanted, {"how": _with_leaves(how, keep)})


_jax.define(
    watch_p, _evaluate, _types, jvp=_jvp, transpose=_transpose, dce=_dce, run=evaluate_alone
)
_jax.register_batching(watch_p, _batched)
