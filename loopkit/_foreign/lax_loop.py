"""A loop of lax, its place in the program, and the loopkit loop that replaces it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypedDict

import jax
import jax.numpy as jnp

from loopkit import _jax
from loopkit._arguments import errors
from loopkit._arguments.error_on_use import without_gradient
from loopkit._arguments.errors import size
from loopkit._engine.facts.bounds import StepBound, bound_of, limits_of
from loopkit._engine.loop import CarryLeaf, parts
from loopkit._jaxprs import equations
from loopkit._jaxprs.kernels import lax_takes_longer
from loopkit._plans.budget import SELDOM_REACHED, Budget, stores_every_step
from loopkit._programs import shared
from loopkit._progress import progress as shown
from loopkit._tracing.axes import Inputs
from loopkit._tracing.functions import Functions
from loopkit._tracing.spec import LoopOptions, LoopSpec, Names
from loopkit._tracing.trace import as_loop, trace
from loopkit._types import Checkpoints, Debug, Lanes, Memory, Progress


class LoopSite(NamedTuple):
    """A loop of lax, as `only` gets it."""

    kind: Literal["scan", "while_loop"]
    """The kind of the loop. A fori_loop is a scan if lax knows its bounds."""
    name_stack: str
    """The `jax.named_scope`s around the loop, up to the innermost `jit`, separated by slashes."""
    source: str
    """The call that made the loop, as `file:line (function)`, outside JAX itself."""
    length: int | None
    """The number of steps, if it is known; else None."""
    carry_bytes: int
    """The bytes of the carry."""
    depth: int = 0
    """The number of loops of lax around this one."""
    outer: LoopSite | None = None
    """The innermost loop around this one, as it is while its steps are traced. A while loop has no
    `length` yet, and its `carry_bytes` count all its operands."""


def site_of(
    kind: Literal["scan", "while_loop"],
    length: int | None,
    carry: Iterable[Any],
    outer: LoopSite | None,
) -> LoopSite:
    """Describe the loop that is being called, from the types of its carry."""
    depth, count = 0 if outer is None else outer.depth + 1, _jax.byte_count(*carry)
    return LoopSite(kind, _jax.name_stack(), _jax.source(), length, count, depth, outer)


class LeftLoop(NamedTuple):
    """A loop of lax that is not replaced."""

    site: LoopSite
    why: str
    """The reason, such as "`only` leaves it"."""


@dataclass
class Asked:
    """The answers of an `only` so far."""

    chose: bool = False
    """Whether it has chosen a loop."""
    left: dict[LoopSite, None] = field(default_factory=dict)
    """The loops that it has left, in order, until it chooses one."""

    def answer(self, site: LoopSite, chosen: bool) -> bool:
        if chosen:
            self.chose = True
            self.left.clear()
        elif not self.chose:
            self.left[site] = None
        return chosen

    def check(self, function: str) -> None:
        """Raise if there are loops, and `only` has chosen none of them."""
        if not self.left:
            return
        loops = [
            f"the {s.kind} at {s.source} of {size(s.carry_bytes)} in the carry" for s in self.left
        ]
        advice = "Change `only`, or pass `strict=False` if there may be no such loop."
        expected, got = "must choose a loop of lax to replace", f"False for {'; '.join(loops)}"
        raise errors.wrong_value(function, "only", expected, got, advice)


_asked: weakref.WeakKeyDictionary[Any, Asked] = weakref.WeakKeyDictionary()
"""The answers of each `only`. JAX does not trace a function again for the very same `only`, which
is then not asked again."""


def asked(only: Callable[[LoopSite], Any] | None) -> Asked:
    """Return the record of what `only` has answered."""
    try:
        return Asked() if only is None else _asked.setdefault(only, Asked())
    except TypeError:  # it does not support weak references
        return Asked()


@dataclass(eq=False)
class Notes:
    """The loops that were left to lax while these notes were taken, each once."""

    left: dict[LeftLoop, None] = field(default_factory=dict)


def left_within(trace: Callable[[], Any]) -> tuple[LeftLoop, ...]:
    """Return the loops that `trace()` leaves to lax. JAX retraces all functions in it."""
    notes = Notes()
    with _jax.noting(notes):
        trace()
    return tuple(notes.left)


class ReplaceKw(TypedDict, total=False):
    """The settings with which to replace loops of lax, as keywords."""

    max_steps: int | None
    checkpoints: Checkpoints
    memory: Memory
    only: Callable[[LoopSite], Any] | None
    strict: bool | None
    lanes: Lanes
    progress: Progress
    debug: Debug


class CheckpointedKw(ReplaceKw, total=False):
    """The settings of `checkpointed`, as keywords."""

    measure: bool


@dataclass(frozen=True)
class Settings:
    """The settings with which to replace loops of lax, checked."""

    function: str
    """The function that the user called, for errors."""
    max_steps: int | None
    budget: Budget
    only: Callable[[LoopSite], Any] | None = field(compare=False)
    only_id: int
    """The id of `only`: two settings are equal in jit's cache keys only if they have the same
    `only`."""
    asked: Asked = field(compare=False)
    """The answers of `only` so far."""
    strict: bool | None
    lanes: Lanes
    progress: shown.ProgressSettings | None
    finite: bool
    """Whether the carries of loops have to stay finite."""
    outer: LoopSite | None = None
    """The loop of lax whose steps are being traced, if a setting depends on it."""

    @property
    def asks_where(self) -> bool:
        """Whether a setting depends on the loops around a loop, or loops left to lax are noted."""
        flat = self.lanes == "flatten"
        return self.only is not None or flat or _jax.noting.value is not None

    @property
    def lanes_here(self) -> Lanes:
        """`lanes` for a loop here. The outermost loop is flattened with the loops inside it."""
        return None if self.outer is not None and self.lanes == "flatten" else self.lanes

    def why_left(self, loop: LaxLoop) -> str:
        """Return why a loop is left to lax; empty if it is replaced."""
        if self.only is not None:
            site = loop.site(self.outer)
            if not self.asked.answer(site, bool(self.only(site))):
                return "`only` leaves it"
        as_lax = loop.kind == "scan" and self.budget == "all"
        as_lax = as_lax and not self.finite and self.progress is None
        as_lax = as_lax and not lax_takes_longer(loop.body, len(loop.consts), loop.length)
        if as_lax and not equations.lax_loses_rules(loop.body):
            return "lax's own scan stores every step already"
        if loop.obstacle and self.strict:
            expected = "can be True only where loopkit can replace every loop"
            got = f"the {loop.kind} at {_jax.source()}: {loop.obstacle}"
            advice = "Leave that loop out with `only`, or pass `strict=False`."
            raise errors.wrong_value(self.function, "strict", expected, got, advice)
        return loop.obstacle

    def check_chosen(self) -> None:
        """Raise if `only` has left every loop so far."""
        if self.strict is not False:
            self.asked.check(self.function)


class LaxLoop(NamedTuple):
    """A loop of lax, with its operands sorted by role."""

    kind: Literal["scan", "while_loop"]
    cond: Any
    """The predicate; None for a scan."""
    cond_consts: list
    body: Any
    consts: list
    init: list
    xs: list
    bound: StepBound | None
    params: dict[str, Any]

    @property
    def length(self) -> int | None:
        """The number of steps, if it is known."""
        return self.bound.steps if self.bound is not None and self.bound.exact else None

    def site(self, outer: LoopSite | None) -> LoopSite:
        return site_of(self.kind, self.length, map(jax.typeof, self.init), outer)

    @property
    def obstacle(self) -> str:
        """Why loopkit cannot run the loop; empty if it can."""
        if _jax.is_symbolic(self.length):
            return "its number of steps is symbolic"
        types = [jax.typeof(v) for v in (*self.cond_consts, *self.consts, *self.init, *self.xs)]
        if not all(type(t) is _jax.ShapedArray for t in types):
            return "it uses references to memory, or other values that are not arrays"
        jaxprs = [self.body] if self.cond is None else [self.cond, self.body]
        if any(_jax.check_effects(j.effects) for j in jaxprs):
            return "its steps have effects that loops of loopkit lack"
        if any(map(equations.has_impure_callback, jaxprs)):
            return "its steps get values from the host"
        if any(j.consts or _makes_references(j) for j in jaxprs):
            return "its steps make references to memory"
        return ""

    def run(self, settings: Settings) -> list:
        """Run the loop with loopkit, and return its results."""
        cond, cond_consts, length = self.cond, self.cond_consts, self.length
        budget = settings.budget
        if self.kind == "while_loop":
            planned = self.bound is not None and self.bound.is_planned_for(budget)
            own = self.bound.steps if self.bound is not None and planned else None
            bounds = [b for b in (own, settings.max_steps) if b is not None]
            if length is not None:
                cond, cond_consts = None, []
            elif settings.max_steps is None and budget is None:
                budget = SELDOM_REACHED
            length = min(bounds) if bounds else None
        _, types, _ = parts(self.body.in_avals, len(self.consts), len(self.init))
        steps, carry = length or 1, [CarryLeaf()] * len(types)
        fields = {
            "length": length,
            "reverse": self.params.get("reverse", False),
            "checkpoints": budget,
            "unroll": min(self.params.get("unroll", 1) or steps, steps),  # 0: all
            "name": self.kind,
            "replaced_by": settings.function,
            "lane_policy": settings.lanes_here,
            "progress": settings.progress and replace(settings.progress, name=self.kind),
        }
        init = list(map(_jax.as_array, self.init))
        if settings.finite:
            results = self._watched(cond, cond_consts, init, fields)
        else:
            of = Functions(cond, cond_consts, self.body, self.consts)
            final, ys = as_loop(of, carry, types, fields).run(init, self.xs)
            results = [*final, *ys]
        if length is not None or not stores_every_step(budget):
            return results
        # Nothing may ask for its gradient: then it needs no bound.
        place = f"in the {self.kind} at {_jax.source()}, which `only` can leave out: `checkpoints`"
        problem = f'{place} can be "all" or a policy only if the number of steps is bounded'
        reason = errors.message(settings.function, problem, "no bound", "Pass `max_steps`.")
        return without_gradient(results, reason)

    def _watched(
        self, cond: _jax.Jaxpr | None, cond_consts: list, init: list, fields: dict[str, Any]
    ) -> list:
        """Run the loop with steps that have to stay finite."""

        def step(carry: list, x: list) -> tuple[list, list, Any]:
            outs = _jax.call_jaxpr(self.body)(*self.consts, *carry, *(x or ()))
            new, y = parts(outs, len(carry))
            return new, y, asks(new)  # once for each step, so that it prints once

        def asks(carry: list) -> Any:
            return None if cond is None else _jax.call_jaxpr(cond)(*cond_consts, *carry)[0]

        function, takes = fields["replaced_by"], "carry, x" if self.kind == "scan" else "carry"
        names = Names(function, self.kind, "carry", self.kind, takes, inputs="x")
        length, axes = fields["length"], (0,) * len(self.xs)
        inputs = Inputs(jax.tree.structure(self.xs), self.xs, axes, length or 0)
        functions = step, None if cond is None else asks
        spec = LoopSpec.of(names, functions, init, inputs, length, LoopOptions(), made=True)
        own = {k: fields[k] for k in ("reverse", "progress")}
        own |= {"budget": fields["checkpoints"], "lanes": fields["lane_policy"], "unroll": 1}
        spec = spec._replace(finite=("", _jax.source()), functions=(), **own)
        traced, leaves, tree = trace(spec, spec.hidden(go=asks(init), steps=jnp.int32(0)))
        changes = {k: fields[k] for k in ("name", "replaced_by")}
        traced = replace(traced, loop=shared(traced.loop.replace(**changes)))
        final, ys = traced.run(leaves, self.xs)
        return [*tree.unflatten(final)[0], *ys]


def _makes_references(jaxpr: _jax.Jaxpr) -> bool:
    """Return whether a step makes references to memory, which JAX removes from its own loops."""
    found = (v.aval for eqn in equations.all_equations(jaxpr) for v in eqn.outvars)
    return any(hasattr(aval, "inner_aval") for aval in found)


def scan(operands: Sequence[Any], params: dict[str, Any]) -> LaxLoop:
    consts, init, xs = parts(operands, *_jax.scan_counts(params))
    bound = StepBound(params["length"], exact=True)
    return LaxLoop("scan", None, [], params["jaxpr"], consts, init, xs, bound, params)


def while_loop(operands: Sequence[Any], params: dict[str, Any]) -> LaxLoop:
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    counts = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, consts, init = parts(operands, *counts)
    limits = limits_of(cond, len(cond_consts), body, len(consts))
    bound = bound_of(limits, [*cond_consts, *init])
    return LaxLoop("while_loop", cond, cond_consts, body, consts, init, [], bound, params)
