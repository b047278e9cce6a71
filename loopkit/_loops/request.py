"""What is asked of a loop, its arguments checked once, and the loop that is traced for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import jax

from loopkit._arguments import static_leaves, validate
from loopkit._buffers import run_time_checks
from loopkit._buffers.buffer import plain
from loopkit._loops.some_ys import Beside, SomeYs
from loopkit._plans.budget import check_budget
from loopkit._plans.plan import Budget
from loopkit._programs.cache import remember
from loopkit._tracing import carry_buffers
from loopkit._tracing.axes import Inputs
from loopkit._tracing.trace import Names, Traced, pair, scalar_bool, trace_loop, type_key


class Asked(NamedTuple):
    """The settings that all loops take, as they are given."""

    unroll: Any = 1
    checkpoints: Any = None
    memory: Any = None
    buffers: Any = None
    checks: Any = None
    return_info: Any = False
    lanes: Any = None
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
    auto_unroll: bool
    buffers: Any
    """As given: which of them there are depends on the carry."""
    carried: carry_buffers.Buffers
    checking: bool
    return_info: bool
    lanes: Any
    """What becomes of lanes that have stopped."""
    functions: tuple
    """The caller's, on which all hangs that is traced; not those made anew on every call."""
    rest: tuple
    """What else it hangs on, besides types and settings."""

    @classmethod
    def of(
        cls,
        names: Names,
        init: Any,
        length: Any,
        asked: Asked,
        own: tuple,
        trips: Any = None,
        **more: Any,
    ) -> Self:
        """`own`: the functions of the loop. `trips`: its steps, if all are taken.

        `more`: what a request for this kind of loop has beside the others, checked.
        """
        name, (functions, *rest) = names.function, asked.made_of or (own,)
        unroll, auto = validate.check_unroll(name, asked.unroll, trips)
        return_info = validate.check_flag(name, "return_info", asked.return_info)
        init = static_leaves.wrapped(name, names.init, init, names.hidden - 1)
        carried = carry_buffers.find(names, asked.buffers, init)
        checking = run_time_checks.wanted(name, asked.checks, carried.any)
        return cls(
            names=names,
            init=plain(init) if carried.any else init,
            length=length,
            budget=check_budget(name, asked.checkpoints, asked.memory),
            unroll=unroll,
            auto_unroll=auto,
            buffers=asked.buffers,
            carried=carried.checked(checking),
            checking=checking,
            return_info=return_info,
            lanes=validate.check_lanes(name, asked.lanes),
            functions=functions,
            rest=tuple(rest),
            **more,
        )

    def hidden(self, go: Any, steps: Any, whole: Any = (), last: Any = ()) -> Hidden:
        written = self.carried.first_written(self.init) if self.checking else []
        return Hidden(go, steps, None, whole, last, written)

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
        carried = flag = None
        key = self.names, tree, type_key(leaves), tuple(x_types), tuple(settings.values())
        key += self.length, self.budget, self.unroll, self.auto_unroll, self.lanes, self.rest
        key += (tuple(rest),)
        if self.carried.any:
            values, masked = len(self.carried.flags), hidden.go is not None
            flag = values if masked else None
            number = values + masked if self.checking else None
            carried = self.carried.followed_by(len(leaves) - values, number)
            key += self.carried.flags, self.carried.free, self.checking

        def take(carry: list, x: list) -> tuple:
            value, hidden = tree.unflatten(carry)
            return step(value, hidden, x)

        asks = None if goes_on is None else lambda carry: goes_on(*tree.unflatten(carry))

        def make() -> Traced:
            fields = {"length": self.length, "checkpoints": self.budget, "unroll": self.unroll}
            fields |= {"auto_unroll": self.auto_unroll, "name": self.names.function}
            fields |= {"narrows": self.lanes, **settings}
            return trace_loop(self.names, take, asks, state, x_types, fields, carried, flag)

        functions = self.functions if carried is None or carried.hashable else ()
        return remember(functions, key, make), leaves, tree


@dataclass(eq=False)
class Stepped(Request):
    """A loop of steps `f(carry, x)`, to the last row or the first after which `until` holds."""

    f: Callable
    inputs: Inputs
    until: Callable | None = None

    def step(self, carry: Any, x: Any) -> tuple[Any, Any, Any]:
        """The next carry, y, and whether to go on; None for that without `until`."""
        new, y = pair(self.names, self.f(carry, x))
        if self.until is None:
            return new, y, None
        stop = self.until(new, y)
        return new, y, ~scalar_bool(self.names.function, self.names.predicate, stop)


@dataclass(eq=False)
class Scan(Stepped):
    """A scan. With `until`, it takes no step if it is `stopped` from the start."""

    out_axes: Any = 0
    reverse: bool = False
    split_transpose: bool = False
    truncate: int | None = None
    stopped: Any = False
    some: SomeYs | None = None
    """Which ys are wanted, if not all. The carry is then a `Beside`."""

    def step(self, carry: Any, x: Any) -> tuple[Any, Any, Any]:
        if self.some is None:
            return super().step(carry, x)
        new, y, go = super().step(carry.carry, x)
        y = static_leaves.wrapped(self.names.function, self.names.body, plain(y))
        ys, own = self.some.step(carry.ys, jax.tree.leaves(y))
        return Beside(new, ys), own, go

    def over(self, init: Any, buffers: Any, inputs: Inputs, **changes: Any) -> Scan:
        """The same of another carry and other inputs."""
        carried = carry_buffers.find(self.names, buffers, init).checked(self.checking)
        changes |= {"carried": carried, "inputs": inputs, "length": inputs.length}
        return replace(self, init=plain(init), buffers=buffers, **changes)
