"""A budget for the gradient of a program: its loops share it with the code between them.

Code between loops runs again in some ways (`straight_line.py`). In each, `one_price.py` chooses
among the plans of the loops. The fastest way that fits is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax

from loopkit import _jax
from loopkit._arguments import errors
from loopkit._arguments.no_gradient import without_gradient
from loopkit._engine.derivative.choices import choices_of, timeline_of, with_budget
from loopkit._engine.derivative.reversal import NotReversedError
from loopkit._engine.derivative.straight_line import divided
from loopkit._engine.derivative.timeline import Timeline, met_in
from loopkit._engine.leaves import spread
from loopkit._engine.loop import kept
from loopkit._engine.primitives import dual_p, while_p
from loopkit._jaxprs import equations
from loopkit._jaxprs.accelerators import planned_for
from loopkit._plans.budget import Bytes, Part
from loopkit._plans.costs import price_beyond_caches
from loopkit._plans.one_price import State, best_within, by_price, few
from loopkit._programs import shared

COMPILED = 5
"""How often a gradient is compiled to fit in a budget, until the plan is the smallest."""
HALVINGS = 4
"""How often a gradient is compiled for the fastest plan between one that fits and one that does
not."""
WORTH = 1.25
"""The least time of a plan that fits, relative to one that does not, with which that is tried."""
SMALLEST = 4
"""How many of the smallest plans are compiled then."""
FLATTEST = 0.25
"""The least bytes of the compiler's that a byte less of a plan is taken to save."""
TOO_HIGH = 8
"""How many times the compiler's figure a prediction may be. Up to this, a gradient is compiled
before its budget is refused."""
DIVISIONS = 12
"""For how many choices of the code that runs again the loops of a program are planned."""
WITH_PARTS = while_p, dual_p
"""The primitives of loops that take part. What the others save, or have saved, is laid out."""


class Way(NamedTuple):
    """A way to run a program: which of its code runs again. Its loops choose within it."""

    line: Timeline
    nanoseconds: float
    """The time of the code that runs again."""
    program: Callable[[], Any]


class Best(NamedTuple):
    """The way that is taken within a number of bytes, and the choices of the loops."""

    way: Way
    state: State
    fits: bool

    @property
    def nanoseconds(self) -> float:
        beyond = price_beyond_caches(self.state.bytes, planned_for()) * self.state.peak.values
        return self.way.nanoseconds + self.state.nanoseconds + beyond


def with_parts(jaxpr: _jax.Jaxpr, budget: Part, first: Sequence[Any] = ()) -> Any:
    """Return a program of which code runs again, and whose loops have parts of a budget.

    The parts are for the gradient in all inputs. Only loops without a number take part.

    `first` has the values of the first inputs. The compiler gets those that are known.
    """
    if budget.measured and (axes := _axes_around(jaxpr)):
        expected = "cannot be True under `jax.shard_map`, or where `fn` exchanges values along an "
        expected += "axis around it"
        got = f"a function of the axis {', '.join(map(repr, axes))}"
        advice = "Leave it out, or put `checkpointed` around what has that axis."
        raise errors.wrong_value("checkpointed", "measure", expected, got, advice)
    count = 0

    def with_number(eqn: _jax.Equation) -> Any:
        nonlocal count
        part = getattr(eqn.params.get("loop"), "checkpoints", None)
        if not isinstance(part, Part) or part.number != 0 or eqn.primitive not in WITH_PARTS:
            return eqn
        count += 1
        return with_budget(eqn, replace(part, number=count))

    numbered = equations.map_equations(jaxpr, with_number)
    ways = _Ways(numbered, budget, first)
    if not ways.first and not ways.others:  # it has no derivative
        return jaxpr
    best = ways.within(budget.count, budget.host)
    if budget.measured:
        return _measured(ways, best)
    if best.fits:
        return _settled(best.way.program(), best.state)
    if _may_fit(budget, best) and not _axes_around(jaxpr):
        return _smallest(ways, best)
    return _refused(_settled(best.way.program(), best.state), _refusal(budget, best))


def _may_fit(budget: Part, best: Best) -> bool:
    """Return whether the smallest way is predicted to need too much, but so little that the
    compiler may need less."""
    return budget.host is None and budget.count < best.state.bytes <= TOO_HIGH * budget.count


