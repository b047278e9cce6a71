"""Gradients of matrices that multiply arrays of several axes, in programs for a single CPU.

The sum over these axes is one over a single axis there: XLA would move the axes of an operand.
"""

import functools as ft
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import loopkit
from derivatives import assert_close, orders
from loopkit._jaxprs.products import MOVED

LAYERS = 3
SETTINGS = {
    "default": {},
    "every residual": {"checkpoints": "all"},
    "a policy": {"checkpoints": jax.checkpoint_policies.dots_saveable},
    "one checkpoint": {"checkpoints": 1},
    "segments": {"checkpoints": loopkit.Plan(2, segment=2, store="residuals")},
}


def inner(h, w):
    """Products in a loop of lax, a branch, and a jitted function."""
    h = lax.scan(lambda h, _: (jnp.tanh(h @ w), None), h, length=2)[0]
    h = lax.cond(h[0, 0, 0] > 0, lambda h: h @ w, lambda h: 0.5 * h @ w, h)
    return h + jax.jit(lambda h: jnp.sin(h @ w))(h)


PRODUCTS = {
    "a matrix": lambda h, w: h @ w,
    "an axis between": lambda h, w: jnp.einsum("bkt,kn->bnt", h.mT, w).mT,
    "axes in another order": lambda h, w: jnp.einsum(
        "btk,ts,kn->sbn", h, h[0] @ h[0].T, w
    ).swapaxes(0, 1),
    "lanes": lambda h, w: (
        jnp.einsum("btgk,gkn->btgn", h.reshape(2, 3, 2, 2), w.reshape(2, 2, 4))
        .reshape(2, 3, 2, 2, 2)
        .sum(3)
        .reshape(2, 3, 4)
    ),
    "both summed": lambda h, w: h * jnp.einsum("btk,btn,kn->k", h, h, w),
    "no matrix": lambda h, w: h * jnp.tensordot(h, h * w[0], 3),
    "inside": inner,
}


def gradient_of(loop, product=PRODUCTS["a matrix"], **how):
    def loss(w, h):
        h, ys = loop(lambda h, w: (jnp.tanh(product(h, w)), (h * h).sum((0, 1))), h, w, **how)
        return (h**2).sum() + jnp.sin(ys).sum()

    return jax.grad(loss, (0, 1))


def python_loop(step, h, ws):
    ys = []
    for w in ws:
        h, y = step(h, w)
        ys.append(y)
    return h, jnp.stack(ys)


def arguments(width=4, rows=(2, 3)):
    w = jnp.sin(jnp.arange(1.0 * LAYERS * width * width) * 1.3).reshape(LAYERS, width, width)
    h = jnp.cos(jnp.arange(1.0 * np.prod(rows) * width) * 0.7).reshape(*rows, width)
    return w / width**0.5, h


@pytest.mark.parametrize("how", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_gradients(product, how):
    got, wanted = (
        jax.jit(gradient_of(f, product, **kw))(*arguments())
        for f, kw in (
            (loopkit.scan, how),
            (python_loop, {}),
        )
    )
    assert_close(got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("second", ["rr", "fr"])
def test_second_order(second):
    w, h = arguments()
    f = lambda loop, w: jnp.concatenate(
        jax.tree.leaves([g.ravel() for g in gradient_of(loop)(w, h)])
    )
    got, wanted = (
        jax.jit(lambda w, loop=loop: orders(ft.partial(f, loop), w, second))(w)
        for loop in (loopkit.scan, python_loop)
    )
    assert_close(got, wanted)


def test_lanes_of_gradients():
    w, h = arguments()
    lanes = jnp.stack([h, 2 * h, -h])
    got, wanted = (
        jax.jit(jax.vmap(gradient_of(loop), (None, 0)))(w, lanes)
        for loop in (loopkit.scan, python_loop)
    )
    assert_close(got, wanted)


def summed_over(program: str) -> set[str]:
    """Return how many axes the products of a lowered program sum over."""
    pairs = re.findall(r"contracting_dims = \[([\d, ]*)\] x", program)
    return {len(pair.split(",")) for pair in pairs}


@pytest.mark.parametrize("how", SETTINGS.values(), ids=SETTINGS)
def test_one_axis_is_summed_over(how):
    program = jax.jit(gradient_of(loopkit.scan, **how)).lower(*arguments(64, (8, 16)))
    assert summed_over(program.as_text()) == {1}


@pytest.mark.parametrize("product", ["lanes", "inside"])
def test_one_axis_is_summed_over_in(product):
    program = jax.jit(gradient_of(loopkit.scan, PRODUCTS[product])).lower(*arguments())
    assert summed_over(program.as_text()) == {1}


def test_the_products_of_lax_are_summed_over_two():
    """So the tests above compare with something else."""
    assert summed_over(jax.jit(gradient_of(lax.scan)).lower(*arguments()).as_text()) == {1, 2}


def test_axes_that_may_be_divided_stay():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    w, h = arguments(rows=(2, 4))
    divided = jax.device_put(h, NamedSharding(mesh, PartitionSpec(None, "x")))
    f = jax.jit(gradient_of(loopkit.scan))
    assert 2 in summed_over(f.lower(w, divided).as_text())
    assert_close(f(w, divided), jax.jit(gradient_of(python_loop))(w, h))


@pytest.mark.parametrize("width", [4, 64])
def test_where_every_residual_is_kept_without_the_scan_of_lax(width):
    """Where the products are large enough to gain by it."""
    w, h = arguments(width, (8, 8))
    program = jax.make_jaxpr(
        lambda w, h: loopkit.scan(lambda h, w: (h @ w, None), h, w, checkpoints="all")
    )(w, h)
    is_large = h.nbytes >= MOVED
    assert ("loopkit_while" in str(program)) == is_large
    assert is_large == (width == 64)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_without_loops(devices, monkeypatch):
    """A value may be divided along any axis if there are several devices."""
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    w, h = arguments(64, (8, 16))

    def f(w, h):
        for x in w:
            h = jnp.tanh(jnp.einsum("btk,kn->btn", h, x))
        return (h**2).sum()

    gradient = jax.jit(jax.grad(loopkit.checkpointed(f, memory="1 MB"), (0, 1)))
    assert summed_over(gradient.lower(w, h).as_text()) == ({1} if devices == 1 else {1, 2})
    assert_close(gradient(w, h), jax.jit(jax.grad(f, (0, 1)))(w, h))
