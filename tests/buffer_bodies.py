"""Loops over the rows of a buffer, and the same on plain arrays without any of our rules."""

import jax
import jax.numpy as jnp

from kinds import loop

XS = jnp.cos(jnp.arange(6 * 2.0)).reshape(6, 2)
W = jnp.asarray([0.3, 0.7])
MORE = 40
"""Rows that no step touches: saving the buffer costs more than logging what steps displace."""


def rows_from_rows(i, rows, xs, w):
    """Reads, overwrites, and accumulates, the same rows again and again."""
    x = rows[i - 1] * xs[i] + jnp.sin(rows[i - 1])
    rows = rows.at[i].set(x)
    rows = rows.at[i - 1].multiply(x * w)
    return rows.at[0].add(rows[i] * rows[i - 1])


def ring(i, rows, xs, w):
    rows = rows.at[i % 2].set(jnp.sin(rows[(i + 1) % 2]) * xs[i] + w)
    return rows.at[2].add(rows[i % 2] ** 2)


def smoothing(i, rows, xs, w):
    """A Gauss-Seidel sweep: what was written in this sweep is read in it."""
    row = i % 4 + 1
    return rows.at[row].set(jnp.tanh(w * (rows[row - 1] + rows[row + 1]) + xs[i]))


def sliding_window(i, rows, xs, w):
    """Attention over a cache of the last three rows."""
    rows = rows.at[i % 3].set(xs[i] * w)
    cache = jnp.stack([rows[j] for j in range(3)])
    return rows.at[5].add(jax.nn.softmax(cache @ xs[i]) @ cache)


def sorting(i, rows, xs, w):
    """One exchange of neighbours, if they are out of order."""
    j = i % 5
    a, b = rows[j], rows[j + 1]
    swap = a[0] > b[0]
    rows = rows.at[j].set(b * w, pred=swap)
    return rows.at[j + 1].set(a + xs[i] ** 2, pred=swap)


def queue(i, rows, xs, w):
    """Takes one row from the front, and puts two at the end."""
    front = rows[(i - 1) % 6]
    rows = rows.at[(2 * i - 1) % 6].set(front * w)
    return rows.at[2 * i % 6].set(jnp.sin(front) + xs[i])


def viterbi(i, rows, xs, w):
    """The best path to each of two states.

    The derivative of `jnp.max` compares floats for equality, which fails in lax.scan too where the
    compiler rounds them differently in two places; that of a choice by index does not.
    """
    steps = rows[i - 1][:, None] + w[:, None] * jnp.outer(xs[i - 1], xs[i])
    best = steps[jnp.argmax(steps, 0), jnp.arange(2)]
    return rows.at[i].set(best + jnp.sin(xs[i]))


BODIES = [rows_from_rows, ring, smoothing, sliding_window, sorting, queue, viterbi]


def first_rows(w):
    return jnp.concatenate([jnp.cos(3.0 * jnp.arange(12.0)).reshape(6, 2) * w, jnp.ones((MORE, 2))])


def reference(body, n=6):
    """The loop unrolled, on plain arrays."""

    class At:
        def __init__(self, array, index=None):
            self.array, self.index = array, index

        def __getitem__(self, index):
            return At(self.array, index)

        def __getattr__(self, name):
            def write(values, pred=True):
                new = getattr(self.array.at[self.index], name)(values)
                return Rows(jnp.where(pred, new, self.array))

            return write

    class Rows:
        def __init__(self, array):
            self.array, self.at = array, At(array)

        def __getitem__(self, index):
            return self.array[index]

    def f(xs, w):
        rows = Rows(first_rows(w))
        for i in range(1, n):
            rows = body(i, rows, xs, w)
        return jnp.sum(rows.array[:6] ** 3)

    return f


def looped(body, kind, checkpoints, unroll=1, max_steps=8):
    """Run the body by a loop of loopkit, over a buffer."""
    how = {"start": 1, "most": max_steps, "checkpoints": checkpoints, "unroll": unroll}

    def f(xs, w, n=6):
        rows = first_rows(w)
        if kind == "fori":  # closes over what the others carry
            rows = loop(kind, lambda i, r: body(i, r, xs, w), rows, n, buffers=True, **how)
        else:
            step = lambda i, carry: (body(i, *carry), *carry[1:])
            named = (True, False, False) if kind == "scan" else lambda carry: carry[0]
            rows = loop(kind, step, (rows, xs, w), n, buffers=named, **how)[0]
        return jnp.sum(rows[:6] ** 3)

    return f