def _axes_around(jaxpr: _jax.Jaxpr) -> list[str]:
    """Return the axes without which a program cannot be compiled: it is a part of what has them."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return sorted({*_jax.free_axes(jaxpr.effects), *manual})


class _Ways:
    """The ways to run a program, from the fastest to the smallest. Most are made if asked for."""

    def __init__(self, numbered: _jax.Jaxpr, budget: Part, first: Sequence[Any]) -> None:
        self.budget, self.choices = budget, {}
        self._known = [None if _jax.is_tracer(v) else v for v in first]
        self._numbered, self._divides = numbered, True
        self.first: list[Way] = []
        eqns = _jax.open_jaxpr(equations.inlined(numbered)).eqns
        refers = _jax.has_references(numbered)
        if refers or any(True for eqn in eqns for _ in met_in(eqn, primal=True)):
            line, self.choices = timeline_of(numbered, budget)
            self.first.append(Way(line, 0.0, lambda: numbered))
            self._divides = line.of_gradient and not refers

    @cached_property
    def others(self) -> list[Way]:
        """The ways in which some code runs again."""
        if not self._divides:
            return []
        try:
            found = divided(self._numbered)
        except NotReversedError:  # of a part that has one only with the rest
            return []
        more = dict(self.choices)
        for key, met in found.loops.items():
            if key not in more:
                more[key] = choices_of(met.loop, met.active, self.budget)
        self.choices = more
        some = few(found.divisions, DIVISIONS) if found.loops else found.divisions
        make = lambda d: Timeline(d.moments, found.loops)
        return [Way(make(d), d.nanoseconds, partial(found.program, d)) for d in some]

    def compiled(self, best: Best) -> tuple[Any, int]:
        """Return the program in a way, and the compiler's figure for its gradient."""
        made = _settled(best.way.program(), best.state)
        try:
            return made, temporary_bytes(made, self._known)
        except Exception as error:
            raise NotCompiledError(
                "loopkit.checkpointed: `measure` can be True only if the gradient of `fn` in all "
                "its arguments compiles here. Leave it out. "
                f"Got: {type(error).__name__}: {error}"
            ) from error

    def within(self, count: int, host: int | None) -> Best:
        """Return the fastest way within so many bytes; if there is none, the smallest."""
        every = [self._in(way, count, host) for way in self.first]
        if any(b.fits and b.state.nanoseconds <= self._fastest for b in every):
            return every[0]
        every += [self._in(way, count, host) for way in self.others]
        if fit := [b for b in every if b.fits]:
            return min(fit, key=lambda b: b.nanoseconds)
        size = lambda b: (0 if host is None else b.state.host, b.state.bytes)
        return min(every, key=size)

    def between(self, larger: Best, smaller: Best) -> list[Best]:
        """Return the states between two, from the fastest to the smallest, in the way of one."""
        way = smaller.way
        found = [Best(way, s, True) for s in by_price(way.line.moments, self.choices)]
        return [b for b in found if larger.nanoseconds < b.nanoseconds < smaller.nanoseconds]

    def smallest(self) -> list[Best]:
        """Return the ways that need the fewest bytes."""
        found = [self._in(way, 0, None) for way in (*self.first, *self.others)]
        return sorted(found, key=lambda best: best.state.bytes)[:SMALLEST]

    @property
    def _fastest(self) -> float:
        return sum(min(c.nanoseconds for c in some) for some in self.choices.values())

    def _in(self, way: Way, count: int, host: int | None) -> Best:
        found, least = best_within(count, host, way.line.moments, self.choices)
        return Best(way, found or least, found is not None)


def _measured(ways: _Ways, best: Best) -> Any:
    """Return the program for which the compiler needs no more than the budget.

    If it needs more, loopkit plans with fewer bytes: in proportion, then by what the last two plans
    say of the others, and last with as few as can be.
    """
    limit = ways.budget.count
    made, needed = ways.compiled(best)
    if needed <= limit:
        return _with_room(ways, best, made, needed)
    fewer = best.state.bytes * limit // needed
    for tries in range(2, COMPILED + 1):
        if not best.fits:
            break
        larger, more = best, needed
        best = ways.within(0 if tries == COMPILED else fewer, None)
        made, needed = ways.compiled(best)
        if needed <= limit:
            return _fastest_between(ways, larger, best, made)
        saved = (more - needed) / max(1, larger.state.bytes - best.state.bytes)
        fewer = best.state.bytes - int(1.1 * (needed - limit) / min(max(saved, FLATTEST), 1))
    for other in ways.smallest():
        if other.way is not best.way:
            again, fewer = ways.compiled(other)
            if fewer <= limit:
                return again
            made, needed = min((made, needed), (again, fewer), key=lambda pair: pair[1])
    return _refused(made, _refusal_as_compiled(limit, needed, best))


