"""Reads of a buffer as it was are moved before the write that follows: which, and where to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopkit import _jax
from loopkit._buffers.slices import read, read_p, write, write_p
from loopkit._buffers.window import Window
from loopkit._engine.passes.reads_first import read_before_written, reads_first

from .small_loops import assert_same, make_loop, run, types_of

ROW = Window((0,), (0, 0), (1, 2), "clip", wrap=False)
ROWS = np.sin(np.arange(10.0)).reshape(5, 2)
I, J = np.array([1]), np.array([3])


def order(jaxpr):
    names = {read_p: "read", write_p: "write"}
    return [names.get(e.primitive, e.primitive.name) for e in _jax.open_jaxpr(jaxpr).eqns]


def rewritten(fun, *values):
    """Return the equations before and after the pass; the results are the same."""
    before = _jax.trace_closed(fun, types_of(values), "step")
    after = read_before_written(before)
    results = [jax.jit(_jax.call_jaxpr(j))(*values) for j in (after, before)]
    assert_same(*results)
    assert (order(after) == order(before)) == (after is before)
    return order(before), order(after)


def test_a_read_that_follows_at_once():
    def swap(rows, new, i, j):
        written = write(rows, new, i, ROW)
        old, _ = read(rows, j, ROW)
        return [write(written, old * 2.0, i, ROW), old]

    assert rewritten(swap, ROWS, np.ones((1, 2)), I, J) == (
        ["write", "read", "mul", "write"],
        ["read", "write", "mul", "write"],
    )


def test_what_a_read_needs_is_moved_with_it():
    """In its order; what else there is stays behind."""

    def step(rows, new, i, j):
        written = write(rows, new, i, ROW)
        k = j * 2
        x = jnp.sin(new)
        k = k - i
        old, _ = read(rows, k % 3, ROW)
        return [written, old + x]

    before, after = rewritten(step, ROWS, np.ones((1, 2)), I, J)
    assert before[:4] == ["write", "mul", "sin", "sub"]
    at = after.index("write")
    assert after[:2] == ["mul", "sub"]
    assert after[at - 1 : at + 2] == ["read", "write", "sin"]


def test_several_reads_and_writes():
    def step(rows, new, i, j):
        one = write(rows, new, i, ROW)
        a, rows = read(rows, j, ROW)
        two = write(one, a, j, ROW)
        b, _ = read(rows, i, ROW)
        c, _ = read(one, j, ROW)
        return [two, b - c]

    _, after = rewritten(step, ROWS, np.ones((1, 2)), I, J)
    assert after == ["read", "read", "write", "read", "write", "sub"]


@pytest.mark.slow
def test_what_stays():
    """These reads stay: before a write, of what was written, at a place that depends on it, of
    others."""

    def before(rows, others, i, j):
        old, _ = read(rows, j, ROW)
        return [write(rows, old, i, ROW), old]

    def of_what_was_written(rows, others, i, j):
        rows = write(rows, jnp.ones((1, 2)), i, ROW)
        return list(read(rows, j, ROW))

    def depending(rows, others, i, j):
        written = write(rows, jnp.ones((1, 2)), i, ROW)
        there = jnp.int32(written[1, :1])
        return [written, read(rows, there, ROW)[0]]

    def of_another(rows, others, i, j):
        written = write(rows, jnp.ones((1, 2)), i, ROW)
        return [written, read(others, j, ROW)[0]]

    def as_an_operand(rows, others, i, j):
        """Write a whole buffer that is read later."""
        written = write(rows, others, i, ROW)
        return [written, read(others, i * 0, ROW)[0]]

    def by_another_primitive(rows, others, i, j):
        written = write(rows, jnp.ones((1, 2)), i, ROW)
        return [written, jnp.sin(rows)]

    of = ROWS, np.ones((1, 2)), I, J
    for step in (before, of_what_was_written, depending, of_another, as_an_operand):
        once, again = rewritten(step, *of)
        assert once == again, step.__name__
    once, again = rewritten(by_another_primitive, *of)
    assert once == again


def test_loops_of_buffers():
    """One buffer among the leaves is enough; without any, the loop is the same."""

    def step(consts, carry, x):
        rows, n = carry
        written = write(rows, jnp.full((1, 2), x[0]), n[None], ROW)
        old, _ = read(rows, n[None] + 1, ROW)
        return [write(written, old * 0.5, n[None] + 2, ROW), n + 1], []

    loop, operands = make_loop(step, [], [ROWS, 0], [np.arange(3.0)], buffers=[0])
    new = reads_first(loop)
    assert next(name for name in order(new.body) if name in ("read", "write")) == "read"
    assert_same(run(new, operands), run(loop, operands))
    assert reads_first(new) is new
    none, _ = make_loop(step, [], [ROWS, 0], [np.arange(3.0)])
    assert reads_first(none) is none
