"""What is asked of a loop, its arguments checked once, and the loop that is traced for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_leaves_with_path
from jaxtyping import PyTree

from loopkit import _jax
from loopkit._arguments import failed_step, static_leaves, validate
from loopkit._buffers.buffer import plain
from loopkit._loops.some_ys import CarryWithYs, SomeYs
from loopkit._plans.budget import Budget, check_budget
from loopkit._programs.cache import remember
from loopkit._progress.progress import ProgressSettings, check_progress
from loopkit._tracing import carry_buffers
from loopkit._tracing.axes import Inputs
from loopkit._tracing.finite_steps import FiniteSteps, Given, names_of
from loopkit._tracing.predicate_gradient import SCOPE
from loopkit._tracing.trace import Names, Traced, pair, scalar_bool, trace_loop, type_key
from loopkit._types import BufferSpec


class LoopOptions(NamedTuple):
    """The settings that all loops take, as they are given."""

    unroll: Any = 1
    checkpoints: Any = None
    memory: Any = None
    buffers: Any = None
    return_info: Any = False
    lanes: Any = None
    progress: Any = None
    debug: Any = None
    made_of: tuple | None = None
    """The functions of the user, a tuple, and what else those of the loop depend on, where they are
    made anew on every call. None: they are the user's."""


class Hidden(NamedTuple):
    """What a loop carries beside the caller's carry, where it is needed."""

    go: Any = None
    """Whether to take a step."""
    steps: Any = None
    """How many were taken."""
    left: Any = None
    """How many may still be, where the length of the loop does not say."""
    whole: Sequence[Any] = ()
    """Inputs that every step is given whole."""
    last: Sequence[Any] = ()
    """What ys are of which only the last is wanted."""
    written: Sequence[Any] = ()
    """Where buffers are checked: for each, which of its elements have been written."""


