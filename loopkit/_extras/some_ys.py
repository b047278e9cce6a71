"""Keep only some of a scan's ys: one for each window of steps, or a reduction of the window.

The steps are cut into windows, in the order in which the loop takes them: windows of `every` steps,
or one window of all steps. A sum is a carry leaf that nothing depends on, so derivatives save
nothing for it. At the last step of a window, its result is written to a buffer.
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


class LeafState(NamedTuple):
    """The part of the carry for a leaf of y. Unused fields are None."""

    total: Any = None
    """The sum over the current window."""
    rows: Any = None
    """A buffer with the results of the windows."""
    last: Any = None
    """The y of the last step."""


class ReductionState(NamedTuple):
    """The part of the carry for the ys."""

    steps: Any
    """The number of steps taken, or None if nothing depends on it."""
    leaves: list[LeafState]


class RowKind(NamedTuple):
    """A leaf of y, and how it is reduced."""

    aval: Any
    how: str | None
    axis: int | None

    @property
    def sums(self) -> bool:
        return self.how in ("sum", "mean")

    @property
    def dtype(self) -> Any:
        """The dtype of the result."""
        function = {"sum": jnp.sum, "mean": jnp.mean}.get(self.how or "")
        given = jax.ShapeDtypeStruct((2,), self.aval.dtype)
        return self.aval.dtype if function is None else jax.eval_shape(function, given).dtype

    @property
    def total_type(self) -> Any:
        """The type of the sum. As in `jnp.sum`, 16-bit numbers are added up in 32 bits."""
        dtype = jnp.dtype("float32") if _is_short(self.dtype) else self.dtype
        return self.aval.update(dtype=dtype, weak_type=False)

    def of_total(self, total: jax.Array, count: Any) -> Any:
        if self.how == "mean":
            total = total / jnp.asarray(count, jnp.finfo(total.dtype).dtype)  # of complex: real
        return total.astype(self.dtype)


class SomeYs(NamedTuple):
    """The ys that a scan keeps, and how it reduces them."""

    tree: Any
    leaves: tuple[RowKind, ...]
    every: int | None
    length: int
    reverse: bool
    stops: bool
    """Whether the loop may stop before it has taken all steps."""

    @staticmethod
    def of(
        tree: _jax.TreeDef, types: Sequence[Any], out_axes: Axes, reduce: Reduce, *settings: Any
    ) -> SomeYs:
        """Decide from the `types` of the leaves of one y; `settings` has the other fields."""
        rows, every = tree.unflatten(types), settings[0]
        advice = 'Pass None, "sum", "mean" or "last" for each leaf, or for whole subtrees.'
        of = "the y that `f` returns"
        hows = validate.from_prefix(FUNCTION, "reduce", reduce, rows, of, advice)
        no_rows = [every is None and how is not None for how in hows]
        leaves = tuple(map(RowKind, types, hows, y_axes(out_axes, rows, no_rows)))
        some = SomeYs(tree, leaves, *settings)
        if reduce is not None:
            _check_whole(rows, leaves)
            for (path, _), leaf in zip(tree_leaves_with_path(rows), leaves, strict=True):
                some._check(path, leaf)
        return some

    def _check(self, path: jax.tree_util.KeyPath, leaf: RowKind) -> None:
        if leaf.sums and jnp.issubdtype(leaf.aval.dtype, jax.dtypes.extended):
            expected, got = 'can be "sum" or "mean" only for numbers', errors.short_type(leaf.aval)
            advice = 'Pass "last" or None for this leaf.'
            raise errors.wrong_value(FUNCTION, "reduce", expected, got, advice, path)
        if leaf.sums and leaf.axis is None and self.every is not None:
            expected = "must be an axis for ys that `every` and `reduce` stack"
            advice = "Pass an axis, or leave `every` out."
            raise errors.wrong_value(FUNCTION, "out_axes", expected, "None", advice, path)

    @property
    def rows(self) -> int:
        """The most windows; 0 without `every`."""
        return 0 if self.every is None else self.length // self.every

    @property
    def _window(self) -> Any:
        return jnp.int32(self.every or self.length)

    def stacks(self, leaf: RowKind) -> bool:
        """Return whether the loop itself stacks a leaf, with a row for every step."""
        return self.every is None and leaf.how is None and leaf.axis is not None

    def keeps_last(self, leaf: RowKind) -> bool:
        """Return whether only the last value of a leaf is kept."""
        if self.every is not None:
            return leaf.axis is None
        return leaf.how == "last" or (leaf.how is None and leaf.axis is None)

    @property
    def axes(self) -> list[int | None]:
        """The axes along which the loop stacks its own ys."""
        return [v.axis for v in filter(self.stacks, self.leaves)]

    def _makes_rows(self, leaf: RowKind) -> bool:
        return self.rows > 0 and not self.keeps_last(leaf)

    def start(self) -> ReductionState:
        """Return the state before the first step."""
        divides = self.stops and self.every is None and any(v.how == "mean" for v in self.leaves)
        counts = divides or any(map(self._makes_rows, self.leaves))
        states = [
            LeafState(
                total=_jax.zeros(leaf.total_type) if leaf.sums else None,
                rows=self._no_rows(leaf) if self._makes_rows(leaf) else None,
                last=_jax.zeros(leaf.aval) if self.keeps_last(leaf) else None,
            )
            for leaf in self.leaves
        ]
        return ReductionState(jnp.int32(0) if counts else None, states)

    def _no_rows(self, leaf: RowKind) -> Any:
        aval = leaf.aval.update(dtype=leaf.dtype)
        return _jax.zeros(_jax.stack_type(aval, self.rows))

    def buffers(self, start: ReductionState, of_carry: Any) -> Any:
        """Return the `buffers` of the loop; the caller's are `of_carry`."""
        if of_carry is None and all(v.rows is None for v in start.leaves):
            return None
        if callable(of_carry):
            return lambda both: (of_carry(both.carry), [v.rows for v in both.ys.leaves])
        steps, states = jax.tree.map(lambda _: False, start)
        states = [v if v.rows is None else v._replace(rows=True) for v in states]
        return CarryWithYs(False if of_carry is None else of_carry, ReductionState(steps, states))

    def step(self, ys: ReductionState, y: Sequence[Any]) -> tuple[ReductionState, list]:
        """Return the state after a step with these leaves of y, and the ys that the loop stacks."""
        steps, states, own = ys.steps, [], []
        for leaf, (total, rows, last), value in zip(self.leaves, ys.leaves, y, strict=True):
            if self.stacks(leaf):
                own.append(value)
            elif self.keeps_last(leaf):
                last = value
            elif leaf.sums:
                total = self._added(total, steps, value.astype(leaf.total_type.dtype))
            if rows is not None:
                row = leaf.of_total(total, self.every) if leaf.sums else value
                rows = self._with_row(rows, steps, row)
            states.append(LeafState(total, rows, last))
        return ReductionState(None if steps is None else steps + 1, states), own

    def _with_row(self, rows: Buffer, steps: Any, value: jax.Array) -> Any:
        """Write the row of a window at its last step. Steps left over belong to no window."""
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
        """Return the requested ys, from the state and from the ys that the loop has stacked."""
        rest = iter(own)
        steps = self.length if ys.steps is None else ys.steps

        def one(leaf: RowKind, state: LeafState) -> Any:
            if self.stacks(leaf):
                return next(rest)
            if self.keeps_last(leaf):
                return state.last
            if self.every is None:
                return leaf.of_total(state.total, steps)
            rows = self._no_rows(leaf) if state.rows is None else state.rows
            return jnp.moveaxis(rows, 0, leaf.axis or 0)

        return self.tree.unflatten(map(one, self.leaves, ys.leaves))


