"""The optimum by dynamic programming: slow, and right by definition."""

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
