"""`LoopSpec`: a requested loop, with every argument checked, and what one of its steps does."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import keystr
from jaxtyping import Array, Bool, Int32, PyTree

from loopkit import _jax
from loopkit._arguments import errors, failed_step, static_leaves, validate
from loopkit._arguments.static_leaves import bare
from loopkit._arguments.validate import type_of
from loopkit._buffers.buffer import plain
from loopkit._plans.budget import Budget, check_budget
from loopkit._progress.progress import ProgressSettings, check_progress
from loopkit._tracing.axes import Inputs
from loopkit._tracing.carry_buffers import Buffers, find
from loopkit._tracing.functions import SCOPE
from loopkit._types import BufferSpec


class LoopInfo(NamedTuple):
    """The steps that a loop took, and why it ended; under `jax.vmap`, for each lane."""

    steps: Int32[Array, "*lanes"]
    """The number of steps taken."""
    stopped: Bool[Array, "*lanes"]
    """True if the predicate (or `until`) ended the loop, False if the bound (or length) did."""


class Names(NamedTuple):
    """The function that the user called and the names of its arguments, for errors."""

    function: str
    body: str
    init: str
    predicate: str
    takes: Literal["carry", "carry, x", "i, carry"]
    """The arguments of the body. With "i, carry", the carry of the loop is ((i, ...), carry)."""
    hidden: int = 1
    """The number of tree levels in the loop's carry above the caller's carry."""
    inputs: str = "xs"


class LoopOptions(NamedTuple):
    """The settings that all loops take, as the caller passes them."""

    unroll: Any = 1
    checkpoints: Any = None
    memory: Any = None
    buffers: Any = None
    return_info: Any = False
    lanes: Any = None
    progress: Any = None
    debug: Any = None


class Hidden(NamedTuple):
    """The part of a loop's carry that the caller does not see. Unused fields are empty."""

    go: Any = None
    """Whether to take a step."""
    steps: Any = None
    """The number of steps taken."""
    left: Any = None
    """The number of steps left, if the loop may take fewer than its length."""
    whole: Sequence[Any] = ()
    """Inputs that every step gets whole."""
    written: Sequence[Any] = ()
    """Masks of the written elements of each buffer, if buffers are checked."""


class CarryWithYs(NamedTuple):
    """The carry of a loop that keeps some of its ys in it."""

    carry: Any
    ys: Any


