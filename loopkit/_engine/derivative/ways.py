"""The ways to run a program within a budget: which code runs again, and what the loops save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from operator import and_
from typing import Any, NamedTuple

import jax

from loopkit import _jax
from loopkit._engine.derivative.choices import choices_of, settled, timeline_of
from loopkit._engine.derivative.divided import with_slices_in_place
from loopkit._engine.derivative.reversal import NotReversedError
from loopkit._engine.derivative.straight_line import divided
from loopkit._engine.derivative.timeline import Timeline, met_in
from loopkit._engine.leaves import spread
from loopkit._engine.loop import kept
from loopkit._jaxprs import equations
from loopkit._jaxprs.accelerators import planned_for
from loopkit._plans.budget import Part
from loopkit._plans.costs import price_beyond_caches
from loopkit._plans.one_price import Chain, State, few, host_prices
from loopkit._programs import shared

MARGIN = 1.1
"""The factor by which the compiler may need more bytes than predicted."""
SPARED = 0.25
"""The largest part of a budget beyond the fewest bytes to leave to the compiler."""
DIVISIONS = 12
"""The most divisions (choices of which code runs again) for which loopkit plans the loops."""


class Way(NamedTuple):
    """A way to run a program: which of its code runs again. The loops' plans are chosen for it."""

    line: Timeline
    nanoseconds: float
    """The time of the code that runs again."""
    program: Callable[[], Any]


class Best(NamedTuple):
    """The best way within a number of bytes, and the choices of the loops."""

    way: Way
    state: State
    fits: bool

    @property
    def nanoseconds(self) -> float:
        beyond = price_beyond_caches(self.state.bytes, planned_for()) * self.state.peak.values
        return self.way.nanoseconds + self.state.nanoseconds + beyond


