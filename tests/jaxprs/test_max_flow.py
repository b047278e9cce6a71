"""Minimum cuts for all prices, against every set of nodes."""

import itertools
import random
from math import inf

from loopkit._jaxprs import max_flow
from loopkit._jaxprs.max_flow import SOURCE, TARGET, Edge, fastest, frontier

from .hull import lower_hull


def random_network(rng):
    """A network as that of a step: an edge to a value has its size, one to a maker its time."""
    count, edges = rng.randint(1, 4), []
    for k in range(count):
        maker, value = 2 * k + 2, 2 * k + 3
        edges.append(Edge(maker, value, 0, rng.randint(0, 6)))
        operands = rng.sample(range(k), min(k, rng.randint(0, 2)))
        times = [0, 0, 1, 4, inf] if operands else [inf, 0, 1, 2, 3, 5]
        if not operands or rng.random() < 0.7:
            edges.append(Edge(SOURCE, maker, rng.choice(times)))
        edges += [Edge(2 * u + 3, maker, inf) for u in operands]
    wanted = rng.sample(range(count), rng.randint(1, count))
    return [*edges, *(Edge(2 * v + 3, TARGET, inf) for v in wanted)], range(2, 2 * count + 2)


def cost(edges, side):
    """The time and the size of a cut."""
    inside = lambda n: n == TARGET or n in side
    across = [e for e in edges if inside(e.end) and not inside(e.start)]
    return sum(e.time for e in across), sum(e.size for e in across)


def every_cost(edges, nodes):
    """Those of all cuts that cut no edge of infinite capacity."""
    flags = itertools.product([False, True], repeat=len(nodes))
    sides = ({n for n, f in zip(nodes, some, strict=True) if f} for some in flags)
    found = {cost(edges, side) for side in sides}
    return sorted((t, s) for t, s in found if t < inf)


def test_the_frontier_is_the_lower_hull_of_all_cuts():
    rng = random.Random(3)
    for _ in range(200):
        edges, nodes = random_network(rng)
        points = frontier(edges)
        assert [(p.time, p.size) for p in points] == lower_hull(every_cost(edges, nodes))
        assert all(cost(edges, p.side) == (p.time, p.size) for p in points)
        assert all(low.side < high.side for low, high in itertools.pairwise(points))
        assert fastest(edges)[1:] == points[0][1:]


def test_points_near_to_each_other_are_left_out():
    rng = random.Random(5)
    fewer = 0
    for _ in range(200):
        edges, _ = random_network(rng)
        every, some = frontier(edges), frontier(edges, parts=2)
        assert set(some) <= set(every)
        assert {every[0], every[-1]} <= set(some)
        assert all(low.size - high.size <= every[0].size / 2 for low, high in _gaps(every, some))
        fewer += len(every) - len(some)
    assert fewer


def _gaps(every, some):
    """Pairs of neighbours in `some` between which `every` has others."""
    for low, high in itertools.pairwise(some):
        if every.index(high) > every.index(low) + 1:
            yield low, high


def test_a_long_chain_takes_few_rounds(monkeypatch):
    """Flow that finds the next edges full goes down the whole chain."""
    rounds = []
    label = max_flow._Preflow._label
    monkeypatch.setattr(
        max_flow._Preflow, "_label", lambda self: (rounds.append(self), label(self))[1]
    )
    edges = [Edge(SOURCE, 3, 0, 10)]
    for k in range(1, 500):
        maker, value, before = 2 * k + 2, 2 * k + 3, 2 * k + 1
        edges += [Edge(SOURCE, maker, 7), Edge(before, maker, inf), Edge(maker, value, 0, 10)]
        edges += [Edge(value, TARGET, inf)]
    points = frontier(edges)
    assert [(p.time, p.size) for p in points] == [
        (0, 4990),
        (7 * 498, 10),
    ]  # the first of them is as small as the input
    assert len(rounds) < 40
