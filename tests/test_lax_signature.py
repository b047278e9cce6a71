"""Every combination of the positional arguments of jax.lax.scan does what it does there."""

import functools as ft
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import loopkit
from derivatives import assert_close

pytestmark = pytest.mark.slow

XS = {
    "array": jnp.linspace(0.1, 0.6, 6),
    "tree": {"a": jnp.linspace(0.1, 0.6, 6), "b": (jnp.ones((6, 2)), None)},
    "none": None,
}
TABLE = [
    case
    for case in itertools.product(
        XS, (None, 6), (False, True), (1, 2, 4, 6, True, False), (False, True)
    )
    if case[0] != "none" or case[1] is not None
]


def step(carry, x):
    total = sum((jnp.sum(leaf) for leaf in jax.tree.leaves(x)), jnp.zeros(()))
    new = jnp.sin(carry["h"] * 1.1 + total)
    return {"h": new, "count": carry["count"] + 1}, (new * carry["h"], x)


def results(scan, xs, *settings):
    """Value, tangent and gradient."""

    def f(h, xs):
        return scan(step, {"h": h, "count": 0}, xs, *settings)

    def loss(h, xs):
        carry, (y, _) = f(h, xs)
        return carry["h"] + jnp.sum(y**2)

    at = 0.4, XS[xs]

    def run():
        return f(*at), jax.jvp(loss, at, at)[1], jax.grad(loss, (0, 1))(*at)

    return jax.jit(run)()


@ft.cache
def of_lax(xs, reverse):
    """Neither unrolling nor splitting changes them."""
    return results(lax.scan, xs, 6, reverse)


@pytest.mark.parametrize(("xs", "length", "reverse", "unroll", "split"), TABLE, ids=str)
def test_scan(xs, length, reverse, unroll, split):
    assert_close(results(loopkit.scan, xs, length, reverse, unroll, split), of_lax(xs, reverse))