class Ways:
    """The ways to run a program, from the fastest to the smallest. Most are made on demand."""

    def __init__(
        self, numbered: _jax.Jaxpr, budget: Part, first: Sequence[Any], asked: Sequence[bool]
    ) -> None:
        self.budget, self.choices = budget, {}
        self._chains: dict[tuple, Chain] = {}
        self._known = [None if _jax.is_tracer(v) else v for v in first]
        self._moves = [v is None for v in self._known]
        self._moves += [True] * (len(numbered.in_avals) - len(first))
        self._numbered, self._divides, self._asked = numbered, True, asked
        self.first: list[Way] = []
        eqns = _jax.open_jaxpr(equations.inlined(numbered)).eqns
        refers = _jax.has_references(numbered)
        if refers or any(True for eqn in eqns for _ in met_in(eqn, primal=True)):
            line, self.choices = timeline_of(numbered, self._moves, budget)
            program = (lambda: numbered) if refers else partial(with_slices_in_place, numbered)
            self.first.append(Way(line, 0.0, program))
            self._divides = line.of_gradient and not refers

    @cached_property
    def others(self) -> list[Way]:
        """The divisions of the program, in most of which some code runs again."""
        if not self._divides:
            return []
        try:
            found = divided(self._numbered, self._moves)
        except NotReversedError:  # a part may have a derivative only together with the rest
            return []
        more = dict(self.choices)
        for key, met in found.loops.items():
            if key not in more:
                more[key] = choices_of(met.loop, met.active, self.budget)
        if more.keys() != self.choices.keys():
            self.choices = more
            self._chains.clear()
        some = few(found.divisions, DIVISIONS) if found.loops else found.divisions
        make = lambda d: Timeline(d.moments, found.loops)
        return [Way(make(d), d.nanoseconds, partial(found.program, d)) for d in some]

    def settled(self, best: Best) -> Any:
        """Return the program in its best way."""
        return settled(best.way.program(), best.state, shared)

    def compiled(self, best: Best) -> tuple[Any, int]:
        """Return the program in its best way, and the memory that XLA reports for its gradient."""
        return self._compiled(self.settled(best))

    def untouched(self) -> tuple[Any, int] | None:
        """Return the program as it is, and its memory; None if there are plans for loops in it."""
        return None if self.first else self._compiled(self._numbered)

    def _compiled(self, made: Any) -> tuple[Any, int]:
        try:
            return made, temporary_bytes(made, self._known, self._asked)
        except Exception as error:
            where = (
                "all its arguments" if all(self._asked) else "the arguments for which it is asked"
            )
            raise NotCompiledError(
                "loopkit.checkpointed: `measure` can be True only if the gradient of `fn` in "
                f"{where} compiles here. Leave it out. "
                f"Got: {type(error).__name__}: {error}"
            ) from error

    def within(self, count: int, host: int | None) -> Best:
        """Return the fastest way within these bytes, or the smallest way if none fits."""
        every = [self._in(way, count, host) for way in self.first]
        if any(b.fits and self._is_fastest(b) for b in every):
            return every[0]
        every += [self._in(way, count, host) for way in self.others]
        if fit := [b for b in every if b.fits]:
            return min(fit, key=lambda b: b.nanoseconds)
        size = lambda b: (0 if host is None else b.state.host, b.state.bytes)
        return min(every, key=size)

    def with_margin(self) -> Best:
        """Return the fastest way that leaves the compiler a margin.

        The margin is smaller near the fewest bytes, where each byte saves much time.
        """
        count, fewer = self.budget.count, int(self.budget.count / MARGIN)
        if self.budget.host is not None:
            return self.within(count, self.budget.host)
        best = self.within(fewer, None)
        if best.fits and self._is_fastest(best):
            return best
        spared = SPARED * (count - self.smallest()[0].state.bytes)
        return self.within(max(fewer, count - max(0, int(spared))), None)

    def between(self, larger: Best, smaller: Best) -> list[Best]:
        """Return the states between two in the way of the smaller one, the fastest first."""
        way = smaller.way
        found = [Best(way, s, True) for s in self._chain(way).states]
        return [b for b in found if larger.nanoseconds < b.nanoseconds < smaller.nanoseconds]

    def smallest(self) -> list[Best]:
        """Return the smallest state of each way, from the fewest bytes to the most."""
        found = [self._in(way, 0, None) for way in (*self.first, *self.others)]
        return sorted(found, key=lambda best: best.state.bytes)

    def _is_fastest(self, best: Best) -> bool:
        """Return whether no code runs again, and no loop can be faster."""
        fastest = sum(min(c.nanoseconds for c in some) for some in self.choices.values())
        return best.way in self.first and best.state.nanoseconds <= fastest

    def _in(self, way: Way, count: int, host: int | None) -> Best:
        chains = [self._chain(way, price) for price in host_prices(host)]
        if fit := [s for chain in chains if (s := chain.within(count, host))]:
            return Best(way, min(fit, key=lambda s: s.nanoseconds), True)
        least = [chain.least(host is not None) for chain in chains]
        return Best(way, min(least, key=lambda s: (0 if host is None else s.host, s.bytes)), False)

    def _chain(self, way: Way, host_price: float = 0.0) -> Chain:
        """Return the states of a way. A byte on the host has `host_price` times the price here."""
        key = id(way), host_price
        if key not in self._chains:
            self._chains[key] = Chain(way.line.moments, self.choices, host_price)
        return self._chains[key]


class NotCompiledError(ValueError):
    """The gradient in all inputs does not compile: it does not exist, or there is no device."""


def temporary_bytes(
    jaxpr: _jax.Jaxpr, first: Sequence[Any] = (), asked: Sequence[bool] | None = None
) -> int:
    """Return the temporary memory that XLA reports for the gradient in all inputs, or those asked.

    Fewer results may take more temporary memory, because values may lie where a result will be.

    For each of the first inputs, `first` has a value that makes it a constant, or None.
    """
    types = list(map(_jax.on_devices, jaxpr.in_avals))
    known = [*first, *[None] * (len(types) - len(first))]
    free = [v is None for v in known]
    outs = list(map(_jax.is_differentiable, jaxpr.out_avals))
    ins = list(map(_jax.is_differentiable, kept(jaxpr.in_avals, free)))
    ins = list(map(and_, ins, kept(asked or [True] * len(types), free)))

    def gradient(*values: jax.Array) -> Any:
        def of(*moving: jax.Array) -> list:
            given = spread(spread(moving, ins, values), free, known)
            return kept(_jax.call_jaxpr(jaxpr)(*given), outs)

        results, pullback = jax.vjp(of, *kept(values, ins))
        return pullback([jax.numpy.ones_like(v) for v in results])

    figures: Any = jax.jit(gradient).lower(*kept(types, free)).compile().memory_analysis()
    return figures.temp_size_in_bytes
