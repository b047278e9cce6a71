"""Find minimum cuts of a network, for one price or for all. Whole numbers make them exact.

A network has a source, a target and edges with capacities. A cut is the set of nodes on the
target's side; it costs the capacities of the edges that lead into that set. The minimum cost is the
maximum flow (Ford & Fulkerson 1956).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import NamedTuple

SOURCE, TARGET = 0, 1
"""The numbers of these two nodes. Other nodes have higher numbers."""


class Edge(NamedTuple):
    """An edge whose capacity is the sum of two costs: `time`, and `size` times its price."""

    start: int
    end: int
    time: float = 0
    size: float = 0
    """Both costs are whole numbers, or infinite."""


class Point(NamedTuple):
    """A cut that is a minimum at some price, and its costs."""

    side: frozenset[int]
    """The nodes on the target's side."""
    time: int
    size: int


def fastest(edges: Sequence[Edge]) -> Point:
    """Return the cut of least time and, among those, of least size."""
    sizes = sum(e.size for e in edges if e.size != inf)
    return _point(edges, minimum_cut(edges, _nodes(edges), (sizes + 1, 1)))


def frontier(edges: Sequence[Edge], first: Point | None = None, parts: int = 0) -> list[Point]:
    """Return the minimum cuts for all prices of a size, from the least time to the least size.

    Each cut is a minimum for a range of prices. `first` is the fastest, if the caller knows it. If
    two cuts differ in size by at most 1 / `parts` of the size of the first, no cut between them is
    looked for. Among cuts of equal cost, the one nearest to the target is taken. Only edges from
    the source may have a time. Then the target's side grows with the price (Gallo, Grigoriadis &
    Tarjan 1989), and a cut between two others decides about few nodes.
    """
    times = sum(e.time for e in edges if e.time != inf)
    first = fastest(edges) if first is None else first
    apart = first.size / parts if parts else 0
    rest = _nodes(edges) - first.side
    last = _point(edges, minimum_cut(edges, rest, (1, times + 1), first.side))
    if last.size >= first.size:
        return [first]
    return [first, *_between(edges, first, last, apart), last]


def _between(edges: Sequence[Edge], low: Point, high: Point, apart: float) -> Iterator[Point]:
    """Yield the points between two points."""
    more, less = high.time - low.time, low.size - high.size
    if less <= apart:
        return
    open_nodes = high.side - low.side
    near = [e for e in edges if e.start in open_nodes or e.end in open_nodes]
    side = minimum_cut(near, open_nodes, (less, more), low.side)
    if side in (low.side, high.side):
        return
    middle = _point(edges, side)
    if middle.time * less + middle.size * more == low.time * less + low.size * more:
        return  # on the line between the two
    yield from _between(edges, low, middle, apart)
    yield middle
    yield from _between(edges, middle, high, apart)


def _nodes(edges: Iterable[Edge]) -> frozenset[int]:
    return frozenset(n for e in edges for n in e[:2]) - {SOURCE, TARGET}


def _point(edges: Iterable[Edge], side: frozenset[int]) -> Point:
    across = [e for e in edges if (e.end in side or e.end == TARGET) and e.start not in side]
    return Point(side, int(sum(e.time for e in across)), int(sum(e.size for e in across)))


def minimum_cut(
    edges: Iterable[Edge],
    nodes: frozenset[int],
    weights: tuple[float, float],
    side: frozenset[int] = frozenset(),
) -> frozenset[int]:
    """Return the target's side of a minimum cut: `side`, and those of `nodes` that belong there.

    `weights` are those of times and of sizes. All other nodes are on the source's side.
    """
    place = {SOURCE: SOURCE, TARGET: TARGET} | {n: k for k, n in enumerate(nodes, TARGET + 1)}
    preflow = _Preflow(len(place))
    for start, end, time, size in edges:
        a = place[start] if start in nodes else TARGET if start in side else SOURCE
        b = place[end] if end in nodes else TARGET if end in side or end == TARGET else SOURCE
        if a != b and a != TARGET and b != SOURCE:
            preflow.add(a, b, weights[0] * time if time else 0, weights[1] * size if size else 0)
    preflow.run()
    return side.union(n for n in nodes if preflow.height[place[n]] < len(place))


class _Preflow:
    """Flow that is pushed from the source towards the target, as far as edges have room.

    Nodes may keep an excess that cannot reach the target: for a cut that is enough. The method is
    that of Goldberg & Tarjan 1988, with heights that are recomputed from time to time.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.ends: list[int] = []
        self.room: list[float] = []
        self.out: list[list[int]] = [[] for _ in range(count)]
        self.excess: list[float] = [0] * count
        self.height: list[int] = []
        """A lower bound on the edges from a node to the target; `count` if no path leads there."""

    def add(self, start: int, end: int, *capacities: float) -> None:
        """Add an edge with the sum of some capacities."""
        room = sum(capacities)
        if room:
            self.out[start].append(len(self.ends))
            self.out[end].append(len(self.ends) + 1)
            self.ends += end, start
            self.room += room, 0

    def run(self) -> None:
        """Push as much as reaches the target, and leave exact heights."""
        enough = 1 + sum(r for r in self.room if r < inf)
        self.room = [min(r, enough) for r in self.room]
        self._label()
        for e in self.out[SOURCE]:
            self.excess[self.ends[e]] += self.room[e]
            self.room[e ^ 1] += self.room[e]
            self.room[e] = 0
        while (work := self._discharge_all()) > 0:
            self._label()
        assert work == 0, "nothing is left that could be pushed"

    def _label(self) -> None:
        """Measure the distances to the target."""
        self.height = [self.count] * self.count
        self.height[TARGET], layer, far = 0, [TARGET], 0
        while layer:
            far, before = far + 1, []
            for b in layer:
                for e in self.out[b]:
                    a = self.ends[e]
                    if self.height[a] == self.count and self.room[e ^ 1] and a != SOURCE:
                        self.height[a] = far
                        before.append(a)
            layer = before

    def _discharge_all(self) -> int:
        """Push until nothing can move, or labels are stale; return 0 once no label changes."""
        active = deque(n for n in range(TARGET + 1, self.count) if self._is_active(n))
        changed = 0
        while active and changed <= self.count:
            changed += self._discharge(active.popleft(), active)
        return changed + len(active)

    def _is_active(self, n: int) -> bool:
        return self.excess[n] > 0 and self.height[n] < self.count

    def _discharge(self, n: int, active: deque[int]) -> int:
        """Push the excess of a node on; return how often its label has changed."""
        changed, ends, room, height = 0, self.ends, self.room, self.height
        while self._is_active(n):
            lowest = self.count
            for e in self.out[n]:
                if not room[e]:
                    continue
                end = ends[e]
                if height[end] + 1 != height[n]:
                    lowest = min(lowest, height[end] + 1)
                    continue
                flow = min(room[e], self.excess[n])
                room[e] -= flow
                room[e ^ 1] += flow
                self.excess[n] -= flow
                if end != TARGET and not self.excess[end]:
                    active.append(end)
                self.excess[end] += flow
                if not self.excess[n]:
                    return changed
                if room[e]:
                    lowest = min(lowest, height[end] + 1)
            height[n] = lowest
            changed += 1
        return changed
