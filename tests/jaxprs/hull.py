"""The lower hull of costs: what is the least at some price."""


def lower_hull(costs):
    """The costs that are the least at some price, from the least time to the least size."""
    hull: list = []
    for time, size in costs:
        if hull and size >= hull[-1][1]:
            continue
        while len(hull) > 1 and _is_above(hull[-1], hull[-2], (time, size)):
            hull.pop()
        hull.append((time, size))
    return hull


def _is_above(middle, low, high):
    """Whether a point is on the line between two others, or above it."""
    (t, s), (t0, s0), (t1, s1) = middle, low, high
    return (t - t0) * (s0 - s1) >= (t1 - t0) * (s0 - s)
