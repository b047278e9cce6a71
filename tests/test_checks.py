"""Run-time checks of what buffers are read and written at."""

import jax
import jax.numpy as jnp
import pytest

import loopkit
from derivatives import assert_close
from kinds import KINDS, loop
from loopkit._buffers.run_time_checks import first_written

XS = jnp.ones((6, 2))


def filled(kind, back, n=5, **how):
    """Row i from the one `back(i)` before it."""

    def f(xs):
        body = lambda i, ys: ys.at[i].set(xs[i] * ys[i - back(i)])
        ys = jnp.zeros_like(xs).at[0].set(xs[0])
        return jnp.sum(loop(kind, body, ys, n, start=1, buffers=True, **how))

    return f


NAMED = {"fori": "init_val", "scan": r"init\[1\]", "until": r"init\[1\]", "while": r"init_val\[1\]"}
SAME, LAST = lambda i: 0, lambda i: 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_read_before_written(kind):
    text = f"Buffer: `{NAMED[kind]}` must be written before.*Got: a read at index 2 in step 1"
    f = filled(kind, lambda i: jnp.where(i == 2, 0, 1), debug="bounds")
    for run in (f, jax.jit(f)):
        with pytest.raises(Exception, match=text):
            jax.block_until_ready(run(XS))
    with jax.disable_jit(), pytest.raises(Exception, match=text):
        f(XS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_right_raises_nothing(kind):
    f, plain = filled(kind, LAST, debug="bounds"), filled(kind, LAST)
    assert_close(jax.jit(jax.value_and_grad(f))(XS), jax.value_and_grad(plain)(XS))
    with jax.disable_jit():
        assert_close(jax.value_and_grad(f)(XS), jax.value_and_grad(plain)(XS))


@pytest.mark.slow
def test_gradients_are_checked_too():
    with pytest.raises(Exception, match="Got: a read at index 1 in step 0"):
        jax.block_until_ready(jax.jit(jax.grad(filled("while", SAME, debug="bounds")))(XS))


@pytest.mark.slow
def test_written_out_of_bounds():
    text = r"Buffer: `init_val\[1\]` must be written with .set within .*Got: index 6 in step 5"
    with pytest.raises(Exception, match=text):
        jax.block_until_ready(jax.jit(filled("while", LAST, 9, debug="bounds"))(XS))
    with jax.disable_jit(), pytest.raises(Exception, match=text):
        filled("while", LAST, 9, debug="bounds")(XS)
    assert float(filled("while", LAST, 9)(XS)) == 12


ROWS_TWICE = {
    "set": lambda b, i: b.at[i].set(1.0),
    "max": lambda b, i: b.at[i].max(1.0),
    "multiply": lambda b, i: b.at[i].multiply(2.0, pred=jnp.asarray([True, False])),
    "apply": lambda b, i: b.at[i].apply(jnp.cos),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS_TWICE)
@pytest.mark.parametrize(
    ("last", "text"), [(0, "Got: a read at index 2 in step 0"), (7, "written with .{}.*index 7")]
)
def test_index_arrays_that_may_name_a_row_twice(name, last, text):
    """They write to what they name alone, and are checked."""

    def body(i, both):
        b, total = both
        b = ROWS_TWICE[name](b, jnp.stack([i + last, i]))
        return b, total + b[2]

    how = {"buffers": (True, False), "debug": "bounds"}
    run = lambda: loopkit.fori_loop(0, 2, body, (jnp.zeros(5), 0.0), **how)
    with pytest.raises(Exception, match=text.format(name)):
        jax.block_until_ready(run())


@pytest.mark.slow
def test_what_an_initial_buffer_counts_as():
    """Entries count as written if the row is not all zeros."""
    rows = jnp.zeros((3, 2, 2)).at[1, 0, 1].set(-2.0).at[2].set(jnp.nan)
    assert first_written(rows).tolist() == [[[yes] * 2] * 2 for yes in (False, True, True)]
    assert first_written(jnp.asarray([0, 3])).tolist() == [False, True]
    assert [bool(first_written(jnp.asarray(n))) for n in (0, 2)] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(), (3,), (3, 2)])