def of_some(
    spec: LoopSpec,
    every: int | None = None,
    reduce: Reduce = None,
    truncate: int | None = None,
) -> tuple[Any, Any, LoopInfo | None]:
    """Run a scan that keeps some of its ys, as a loop that carries their reductions."""
    all_ys = spec._replace(out_axes=0)
    kind = every, spec.inputs.length, spec.reverse, spec.predicate is not None

    def in_python() -> tuple[Any, Any, Any]:
        carry, ys, info = truncated(all_ys._replace(return_info=True), truncate)
        assert info is not None, "asked for"
        leaves, tree = jax.tree.flatten(ys)
        types = [_jax.slice_type(jax.typeof(y)) for y in leaves]
        some = SomeYs.of(tree, types, spec.out_axes, reduce, *kind)
        return carry, _of_all(some, leaves, int(info.steps)), info

    if spec.inputs.length and (ran := validate.in_python(in_python)) is not None:
        return ran
    some = SomeYs.of(*row_types(all_ys), spec.out_axes, reduce, *kind)

    def step(both: CarryWithYs, x: PyTree[Any]) -> tuple[CarryWithYs, list, Any]:
        new, y, go = spec.take(both.carry, x, spec.predicate is not None)
        y = static_leaves.wrapped(spec.names.function, spec.names.body, plain(y))
        ys, own = some.step(both.ys, jax.tree.leaves(y))
        return CarryWithYs(new, ys), own, go

    start = some.start()
    init = CarryWithYs(spec.carried.returned(spec.init), start)
    names = spec.names._replace(hidden=spec.names.hidden + 1)
    made = {"body": step, "made": True, "rest": ("some", some), "names": names}
    both = spec.over(
        init, some.buffers(start, spec.buffers), spec.inputs, out_axes=some.axes, **made
    )
    carry, ys, info = truncated(both, truncate)
    return carry.carry, some.result(carry.ys, ys), info


