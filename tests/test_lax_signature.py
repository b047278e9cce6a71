"""Every combination of the positional arguments of jax.lax.scan does what it does there."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import loopkit
from derivatives import assert_close

XS = {
    "array": jnp.linspace(0.1, 0.6, 6),
    "tree": {"a": jnp.linspace(0.1, 0.6, 6), "b": (jnp.ones((6, 2)), None)},
    "none": None,
}
LENGTHS = (None, 6)
TABLE = [
    case
    for case in itertools.product(XS, LENGTHS, (False, True), (1, 2, 4, 6, True, False))
    if case[0] != "none" or case[1] is not None
]


def step(carry, x):
    total = sum((jnp.sum(leaf) for leaf in jax.tree.leaves(x)), jnp.zeros(()))
    new = jnp.sin(carry["h"] * 1.1 + total)
    return {"h": new, "count": carry["count"] + 1}, (new * carry["h"], x)


@pytest.mark.parametrize(("xs", "length", "reverse", "unroll"), TABLE, ids=str)
def test_scan(xs, length, reverse, unroll):
    def run(scan):
        def f(h, xs):
            carry, ys = scan(step, {"h": h, "count": 0}, xs, length, reverse, unroll)
            return carry, ys

        def loss(h, xs):
            carry, (y, _) = f(h, xs)
            return carry["h"] + jnp.sum(y**2)

        at = 0.4, XS[xs]
        value = f(*at)
        tangent = jax.jvp(loss, at, at)[1]
        return value, tangent, jax.grad(loss, (0, 1))(*at)

    assert_close(jax.jit(lambda: run(loopkit.scan))(), jax.jit(lambda: run(lax.scan))())
