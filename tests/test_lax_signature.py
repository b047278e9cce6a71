"""Every combination of the positional arguments of jax.lax.scan does what it does there."""

import functools as ft
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from derivatives import assert_close
from loopkit._jaxprs import equations

pytestmark = pytest.mark.slow

XS = {
    "array": jnp.linspace(0.1, 0.6, 6),
    "tree": {"a": jnp.linspace(0.1, 0.6, 6), "b": (jnp.ones((6, 2)), None)},
    "none": None,
    "no rows": {"a": jnp.ones(0), "b": (jnp.ones((0, 2)), None)},
    "no steps": None,
}
LENGTHS = {"no rows": 0, "no steps": 0}
UNROLLS = {6: (0, 1, 2, 4, 6, True, False), 0: (0, 1, True)}
FLAGS = (False, True)
TABLE = [
    (xs, length, reverse, unroll, split)
    for xs in XS
    for length in ((None, LENGTHS.get(xs, 6)) if XS[xs] is not None else (LENGTHS.get(xs, 6),))
    for reverse, unroll, split in itertools.product(FLAGS, UNROLLS[LENGTHS.get(xs, 6)], FLAGS)
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
def of_lax(xs, reverse, unroll, split):
    return results(lax.scan, xs, LENGTHS.get(xs, 6), reverse, unroll, split)


@pytest.mark.parametrize(("xs", "length", "reverse", "unroll", "split"), TABLE, ids=str)
def test_scan(xs, length, reverse, unroll, split):
    wanted = of_lax(xs, reverse, unroll, split)
    assert_close(results(loopkit.scan, xs, length, reverse, unroll, split), wanted)


# ---------------------------------------------------------------- all steps at once


def unrolled_by(f, *args):
    """Steps to an iteration of the loops of loopkit in a function."""
    found = equations.all_equations(jax.make_jaxpr(f)(*args))
    return [eqn.params["loop"].unroll for eqn in found if eqn.primitive.name == "loopkit_while"]


@pytest.mark.parametrize("unroll", [0, True, 6, np.int64(0), np.True_])
def test_all_steps_at_once(unroll):
    row = lambda h, x: (jnp.sin(h * x), h)
    scan = lambda h: loopkit.scan(row, h, XS["array"], unroll=unroll)[0]
    fori = lambda h: loopkit.fori_loop(0, 6, lambda i, h: jnp.sin(h + i), h, unroll=unroll)
    assert unrolled_by(scan, 0.3) == unrolled_by(fori, 0.3) == [6]
    for f, wanted in (
        (scan, lambda h: lax.scan(row, h, XS["array"], unroll=0)[0]),
        (fori, lambda h: lax.fori_loop(0, 6, lambda i, h: jnp.sin(h + i), h, unroll=0)),
    ):
        assert_close(jax.value_and_grad(f)(0.3), jax.value_and_grad(wanted)(0.3))
    stored = jax.jit(lambda h: loopkit.scan(row, h, XS["array"], None, False, unroll, True)[0])
    assert "while" not in stored.lower(0.3).as_text()


@pytest.mark.parametrize("unroll", [0, True, 4])
@pytest.mark.parametrize("length", [0, 3])
def test_all_steps_at_once_of_a_loop_of_lax(length, unroll):
    def f(h):
        h, ys = lax.scan(lambda h, _: (jnp.sin(h), h), h, length=length, unroll=unroll)
        return lax.fori_loop(0, length, lambda i, h: h + i * h, h, unroll=unroll) + ys.sum()

    replaced = loopkit.checkpointed(f)
    assert unrolled_by(replaced, 0.3) == [max(1, length)] * 2
    assert_close(jax.value_and_grad(replaced)(0.3), jax.value_and_grad(f)(0.3))


@pytest.mark.parametrize("unroll", [0, True])
def test_all_steps_at_once_need_a_known_number_of_them(unroll):
    def body(i, h):
        return h + i

    if unroll == 0:  # lax takes True for 1 there
        with pytest.raises(ValueError, match="Can only use `unroll` in `fori_loop` if"):
            jax.jit(lambda n: lax.fori_loop(0, n, body, 0.3, unroll=0))(3)
    message = (
        rf"loopkit.fori_loop: `unroll` can be True or 0 only if .* static ints[.] .*Got: {unroll}"
    )
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda n: loopkit.fori_loop(0, n, body, 0.3, unroll=unroll))(3)
    (size,) = jax.export.symbolic_shape("n")
    scan = jax.jit(lambda xs: loopkit.scan(lambda h, x: (h + x, h), 0.0, xs, unroll=unroll)[0])
    with pytest.raises(ValueError, match=r"`length` must be known .* symbolic n and `unroll`"):
        jax.export.export(scan)(jax.ShapeDtypeStruct((size,), float))
