"""Choose which values of a step to store for the backward pass, and which equations to run again.

The residuals of a step follow from one another: 1 - y**2 from y, four stages of a Runge-Kutta step
from the state before it, softmax from the scores. The backward pass runs again what the loop did
not store. Cheap, elementwise equations cost nothing there: they are fused into kernels that read
their operands anyway. Any other equation costs its predicted time. At a given price of a stored
byte, the best choice is a minimum cut of the graph of the step. From one price to the next, the
choices are nested, and their costs are convex. The list of choices is the frontier of the step. It
begins with the fewest bytes from which the residuals follow by cheap equations alone. A budget may
lie between two choices that are far apart. For such budgets there are further choices, which are
the best at no price.

Chen et al. 2016 describe the trade; the cut is that of a maximum flow (`max_flow.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

from loopkit import _jax
from loopkit._jaxprs import equations, max_flow
from loopkit._jaxprs.accelerators import Accelerator
from loopkit._jaxprs.cost import equation_nanoseconds, is_cheap, is_repeatable
from loopkit._jaxprs.max_flow import SOURCE, TARGET, Edge

EACH = 32
"""The cost of an array beyond its bytes, in bytes."""
LARGEST_GRAPH = 4000
"""The most equations of a step for which a cut is computed. Longer steps store their residuals."""
RESOLUTION = 64
"""A frontier leaves out points that are nearer than 1 / RESOLUTION of its first point's bytes."""
FAR = 0.8
"""Two points are far apart if the second has at most this fraction of the bytes of the first."""
LONGEST_SEARCH = 1 << 14
"""The most equations to visit in a search between two points."""
TRIFLE = 1e-9
"""The fraction by which the price of a choice is less than that of the next one."""
PICOSECONDS = 1000
"""The picoseconds in a nanosecond. Times are whole picoseconds, so that a cut is exact."""


class Point(NamedTuple):
    """A choice of what to store of a step: the best for a range of prices."""

    price: float
    """The price of a byte, in nanoseconds, from which this choice is the best."""
    nanoseconds: float
    """The time to run the rest again, not counting cheap equations."""
    stored: tuple[_jax.Var, ...]


@dataclass(frozen=True)
class Cut:
    """A step divided into what is computed once, what each step stores, and what runs again."""

    hoisted: list
    """Variables that depend on constants alone."""
    stored: list
    """Variables to store of each step."""
    given: set
    """The constants and the slices from which the residuals are made."""
    remake: Callable[[dict], list]
    """A function from a dict of constants, slices, hoisted and stored variables to residuals."""
    uncut: int
    """The bytes of all residuals, which jax.lax.scan stores of a step."""
    again: list
    """Equations that run again."""
    offloaded: list[bool]
    """For each stored variable, whether a policy puts it into the host's memory."""


