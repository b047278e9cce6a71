"""Buffers that many lanes write rows of: in derivatives the rows of a step lie together."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import loopkit
from derivatives import assert_close
from kinds import loop
from loopkit import Plan
from turns import in_turn, later

LANES = 9
XS = jnp.cos(jnp.arange(LANES * 6 * 2.0)).reshape(LANES, 6, 2)
WS = jnp.linspace(0.5, 1.5, LANES)
SLOW = [("scan", None), ("scan", "all"), ("while", Plan(1)), ("until", 2), ("fori", None)]
WAYS = [
    *[("scan", Plan(2, 2, "residuals")), ("while", None)],
    *[later(*way) for way in SLOW],
]


def step(i, xs, state, w):
    state = jnp.sin(state * w) + xs[i]
    return state, state * i * w


def reference(xs, w, first=None, n=6):
    state, rows = jnp.ones(2), jnp.zeros((8, 2)) if first is None else first
    for i in range(n):
        state, row = step(i, xs, state, w)
        rows = rows.at[i + 1].set(row)
    return rows


def looped(kind, plan, unroll=1):
    def f(xs, w, first=None, n=6):
        rows = jnp.zeros((8, 2)) if first is None else first

        def body(i, carry):
            state, row = step(i, xs, carry[0], w)
            return state, carry[1].at[i + 1].set(row)

        how = {"checkpoints": plan, "buffers": lambda carry: carry[1], "unroll": unroll}
        return loop(kind, body, (jnp.ones(2), rows), n, most=7, **how)[1]

    return f


def cubed(f):
    """Whose cotangents differ from row to row."""
    return lambda *args: jnp.sum(f(*args) ** 3)


def derivatives(f):
    g = jax.value_and_grad(cubed(f), (0, 1))
    back = jax.grad(lambda xs, ws: jnp.sum(jax.vmap(f)(xs, ws) ** 3), (0, 1))
    along = lambda xs, w: jax.jvp(g, (xs, w), (jnp.sin(xs), w))[1]
    hessian = jax.hessian(cubed(f), 1)
    return (
        *(jax.vmap(g)(XS, WS), back(XS, WS), jax.vmap(g, (None, 0))(XS[0], WS)),
        *(jax.vmap(along)(XS, WS), jax.vmap(hessian)(XS, WS), jax.jacrev(f, 1)(XS[0], 0.5)),
        jax.vmap(jax.jacrev(f, 1))(XS, WS),
    )


@ft.cache
def of_reference(results, *args):
    return results(reference, *args)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "plan"), WAYS, ids=range(len(WAYS)))
def test_lanes_of_derivatives_and_derivatives_of_lanes(kind, plan):
    got = jax.jit(lambda: derivatives(looped(kind, plan)))()
    assert_close(got, of_reference(derivatives))


def from_the_start(f, axis):
    first = jnp.moveaxis(jnp.sin(jnp.arange(LANES * 16.0)).reshape(LANES, 8, 2), 0, axis)
    lanes, ws = (0, 0, axis), WS[:, None] + jnp.arange(1.0 * LANES)
    grads = jax.vmap(jax.grad(cubed(f), (0, 1, 2)), lanes)(XS, WS, first)
    # The axis of what comes out is that of what is put in.
    return grads, jax.vmap(jax.vmap(f, lanes, out_axes=axis), (None, 0, None))(XS, ws, first)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "axis"), in_turn(["scan", "while"], [0, 1, 2]))
def test_rows_that_differ_from_the_start(kind, axis):
    got = jax.jit(lambda: from_the_start(looped(kind, None), axis))()
    assert_close(got, of_reference(from_the_start, axis))


COUNTS = jnp.arange(LANES) % 7


def one_by_one(f):
    g = jax.value_and_grad(cubed(f), (0, 1))
    each = [g(XS[i], WS[i], None, int(n)) for i, n in enumerate(COUNTS)]
    return jax.tree.map(lambda *v: jnp.stack(v), *each)


APART = {"while": ("while", None), "until": ("until", Plan(2, 2)), "two": ("while", 2)}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("way", "unroll"), in_turn(APART, [1, 3]))
def test_lanes_that_stop_apart(way, unroll):
    g = jax.value_and_grad(cubed(looped(*APART[way], unroll)), (0, 1))
    got = jax.jit(jax.vmap(g, (0, 0, None, 0)))(XS, WS, None, COUNTS)
    assert_close(got, of_reference(one_by_one))


def in_lanes_of_lanes(f, outer):
    xs = jnp.stack([XS, XS + 1, XS - 1] * 3)
    ws = jnp.stack([WS, WS + 0.1, WS - 0.1] * 3)
    args = [a if o == 0 else a[0] for a, o in zip((xs, ws), outer, strict=True)]
    return jax.vmap(jax.vmap(jax.grad(cubed(f), (0, 1))), outer)(*args)


@pytest.mark.exhaustive
@pytest.mark.parametrize("outer", [(0, None), (None, 0), (0, 0)])
@pytest.mark.parametrize(("kind", "plan"), WAYS, ids=range(len(WAYS)))
def test_lanes_of_lanes(kind, plan, outer):
    """One axis comes into the loop after another: with what differs in both, or in one."""
    got = jax.jit(lambda: in_lanes_of_lanes(looped(kind, plan), outer))()
    assert_close(got, of_reference(in_lanes_of_lanes, outer))


@pytest.mark.exhaustive
def test_lanes_that_start_apart():
    """Each lane writes at a row of its own, and puts rows out besides."""

    def f(scan, xs, w, start):
        def body(carry, x):
            i, rows = carry
            row = jnp.sin(x * w)
            return (i + 1, rows.at[i].set(row)), row * rows[i - 1]

        (_, rows), ys = scan(body, (start, jnp.zeros((8, 2))), xs)
        return jnp.sum(rows**3) + jnp.sum(ys**2)

    starts = jnp.arange(LANES) % 3
    grads = lambda scan: jax.vmap(jax.grad(lambda *a: f(scan, *a), (0, 1)))(XS, WS, starts)
    buffered = lambda *a: loopkit.scan(*a, buffers=lambda carry: carry[1])
    assert_close(jax.jit(lambda: grads(buffered))(), grads(lax.scan))


@pytest.mark.exhaustive
def test_an_inner_loop_that_writes_rows():
    def f(outer, inner, xs, w):
        def body(state, x):
            one = lambda c, _: ((c[0] + 1, c[1].at[c[0]].set(jnp.sin(state * w * c[0]))), None)
            (_, rows), _ = inner(one, (0, jnp.zeros((4, 2))), None, 4)
            return state + jnp.sum(rows**2, 0) * x, None

        return jnp.sum(outer(body, jnp.ones(2), xs)[0] ** 2)

    grads = lambda *loops: jax.vmap(jax.value_and_grad(lambda *a: f(*loops, *a), (0, 1)))(XS, WS)
    buffered = lambda *a: loopkit.scan(*a, buffers=lambda carry: carry[1])
    wanted = grads(lax.scan, lax.scan)
    assert_close(jax.jit(lambda: grads(loopkit.scan, buffered))(), wanted)
    assert_close(jax.jit(lambda: grads(lax.scan, buffered))(), wanted)


def test_the_rows_of_a_step_lie_together():
    f = cubed(looped("scan", None))
    rows = f"f64[8,{LANES},2]"
    assert rows in str(jax.make_jaxpr(jax.vmap(jax.grad(f)))(XS, WS))
    assert rows not in str(jax.make_jaxpr(jax.vmap(jax.grad(f)))(XS[:3], WS[:3]))
    # Values are as they are asked for: nothing is moved at the end.
    assert rows not in str(jax.make_jaxpr(jax.vmap(looped("scan", None)))(XS, WS))