@dataclass(eq=False)  # frozen, it would take microseconds longer to make, at every call
class Request:
    """A loop as it was asked for. Nothing in it has to be checked again, or is changed."""

    names: Names
    init: Any
    """Arrays, the initial carry."""
    length: Any
    """The most steps; None for no bound."""
    budget: Budget
    unroll: int
    buffers: Any
    """As given: which of them there are depends on the carry."""
    carried: carry_buffers.Buffers
    checking: bool
    return_info: bool
    lanes: Any
    """What becomes of lanes that have stopped."""
    progress: ProgressSettings | None
    body: tuple[str, str] | None
    """Name and place of the caller's body, if its steps have to stay finite."""
    functions: tuple
    """The caller's, on which all hangs that is traced; not those made anew on every call."""
    rest: tuple
    """What else it hangs on, besides types and settings."""

    @classmethod
    def of(
        cls,
        names: Names,
        init: PyTree[Any],
        length: int | None,
        asked: LoopOptions,
        own: tuple,
        trips: int | None = None,
        **more: Any,
    ) -> Self:
        """`own`: the functions of the loop. `trips`: its steps, if all are taken.

        `more`: what a request for this kind of loop has beside the others, checked.
        """
        name, (functions, *rest) = names.function, asked.made_of or (own,)
        unroll = validate.check_unroll(name, asked.unroll, trips)
        return_info = validate.check_flag(name, "return_info", asked.return_info)
        init = static_leaves.wrapped(name, names.init, init, names.hidden - 1)
        carried = carry_buffers.find(names, asked.buffers, init)
        debug = validate.check_debug(name, asked.debug, validate.DEBUGGED)
        checking = "bounds" in debug and carried.any
        lanes, body = validate.check_lanes(name, asked.lanes), None
        if "finite" in debug:
            # Each step is taken for itself, and lanes stay where they are.
            unroll, lanes = 1, "wait"
            body = failed_step.named(functions[0], names.body)
        elif checking and lanes == "flatten":
            lanes = "wait"  # what is checked is whether lanes take a step, and not where they are
        validate.check_beside_flat(name, lanes, asked.progress)
        return cls(
            names=names,
            init=plain(init) if carried.any else init,
            length=length,
            budget=check_budget(name, asked.checkpoints, asked.memory),
            unroll=unroll,
            buffers=asked.buffers,
            carried=carried.checked(checking),
            checking=checking,
            return_info=return_info,
            lanes=lanes,
            progress=check_progress(name, asked.progress),
            body=body,
            functions=functions,
            rest=tuple(rest),
            **more,
        )

    @property
    def counts(self) -> bool:
        """Whether run-time errors need the number of the step."""
        return self.checking or self.body is not None

    def hidden(
        self,
        go: jax.Array | None,
        steps: _jax.Whole | None,
        whole: Sequence[Any] = (),
        last: Sequence[Any] = (),
    ) -> Hidden:
        written = self.carried.first_written(self.init) if self.checking else []
        return Hidden(go, steps, None, whole, last, written)

    def finite(self, state: tuple[Any, Hidden], flag: int | None, x_count: int) -> FiniteSteps:
        """How steps that have to stay finite are watched. `flag`: which leaf says what counts."""
        assert self.body is not None, "asked for"
        paths = [path for path, _ in tree_leaves_with_path(state)]
        count = len(paths) - len(jax.tree.leaves(state[1]))
        fields = [path[1].name for path in paths[count:]]
        counter, left = (
            next((count + i for i, name in enumerate(fields) if name == leaf), None)
            for leaf in ("steps", "left")
        )
        buffers = *self.carried.flags, *[False] * (len(paths) - count)
        typed = zip(jax.tree.leaves(state), buffers, strict=True)
        missing = tuple((i, v.shape, v.dtype) for i, (v, has) in enumerate(typed) if has)
        loop = self.watched(jax.tree.structure(state), missing)
        names = tuple(map(self._name, paths))
        assert counter is not None, "counted"
        return FiniteSteps(loop, names, self.x_names(x_count), flag, counter, buffers, left)

    def by_hand(self, body: Callable, before: _jax.Whole = 0) -> Callable:
        """A function of the carry, or of x and the carry, that runs outside a compiled loop.

        `before`: steps taken before it is called first.
        """
        body = self.carried.by_hand(body)
        return body if self.body is None else self._watched_by_hand(body, before)

    def _watched_by_hand(self, body: Callable, before: _jax.Whole) -> Callable:
        steps = itertools.count(int(before))

        def watched(*args: PyTree[Any]) -> Any:
            *x, carry = args
            state = carry, Hidden(steps=jnp.int32(next(steps)))
            (leaves, tree), (x_leaves, x_tree) = map(jax.tree.flatten, (state, x))
            of_loop = self.finite(state, None, 0)
            loop = replace(of_loop.loop, missing=())
            if loop.x is not None:
                loop = replace(loop, x=(jax.tree.structure(x[0]), (False,) * len(x_leaves)))
            names = names_of("xs", x, 1)
            finite = replace(of_loop, loop=loop, x_names=names, buffers=(False,) * len(leaves))
            out_tree: Any = None

            def take(seen: Given, _: object) -> tuple[list, Sequence[str]]:
                nonlocal out_tree
                (carry, hidden), x = tree.unflatten(seen.carry), x_tree.unflatten(seen.x)
                out = body(*x, carry)
                new, y = out if x else (out, None)
                new = static_leaves.wrapped(self.names.function, self.names.body, new)
                new, out_tree = jax.tree.flatten(((new, hidden), y))
                return new, names_of("ys", y)

            outs = finite.around(Given([], leaves, x_leaves), take)
            (new, _), y = out_tree.unflatten(outs)
            return (new, y) if x else new

        return watched

    def watched(self, tree: _jax.TreeDef, missing: tuple) -> failed_step.Watched:
        """What is said of the loop where a step fails."""
        assert self.body is not None, "asked for"
        style = "i, carry" if self.names.function == "fori_loop" else "carry"
        return failed_step.Watched(
            self.names.function, self.names.body, *self.body, style, tree, missing=missing
        )

    def _name(self, path: jax.tree_util.KeyPath) -> str:
        hidden = {"whole": "xs", "last": "ys"}
        if path[0].idx == 1:
            return f"`{hidden.get(path[1].name, path[1].name)}`"
        return f"`{self.names.init}{keystr(path[self.names.hidden :])}`"

    def x_names(self, count: int) -> tuple[str, ...]:
        return ("`xs`",) * count

    def traced(
        self,
        step: Callable[[Any, Hidden, list], tuple],
        goes_on: Callable[[Any, Hidden], Any] | None,
        hidden: Hidden,
        x_types: Sequence[Any],
        settings: dict[str, Any],
        rest: Sequence[Any],
    ) -> tuple[Traced, list, Any]:
        """The loop of `step(carry, hidden, x) -> (carry, hidden), y`, its initial carry, the tree.

        `settings`: fields of `Loop` beside those that all loops have.
        """
        state = (self.init, hidden)
        leaves, tree = jax.tree.flatten(state)
        carried = None
        key = self.names, tree, type_key(leaves), tuple(x_types), tuple(settings.values())
        key += self.length, self.budget, self.unroll, self.lanes, self.rest
        key += (tuple(rest), self.progress, self.body)
        values, masked = len(leaves) - len(jax.tree.leaves(hidden)), hidden.go is not None
        flag = values if masked else None
        if self.carried.any:
            number = values + masked if self.checking else None
            carried = self.carried.followed_by(len(leaves) - values, number)
            key += self.carried.flags, self.carried.free, self.checking

        def take(carry: list, x: list) -> tuple:
            value, hidden = tree.unflatten(carry)
            return step(value, hidden, x)

        asks = None if goes_on is None else lambda carry: goes_on(*tree.unflatten(carry))

        def make() -> Traced:
            fields = {"length": self.length, "checkpoints": self.budget, "unroll": self.unroll}
            fields |= {"name": self.names.function, "lane_policy": self.lanes}
            fields |= {"progress": self.progress, **settings}
            finite = None if self.body is None else self.finite(state, flag, len(x_types))
            return trace_loop(self.names, take, asks, state, x_types, fields, carried, flag, finite)

        functions = self.functions if carried is None or carried.hashable else ()
        return remember(functions, key, make), leaves, tree