def _of_all(some: SomeYs, ys: list, steps: int) -> Any:
    """Return the requested ys, from the rows of all steps."""
    taken = [(y[::-1] if some.reverse else y)[:steps] for y in ys]  # in the order of the steps
    count, states = some.start()
    states = [v if v.rows is None else v._replace(rows=Buffer(v.rows)) for v in states]
    state = ReductionState(count, states)
    for t in range(steps):
        state, _ = some.step(state, [y[t] for y in taken])
    own = zip(some.leaves, ys, strict=True)
    own = [jnp.moveaxis(y, 0, leaf.axis or 0) for leaf, y in own if some.stacks(leaf)]
    return some.result(plain(state), own)


def _check_whole(y: PyTree[Any], leaves: Sequence[RowKind]) -> None:
    """Raise if a node of y that is a unit, such as a TensorArray, would be summed leaf by leaf."""
    rest = iter(leaves)
    for path, node in tree_leaves_with_path(y, is_leaf=static_leaves.is_whole):
        own = [next(rest) for _ in jax.tree.leaves(node)]
        if static_leaves.is_whole(node) and any(leaf.sums for leaf in own):
            expected, got = 'can be "sum" or "mean" only for numbers', f"a {type(node).__name__}"
            advice = 'Pass "last" or None for it, or return its numbers.'
            raise errors.wrong_value(FUNCTION, "reduce", expected, got, advice, path)


def check_words(reduce: Reduce) -> None:
    """Raise if a leaf of `reduce` is not one of the reductions."""
    for path, how in tree_leaves_with_path(reduce):
        if not (isinstance(how, str) and how in REDUCTIONS):
            wrong = errors.wrong_value if isinstance(how, str) else errors.wrong_type
            advice = "Use the carry to reduce in another way."
            raise wrong(FUNCTION, "reduce", EXPECTED, errors.shown(how), advice, path)


def _is_short(dtype: np.dtype[Any]) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
