"""Choose plans for all loops of a program with one price per byte.

Each loop has a list of choices: the bytes that it needs, and the time that it takes with them. At a
given price, each loop takes the choice with the least time plus price times bytes. At any moment,
the program needs the bytes of its values, of what loops have saved and not yet reversed, and of the
loop that is being reversed. These bytes fall as the price rises. The smallest price at which the
program fits is the best one, up to the bytes that a single change of choice leaves unused.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T", bound=Any)


class Count(NamedTuple):
    """The budget of a loop, by its number in the program."""

    number: int
    device: int
    host: int | None


class Choice(NamedTuple):
    """The bytes that a loop may need, and the time that it takes with them."""

    saved: int
    """The bytes that it needs from its forward sweep until it is reversed."""
    working: int
    """The additional bytes that it needs while it is reversed."""
    nanoseconds: float
    host: int = 0
    """The bytes that it saves in the host's memory."""
    counts: tuple[Count, ...] = ()
    """The budgets, of this loop and of those in its steps, that lead to this choice."""

    def size(self, host_price: float) -> float:
        """Return the bytes on the device, and those on the host by their relative price."""
        return self.saved + self.working + host_price * self.host


Choices = Mapping[Hashable, Sequence[Choice]]

HOST_PRICES = 0.0, 0.25, 1.0, 4.0, 16.0
"""The prices of a byte on the host, relative to one on the device, that a budget for both tries.

They do not depend on the budget, so a larger one never leads to a slower plan.
"""


def host_prices(host: int | None) -> Sequence[float]:
    """Return the prices to try with this budget on the host."""
    return (0.0,) if host is None else HOST_PRICES


class Moment(NamedTuple):
    """The values and the loops that need memory at a moment of a gradient."""

    what: str
    """The equation that runs, in words."""
    values: int
    """The bytes of values, without those that loops save."""
    held: tuple[tuple[Hashable, int], ...] = ()
    """The loops whose saved values live, and how often each counts."""
    reversed: Hashable = None
    """The loop that is being reversed, if one is."""

    def bytes(self, chosen: Mapping[Hashable, Choice]) -> int:
        """Return the bytes that live with these choices of the loops."""
        working = 0 if self.reversed is None else chosen[self.reversed].working
        return self.values + working + sum(n * chosen[key].saved for key, n in self.held)


@dataclass(frozen=True)
class State:
    """A choice for each loop, and what the program needs with them."""

    chosen: Mapping[Hashable, Choice]
    peak: Moment
    bytes: int
    host: int
    nanoseconds: float

    @property
    def counts(self) -> tuple[Count, ...]:
        return tuple(count for choice in self.chosen.values() for count in choice.counts)


def state_of(moments: Sequence[Moment], chosen: Mapping[Hashable, Choice]) -> State:
    """Return what a program needs with these choices."""
    peak = max(moments, key=lambda m: m.bytes(chosen))
    time = sum(c.nanoseconds for c in chosen.values())
    host = sum(c.host for c in chosen.values())
    return State(chosen, peak, peak.bytes(chosen), host, time)


def without_dominated(moments: Iterable[Moment]) -> list[Moment]:
    """Return the moments that may be the peak, whatever the loops choose."""
    most: dict[Hashable, Moment] = {}
    for m in moments:
        if m[2:] not in most or m.values > most[m[2:]].values:
            most[m[2:]] = m
    return list(most.values())


def by_price(
    moments: Sequence[Moment], choices: Choices, host_price: float = 0.0
) -> Iterator[State]:
    """Yield the states that are the best at some price, in order of price from zero.

    `host_price` is the price of a byte on the host, relative to one on the device.
    """
    size = lambda c: c.size(host_price)
    hulls = {key: _hull(some, size) for key, some in choices.items()}
    chosen = {key: hull[0][1] for key, hull in hulls.items()}
    yield state_of(moments, chosen)
    later = [(price, key, c) for key, hull in hulls.items() for price, c in hull[1:]]
    for _, key, choice in sorted(later, key=lambda step: step[0]):
        chosen = {**chosen, key: choice}
        yield state_of(moments, chosen)


class Chain:
    """The states of a program by price, from the fastest to the smallest."""

    def __init__(
        self, moments: Iterable[Moment], choices: Choices, host_price: float = 0.0
    ) -> None:
        self._moments, self._choices = without_dominated(moments), choices
        self.states = list(by_price(self._moments, choices, host_price))

    def within(self, count: int, host: int | None = None) -> State | None:
        """Return the state of least time within a budget, or None.

        It is the state of the smallest price at which the program fits, or that state with a faster
        choice for one loop. The state of the price before does not fit.
        """
        fits = lambda s: s.bytes <= count and (host is None or s.host <= host)
        number = next((i for i, s in enumerate(self.states) if fits(s)), None)
        if number is None:
            return None
        found, fastest = self.states[number], self.states[max(0, number - 1)].nanoseconds
        # If it were faster than the state before, a little more memory would take more time.
        between = lambda time: fastest <= found.nanoseconds + time < found.nanoseconds
        changed = (
            state_of(self._moments, {**found.chosen, key: choice})
            for key, some in self._choices.items()
            for choice in some
            if between(choice.nanoseconds - found.chosen[key].nanoseconds)
        )
        return min([found, *filter(fits, changed)], key=lambda s: s.nanoseconds)

    def least(self, by_host: bool = False) -> State:
        """Return the state with the fewest bytes; if `by_host`, those of the host count first."""
        return min(self.states, key=lambda s: (s.host if by_host else 0, s.bytes))


def few(items: Iterable[T], most: int) -> list[T]:
    """Return at most `most` items, spread evenly from the fastest to the smallest."""
    found = fastest_first(items, lambda item: item.bytes)
    if len(found) <= most:
        return found
    return [found[round(k * (len(found) - 1) / (most - 1))] for k in range(most)]


def fastest_first(items: Iterable[T], size: Callable[[T], float]) -> list[T]:
    """Return the Pareto-optimal items, from the fastest to the smallest."""
    found: list[T] = []
    for item in sorted(items, key=lambda c: (c.nanoseconds, size(c))):
        if not found or size(item) < size(found[-1]):
            found.append(item)
    return found


def _hull(choices: Sequence[Choice], size: Callable[[Choice], float]) -> list[tuple[float, Choice]]:
    """Return the choices that are the best at some price, and the lowest price for each."""
    hull: list[tuple[float, Choice]] = []
    for choice in fastest_first(choices, size):
        price = 0.0
        while hull:
            before = hull[-1][1]
            price = (choice.nanoseconds - before.nanoseconds) / (size(before) - size(choice))
            if price > hull[-1][0] or len(hull) == 1:
                break
            hull.pop()
        hull.append((price, choice))
    return hull