def test_read_as_a_whole_before_anything_is_written(shape):
    def f(start):
        body = lambda i, b: b.at[...].set(b[...] * 2)
        return loopkit.fori_loop(0, 3, body, start, buffers=True, debug="bounds")

    assert f(jnp.ones(shape)).ravel()[0] == 8
    at = "0" if shape else r"\(\)"
    text = f"must be written before it is read.*Got: a read at index {at} in step 0"
    with pytest.raises(Exception, match=text):
        jax.block_until_ready(f(jnp.zeros(shape)))


@pytest.mark.slow
def test_read_out_of_bounds():
    def ends(read):
        body = lambda i, ys: ys.at[0].add(read(ys, i))
        return loopkit.fori_loop(0, 8, body, XS, buffers=True, debug="bounds")

    for read in (lambda ys, i: ys[i], lambda ys, i: ys[jnp.stack([i - 1, i])].sum(0)):
        with pytest.raises(Exception, match=r"must be read within its shape .*index 6 in step 6"):
            jax.block_until_ready(ends(read))

    def f(mode):
        def body(i, ys):
            return ys.at[0].add(ys.at[i, 1].get(mode=mode))

        return loopkit.fori_loop(0, 8, body, XS, buffers=True, debug="bounds")

    with pytest.raises(Exception, match=r"read within its shape .*index \(6, 1\) in step 6"):
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
        how = {"buffers": lambda c: c[1], "debug": "bounds"}
        return loopkit.while_loop(lambda c: c[0] < n, body, (1, ys), **how)[1]

    lanes = jax.jit(jax.vmap(f, (None, 0, 0)))
    rows = lanes(XS, jnp.asarray([2, 5]), jnp.asarray([1, 1]))
    assert_close(rows.sum((1, 2)), jnp.asarray([4.0, 10.0]))
    with pytest.raises(Exception, match="Got: a read at index 1 in step 0"):
        jax.block_until_ready(lanes(XS, jnp.asarray([2, 5]), jnp.asarray([1, 0])))


def test_the_environment_variable(monkeypatch):
    monkeypatch.setenv("LOOPKIT_DEBUG", "bounds")
    with pytest.raises(Exception, match="Got: a read at index 1 in step 0"):
        jax.block_until_ready(filled("fori", SAME)(XS))
    assert float(filled("fori", SAME, debug=())(XS)) == 2
    monkeypatch.setenv("LOOPKIT_DEBUG", "finite")
    assert float(filled("fori", SAME)(XS)) == 2
    step = lambda x, _: (x / 0.0, None)
    with pytest.raises(Exception, match="in step 0"):
        jax.block_until_ready(loopkit.scan(step, 1.0, length=2))
    monkeypatch.setenv("LOOPKIT_DEBUG", "finite, bounds")
    with pytest.raises(Exception, match="Got: a read at index 1 in step 0"):
        jax.block_until_ready(filled("fori", SAME)(XS))
    monkeypatch.setenv("LOOPKIT_DEBUG", "")
    assert float(filled("fori", SAME)(XS)) == 2
    monkeypatch.setenv("LOOPKIT_DEBUG", "NaN")
    message = r"fori_loop: `debug` can be None only if LOOPKIT_DEBUG is empty, .*[.] .*Got: 'NaN'"
    with pytest.raises(ValueError, match=message):
        filled("fori", SAME)(XS)


@pytest.mark.slow
def test_both():
    with pytest.raises(Exception, match="Got: a read at index 1 in step 0"):
        jax.block_until_ready(filled("while", SAME, debug=("finite", "bounds"))(XS))


def test_bad_argument():
    for debug in (True, 3, ["bounds", None]):
        with pytest.raises(TypeError, match=r'`debug` must be None or "finite" or "bounds", or a'):
            filled("while", LAST, debug=debug)(XS)
    with pytest.raises(ValueError, match=r'`debug` must be None or "finite" or "bounds"'):
        filled("while", LAST, debug="all")(XS)
    with pytest.raises(
        ValueError, match=r'checkpointed: `debug` must be None or "finite"[.] .*Got:'
    ):
        loopkit.checkpointed(jnp.sin, debug="bounds")
