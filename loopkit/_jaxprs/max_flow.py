"""Minimum cuts of a network, one or for all prices, in whole numbers and so exactly.

A network has a source, a target and edges with capacities. A cut is the set of nodes on the
target's side; it costs the capacities of the edges that lead into that set. The least cost is the
greatest flow (Ford & Fulkerson 1956), found by shortest paths, layer by layer (Dinitz 1970).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import NamedTuple

SOURCE, TARGET = 0, 1
"""Numbers of these two nodes. Others follow."""


class Edge(NamedTuple):
    """An edge, whose capacity is a sum of two costs: `time`, and `size` times the price of one."""

    start: int
    end: int
    time: float = 0
    size: float = 0
    """Whole numbers, or infinite."""


class Point(NamedTuple):
    """A cut that is the least at some price, and what it costs."""

    side: frozenset[int]
    """The nodes on the target's side."""
    time: int
    size: int


def fastest(edges: Sequence[Edge]) -> Point:
    """The cut of least time, and of those, of least size."""
    sizes = sum(e.size for e in edges if e.size != inf)
    return _point(edges, minimum_cut(edges, _nodes(edges), (sizes + 1, 1)))


def frontier(edges: Sequence[Edge], first: Point | None = None, parts: int = 0) -> list[Point]:
    """The least cut for each price of a size, from the least time to the least size.

    Each is the least for a range of prices. `first` is the fastest, if that is known. Between two
    whose sizes differ by one in `parts` of that of the first, no others are sought. Of cuts of one
    cost, the one nearest to the target is taken. Only edges from the source may have a time: then
    the target's side grows with the price (Gallo, Grigoriadis & Tarjan 1989), and a cut between two
    others decides about few nodes.
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
    """The points between two of them."""
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
    """The target's side of a least cut: `side`, and those of `nodes` that belong there.

    `weights`: of times and of sizes. All other nodes are on the source's side.
    """
    ends: list[int] = []
    room: list[float] = []
    out: dict[int, list[int]] = {n: [] for n in (SOURCE, TARGET, *nodes)}
    for start, end, time, size in edges:
        a = start if start in nodes else TARGET if start in side else SOURCE
        b = end if end in nodes else TARGET if end in side or end == TARGET else SOURCE
        capacity = (weights[0] * time if time else 0) + (weights[1] * size if size else 0)
        if a != b and a != TARGET and b != SOURCE and capacity:
            out[a].append(len(ends))
            out[b].append(len(ends) + 1)
            ends += b, a
            room += capacity, 0
    while (distance := _distances(ends, room, out))[SOURCE] < inf:
        _push(ends, room, out, distance)
    return side.union(n for n, far in distance.items() if far < inf) - {SOURCE, TARGET}


def _distances(ends: list[int], room: list[float], out: dict[int, list[int]]) -> dict:
    """How many edges with room there are from each node to the target."""
    distance: dict[int, float] = dict.fromkeys(out, inf)
    distance[TARGET], layer, far = 0, [TARGET], 0
    while layer:
        far, before = far + 1, []
        for b in layer:
            for e in out[b]:
                a = ends[e]
                if distance[a] == inf and room[e ^ 1]:
                    distance[a] = far
                    before.append(a)
        layer = before
    return distance


def _push(ends: list[int], room: list[float], out: dict[int, list[int]], distance: dict) -> None:
    """As much flow as the shortest paths have room for."""
    pending = {n: list(edges) for n, edges in out.items()}
    path: list[int] = []
    node = SOURCE
    while True:
        if node == TARGET:
            flow = min(room[e] for e in path)
            full = 0
            for k in range(len(path) - 1, -1, -1):
                e = path[k]
                room[e] -= flow
                room[e ^ 1] += flow
                if not room[e]:
                    full = k
            node = ends[path[full] ^ 1]
            del path[full:]
            continue
        edges, step = pending[node], distance[node] - 1
        while edges and not (room[edges[-1]] and distance[ends[edges[-1]]] == step):
            edges.pop()
        if edges:
            path.append(edges[-1])
            node = ends[edges[-1]]
        elif path:
            node = ends[path.pop() ^ 1]
            pending[node].pop()
        else:
            return