class LoopSpec(NamedTuple):
    """A requested loop, with all settings checked."""

    names: Names
    body: Callable
    """The caller's body or, if `made`, one of loopkit's."""
    predicate: Callable | None
    """A function of the carry that says whether to go on, or a function of the carry and y of a
    step that says whether to stop."""
    init: Any
    """The initial carry, with arrays as leaves."""
    inputs: Inputs
    length: Any
    """The maximum number of steps; None for no bound."""
    budget: Budget
    unroll: int
    buffers: Any
    """The argument `buffers`, as given: which leaves it selects depends on the carry."""
    carried: Buffers
    checking: bool
    """Whether reads and writes of buffers are checked."""
    return_info: bool
    lanes: Any
    """The argument `lanes`, checked."""
    progress: ProgressSettings | None
    finite: tuple[str, str] | None
    """The name of the caller's body, and its file and line, if its steps must stay finite."""
    functions: tuple
    """The caller's functions, on which a trace depends; functions made on every call are left
    out."""
    out_axes: Any = 0
    reverse: bool = False
    split_transpose: bool = False
    stopped: Any = False
    """Whether a scan with a predicate takes no step at all."""
    before: Any = 0
    """The number of steps taken before this loop, for errors."""
    made: bool = False
    """Whether the body is loopkit's own, and returns the next carry, y, and whether to go on."""
    rest: tuple = ()
    """Everything else that the trace of a `made` body depends on: types, settings."""

    @classmethod
    def of(
        cls,
        names: Names,
        functions: tuple[Callable, Callable | None],
        init: PyTree[Any],
        inputs: Inputs,
        length: int | None,
        asked: LoopOptions,
        **more: Any,
    ) -> LoopSpec:
        """Check a request. `functions` are body and predicate.

        `more` has other fields, which the caller has checked.
        """
        name, (body, predicate) = names.function, functions
        validate.check_callable(name, names.body, body)
        if predicate is not None:
            validate.check_callable(name, names.predicate, predicate)
        trips = _jax.SYMBOLIC if _jax.is_symbolic(inputs.length) else inputs.length
        unroll = validate.check_unroll(name, asked.unroll, trips)
        return_info = validate.check_flag(name, "return_info", asked.return_info)
        init = static_leaves.wrapped(name, names.init, init, names.hidden - 1)
        carried = find(names, asked.buffers, init)
        debug = validate.check_debug(name, asked.debug, validate.DEBUGGED)
        checking, finite = "bounds" in debug and carried.any, None
        lanes = validate.check_lanes(name, asked.lanes)
        if "finite" in debug:
            # Each step must be its own iteration, and lanes must stay in place.
            unroll, lanes = 1, "wait"
            finite = failed_step.named(body, names.body)
        elif checking and lanes == "flatten":
            lanes = "wait"  # the checks need lanes that stay in place
        validate.check_beside_flat(name, lanes, asked.progress)
        return cls(
            names=names,
            body=body,
            predicate=predicate,
            init=plain(init) if carried.any else init,
            inputs=inputs,
            length=length,
            budget=check_budget(name, asked.checkpoints, asked.memory),
            unroll=unroll,
            buffers=asked.buffers,
            carried=carried,
            checking=checking,
            return_info=return_info,
            lanes=lanes,
            progress=check_progress(name, asked.progress),
            finite=finite,
            functions=functions,
            **more,
        )

    def over(
        self, init: PyTree[Any], buffers: BufferSpec | None, inputs: Inputs, **changes: Any
    ) -> LoopSpec:
        """Return the spec with another carry and other inputs."""
        changes |= {"inputs": inputs, "length": inputs.length, "buffers": buffers}
        carried = find(changes.get("names", self.names), buffers, init)
        init = plain(init) if carried.any else init
        return self._replace(init=init, carried=carried, **changes)

    @property
    def counts(self) -> bool:
        """Whether run-time errors need the number of the step."""
        return self.checking or self.finite is not None

    @property
    def keeps_some(self) -> bool:
        """Whether the carry holds some of the ys."""
        return type(self.init) is CarryWithYs

    def hidden(self, **known: Any) -> Hidden:
        """Return the initial value of the hidden part of the carry."""
        written = self.carried.first_written(self.init) if self.checking else ()
        return Hidden(**known, whole=self.inputs.whole, written=written)

    def key(self, leaves: Sequence[Any], tree: _jax.TreeDef) -> tuple[Hashable, ...]:
        """Return what a trace depends on besides the functions; `leaves`, `tree` are its carry."""
        inputs, carried = self.inputs, self.carried
        of_xs = inputs.tree, *inputs.axes, *inputs.slice_types
        settings = self.length, self.budget, self.unroll, self.lanes, self.reverse, self.progress
        checks = self.finite, carried.flags, carried.free, self.checking
        return (self.names, tree, type_key(leaves), of_xs, settings, checks, self.rest)

    def step(self, state: tuple[Any, Hidden], x: Sequence[Any]) -> tuple[tuple[Any, Hidden], Any]:
        """Take a step: return the next state, and y, from a state and slices of the inputs."""
        carry, hidden = state
        new, y, go = self.take(carry, self.inputs.join(x, hidden.whole), hidden.go is not None)
        steps = None if hidden.steps is None else hidden.steps + 1
        left = None if hidden.left is None else hidden.left - 1
        return (new, hidden._replace(go=go, steps=steps, left=left)), y

    def take(self, carry: PyTree[Any], x: PyTree[Any], asks: bool) -> tuple[Any, Any, Any]:
        """Call the body; return the next carry, y, and whether to go on (None unless `asks`)."""
        names, y, go = self.names, None, None
        if self.made:
            new, y, go = self.body(carry, x)
            return new, y, go if asks else None
        if names.takes == "carry, x":
            new, y = pair(names, self.body(bare(carry), bare(x)))
        elif names.takes == "carry":
            new = self.body(bare(carry))
        else:
            (i, *stop), value = carry
            new = (i + 1, *stop), self.body(i, bare(value))
        if asks:
            with jax.named_scope(SCOPE):
                go = self.goes_on(new, y)
        return new, y, go

    def goes_on(self, carry: PyTree[Any], y: PyTree[Any] = None) -> Any:
        """Call the predicate: return whether to go on after a step with this carry and y."""
        assert self.predicate is not None, "asked for"
        names, ends = self.names, self.names.takes == "carry, x"
        given = (bare(carry), bare(y)) if ends else (bare(carry),)
        said = scalar_bool(names.function, names.predicate, self.predicate(*given))
        return jnp.logical_not(said) if ends else said

    def watched(self, tree: _jax.TreeDef, missing: tuple) -> failed_step.Watched:
        """Return what errors need to know about a failed step; `tree` is that of the carry."""
        assert self.finite is not None, "asked for"
        names, x = self.names, None
        if names.takes == "carry, x":
            x = self.inputs.tree, tuple(a is None for a in self.inputs.axes)
        given = *self.finite, names.takes, tree, x, self.keeps_some, missing
        return failed_step.Watched(names.function, names.body, *given)

    def leaf_name(self, path: jax.tree_util.KeyPath) -> str:
        """Return the name of a leaf of the state in errors."""
        if path[0].idx == 1:
            return f"`{self.names.inputs}`" if path[1].name == "whole" else f"`{path[1].name}`"
        if self.keeps_some and path[1].name == "ys":
            return "`ys`"
        return f"`{self.names.init}{keystr(path[self.names.hidden :])}`"


def type_key(values: Sequence[Any]) -> tuple:
    """Return the types of values, and which of them are weak."""
    types = tuple(map(type_of, values))
    return types, tuple([t.weak_type for t in types])


def scalar_bool(function: str, argument: str, value: PyTree[Any]) -> Any:
    """Return the result of a predicate; raise if it is not a scalar bool."""
    if not jax.tree_util.all_leaves([value]):
        got = f"a {type(value).__name__} ({jax.tree.structure(value)})"
    else:
        try:
            array = _jax.as_array(value)
            if array.shape == () and array.dtype == bool:
                return array
            got = errors.short_type(jax.typeof(array))
        except (TypeError, ValueError):
            got = errors.shown(value)
    advice = "Reduce it with .any() or .all(), or compare with a number."
    raise errors.wrong_type(function, argument, "must return a scalar bool[]", got, advice)


def pair(names: Names, out: PyTree[Any]) -> tuple[Any, Any]:
    """Return the carry and y that a step returned; raise if it returned anything else."""
    is_sequence = isinstance(out, (tuple, list))
    if is_sequence and len(out) == 2:
        return out[0], out[1]
    got = type(out).__name__ + (f" of length {len(out)}" if is_sequence else "")
    expected = "must return a pair (carry, y)"
    advice = "Return `carry, None` if there is nothing to stack."
    raise errors.wrong_type(names.function, names.body, expected, got, advice)
