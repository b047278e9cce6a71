"""Some of a scan's ys in place of all: one of each window of steps, or what windows come to.

Steps are cut into windows, in the order in which they are taken: of `every` steps each, or one of
all steps. A sum is a carry leaf that nothing depends on, so derivatives save nothing for it. What a
window comes to is written to a buffer after the last of its steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import tree_leaves_with_path
from jaxtyping import PyTree

from loopkit import _jax
from loopkit._arguments import errors, static_leaves, validate
from loopkit._buffers.buffer import Buffer, plain
from loopkit._extras.truncate import truncated
from loopkit._tracing.axes import y_axes
from loopkit._tracing.run import row_types
from loopkit._tracing.spec import CarryWithYs, LoopInfo, LoopSpec
from loopkit._types import Axes, Reduce

FUNCTION = "scan"
REDUCTIONS = "sum", "mean", "last"
EXPECTED = 'must be None, "sum", "mean" or "last"'


class ReductionState(NamedTuple):
    """What the loop carries for its ys."""

    steps: Any
    """Steps taken, where that matters."""
    totals: list[Any]
    """Sums over the window at hand."""
    rows: list[Any]
    """What windows come to, buffers."""


class RowKind(NamedTuple):
    """A leaf of y, and what becomes of it."""

    aval: Any
    how: str | None
    axis: int | None

    @property
    def sums(self) -> bool:
        return self.how in ("sum", "mean")

    @property
    def dtype(self) -> Any:
        """Of the result."""
        function = {"sum": jnp.sum, "mean": jnp.mean}.get(self.how or "")
        given = jax.ShapeDtypeStruct((2,), self.aval.dtype)
        return self.aval.dtype if function is None else jax.eval_shape(function, given).dtype

    @property
    def total_type(self) -> Any:
        """Of the sum: as `jnp.sum` has it, numbers of 16 bits are added up in 32."""
        dtype = jnp.dtype("float32") if _is_short(self.dtype) else self.dtype
        return self.aval.update(dtype=dtype, weak_type=False)

    def of_total(self, total: jax.Array, count: Any) -> Any:
        value = total / jnp.asarray(count, _real(total.dtype)) if self.how == "mean" else total
        return value.astype(self.dtype)


class SomeYs(NamedTuple):
    """Which ys are kept."""

    tree: Any
    leaves: tuple[RowKind, ...]
    every: int | None
    length: int
    reverse: bool
    stops: bool
    """Whether it may stop before all steps are taken."""

    @staticmethod
    def of(
        tree: _jax.TreeDef, types: Sequence[Any], out_axes: Axes, reduce: Reduce, *settings: Any
    ) -> SomeYs:
        """`types`: of the leaves of one y. `settings`: the other fields."""
        rows = tree.unflatten(types)
        hows, every = _hows(reduce, rows), settings[0]
        no_rows = [every is None and how is not None for how in hows]
        leaves = tuple(map(RowKind, types, hows, y_axes(out_axes, rows, no_rows)))
        _check_whole(rows, leaves)
        some = SomeYs(tree, leaves, *settings)
        for (path, _), leaf in zip(tree_leaves_with_path(rows), leaves, strict=True):
            some._check(path, leaf)
        return some

    def _check(self, path: jax.tree_util.KeyPath, leaf: RowKind) -> None:
        if leaf.sums and jnp.issubdtype(leaf.aval.dtype, jax.dtypes.extended):
            expected, got = "can be summed only of numbers", errors.short_type(leaf.aval)
            advice = 'Pass "last" or None for this leaf.'
            raise errors.wrong_value(FUNCTION, "reduce", expected, got, advice, path)
        if leaf.sums and leaf.axis is None and self.every is not None:
            expected = "must be an axis for what `every` and `reduce` make rows of"
            advice = "Pass an axis, or leave `every` out."
            raise errors.wrong_value(FUNCTION, "out_axes", expected, "None", advice, path)

    @property
    def rows(self) -> int:
        """How many windows there may be, if their number is wanted."""
        return 0 if self.every is None else self.length // self.every

    @property
    def _window(self) -> Any:
        return jnp.int32(self.every or self.length)

    def passes(self, leaf: RowKind) -> bool:
        """Whether a leaf is one of the loop's own ys: stacked in full, or only the last."""
        return not leaf.sums if self.every is None else leaf.axis is None

    @property
    def axes(self) -> list[int | None]:
        """Where those are stacked."""
        own = filter(self.passes, self.leaves)
        return [None if self.every is not None or v.how == "last" else v.axis for v in own]

    @property
    def _written(self) -> list[RowKind]:
        return [v for v in self.leaves if self.rows and not self.passes(v)]

    @property
    def _summed(self) -> list[RowKind]:
        return [v for v in self.leaves if v.sums]

    def start(self) -> ReductionState:
        divides = self.stops and self.every is None and any(v.how == "mean" for v in self.leaves)
        steps = jnp.int32(0) if self._written or divides else None
        totals = [_jax.zeros(leaf.total_type) for leaf in self._summed]
        return ReductionState(steps, totals, [self._no_rows(leaf) for leaf in self._written])

    def _no_rows(self, leaf: RowKind) -> Any:
        aval = leaf.aval.update(dtype=leaf.dtype)
        return _jax.zeros(_jax.stack_type(aval, self.rows))

    def buffers(self, of_carry: Any) -> Any:
        """The `buffers` of the loop, where those of the caller's are `of_carry`."""
        if callable(of_carry):
            return lambda both: (of_carry(both.carry), both.ys.rows)
        own = [True] * len(self._written)
        count = None if self.start().steps is None else False
        spec = ReductionState(count, [False] * len(self._summed), own)
        return CarryWithYs(False if of_carry is None else of_carry, spec)

    def step(self, ys: ReductionState, y: Sequence[Any]) -> tuple[ReductionState, list]:
        """What is carried after a step with these leaves of y, and its own ys."""
        totals, rows, rest = iter(ys.totals), iter(ys.rows), []
        after = ReductionState(None if ys.steps is None else ys.steps + 1, [], [])
        for leaf, value in zip(self.leaves, y, strict=True):
            if self.passes(leaf):
                rest.append(value)
                continue
            if leaf.sums:
                value = self._added(next(totals), ys.steps, value.astype(leaf.total_type.dtype))
                after.totals.append(value)
            if self.rows:
                value = leaf.of_total(value, self.every) if leaf.sums else value
                after.rows.append(self._with_row(next(rows), ys.steps, value))
        return after, rest

    def _with_row(self, rows: Buffer, steps: Any, value: jax.Array) -> Any:
        """Rows with that of the window, if the step is its last; steps left over are in none."""
        window = lax.min(lax.div(steps, self._window), jnp.int32(self.rows - 1))
        row = self.rows - 1 - window if self.reverse else window
        ends = lax.rem(steps, self._window) == self._window - 1
        return rows.at[row].set(value, pred=ends, mode="promise_in_bounds")

    def _added(self, total: jax.Array, steps: Any, value: jax.Array) -> Any:
        if not self.rows:
            return total + value
        begins = lax.rem(steps, self._window) == 0
        return jnp.where(begins, 0, total).astype(total.dtype) + value

    def result(self, ys: ReductionState, own: Sequence[Any]) -> Any:
        """The ys as they were asked for, of what was carried and of the loop's own."""
        totals, rows, rest = iter(ys.totals), iter(ys.rows), iter(own)
        steps = self.length if ys.steps is None else ys.steps

        def one(leaf: RowKind) -> Any:
            if self.passes(leaf):
                return next(rest)
            if self.every is None:
                return leaf.of_total(next(totals), steps)
            found = next(rows) if self.rows else self._no_rows(leaf)
            return jnp.moveaxis(found, 0, leaf.axis or 0)

        return self.tree.unflatten(map(one, self.leaves))

    def of_all(self, ys: Sequence[Any], steps: int) -> Any:
        """The same of all rows, which are stacked along the leading axis, `steps` of them real."""
        return self.tree.unflatten(
            self._of_rows(leaf, y, steps) for leaf, y in zip(self.leaves, ys, strict=True)
        )

    def _of_rows(self, leaf: RowKind, y: jax.Array, steps: int) -> Any:
        taken = (y[::-1] if self.reverse else y)[:steps]
        if self.passes(leaf):
            if leaf.axis is None or leaf.how == "last":
                return taken[-1] if steps else _jax.zeros(leaf.aval)
            return jnp.moveaxis(y, 0, leaf.axis)
        function = {"sum": jnp.sum, "mean": jnp.mean}.get(leaf.how or "", lambda v, axis: v[:, -1])
        if self.every is None:
            return function(taken, axis=0)
        whole = steps // self.every
        windows = taken[: whole * self.every].reshape(whole, self.every, *y.shape[1:])
        rows = self._no_rows(leaf).at[:whole].set(function(windows, axis=1))
        return jnp.moveaxis(rows[::-1] if self.reverse else rows, 0, leaf.axis or 0)