def _with_room(ways: _Ways, best: Best, made: Any, needed: int) -> Any:
    """Return a program that is faster by as much as was predicted too high, if it fits."""
    limit = ways.budget.count
    more = ways.within(best.state.bytes * limit // max(1, needed), None)
    if more.nanoseconds >= best.nanoseconds:
        return made
    faster, larger = ways.compiled(more)
    return faster if larger <= limit else _fastest_between(ways, more, best, made)


def _fastest_between(ways: _Ways, larger: Best, best: Best, made: Any) -> Any:
    """Return the fastest program that fits between one that does not and one that does, `made`."""
    if best.nanoseconds < WORTH * larger.nanoseconds:
        return made
    between = ways.between(larger, best)
    for _ in range(HALVINGS):
        if not between:
            break
        half = len(between) // 2
        again, needed = ways.compiled(between[half])
        if needed <= ways.budget.count:
            made, between = again, between[:half]
        else:
            between = between[half + 1 :]
    return made


def _smallest(ways: _Ways, best: Best) -> Any:
    """Return the program in its smallest way, or a faster one, if the compiler needs less than was
    predicted."""
    budget = ways.budget
    try:
        made, needed = ways.compiled(best)
    except NotCompiledError:
        made, needed = _settled(best.way.program(), best.state), best.state.bytes
    if needed <= budget.count:
        return _with_room(ways, best, made, needed)
    if needed < best.state.bytes:
        return _refused(made, _refusal_as_compiled(budget.count, needed, best))
    return _refused(made, _refusal(budget, best))


class NotCompiledError(ValueError):
    """The gradient in all inputs does not compile: there is none, or no device for it."""


def _refused(jaxpr: _jax.Jaxpr, reason: str) -> Any:
    """Return the program, whose gradient raises an error."""
    run = lambda *values: without_gradient(_jax.call_jaxpr(jaxpr)(*values), reason)
    return _jax.trace_closed(run, jaxpr.in_avals, "refused")


def temporary_bytes(jaxpr: _jax.Jaxpr, first: Sequence[Any] = ()) -> int:
    """Return the compiler's figure for the temporary memory of the gradient in all inputs.

    `first` has values for the first inputs, which are constants then, or None.
    """
    types = list(map(_jax.on_devices, jaxpr.in_avals))
    known = [*first, *[None] * (len(types) - len(first))]
    free = [v is None for v in known]
    outs = list(map(_jax.is_differentiable, jaxpr.out_avals))
    ins = list(map(_jax.is_differentiable, kept(jaxpr.in_avals, free)))

    def gradient(*values: jax.Array) -> Any:
        def of(*moving: jax.Array) -> list:
            given = spread(spread(moving, ins, values), free, known)
            return kept(_jax.call_jaxpr(jaxpr)(*given), outs)

        results, pullback = jax.vjp(of, *kept(values, ins))
        return pullback([jax.numpy.ones_like(v) for v in results])

    figures: Any = jax.jit(gradient).lower(*kept(types, free)).compile().memory_analysis()
    return figures.temp_size_in_bytes


def _settled(numbered: _jax.Jaxpr, state: State) -> Any:
    """Return the program whose loops have the parts of a state."""
    counts = {count.number: count for count in state.counts}

    def with_its_part(eqn: _jax.Equation) -> Any:
        part = getattr(eqn.params.get("loop"), "checkpoints", None)
        if not isinstance(part, Part) or not part.number:
            return eqn
        _, device, host = counts.get(part.number, (part.number, part.count, part.host))
        settled = replace(part, count=device, host=host, number=None)
        return with_budget(eqn, settled, shared)

    return equations.map_equations(numbered, with_its_part)


def _refusal(budget: Bytes, best: Best) -> str:
    """Return the error for a budget in which no gradient of the program fits."""
    least = best.state
    where, needed, got, advice = "", least.bytes, budget.count, f"`memory={least.bytes}` or more"
    if budget.host is not None:
        where, advice = " on the device", f"{needed} or more for 'device'"
        if least.host > budget.host:
            where, needed, got = " on the host", least.host, budget.host
            advice = f"{needed} or more for 'host'"
    most, count = _holds_most(best)
    return (
        f"loopkit.checkpointed: `memory` must be at least {needed} bytes{where}. Most of it, "
        f"{count} bytes, is for {most}. Pass {advice}. Got: {got} bytes."
    )


def _refusal_as_compiled(limit: int, needed: int, best: Best) -> str:
    """Return the error for a budget in which no gradient fits once it is compiled."""
    return (
        f"loopkit.checkpointed: `memory` must be at least {needed} bytes, which the smallest plan "
        f"needs once it is compiled. Most of it is for {_holds_most(best)[0]}. "
        f"Pass `memory={needed}` or more. Got: {limit} bytes."
    )


def _holds_most(best: Best) -> tuple[str, int]:
    """Return what holds most of the memory at the peak, and its bytes."""
    return max(best.way.line.holders(best.state), key=lambda pair: pair[1])