@dataclass(eq=False)
class Stepped(Request):
    """A loop of steps `f(carry, x)`, to the last row or the first after which `until` holds."""

    f: Callable
    inputs: Inputs
    until: Callable | None = None

    def watched(self, tree: _jax.TreeDef, missing: tuple) -> failed_step.Watched:
        loop, whole = super().watched(tree, missing), tuple(a is None for a in self.inputs.axes)
        if loop.style == "i, carry":
            return loop
        return replace(loop, style="carry, x", x=(self.inputs.tree, whole))

    def x_names(self, count: int) -> tuple[str, ...]:
        tree, axes = self.inputs.tree, self.inputs.axes
        names = names_of("xs", tree.unflatten(range(len(axes))))
        return tuple(n for n, a in zip(names, axes, strict=True) if a is not None)

    def step(self, carry: PyTree[Any], x: PyTree[Any]) -> tuple[Any, Any, Any]:
        """The next carry, y, and whether to go on; None for that without `until`."""
        new, y = pair(self.names, self.f(carry, x))
        if self.until is None:
            return new, y, None
        with jax.named_scope(SCOPE):
            stop = scalar_bool(self.names.function, self.names.predicate, self.until(new, y))
        return new, y, jnp.logical_not(stop)


@dataclass(eq=False)
class Scan(Stepped):
    """A scan. With `until`, it takes no step if it is `stopped` from the start."""

    out_axes: Any = 0
    reverse: bool = False
    split_transpose: bool = False
    truncate: int | None = None
    stopped: Any = False
    before: Any = 0
    """Steps taken before the first, for errors."""
    some: SomeYs | None = None
    """Which ys are wanted, if not all. The carry is then a `Beside`."""

    def watched(self, tree: _jax.TreeDef, missing: tuple) -> failed_step.Watched:
        return replace(super().watched(tree, missing), beside=self.some is not None)

    def _name(self, path: jax.tree_util.KeyPath) -> str:
        of_ys = self.some is not None and path[0].idx == 0 and path[1].name == "ys"
        return "`ys`" if of_ys else super()._name(path)

    def step(self, carry: PyTree[Any], x: PyTree[Any]) -> tuple[Any, Any, Any]:
        if self.some is None:
            return super().step(carry, x)
        new, y, go = super().step(carry.carry, x)
        y = static_leaves.wrapped(self.names.function, self.names.body, plain(y))
        ys, own = self.some.step(carry.ys, jax.tree.leaves(y))
        return CarryWithYs(new, ys), own, go

    def over(
        self, init: PyTree[Any], buffers: BufferSpec | None, inputs: Inputs, **changes: Any
    ) -> Scan:
        """The same of another carry and other inputs."""
        carried = carry_buffers.find(self.names, buffers, init).checked(self.checking)
        changes |= {"carried": carried, "inputs": inputs, "length": inputs.length}
        return replace(self, init=plain(init), buffers=buffers, **changes)
