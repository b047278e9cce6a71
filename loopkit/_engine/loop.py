"""The description of a loop, which the primitives of the engine take as a parameter.

A `Loop` holds no arrays. Its operands are, in this order,

cond_consts, consts, init, xs

and one step, with x its slices of the xs, computes

    active       = cond(*cond_consts, *carry)
    *carry, *y   = body(*consts, *carry, *x)

until `active` is false or `length` steps are taken. Without `cond`, a loop takes exactly `length`
steps. Step t writes row t of the ys (from the end if `reverse`); rows that no step writes are zero.

Under vmap with a batched predicate, `active` has axes, the *lane axes*. All lanes step together
until none is active, and a lane that is not active keeps its carry. Every carry and every y then
begins with the lane axes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from loopkit import _jax
from loopkit._arguments import errors
from loopkit._engine.leaves import Active, CarryLeaf, Const, Input, Operands, Output, kept, parts
from loopkit._jaxprs import equations
from loopkit._jaxprs.accelerators import Accelerator, planned_for
from loopkit._plans.budget import Budget
from loopkit._progress.progress import ProgressSettings
from loopkit._types import Lanes

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop, compared and hashed by identity.

    `memory` caches what is derived from it, `step_memory` what does not depend on its budget.
    """

    cond: _jax.Jaxpr | None
    body: _jax.Jaxpr
    cond_const_count: int
    consts: tuple[Const, ...]
    carry: tuple[CarryLeaf, ...]
    xs: tuple[Input, ...]
    ys: tuple[Output, ...]
    length: int | None
    reverse: bool = False
    checkpoints: Budget = None
    unroll: int = 1
    """The number of steps in one iteration."""
    name: str = "while_loop"
    replaced_by: str = ""
    """The loopkit function that replaced a lax loop with this one, if there is one."""
    lane_policy: Lanes = None
    """The caller's choice of what lanes do after they have stopped."""
    min_active_lanes: int = 0
    """The loop goes on while more than this many lanes, of a single axis, are active."""
    reads_lanes: bool = False
    """Whether steps read the values of other lanes, also of those that have stopped."""
    masks_itself: bool = False
    """Whether the step itself leaves stopped lanes unchanged."""
    progress: ProgressSettings | None = field(default=None, repr=False)
    """How the loop shows its progress, if it does."""
    device: Accelerator | None = field(default_factory=planned_for, repr=False)
    """The accelerator that it is planned for; None for a CPU."""
    lasting: bool = field(default=False, compare=False)
    """Whether all loops with equal equations share this object, and so are compiled once."""
    memory: dict = field(default_factory=dict, repr=False, compare=False)
    step_memory: dict = field(default_factory=dict, repr=False, compare=False)
    lane: Any = field(default=None, repr=False)
    """The loop of a single one of its lanes: see `lanes/many_lanes.py`."""

    def __post_init__(self) -> None:
        ins, outs = len(self.body.in_avals), len(self.body.out_avals)
        assert ins == self.const_count + self.carry_count + self.xs_count, "a record for each input"
        assert outs == self.carry_count + self.ys_count, "a record for each output"
        taken = self.cond_const_count + self.carry_count
        assert self.cond is None or len(self.cond.in_avals) == taken, "a predicate of the carry"

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return `make()`, which is called once per key."""
        if key not in self.memory:
            self.memory[key] = make()
        return self.memory[key]

    def derived_of_step(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return `make()`, which is called once per key, whatever the budget of the loop."""
        if key not in self.step_memory:
            self.step_memory[key] = make()
        return self.step_memory[key]

    def replace(self, **changes: Any) -> Loop:
        """Return a copy of the loop with other fields, and nothing cached."""
        return replace(self, **{"memory": {}, "step_memory": {}, **changes})

    def with_bytes(self, budget: Budget) -> Loop:
        """Return a copy with another budget; values derived from the step stay cached."""
        return replace(self, checkpoints=budget, memory={}, step_memory=dict(self.step_memory))

    def unrolled(self, unroll: int) -> Loop:
        """Return this loop with `unroll` steps in an iteration; its derived values stay cached."""
        return self if self.unroll == unroll else replace(self, unroll=unroll)

    def split(self, operands: Sequence[Any]) -> tuple[Operands, list]:
        """Return the operands of the loop, and the values that follow them."""
        counts = (self.cond_const_count, self.const_count, self.carry_count, self.xs_count)
        *of_loop, rest = parts(operands, *counts)
        return Operands(*of_loop), rest

    @cached_property
    def const_count(self) -> int:
        return len(self.consts)

    @cached_property
    def carry_count(self) -> int:
        return len(self.carry)

    @cached_property
    def xs_count(self) -> int:
        return len(self.xs)

    @cached_property
    def ys_count(self) -> int:
        return len(self.ys)

    @cached_property
    def operand_count(self) -> int:
        return self.cond_const_count + self.const_count + self.carry_count + self.xs_count

    @property
    def primal_counts(self) -> tuple[int, int]:
        """The numbers of primal operands and of primal results."""
        return self.operand_count, self.carry_count + self.ys_count

    @cached_property
    def lanes(self) -> tuple[int, ...]:
        return () if self.cond is None else self.cond.out_avals[0].shape

    @cached_property
    def is_buffer(self) -> tuple[bool, ...]:
        """For each carry leaf, whether it is a buffer."""
        return tuple(leaf.buffer for leaf in self.carry)

    @cached_property
    def flag(self) -> int | None:
        """The index of the carry leaf that says whether a step is active, if there is one."""
        return next((i for i, leaf in enumerate(self.carry) if leaf.flag), None)

    @cached_property
    def cond_types(self) -> list[_jax.ShapedArray]:
        """The types of the constants of the predicate."""
        return [] if self.cond is None else list(self.cond.in_avals[: self.cond_const_count])

    @cached_property
    def const_types(self) -> list[_jax.ShapedArray]:
        return list(self.body.in_avals[: self.const_count])

    @cached_property
    def carry_types(self) -> list[_jax.ShapedArray]:
        return list(self.body.out_avals[: self.carry_count])

    @cached_property
    def x_types(self) -> list[_jax.ShapedArray]:
        return list(self.body.in_avals[self.const_count + self.carry_count :])

    @cached_property
    def y_types(self) -> list[_jax.ShapedArray]:
        return list(self.body.out_avals[self.carry_count :])

    @cached_property
    def xs_types(self) -> list[_jax.ShapedArray]:
        return [self.stack_type(x, a) for x, a in zip(self.x_types, self.x_axes, strict=True)]

    @cached_property
    def ys_types(self) -> list[_jax.ShapedArray]:
        return [self.stack_type(y, a) for y, a in zip(self.y_types, self.y_axes, strict=True)]

    @cached_property
    def x_axes(self) -> tuple[int, ...]:
        return tuple(x.axis for x in self.xs)

    @cached_property
    def y_axes(self) -> tuple[int, ...]:
        return tuple(y.axis for y in self.ys)

    @cached_property
    def const_lanes(self) -> tuple[int, ...]:
        return tuple(c.lanes for c in self.consts)

    @cached_property
    def xs_lanes(self) -> tuple[int, ...]:
        return tuple(x.lanes for x in self.xs)

    def stack_type(self, aval: _jax.ShapedArray, axis: int = 0) -> _jax.ShapedArray:
        assert self.length is not None
        return _jax.stack_type(aval, self.length, axis)

    @property
    def jaxprs(self) -> list[_jax.Jaxpr]:
        return [self.body] if self.cond is None else [self.body, self.cond]

    @cached_property
    def effects(self) -> Any:
        return frozenset().union(*(j.effects for j in self.jaxprs))

    @cached_property
    def axis_names(self) -> set:
        """The named axes along which steps communicate."""
        return set().union(*map(equations.axis_names, self.jaxprs))

    @cached_property
    def holds_custom_vjp(self) -> bool:
        """Whether a step calls a function that has a VJP and no JVP."""
        return equations.holds_custom_vjp(self.body)

    @cached_property
    def shows_within(self) -> bool:
        """Whether a loop in a step shows its progress."""
        return any(map(equations.shows, self.jaxprs))

    @property
    def shows(self) -> bool:
        """Whether the loop, or one in it, shows its progress."""
        return self.progress is not None or self.shows_within

    @property
    def shows_forward(self) -> bool:
        """Whether the loop shows the steps that it takes forward."""
        return self.progress is not None and self.progress.forward

    def unshown(self, backward: bool = True) -> Loop:
        """Return the loop, and those in it, without forward bars; if `backward`, with none."""
        how = None if backward or self.progress is None else self.progress.backward_only
        of_loops = lambda jaxpr: equations.unshown(jaxpr, backward)

        make = lambda: self.map_jaxprs(of_loops).replace(progress=how)
        return self.derived(("unshown", backward), make) if self.shows else self

    def without_debug_effects(self) -> Loop:
        """Return the loop without debug effects and forward bars, to run its steps again."""
        loop = self.unshown(backward=False)
        if not loop.effects:
            return loop
        return loop.derived("quiet", lambda: loop.map_jaxprs(equations.without_debug_effects))

    @cached_property
    def has_impure_callback(self) -> bool:
        """Whether a step reads values that may differ next time, so that it must not run again."""
        return any(map(equations.has_impure_callback, self.jaxprs))

    def check_repeats(self) -> None:
        """Raise if the steps must not run again."""
        if self.has_impure_callback:
            problem = "steps that run again for a derivative must return the same values again"
            got = "a jax.experimental.io_callback that returns values"
            advice = 'To store them for a gradient, pass `checkpoints="all"` and bound the steps. '
            advice += "If the callback is pure, call jax.pure_callback instead."
            raise NotImplementedError(errors.message(self.name, problem, got, advice))

    def map_jaxprs(self, change: Callable[[_jax.Jaxpr], _jax.Jaxpr]) -> Loop:
        """Return the loop with `change` applied to its two jaxprs."""
        cond = None if self.cond is None else change(self.cond)
        body = change(self.body)
        if cond is self.cond and body is self.body:
            return self
        return self.replace(cond=cond, body=body)

    @property
    def operand_types(self) -> list[_jax.ShapedArray]:
        return Operands(self.cond_types, self.const_types, self.carry_types, self.xs_types).flat

    @property
    def result_types(self) -> list[_jax.ShapedArray]:
        return [*self.carry_types, *self.ys_types]

    def input_types(self, active: Active) -> list[_jax.ShapedArray]:
        """Return the types of the active inputs' tangents."""
        types = self.operand_types[self.cond_const_count :]
        return [t.to_tangent_aval() for t in kept(types, active.inputs)]

    def output_types(self, active: Active) -> list[_jax.ShapedArray]:
        """Return the types of the active outputs' tangents."""
        return [t.to_tangent_aval() for t in kept(self.result_types, active.outputs)]


@dataclass(frozen=True)
class Rewritten:
    """A loop made from another loop, with maps between their operands and results."""

    loop: Loop
    map_operands: Callable[..., list]
    """A function from the other loop's operands, or one value for each, to those of this loop."""
    map_results: Callable[..., list]
    """A function from this loop's results, and the other's operands, to the other's results."""


def run_rewritten(
    bind: Callable[..., Sequence[Any]], passes: Sequence[Rewritten], operands: Sequence[Any]
) -> list:
    """Run the loop that the last pass returned, and return the results of the first loop."""
    given = []
    for done in passes:
        given.append(operands)
        operands = done.map_operands(operands)
    results = list(bind(*operands))
    for done, before in zip(reversed(passes), reversed(given), strict=True):
        results = done.map_results(results, before)
    return results