def of_some(
    spec: LoopSpec, every: int | None, reduce: Reduce, truncate: int | None
) -> tuple[Any, Any, LoopInfo | None]:
    """Run a scan of which not all ys are wanted, as one that carries what they come to."""
    all_ys = spec._replace(out_axes=0)
    kind = every, spec.inputs.length, spec.reverse, spec.predicate is not None

    def in_python() -> tuple[Any, Any, Any]:
        carry, ys, info = truncated(all_ys._replace(return_info=True), truncate)
        assert info is not None, "asked for"
        leaves, tree = jax.tree.flatten(ys)
        types = [_jax.slice_type(jax.typeof(y)) for y in leaves]
        some = SomeYs.of(tree, types, spec.out_axes, reduce, *kind)
        return carry, some.of_all(leaves, int(info.steps)), info

    if spec.inputs.length and (ran := validate.in_python(in_python)) is not None:
        return ran
    some = SomeYs.of(*row_types(all_ys), spec.out_axes, reduce, *kind)

    def step(both: CarryWithYs, x: PyTree[Any]) -> tuple[CarryWithYs, list, Any]:
        new, y, go = spec.take(both.carry, x, spec.predicate is not None)
        y = static_leaves.wrapped(spec.names.function, spec.names.body, plain(y))
        ys, own = some.step(both.ys, jax.tree.leaves(y))
        return CarryWithYs(new, ys), own, go

    init = CarryWithYs(spec.carried.returned(spec.init), some.start())
    names = spec.names._replace(hidden=spec.names.hidden + 1)
    made = {"body": step, "made": True, "rest": ("some", some), "names": names}
    both = spec.over(init, some.buffers(spec.buffers), spec.inputs, out_axes=some.axes, **made)
    carry, ys, info = truncated(both, truncate)
    return carry.carry, some.result(carry.ys, ys), info