@dataclass(frozen=True, eq=False)
class Residuals:
    """The residuals of a step: its outputs from `results` on.

    The inputs are `constants` constants, then the carry, and from index `slices` on slices of xs.
    A carry leaf that is `free` costs nothing to store. Equations whose ids are in `again` run
    again, whatever they cost, unless they depend on constants alone.
    """

    jaxpr: _jax.Jaxpr
    results: int
    constants: int
    slices: int
    free: Sequence[bool]
    again: Container[int] = ()
    policy: Callable[..., Any] | None = None
    """A policy of `jax.checkpoint`. With one, only what it saves is stored."""
    saves_all: bool = False
    """Whether to store all that the policy saves and that a residual depends on."""
    device: Accelerator | None = None
    """The accelerator that the times of equations are for; None for a CPU."""
    only: Set[_jax.Var] | None = None
    """The variables that may be stored, if not all may."""

    @property
    def step(self) -> _jax.OpenJaxpr:
        return _jax.open_jaxpr(self.jaxpr)

    @cached_property
    def given(self) -> set:
        """Constants, slices and values that follow from constants: the backward pass has these."""
        known = equations.following_from(self.step, self.step.invars[: self.constants])
        return known.union(self.step.invars[self.slices :])

    @property
    def _carry(self) -> list:
        return self.step.invars[self.constants : self.slices]

    @cached_property
    def _costless(self) -> list:
        return [v for v, is_free in zip(self._carry, self.free, strict=True) if is_free]

    @cached_property
    def wanted(self) -> list:
        """The residuals that have to be stored or made."""
        found = dict.fromkeys(_jax.variables(self.step.outvars[self.results :]))
        return [v for v in found if v not in self.given]

    @cached_property
    def times(self) -> dict[int, float]:
        """Picoseconds to run each equation again, by its id; infinite if it must not run again."""
        return {id(eqn): self._time(eqn) for eqn in self.step.eqns}

    def _time(self, eqn: _jax.Equation) -> float:
        if not is_repeatable(eqn) or (self.saves_all and self._may_store(eqn)):
            return inf
        if is_cheap(eqn) or id(eqn) in self.again:
            return 0
        return max(1, round(PICOSECONDS * equation_nanoseconds(eqn, self.device)))

    def _may_store(self, eqn: _jax.Equation) -> bool:
        """Return whether the results of an equation may be stored."""
        if id(eqn) in self.again:
            return False
        if self.policy is None or not is_repeatable(eqn):
            return True
        return _jax.may_save(self.policy, eqn)

    @cached_property
    def graph(self) -> tuple[list[Edge], dict[int, _jax.Var]]:
        """The network of the step, and the variable that each node stands for.

        An equation is on the target's side if it runs again. A variable is on that side if the
        backward pass has its value. If the edge from the equation to its variable is cut, the
        variable is stored.
        """
        places = {v: n for n, v in enumerate(self._needed(), TARGET + 1)}
        edges = [Edge(places[v], TARGET, inf) for v in self.wanted]
        for v in self._carry:
            if v in places:
                edges.append(Edge(SOURCE, places[v], 0, 0 if v in self._costless else _size(v)))
        for eqn in self.step.eqns:
            made = [v for v in eqn.outvars if v in places]
            if not made:
                continue
            number, storable = len(places) + len(edges) + TARGET + 1, self._may_store(eqn)
            for v in made:
                free = storable and (self.only is None or v in self.only)
                edges.append(Edge(number, places[v], 0 if free else inf, _size(v) if free else 0))
            edges.append(Edge(SOURCE, number, self.times[id(eqn)]))
            edges += [Edge(places[u], number, inf) for u in self._operands(eqn) if u in places]
        return edges, {n: v for v, n in places.items()}

    def _operands(self, eqn: _jax.Equation) -> list:
        return [u for u in equations.variables(eqn) if u not in self.given]

    def _needed(self) -> dict:
        """Return the variables from which the residuals can be made, in the order of the step."""
        needed = set(self.wanted)
        for eqn in reversed(self.step.eqns):
            if not needed.isdisjoint(eqn.outvars) and self.times[id(eqn)] < inf:
                needed.update(self._operands(eqn))
        made = (v for eqn in self.step.eqns for v in eqn.outvars)
        return dict.fromkeys(v for v in (*self.step.invars, *made) if v in needed)

    @cached_property
    def least(self) -> Point:
        """The first point of the frontier, where only cheap equations run again."""
        if len(self.step.eqns) > LARGEST_GRAPH and not self.again:
            return Point(0.0, 0.0, tuple(self.wanted))
        return self._point(0.0, self._fastest)

    @cached_property
    def _maker(self) -> Callable[[Any], Any]:
        return equations.maker_of(self.step)

    @cached_property
    def _fastest(self) -> max_flow.Point:
        return max_flow.fastest(self.graph[0])

    @cached_property
    def frontier(self) -> list[Point]:
        """The choices from the least time to the fewest bytes."""
        if len(self.step.eqns) > LARGEST_GRAPH and not self.again:
            return [self.least]
        found = max_flow.frontier(self.graph[0], self._fastest, RESOLUTION)
        price = lambda a, b: (b.time - a.time) / (PICOSECONDS * (a.size - b.size))
        return [self.least, *(self._point(price(a, b), b) for a, b in pairwise(found))]

    @cached_property
    def choices(self) -> list[Point]:
        """The frontier, and choices between points far apart, at nearly the price of the second."""
        found = self.frontier[:1]
        for more, less in pairwise(self.frontier):
            points = [*self._between(more, less), less]
            prices = [less.price * (1 - TRIFLE * n) for n in reversed(range(len(points)))]
            found += [p._replace(price=price) for p, price in zip(points, prices, strict=True)]
        return found

    def _between(self, more: Point, less: Point) -> list[Point]:
        """Return choices between two points that are far apart, none of which dominates another."""
        size, points = self._bytes, [more]
        grain = size(more.stored) // RESOLUTION
        large = [v for v in more.stored if _size(v) > grain]
        searched = len(large) ** 2 * len(self.step.eqns)
        if size(less.stored) > FAR * size(more.stored) or searched > LONGEST_SEARCH:
            return []
        beside = [v for v in self._carry if v not in self._costless and v not in more.stored]
        found = [*self._without_some(more, less, ())]
        found += self._without_some(more, less, beside) if beside else ()
        for point in sorted(found, key=lambda p: (p.nanoseconds, size(p.stored))):
            if size(point.stored) < size(points[-1].stored) - grain:
                points.append(point)
        return points[1:]

    def _without_some(
        self, more: Point, less: Point, beside: Iterable[_jax.Var]
    ) -> Iterator[Point]:
        """Yield choices that leave out variables of `more` one by one, least time per byte first.

        Variables `beside` it may be stored instead.
        """
        stored = dict.fromkeys((*self._costless, *more.stored, *beside))
        kept, grain = more.stored, self._bytes(more.stored) // RESOLUTION
        time, most = more.nanoseconds * PICOSECONDS, less.nanoseconds * PICOSECONDS
        while True:
            room = self._bytes(kept) - self._bytes(less.stored) - grain
            some = [v for v in kept if grain < _size(v) < room and v not in self._costless]
            made = {v: self._again(stored.keys() - {v}) for v in some}
            if not (fit := [v for v in some if made[v][0] < most]):
                return
            rest = {v: tuple(u for u in stored if u in made[v][1] and u is not v) for v in fit}
            yield from (Point(less.price, made[v][0] / PICOSECONDS, rest[v]) for v in fit)
            left_out = min(fit, key=lambda v: (made[v][0] - time) / _size(v))
            time, kept = made[left_out][0], rest[left_out]
            del stored[left_out]

    def _bytes(self, stored: Iterable[_jax.Var]) -> int:
        return sum(_size(v) for v in stored if v not in self._costless)

    def _again(self, stored: Container[_jax.Var]) -> tuple[float, set]:
        """Return the picoseconds to make the residuals from `stored`, and the variables read."""
        read, again, pending = set(self.given), {}, list(self.wanted)
        while pending:
            if (v := pending.pop()) not in read:
                read.add(v)
                if v not in stored:
                    eqn = self._maker(v)
                    again[id(eqn)] = inf if eqn is None else self.times[id(eqn)]
                    pending += [] if eqn is None else equations.variables(eqn)
        return sum(again.values()), read

    def _point(self, price: float, cut: max_flow.Point) -> Point:
        edges, variables = self.graph
        ends = {e.end for e in edges if e.end in cut.side and e.start not in cut.side}
        stored = [variables[n] for n in sorted(ends & variables.keys())]
        return Point(price, cut.time / PICOSECONDS, tuple(stored))

    def at(self, price: float) -> Point:
        """Return the best choice at a price."""
        if price <= 0:
            return self.least
        return [point for point in self.choices if point.price <= price][-1]

    def cut(self, point: Point) -> Cut:
        """Divide the step for a choice of stored values."""
        j, maker = self.step, self._maker
        given = {*j.invars[: self.constants], *j.invars[self.slices :]}
        met, needed, hoisted, read = given.union(point.stored), set(), [], set()
        pending = _jax.variables(j.outvars[self.results :])
        while pending:
            v = pending.pop()
            read.add(v)
            if v in met:
                continue
            met.add(v)
            eqn = maker(v)
            assert eqn is not None, "what is neither given nor stored is made by an equation"
            if v in self.given and not (is_cheap(eqn) and self.times[id(eqn)] < inf):
                hoisted.append(v)
            else:
                assert self.times[id(eqn)] < inf, "what may not be made again is stored"
                needed.add(v)
                pending += equations.variables(eqn)
        order = [eqn for eqn in j.eqns if any(v in needed for v in eqn.outvars)]

        remake = lambda values: equations.run(order, dict(values), j.outvars[self.results :])
        uncut = _jax.byte_count(*(v.aval for v in self.wanted))
        offloaded = [self._is_offloaded(maker(v)) for v in point.stored]
        return Cut(hoisted, list(point.stored), read & given, remake, uncut, order, offloaded)

    def _is_offloaded(self, eqn: _jax.Equation | None) -> bool:
        if eqn is None or self.policy is None:
            return False
        return _jax.offloads(self.policy, eqn)


def _size(v: _jax.Var) -> int:
    """Return the cost of storing a variable, in bytes."""
    return _jax.byte_count(v.aval) + EACH
