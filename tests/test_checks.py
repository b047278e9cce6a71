"""Run-time checks of what buffers are read and written at."""

import jax
import jax.numpy as jnp
import pytest

import loopkit
from derivatives import assert_close

XS = jnp.ones((6, 2))


def filled(kind, back, n=5, **how):
    """Rows from the rows `back` before them."""

    def f(xs):
        def body(c, *_):
            i, ys = c
            return i + 1, ys.at[i].set(xs[i] * ys[i - back])

        ys, init = jnp.zeros_like(xs).at[0].set(xs[0]), {"buffers": lambda c: c[1]}
        if kind == "while":
            out = loopkit.while_loop(lambda c: c[0] < n, body, (1, ys), **init, **how)[1]
        elif kind == "fori":
            step = lambda i, ys: body((i, ys))[1]
            out = loopkit.fori_loop(1, n, step, ys, buffers=True, **how)
        else:
            out = loopkit.scan(lambda c, _: (body(c), None), (1, ys), None, n - 1, **init, **how)
            out = out[0][1]
        return jnp.sum(out)

    return f


NAMED = {"while": r"init_val\[1\]", "fori": "init_val", "scan": r"init\[1\]"}


@pytest.mark.parametrize("kind", NAMED)
def test_read_before_written(kind):
    text = f"buffer `{NAMED[kind]}` is read at index 2 in step 1, where nothing has been written"
    late = lambda i: jnp.where(i == 2, 0, 1)

    def f(xs):
        def body(i, ys):
            return ys.at[i].set(xs[i] * ys[i - late(i)])

        ys = jnp.zeros_like(xs).at[0].set(xs[0])
        one = lambda c, *_: (c[0] + 1, body(*c))
        if kind == "while":
            how = {"buffers": lambda c: c[1], "checks": True}
            return loopkit.while_loop(lambda c: c[0] < 5, one, (1, ys), **how)[1]
        if kind == "fori":
            return loopkit.fori_loop(1, 5, body, ys, buffers=True, checks=True)
        how = {"buffers": lambda c: c[1], "checks": True}
        return loopkit.scan(lambda c, _: (one(c), None), (1, ys), None, 4, **how)[0][1]

    for run in (f, jax.jit(f)):
        with pytest.raises(Exception, match=text):
            jax.block_until_ready(run(XS))
    with jax.disable_jit(), pytest.raises(Exception, match=text):
        f(XS)


@pytest.mark.parametrize("kind", NAMED)
def test_what_is_right_raises_nothing(kind):
    f, plain = filled(kind, 1, checks=True), filled(kind, 1)
    assert_close(jax.jit(jax.value_and_grad(f))(XS), jax.value_and_grad(plain)(XS))
    with jax.disable_jit():
        assert_close(jax.value_and_grad(f)(XS), jax.value_and_grad(plain)(XS))


def test_gradients_are_checked_too():
    with pytest.raises(Exception, match="is read at index 1 in step 0"):
        jax.block_until_ready(jax.jit(jax.grad(filled("while", 0, checks=True)))(XS))


def test_written_out_of_bounds():
    text = r"buffer `init_val\[1\]` is written with .set at index 6 in step 5, outside of its shape"
    with pytest.raises(Exception, match=text):
        jax.block_until_ready(jax.jit(filled("while", 1, 9, checks=True))(XS))
    with jax.disable_jit(), pytest.raises(Exception, match=text):
        filled("while", 1, 9, checks=True)(XS)
    assert float(filled("while", 1, 9)(XS)) == 12


def test_read_out_of_bounds():
    def f(mode):
        def body(i, ys):
            return ys.at[0].add(ys.at[i, 1].get(mode=mode))

        return loopkit.fori_loop(0, 8, body, XS, buffers=True, checks=True)

    with pytest.raises(Exception, match=r"is read at index \(6, 1\) in step 6, outside of its"):
        jax.block_until_ready(f(None))
    # Row 0 doubles in the first step; then come 1, five times, and 1 again for rows past the end.
    assert_close(f("clip")[0], jnp.asarray([9.0, 9.0]))


def test_lanes_that_have_stopped_are_not_checked():
    """Nor is a write whose predicate is false."""

    def f(xs, n, back):
        def body(c):
            i, ys = c
            ys = ys.at[i].set(xs[i] * ys[i - back])
            return i + 1, ys.at[i + 9].set(0.0, pred=i < 0)

        ys = jnp.zeros_like(xs).at[0].set(xs[0])
        how = {"buffers": lambda c: c[1], "checks": True}
        return loopkit.while_loop(lambda c: c[0] < n, body, (1, ys), **how)[1]

    lanes = jax.jit(jax.vmap(f, (None, 0, 0)))
    rows = lanes(XS, jnp.asarray([2, 5]), jnp.asarray([1, 1]))
    assert_close(rows.sum((1, 2)), jnp.asarray([4.0, 10.0]))
    with pytest.raises(Exception, match="is read at index 1 in step 0"):
        jax.block_until_ready(lanes(XS, jnp.asarray([2, 5]), jnp.asarray([1, 0])))


def test_the_environment_variable(monkeypatch):
    monkeypatch.setenv("LOOPKIT_CHECKS", "1")
    with pytest.raises(Exception, match="is read at index 1 in step 0"):
        jax.block_until_ready(filled("fori", 0)(XS))
    assert float(filled("fori", 0, checks=False)(XS)) == 2
    monkeypatch.setenv("LOOPKIT_CHECKS", "0")
    assert float(filled("fori", 0)(XS)) == 2


def test_bad_argument():
    with pytest.raises(TypeError, match=r"while_loop: `checks` must be a bool or None"):
        filled("while", 1, checks="yes")(XS)