def _check_whole(y: PyTree[Any], leaves: Sequence[RowKind]) -> None:
    """Raise where something would be summed leaf by leaf that is more than its leaves."""
    whole, rest = lambda v: getattr(type(v), "_is_whole", False), iter(leaves)
    for path, node in tree_leaves_with_path(y, is_leaf=whole):
        own = [next(rest) for _ in jax.tree.leaves(node)]
        if whole(node) and any(leaf.sums for leaf in own):
            expected, got = "can be summed only of numbers", f"a {type(node).__name__}"
            advice = 'Pass "last" or None for it, or return its numbers.'
            raise errors.wrong_value(FUNCTION, "reduce", expected, got, advice, path)


def _hows(reduce: Reduce, y: PyTree[Any]) -> list[str | None]:
    """What becomes of each leaf of y, from a prefix of its tree."""
    try:
        flat = _jax.broadcast_prefix(reduce, y, is_leaf=lambda v: v is None)
    except ValueError:
        got = f"{reduce!r} for {jax.tree.structure(y)}"
        advice = f"Each leaf, or whole subtree, {EXPECTED}."
        expected = "must be a tree prefix of what `f` returns as y"
        raise errors.wrong_value(FUNCTION, "reduce", expected, got, advice) from None
    return flat


def check_words(reduce: Reduce) -> Any:
    """`reduce`, whose leaves have to be words that there are."""
    for path, how in tree_leaves_with_path(reduce):
        if not (isinstance(how, str) and how in REDUCTIONS):
            wrong = errors.wrong_value if isinstance(how, str) else errors.wrong_type
            advice = "Reduce in another way in the carry."
            raise wrong(FUNCTION, "reduce", EXPECTED, errors.shown(how), advice, path)
    return reduce


def _is_short(dtype: np.dtype[Any]) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def _real(dtype: np.dtype[Any]) -> Any:
    return jnp.finfo(dtype).dtype
