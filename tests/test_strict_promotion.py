"""Loops compute the same whether JAX promotes types and ranks by itself or refuses to.

The programs here cast what they mix, as strict promotion asks. The engine has to do so too: beside
what a program computes, it counts steps, lanes, slots and rows.
"""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from turns import in_turn

XS = np.array([0.2, 1.1, 0.6, 1.9, 0.4])
"""The first value of each lane, and its number of steps."""


def limit(x):
    return jnp.int32(1 + 3 * x)


def rows(x):
    return jnp.cos(x * jnp.arange(1.0, 8.0, dtype=x.dtype))


def as_while(x, step=jnp.sin, **how):
    body = lambda c: (c[0] + 1, step(c[1]) * x)
    return loopkit.while_loop(lambda c: c[0] < limit(x), body, (jnp.int32(0), x), **how)[1]


def as_scan(x, **how):
    """Its step has a weak counter, which is an int64 where there are such."""
    step = lambda c, row: ((c[0] + 1, jnp.sin(c[1] + row)), c[1] * row)
    (_, last), ys, *_ = loopkit.scan(step, (0, x), rows(x), **how)
    return last + jnp.sum(ys)


def until(x, **how):
    how = {"until": lambda c, _: c[0] > limit(x), "return_info": True, **how}
    step = lambda c, row: ((c[0] + 1, jnp.sin(c[1] + row)), c[1] * row)
    (_, last), ys, info = loopkit.scan(step, (jnp.int32(0), x), rows(x), **how)
    return last + jnp.sum(ys) + info.steps.astype(x.dtype)


def as_fori(x, **how):
    return loopkit.fori_loop(0, limit(x), lambda i, c: jnp.sin(c) * x + rows(x)[i], x, **how)


def nested(x, inner=None, **how):
    """Lanes stop apart, in both loops."""
    return as_while(x, lambda v: as_while(1 + jnp.sin(v), **inner or {}) / 2, **how)


def buffers(x, write=None, **how):
    """Rows are written and read in place, by counters of two types."""

    def step(c):
        i, k, b = c
        return i + 1, k + 1, b.at[i % 4].set(jnp.sin(b[k - 1]) * x + b[k, None].sum())

    init = jnp.int32(0), jnp.arange(1)[0], jnp.full(6, x)
    how = {"buffers": lambda c: c[2], **how}
    return jnp.sum(loopkit.while_loop(lambda c: c[0] < limit(x), step, init, **how)[2])


def tensor_array(x, **how):
    """Appended to, written and read from its end, by indices of several types."""

    def step(c):
        i, a = c
        last = a.read(jnp.arange(-1, 0)[0])
        return i + 1, a.append(jnp.sin(last) * x).write(jnp.int8(i // 2), last + x)

    start = loopkit.TensorArray.empty(8, x).append(x)
    loop = loopkit.while_loop(lambda c: c[0] < limit(x), step, (jnp.int32(0), start), **how)
    return jnp.sum(loop[1].stack())


def ragged(x, **how):
    step = lambda c, row: (jnp.sin(c * row) + x, c)
    last, ys = loopkit.ragged_scan(step, x, [rows(x)[:2], rows(x), rows(x)[3:]], batch=2, **how)
    return jnp.sum(last) + sum(map(jnp.sum, ys))


def unbounded(x, **how):
    how = {"until": lambda c, _: c[0] > limit(x), "segment": 2, **how}
    step = lambda c, _: ((c[0] + 1, jnp.sin(c[1]) * x), c[1])
    (_, last), ys = loopkit.unbounded_scan(step, (jnp.int32(0), x), **how)
    return last + jnp.sum(ys)


def blocked(x, **how):
    batch = jax.vmap(lambda v: as_while(v, **how))
    return jnp.sum(loopkit.blocked(batch, block=2)(rows(x)))


def of_lax(x, **how):
    """A loop that is lax's own, in a scan of lax, both replaced."""

    def step(c, row):
        body = lambda s: (s[0] + 1, jnp.sin(s[1]) * row)
        return lax.while_loop(lambda s: s[0] < limit(x), body, (jnp.int32(0), c))[1], c

    return loopkit.checkpointed(lambda x: jnp.sum(lax.scan(step, x, rows(x))[1]), **how)(x)


BOUND = {"max_steps": 9}
PROGRAMS = {
    "while_loop": (as_while, {}),
    "while_loop of some carries": (as_while, {"checkpoints": 3}),
    "while_loop of all carries": (as_while, {"checkpoints": 9, **BOUND}),
    "while_loop of all residuals": (as_while, {"checkpoints": "all", **BOUND}),
    "while_loop unrolled": (as_while, {"unroll": 3, **BOUND}),
    "fori_loop": (as_fori, {}),
    "scan": (as_scan, {"checkpoints": 2}),
    "scan of all residuals": (as_scan, {"checkpoints": "all"}),
    "scan in blocks of steps": (as_scan, {"truncate": 3}),
    "scan of some ys": (as_scan, {"every": 3}),
    "scan of means": (as_scan, {"every": 3, "reduce": "mean"}),
    "until": (until, {}),
    "until of all residuals": (until, {"checkpoints": "all"}),
    "nested": (nested, {}),
    "nested, of all residuals": (nested, {"checkpoints": "all", "inner": BOUND, **BOUND}),
    "flattened": (nested, {"lanes": "flatten"}),
    "flattened, with a bound": (nested, {"lanes": "flatten", "inner": BOUND, **BOUND}),
    "narrowing": (as_while, {"lanes": (3, 2)}),
    "narrowing, with a bound": (as_while, {"lanes": (3, 2), **BOUND}),
    "narrowing until": (until, {"lanes": (3, 1)}),
    "buffers": (buffers, {}),
    "buffers, of some carries": (buffers, {"checkpoints": 2}),
    "buffers, checked": (buffers, {"debug": "bounds", "checkpoints": "all", **BOUND}),
    "TensorArray": (tensor_array, {}),
    "TensorArray, with a bound": (tensor_array, {"checkpoints": "all", **BOUND}),
    "ragged_scan": (ragged, {}),
    "unbounded_scan": (unbounded, {}),
    "blocked": (blocked, {}),
    "debug": (as_while, {"debug": "finite", **BOUND}),
    "debug of a scan": (until, {"debug": "finite"}),
    "checkpointed": (of_lax, {}),
    "checkpointed and flattened": (of_lax, {"lanes": "flatten"}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "bits"), in_turn(PROGRAMS, [32, 64]))
def test_as_under_standard_promotion(name, bits):
    """To the last bit, of one lane, of several that stop apart, and of their sum."""
    function, how = PROGRAMS[name]
    f = ft.partial(function, **how)
    lanes, total = jax.vmap(jax.value_and_grad(f)), lambda xs: jnp.sum(jax.vmap(f)(xs))
    every = lambda xs: (jax.value_and_grad(f)(xs[0]), lanes(xs), jax.grad(total)(xs))
    every = every if function is unbounded else jax.jit(every)
    with jax.enable_x64(bits == 64):
        xs = jnp.asarray(XS)
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            found = jax.tree.leaves(every(xs))
        with jax.numpy_dtype_promotion("standard"):
            wanted = jax.tree.leaves(every(xs))
    assert {v.dtype.name for v in (*found, *wanted)} == {f"float{bits}"}
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got, want)
        assert np.isfinite(got).all()
        assert np.any(got)
