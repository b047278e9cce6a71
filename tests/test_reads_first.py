"""Reads of a buffer as it was before a write, written down after it: swaps."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback

import loopkit
from derivatives import assert_close
from loopkit import _jax
from loopkit._buffers.slices import read_p, write_p
from loopkit._engine.passes.reads_first import read_before_written
from loopkit._jaxprs import equations
from turns import later

N = 6
XS = jnp.sin(3 * jnp.arange(N * 2.0)).reshape(N, 2)
NEWEST = pytest.mark.skipif(not _jax.KEEPS_BARRIERS, reason="the compiler drops the barriers")


def reversal(i, rows, w):
    j = N - 1 - i
    return rows.at[i].set(w * rows[j]).at[j].set(rows[i])


def rotation(i, rows, w):
    j, k = (i + 1) % N, (2 * i + 3) % N
    return rows.at[i].set(rows[j]).at[j].set(jnp.sin(rows[k]) * w).at[k].add(rows[i])


def bubble_sort(i, rows, w):
    def swap(k, rows):
        wrong = rows[k, 0] > rows[k + 1, 0]
        a, b = jnp.where(wrong, k + 1, k), jnp.where(wrong, k, k + 1)
        return rows.at[k].set(rows[a] * w).at[k + 1].set(rows[b])

    if isinstance(rows, loopkit.Buffer):
        return loopkit.fori_loop(0, N - 1, swap, rows)
    for k in range(N - 1):
        rows = swap(k, rows)
    return rows


BODIES = reversal, rotation, bubble_sort


def reference(body):
    def f(w, rows):
        for i in range(N):
            rows = body(i, rows, w)
        return rows

    return f


def looped(body, checkpoints=None):
    def f(w, rows):
        step = lambda i, rows: body(i, rows, w)
        return loopkit.fori_loop(0, N, step, rows, buffers=True, checkpoints=checkpoints)

    return f


MODES = {
    "value": lambda f: f(0.7, XS),
    "jvp": lambda f: jax.jvp(f, (0.7, XS), (1.0, jnp.cos(XS))),
    "grad": lambda f: jax.grad(lambda w, rows: jnp.sum(f(w, rows) ** 3), (0, 1))(0.7, XS),
    "hessian": lambda f: jax.hessian(lambda w: jnp.sum(f(w, XS) ** 3))(0.7),
    "lanes": lambda f: jax.vmap(jax.grad(lambda w, rows: jnp.sum(f(w, rows) ** 3)), (0, None))(
        jnp.linspace(0.5, 1, 3), XS
    ),
}


@ft.cache
def expected(body, mode):
    return MODES[mode](reference(body))


late = lambda value: later(value)


@pytest.mark.exhaustive
@pytest.mark.parametrize("checkpoints", [None, late(2)])
@pytest.mark.parametrize("mode", [m if m in ("grad", "lanes") else late(m) for m in MODES])
@pytest.mark.parametrize("body", BODIES)
def test_rows_are_those_of_a_python_loop(body, mode, checkpoints):
    got = jax.jit(lambda: MODES[mode](looped(body, checkpoints)))()
    assert_close(got, expected(body, mode))


def order(body):
    """Return the operations on the buffer in the steps of the innermost loop, in order."""
    eqns = list(equations.all_equations(jax.make_jaxpr(looped(body))(0.7, XS)))
    loop = [e.params["loop"] for e in eqns if e.primitive.name == "loopkit_while"][-1]
    names = {read_p: "read", write_p: "write"}
    found = _jax.open_jaxpr(loop.body).eqns
    return [names[e.primitive] for e in found if e.primitive in names]


@pytest.mark.parametrize("body", BODIES)
def test_what_is_read_of_the_buffer_before_is_read_first(body):
    done = order(body)
    writes = done.index("write")
    # `add` adds in place; it reads nothing.
    assert "read" not in done[writes:]


def test_reads_that_need_what_was_written_stay():
    def body(i, rows, w):
        new = rows.at[i].set(rows[i] * w)
        there = jnp.where(new[i, 0] > 0, i, 0)
        return new.at[0].add(rows[there])

    assert order(body) == ["read", "write", "read", "read", "write"]
    assert_close(looped(body)(0.7, XS), reference(body)(0.7, XS))


@pytest.mark.parametrize(
    ("call", "done"),
    [
        (jax.pure_callback, ["read", "read", "write", "write"]),
        (io_callback, ["read", "write", "read", "write"]),
    ],
)
def test_what_asks_the_host_stays_in_its_place_unless_it_is_pure(call, done):
    def body(i, rows, w):
        new = rows.at[i].set(rows[i] * w)
        there = call(lambda i: i, jax.ShapeDtypeStruct((), int), i)
        return new.at[0].add(rows[there])

    assert order(body) == done
    wanted = XS
    for i in range(N):
        wanted = wanted.at[i].set(wanted[i] * 0.7).at[0].add(wanted[i])
    assert_close(looped(body)(0.7, XS), wanted)


def test_other_jaxprs_stay_the_same():
    jaxpr = _jax.trace(lambda x: [x + 1], [jax.typeof(XS)], "step")[0]
    assert read_before_written(jaxpr) is jaxpr


@NEWEST
@pytest.mark.parametrize("grad", [False, later(True)])
def test_swapped_rows_are_not_copied(grad):
    def f(rows):
        def swap(i, rows):
            j = len(rows) - 1 - i
            return rows.at[i].set(2 * rows[j]).at[j].set(rows[i])

        return jnp.sum(loopkit.fori_loop(0, 100, swap, rows, buffers=True) ** 2)

    assert loopkit.in_place_report(f, jnp.ones((200, 8)), grad=grad)


def test_all_entries_are_read_once_between_two_writes():
    """Otherwise a step would store them twice."""

    def step(b, i):
        first, again = b[:], b[...]
        b = b.at[i].add(first.sum() * again[0])
        return b, b[:] @ again

    init, steps = jnp.arange(1.0, 4.0), jnp.arange(3)
    run = lambda init: loopkit.scan(step, init, steps, buffers=True)
    assert str(jax.make_jaxpr(run)(init)).count("loopkit_read[") == 2
    loss = lambda scan: lambda init: jnp.sum(jnp.sin(scan(step, init, steps)[1]))
    slopes = jax.grad(loss(lambda f, b, xs: loopkit.scan(f, b, xs, buffers=True)))(init)
    assert_close(slopes, jax.grad(loss(jax.lax.scan))(init))
