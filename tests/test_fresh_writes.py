"""Rows that one step alone writes: their cotangents are not cleared where nobody asks for them."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest

import loopkit
from derivatives import assert_close
from kinds import loop
from loopkit import Plan
from turns import in_turn

XS = jnp.cos(jnp.arange(12.0)).reshape(6, 2)
FIRST = jnp.sin(jnp.arange(16.0)).reshape(8, 2)
WAYS = [
    *[("scan", None), ("scan", Plan(2, 2, "residuals")), ("while", "all"), ("while", Plan(1))],
    ("while", None),
]


def earlier(i, rows, x):
    return rows.at[i].set(jnp.sin(rows[i - 1]) * x)


def later(i, rows, x):
    """Reads what has not been written yet, of this row and of the next one."""
    return rows.at[i].set(rows[i] * x + jnp.tanh(rows[(i + 1) % 8] * x) + rows[0])


def masked(i, rows, x):
    return rows.at[i].set(jnp.sin(x) + rows[i - 1], pred=jnp.asarray([True, False]) ^ (i % 2 == 0))


def alone(i, rows, x):
    return rows.at[i].set(x * i)


BODIES = [earlier, later, masked, alone]


class Table:
    """A plain array, with `pred`."""

    def __init__(self, array):
        self.array, self.at = array, At(array)

    def __getitem__(self, index):
        return self.array[index]


class At:
    def __init__(self, array, index=None):
        self.array, self.index = array, index

    def __getitem__(self, index):
        return At(self.array, index)

    def set(self, value, pred=True):
        new = jnp.where(pred, value, self.array[self.index])
        return Table(self.array.at[self.index].set(new))


def reference(body, n=6):
    def f(xs, first):
        rows = Table(jnp.zeros((8, 2)) if first is None else first)
        for i in range(n):
            rows = body(i + 1, rows, xs[i])
        return jnp.sum(rows.array**3)

    return f


def looped(body, kind, plan):
    def f(xs, first, n=6):
        rows = jnp.zeros((8, 2)) if first is None else first
        how = {"start": 1, "most": 7, "xs": xs, "buffers": True, "checkpoints": plan}
        return jnp.sum(loop(kind, body, rows, n + 1, **how) ** 3)

    return f


def both(f):
    """Gradients without and with a cotangent of the first rows."""
    none = jax.value_and_grad(lambda xs: f(xs, None))
    return lambda xs, first: (none(xs), jax.grad(f, (0, 1))(xs, first))


@ft.cache
def expected(body):
    return both(reference(body))(XS, FIRST)


@pytest.mark.slow
@pytest.mark.parametrize(("body", "way"), in_turn(BODIES, range(len(WAYS))))
def test_gradients(body, way):
    got = jax.jit(both(looped(body, *WAYS[way])))(XS, FIRST)
    assert_close(got, expected(body))


@pytest.mark.slow
def test_in_every_transformation():
    f, wanted = looped(later, "while", None), reference(later)
    grad = jax.grad(lambda xs: f(xs, None))
    want = jax.grad(lambda xs: wanted(xs, None))
    second = lambda grad: (
        lambda xs: (
            jax.jacrev(grad)(xs)[:2, 0],
            jax.jvp(grad, (xs,), (jnp.sin(xs),))[1],
        )
    )
    assert_close(jax.jit(second(grad))(XS), jax.jit(second(want))(XS))
    counts = jnp.asarray([6, 0, 3])
    lanes = jax.vmap(jax.grad(lambda xs, n: f(xs, None, n)), (None, 0))
    each = [jax.grad(reference(later, int(n)))(XS, None) for n in counts]
    assert_close(jax.jit(lanes)(XS, counts), jnp.stack(each))


def writes(body, first):
    """Count the writes in the gradient."""
    gradient = jax.grad(looped(body, "scan", None), 0 if first is None else (0, 1))
    text = jax.jit(gradient).lower(XS, first).as_text()
    return text.count("stablehlo.dynamic_update_slice")


@pytest.mark.exhaustive
def test_no_more_writes_than_needed():
    for body in BODIES:
        assert writes(body, None) < writes(body, FIRST), body.__name__


NARROW = {
    "a narrow counter": (jnp.uint8, lambda i: i),
    "a counter made narrow": (jnp.int32, lambda i: i.astype("uint8")),
    "a fractional counter": (jnp.float32, lambda i: i.astype("int32")),
}


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [Plan(2, 100), "all"], ids=["log", "all"])
@pytest.mark.parametrize("which", NARROW)
def test_counters_that_start_over_write_rows_again(which, checkpoints):
    dtype, row = NARROW[which]

    def f(x, **how):
        loop = loopkit.scan if how else jax.lax.scan

        def step(c, _):
            i, rows, s = c
            rows = rows.at[row(i)].set(jnp.sin(s) * x)
            by = 1.5 if dtype == jnp.float32 else 1
            return (i + jnp.asarray(by, dtype), rows, s + rows[5] / 100 + rows[9] / 10), None

        first = -3.0 if dtype == jnp.float32 else 0
        (_, rows, s), _ = loop(
            step, (jnp.asarray(first, dtype), jnp.ones(300) / 10, x), length=280, **how
        )
        return jnp.sum(rows) + s

    got = jax.jit(jax.grad(lambda x: f(x, buffers=lambda c: c[1], checkpoints=checkpoints)))(0.7)
    assert_close(got, jax.grad(f)(0.7))
