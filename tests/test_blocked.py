"""Batches in blocks: how often `fn` is traced, how large blocks are, and what they report."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from derivatives import assert_close
from loopkit._extras import blocked as _blocked

LARGE = np.linspace(0.1, 0.9, 10_000)  # more than a cache keeps alive for a function


class Calls:
    """Counts where no key of a function sees it."""

    count = 0


def counted(calls):
    large = jnp.asarray(LARGE)

    def fn(x):
        calls.count += 1
        return jnp.sin(x) * large[7]

    return fn


# ---------------------------------------------------------------- traced once


@pytest.mark.slow
@pytest.mark.parametrize("block", [None, 1000, 999])
@pytest.mark.parametrize("transform", ["value", "grad"])
def test_new_arrays_do_not_trace(block, transform, monkeypatch):
    monkeypatch.setattr(_blocked, "cache_bytes", lambda: 1 << 16)
    calls = Calls()
    fn = counted(calls)

    def run(x):
        in_blocks = loopkit.blocked(fn, block=block)
        if transform == "value":
            return in_blocks(x)
        return jax.grad(lambda x: in_blocks(x).sum())(x)

    x = jnp.ones((20_000, 2))
    run(x)
    traced = calls.count
    assert 1 <= traced <= 2  # blocks, and the bytes of a row or the rows left over
    for k in range(3):
        got = run(x * k)
    wanted = (jnp.sin if transform == "value" else jnp.cos)(x * 2) * LARGE[7]
    assert_close(got, wanted)
    assert calls.count == traced


def test_new_arrays_do_not_trace_what_only_the_last_block_returns():
    calls = Calls()
    fn = counted(calls)
    in_blocks = loopkit.blocked(lambda x: (fn(x), fn(x).sum()), block=1000, out_axes=(0, None))
    x = jnp.ones((20_000, 2))
    in_blocks(x)
    traced = calls.count
    for k in range(3):
        rows, last = in_blocks(x * k)
    assert calls.count == traced
    assert_close((rows, last), (jnp.sin(x * 2) * LARGE[7], jnp.sin(2.0) * LARGE[7] * 2000))


def test_a_scan_that_returns_a_last_y_is_traced_once():
    calls = Calls()
    fn = counted(calls)
    step = lambda h, x: (h + x, fn(h))
    loop = lambda h: loopkit.scan(step, h, jnp.arange(5.0), out_axes=None)
    loop(jnp.asarray(0.0))
    traced = calls.count
    assert_close(loop(jnp.asarray(1.0)), (11.0, jnp.sin(7.0) * LARGE[7]))
    assert calls.count == traced


def test_a_fori_loop_over_a_large_array_is_traced_once():
    calls = Calls()
    fn = counted(calls)
    body = lambda i, x: fn(x) + i
    run = lambda x: loopkit.fori_loop(0, 1, body, x)
    run(jnp.asarray(0.0))
    traced = calls.count
    assert_close(run(jnp.asarray(1.0)), jnp.sin(1.0) * LARGE[7])
    assert calls.count == traced


@pytest.mark.slow
def test_other_values_closed_over_are_not_mixed_up():
    x = jnp.arange(6.0)

    def loss(w, v):
        of = lambda w: loopkit.blocked(lambda x: x * w + w, block=4)(x)
        return (of(w) * of(v)).sum()

    wanted = lambda w, v: ((x * w + w) * (x * v + v)).sum()
    for w in (0.5, 2.0):
        assert_close(jax.grad(loss, (0, 1))(w, 3.0), jax.grad(wanted, (0, 1))(w, 3.0))
        assert_close(loss(w, 3.0), wanted(w, 3.0))


# ---------------------------------------------------------------- how many rows


def halves(x):
    return lax.scan(lambda h, x: (h * 0.5 + x, h), x[:, 0], x.T)[1].T


@jax.custom_jvp
def with_jvp(x):
    return halves(x)


with_jvp.defjvp(lambda p, t: (halves(*p), halves(*t)))


@jax.custom_vjp
def with_vjp(x):
    return halves(x)


with_vjp.defvjp(lambda x: (halves(x), None), lambda _, ct: (ct,))


def solved(x):
    times = lambda y: y * 2.0
    solve = lambda _, b: halves(b)
    return lax.custom_linear_solve(times, x, solve, solve)


CALLS = {
    "jit": jax.jit(halves),
    "checkpoint": jax.checkpoint(halves),
    "cond": lambda x: lax.cond(x[0, 0] > 0, halves, lambda x: x, x),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "custom_linear_solve": solved,
    "checkpointed": loopkit.checkpointed(halves),
    "all of them": jax.checkpoint(lambda x: lax.cond(x[0, 0] > 0, with_jvp, jax.jit(solved), x)),
}


@pytest.mark.parametrize("call", CALLS)
def test_loops_count_wherever_they_are(call, monkeypatch):
    monkeypatch.setattr(_blocked, "cache_bytes", lambda: 1 << 15)
    blocks = []

    def fn(of):
        def noted(x):
            blocks.append(x.shape[0])
            return of(x)

        return noted

    x = jnp.ones((1000, 10))
    got = loopkit.blocked(fn(CALLS[call]))(x)
    assert_close(got, CALLS[call](x))
    loopkit.blocked(fn(halves))(x)
    loopkit.blocked(fn(lambda x: x * 2))(x)
    whole, rows, _, directly, _, without = blocks[:6]
    assert whole == 1000
    assert rows == directly < without


# ---------------------------------------------------------------- as a decorator


def test_decorates_with_arguments():
    @loopkit.blocked(block=3, in_axes=1, out_axes=1)
    def doubled(x):
        """Twice as much."""
        shapes.append(x.shape)
        return x * 2

    @loopkit.blocked
    def halved(x):
        return x / 2

    shapes = []
    x = jnp.arange(12.0).reshape(2, 6)
    assert_close(doubled(x), x * 2)
    assert set(shapes) == {(2, 3)}
    assert (doubled.__name__, doubled.__doc__) == ("doubled", "Twice as much.")
    assert_close(halved(x), x / 2)


def test_a_decorator_checks_its_arguments():
    with pytest.raises(ValueError, match=r"loopkit\.blocked: `block` must be an int >= 1"):
        loopkit.blocked(block=0)
    with pytest.raises(TypeError, match=r"loopkit\.blocked: `fn` must be a function[.] .*Got: 3"):
        loopkit.blocked(3)


# ---------------------------------------------------------------- a row for each row


@pytest.mark.every_case
@pytest.mark.parametrize("block", [None, 3, 4, 8, 20])
@pytest.mark.parametrize("fn", [jnp.sum, lambda x: x[:1], lambda x: {"a": [x, x.sum()]}])
def test_results_have_a_row_for_each_row(fn, block):
    message = r"loopkit\.blocked: (`fn`\S*'\]\[1\]|`fn`|`out_axes\b.*) must "
    with pytest.raises(ValueError, match=message):
        loopkit.blocked(fn, block=block)(jnp.ones(8))


@pytest.mark.parametrize("block", [None, 3, 8])
def test_results_without_rows_may_have_any_shape(block):
    f = loopkit.blocked(lambda x: (x * 2, x[-1], 1.0), block=block, out_axes=(0, None, None))
    x = jnp.arange(8.0)
    assert_close(f(x), (x * 2, x[-1], 1.0))


# ---------------------------------------------------------------- progress


@pytest.mark.slow
@pytest.mark.parametrize(("block", "count"), [(3, 4), (5, 2), (4, 3), (10, 1)])
def test_reports_once_a_block(block, count):
    seen = []

    def fn(x):
        jax.debug.callback(lambda first: seen.append(int(first)), x[0])
        return loopkit.scan(lambda h, _: (jnp.sin(h), None), x, length=3)[0]

    in_blocks = loopkit.blocked(fn, block=block)
    x = jnp.arange(10.0)
    starts = list(range(0, 10, block))
    assert len(starts) == count
    for run in (
        in_blocks,
        jax.jit(in_blocks),
        jax.value_and_grad(lambda x: in_blocks(x).sum()),
        jax.jit(jax.value_and_grad(lambda x: in_blocks(x).sum())),
    ):
        seen.clear()
        jax.block_until_ready(run(x))
        jax.effects_barrier()
        assert sorted(seen) == starts
