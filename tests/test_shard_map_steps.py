"""Steps on several devices: what differs between them, and what is the same on all."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import loopkit
from derivatives import assert_close
from loopkit import _jax
from test_shard_map import MESH, NS, XS, on_each_device, one_by_one


def on_each(f):
    """f of the part of an array that a device has."""
    return jax.jit(jax.shard_map(f, mesh=MESH, in_specs=P("d"), out_specs=P("d")))


@pytest.mark.slow
def test_a_loop_of_lax_that_devices_leave_at_different_steps():
    """Its carry need not vary where its predicate does."""

    def f(loops, n, x, w):
        body = lambda c: (c[0] + 1, jnp.sin(w * c[1]) + w * c[2], c[2])
        return loops.while_loop(lambda c: c[0] < n, body, (0, x, 0.5 * w))[1]

    replaced = loopkit.checkpointed(ft.partial(f, lax))
    got = jax.jit(on_each_device(jax.value_and_grad(replaced, 1)))(NS, XS, 0.8)

    def wanted(n, x, w):
        for _ in range(n):
            x = jnp.sin(w * x) + 0.5 * w * w
        return jnp.asarray(x)

    assert_close(got, one_by_one(jax.value_and_grad(wanted, 1)))


def listed(x, room):
    """All that a loop came by, in a list."""
    start = x, loopkit.TensorArray.empty(room, jnp.zeros(()))
    body = lambda _, c: (jnp.sin(c[0]), c[1].append(c[0]))
    return jnp.sum(loopkit.fori_loop(0, 3, body, start)[1].stack())


def raising(x, bound):
    return loopkit.while_loop(lambda v: v < 3, lambda v: v * 1.5, x, max_steps=bound, throw=True)


@pytest.mark.slow
@pytest.mark.parametrize("transform", [lambda f: f, jax.grad], ids=["value", "gradient"])
@pytest.mark.parametrize(("f", "enough", "says"), [(listed, 3, "capacity"), (raising, 9, "max_st")])
def test_errors_at_run_time(f, enough, says, transform):
    """The function that raises is the same on all devices; the values that it tests are not."""
    xs = jnp.array([0.3, 0.5, 0.7, 0.9])
    local = lambda bound: lambda x: transform(lambda x: f(x, bound))(x[0])[None]
    each = [transform(lambda x: f(x, enough))(x) for x in xs]
    assert_close(on_each(local(enough))(xs), jnp.stack(each))
    with pytest.raises(Exception, match=says):
        jax.block_until_ready(on_each(local(2))(xs))


def test_a_check_that_is_the_same_on_devices_of_which_some_have_stopped():
    def f(x, **how):
        count = lambda: loopkit.while_loop(lambda i: i < 2, lambda i: i + 1, 0, max_steps=3, **how)
        return loopkit.while_loop(lambda y: y < 2, lambda y: y * y + count(), x, **how, max_steps=9)

    each = lambda x: f(x[0], throw=True)[None]
    x = jnp.linspace(-0.9, 2.4, 4)
    wanted = [lax.while_loop(lambda y: y < 2, lambda y: y * y + 2, v) for v in x]
    assert_close(on_each(each)(x), jnp.stack(wanted))


def test_what_a_checked_loop_returns_is_the_same_on_devices_of_which_some_have_stopped():
    """An inner loop reads a list, which is checked, and the list is the same everywhere."""

    def body(y):
        start = loopkit.TensorArray.empty(4, jnp.zeros(()))
        pick = lambda c, _: ((c[0] + c[1].read(2), c[1]), None)
        (more, kept), _ = loopkit.scan(pick, (y, start), None, 2)
        return y * y + more + jnp.sum(kept.stack()) + 1

    x = jnp.linspace(-0.9, 2.4, 4)
    each = lambda x: loopkit.while_loop(lambda y: y < 2, body, x[0], max_steps=9)[None]
    wanted = [lax.while_loop(lambda y: y < 2, lambda y: y * y + y + 1, v) for v in x]
    assert_close(on_each(each)(x), jnp.stack(wanted))


@pytest.mark.slow
def test_keys_that_differ_between_devices():
    """Their zeros stand for them in what is only transposed, and differ between devices too."""

    def noisy(loops, x):
        key = jax.random.key(jnp.uint32(1000 * jnp.abs(x)))
        draw = lambda i: jax.random.normal(jax.random.fold_in(key, i))
        inner = lambda y: loops.scan(lambda y, i: (jnp.sin(y + draw(i)), None), y, jnp.arange(2))[0]
        return loops.fori_loop(0, 3, lambda _, y: inner(y) + x, x)

    def gradients(loops):
        return on_each(lambda x: jax.grad(lambda x: noisy(loops, x))(x[0])[None])(XS)

    assert_close(gradients(loopkit), gradients(lax))


def test_zeros_of_keys():
    """They vary as their type says, however that came about."""

    def f(x):
        key = jax.random.key(jnp.uint32(10 * x[0]))
        assert jax.typeof(_jax.zeros(jax.typeof(key))) == jax.typeof(key)
        return x

    on_each(f)(jnp.abs(XS))


COUNTING = {
    "carries": ("int64", 1, {"truncate": 1}),
    "residuals": ("int32", 1, {}),
    "residuals that are made again": ("int32", 200, {"checkpoints": 2}),
    "carries on the host": ("int64", 1, {"checkpoints": loopkit.Plan(8, host=True)}),
}
"""The type of what is the same everywhere, how large the rest is, and how the loop is run."""


@pytest.mark.slow
@pytest.mark.parametrize("stored", COUNTING)
def test_what_is_stored_differs_between_devices_in_part(stored):
    """A value behind a barrier keeps its type, even if it is the same everywhere."""
    dtype, size, how = COUNTING[stored]
    cut = lax.stop_gradient if "truncate" in how else lambda v: v

    def summed(scan, x):
        def step(c, _):
            v, count = c
            return (jnp.sin(v) * jnp.cos(count).astype(v.dtype), 2 * count + 1), jnp.sort(1.5 * v)

        return jnp.sum(scan(step, (x, jnp.zeros((), dtype)), None, 8)[1], 0)

    def unrolled_scan(step, carry, _, length):
        rows = []
        for _ in range(length):
            (v, count), row = step(carry, None)
            carry = (cut(v), count)
            rows.append(row)
        return carry, jnp.stack(rows)

    local = lambda x: summed(ft.partial(loopkit.scan, **how), x)
    sharded = jax.shard_map(local, mesh=MESH, in_specs=P("d"), out_specs=P("d"))
    x = jnp.linspace(-0.9, 0.9, 4 * size)
    got = jax.jit(lambda x: jax.vjp(sharded, x)[1](jnp.cos(x))[0])(x)
    wanted = lambda x, ct: jax.vjp(lambda x: summed(unrolled_scan, x), x)[1](ct)[0]
    lanes = jnp.reshape(x, (4, size))
    assert_close(got, jax.vmap(wanted)(lanes, jnp.cos(lanes)).reshape(-1))


@pytest.mark.slow
def test_a_residual_that_is_the_same_everywhere():
    """Each device saves the number of steps of an inner loop in rows of its own."""
    some = np.linspace(0.3, 0.8, 3)

    def f(x, n, fori_loop, **how):
        def body(_, c):
            read = lambda c: jax.jit(lambda x: x * some)(c)  # by a constant of the inner loop
            return jnp.sin(c) * fori_loop(0, 1, lambda _, z: jnp.sin(x) * z + 0 * len(read(c)), x)

        return jnp.sum(fori_loop(0, n, body, x, **how))

    lanes, counts = jnp.reshape(jnp.linspace(-0.9, 0.9, 12), (4, 3)), jnp.array([1, 4, 0, 3])
    slopes = lambda x, n: jax.grad(f)(x[0], n[0], loopkit.fori_loop, max_steps=4)[None]
    python = lambda first, last, body, c: ft.reduce(lambda c, i: body(i, c), range(first, last), c)
    wanted = [jax.grad(f)(x, int(n), python) for x, n in zip(lanes, counts, strict=True)]
    assert_close(on_each(slopes)(lanes, counts), jnp.stack(wanted))


@jax.custom_vjp
def clipped(w):
    return jnp.sin(w)


clipped.defvjp(lambda w: (jnp.sin(w), w), lambda w, ct: (jnp.clip(ct, -0.5, 0.5) * jnp.cos(w),))


@pytest.mark.exhaustive
def test_a_rule_for_what_is_the_same_on_all_devices():
    """JAX raises an error until the rule says whether cotangents are summed over devices."""

    def each(w, n, x, to):
        body = lambda c: (c[0] + 1, c[1] * clipped(to(w)))
        return loopkit.while_loop(lambda c: c[0] < n[0], body, (0, x[0]), max_steps=5)[1][None]

    def total(w, to):
        local, specs = ft.partial(each, to=to), (P(), P("d"), P("d"))
        return jax.shard_map(local, mesh=MESH, in_specs=specs, out_specs=P("d"))(w, NS, XS).sum()

    with pytest.raises(ValueError, match="manual axis types do not match"):
        jax.grad(total)(0.7, lambda w: w)
    vary, pairs = lambda w: lax.pcast(w, "d", to="varying"), list(zip(NS, XS, strict=True))
    same = lambda w: sum(each(w, n[None], x[None], lambda w: w)[0] for n, x in pairs)
    assert_close(jax.grad(total)(0.7, vary), jax.grad(same)(0.7))
