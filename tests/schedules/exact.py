"""The optimum by dynamic programming and by search: slow, and right by definition."""

import heapq
from itertools import count

import numpy as np


def advances(segments, free):
    """advances[f, l]: the fewest advances that reverse l segments from a stored start, f slots
    free.

    Advance by m, save, reverse what lies beyond with a slot less, come back for the m segments.
    """
    table = np.zeros((free + 1, segments + 1), np.int64)
    length = np.arange(segments + 1)
    table[0] = length * (length - 1) // 2
    for f in range(1, free + 1):
        for l in range(2, segments + 1):
            m = np.arange(1, l)
            table[f, l] = np.min(m + table[f - 1, l - m] + table[f, m])
    return table


def _cheapest_path(start, moves, finished):
    number = count()
    distance = {start: 0}
    queue = [(0, 0, start)]
    while queue:
        so_far, _, node = heapq.heappop(queue)
        if finished(node):
            return so_far
        if so_far == distance[node]:
            for cost, other in moves(node):
                if so_far + cost < distance.get(other, 10**9):
                    distance[other] = so_far + cost
                    heapq.heappush(queue, (so_far + cost, next(number), other))
    return None


def reversal(positions, segments, slots):
    """The fewest advances that reverse from the segments stored, over everything one could do."""

    def moves(node):
        stored, live, target = node
        for segment in stored:
            yield 0, (stored, segment, target)
            yield 0, (stored - {segment}, live, target)
        if live is not None:
            if live < target:
                yield 1, (stored, live + 1, target)
            if live == target:
                yield 0, (stored, None, target - 1)
            if len(stored) < slots:
                yield 0, (stored | {live}, live, target)

    start = (frozenset(positions), None, segments - 1)
    return _cheapest_path(start, moves, lambda node: node[2] < 0)
