"""`debug="finite"` names the leaf that is not finite, the step, and the body that made it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from derivatives import assert_close
from test_finite import ON, XS, fails, root


def test_every_leaf_that_fails_is_named():
    def step(carry, x):
        return {"a": carry["a"] / x, "b": [carry["b"][0] * 0 / x], "n": carry["n"] + 1}, carry["a"]

    init = {"a": jnp.ones(3), "b": [1.0], "n": 0}
    text = r"value of `init\['a'\]`, and `init\['b'\]\[0\]` must stay finite[.] .*Got: inf at index"
    fails(text, lambda xs: loopkit.scan(step, init, xs, **ON), XS)


@pytest.mark.exhaustive
def test_the_body_is_named_and_where_it_is():
    line = root.__code__.co_firstlineno
    text = (
        r"Run that step alone, with jax.debug_nans or in a debugger: `root\(\*loopkit.replay\(\)\)`"
    )
    text += (
        rf". Steps are counted from 0. Got: .*in `f`, which is `root` at .*test_finite.py:{line}\."
    )
    run = lambda xs: loopkit.scan(root, -1.0, xs, **ON)[0]
    replayed = fails(text, run, XS)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="sqrt"):
        root(*replayed)
    unnamed = lambda xs: loopkit.scan(lambda h, x: (h / x, None), 1.0, xs, **ON)[0]
    fails(
        r"Run .*: `f\(\*loopkit.replay\(\)\)`. .* Got: .* in `f` at .*test_finite_leaves.py:\d+",
        unnamed,
        XS,
    )
    f = jax.grad(lambda h: loopkit.scan(root, h, XS, **ON)[0])
    fails(r"debugger: `jax.vjp` of `root` at `loopkit.replay\(\)`", f, 1.0)
    f = lambda h: jax.jvp(lambda h: loopkit.scan(root, h, XS, **ON)[0], (h,), (h,))
    fails(r"debugger: `jax.jvp` of `root` at `loopkit.replay\(\)`", f, 1.0)


def test_a_y():
    f = lambda xs: loopkit.scan(lambda h, x: (h, {"y": 1 / x}), 1.0, xs, **ON)
    fails(r"the value of `ys\['y'\]` must stay finite[.] .*Got: inf in step 2", f, XS)
    # A cotangent from outside is found where it enters.
    f = jax.grad(lambda h: jnp.log(loopkit.scan(lambda h, x: (h, h * x), h, XS, **ON)[1]).sum())
    fails(r"the cotangent of `ys` must stay finite[.] .*Got: inf in step 2, going backward", f, 1.0)


SOME = [
    {"every": 2},
    {"every": 2, "reduce": "mean"},
    {"reduce": "sum"},
    {"reduce": "last"},
    {"out_axes": None},
]


@pytest.mark.parametrize("how", SOME, ids=str)
def test_ys_of_which_some_are_kept(how):
    f = lambda xs: loopkit.scan(lambda h, x: (h * 2, 1 / x), 1.0, xs, **how, **ON)
    xs = jnp.array([1.0, 1.0, 1.0, 0.0])
    replayed = fails(r"the value of `ys`.* must stay finite[.] .*Got: inf.* in step 3", f, xs)
    assert_close(replayed, (jnp.asarray(8.0), jnp.asarray(0.0)))


@pytest.mark.exhaustive
def test_what_is_closed_over():
    def loss(w):
        step = lambda h, x: (h + jnp.where(x > 1, jnp.sqrt(w * x), 0.0).sum(), None)
        return loopkit.scan(step, 0.0, XS, **ON)[0]

    kind = jnp.zeros(3).dtype
    text = (
        rf"cotangent of what `f` closes over \({kind}\[3\]\) must stay finite[.] .* Got: .* step 4"
    )
    fails(text, jax.grad(loss), jnp.zeros(3))
    rows = lambda w: loopkit.fori_loop(0, 4, lambda i, h: h + jnp.sqrt(w[i]), 0.0, **ON)
    text = r"cotangent of what `body_fun` closes over .*, in a row that is read, .* in step 2"
    fails(text, jax.grad(rows), jnp.array([1.0, 2.0, 0.0, 3.0]))


@pytest.mark.slow
def test_a_cotangent_of_xs():
    f = jax.grad(
        lambda xs: loopkit.scan(lambda h, x: (h + jnp.sqrt(x["a"]), None), 0.0, {"a": xs}, **ON)[0]
    )
    fails(
        r"the cotangent of `xs\['a'\]` must stay finite[.] .*Got: inf in step 2, going backward",
        f,
        XS,
    )


def test_leaves_of_all_kinds():
    """Integers, keys, static leaves, empty ones; a complex number fails."""

    def step(carry, x):
        key = jax.random.split(carry["key"])[0]
        return carry | {"n": carry["n"] + 1, "key": key, "z": carry["z"] / x.astype(complex)}, None

    init = {"n": 0, "key": jax.random.key(3), "f": jnp.sin, "none": jnp.zeros((0, 2)), "z": 1j}
    replayed = fails(
        r"`init\['z'\]` must stay finite[.] .*Got: nan in step 2",
        lambda xs: loopkit.scan(step, init, xs, **ON)[0]["z"],
        XS,
    )
    carry, x = replayed
    assert carry["f"] is jnp.sin
    assert int(carry["n"]) == 2
    after = step(carry, x)[0]
    assert np.isnan(after["z"])
    key = jax.random.split(jax.random.split(jax.random.key(3))[0])[0]
    assert_close(jax.random.key_data(carry["key"]), jax.random.key_data(key))


@pytest.mark.slow
def test_buffers():
    """The rows that a step writes, and the cotangents of those that it reads."""
    f = lambda b: loopkit.fori_loop(
        0, 5, lambda i, b: b.at[i].set(1 / (3.0 - i)), b, buffers=True, **ON
    )
    i, buffer = fails(
        "the value of `init_val`, in a row that is written, must .* in step 3", f, jnp.zeros(6)
    )
    assert int(i) == 3
    assert isinstance(buffer, jax.ShapeDtypeStruct)
    assert buffer.shape == (6,)
    body = lambda i, b: b.at[i + 1].set(jnp.sqrt(b[i] * (3.0 - i)))
    g = lambda x: loopkit.fori_loop(0, 4, body, jnp.zeros(6).at[0].set(x), buffers=True, **ON)[4]
    fails("the cotangent of `init_val`, in a row that is read, must .* in step 3", jax.grad(g), 1.0)
    array = loopkit.TensorArray.empty(4, jnp.float32(0))
    appended = lambda n: loopkit.fori_loop(0, n, lambda i, c: c.append(1 / (2.0 - i)), array, **ON)
    fails(
        r"`init_val.elements\[0\]`, in a row that is written, must .* in step 2",
        lambda: appended(4),
    )
    assert_close(appended(2).stack()[:2], jnp.float32([0.5, 1.0]))
