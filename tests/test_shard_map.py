"""Loops on several devices: inside jax.shard_map, around it, and over sharded arrays."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import kinds
import loopkit
from derivatives import assert_close
from problems import CHECKPOINTS
from tolerances import assert_near

MESH = Mesh(np.asarray(jax.devices()[:4]), ("d",))
NS = np.asarray([3, 0, 5, 1])
XS = np.asarray([0.3, 0.7, -0.4, 0.9])


def loop(n, x, w, checkpoints=2):
    body = lambda c: (c[0] + 1, jnp.sin(w * c[1]) + c[1] / 2)
    return loopkit.while_loop(
        lambda c: c[0] < n, body, (0, x), checkpoints=checkpoints, max_steps=6
    )[1]


def unrolled(n, x, w):
    for _ in range(n):
        x = jnp.sin(w * x) + x / 2
    return jnp.asarray(x)


def stopping(n, x, w):
    body = lambda c, _: ((c[0] + 1, jnp.sin(w * c[1]) + c[1] / 2), c[1])
    until = lambda c, _: c[0] >= n
    return jnp.sum(loopkit.scan(body, (0, x), length=6, until=until, checkpoints=2)[1])


def unrolled_stopping(n, x, w):
    total = 0.0
    for _ in range(max(n, 1)):
        total, x = total + x, jnp.sin(w * x) + x / 2
    return total


LOOPS = {"while_loop": (loop, unrolled), "scan": (stopping, unrolled_stopping)}


IN_SPECS = (P("d"), P("d"), P())


def on_each_device(f, out_specs=None):
    """f(n, x, w) with one n and one x to a device, and w on all."""

    def local(n, x, w):
        return jax.tree.map(jnp.atleast_1d, f(n[0], x[0], w))

    specs = P("d") if out_specs is None else out_specs
    return jax.shard_map(local, mesh=MESH, in_specs=IN_SPECS, out_specs=specs)


def one_by_one(f):
    each = [f(int(n), x, 0.8) for n, x in zip(NS, XS, strict=True)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_value(name):
    """Devices take as many steps as their own lane needs."""
    f, wanted = LOOPS[name]
    assert_close(jax.jit(on_each_device(f))(NS, XS, 0.8), one_by_one(wanted))


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_gradient_inside(checkpoints):
    f = jax.value_and_grad(ft.partial(loop, checkpoints=checkpoints), 1)
    got = jax.jit(on_each_device(f))(NS, XS, 0.8)
    assert_close(got, one_by_one(jax.value_and_grad(unrolled, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_gradient_of_a_replicated_parameter_inside(name):
    """The cotangent of what does not vary between devices is their sum, the same on each."""
    f, wanted = LOOPS[name]
    got = jax.jit(on_each_device(jax.grad(f, (1, 2)), out_specs=(P("d"), P())))(NS, XS, 0.8)
    x_bar, w_bar = one_by_one(jax.grad(wanted, (1, 2)))
    assert_close(got, (x_bar, jnp.sum(w_bar)[None]))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("transform", ["jvp", "grad", "hessian", "reverse over reverse"])
def test_derivative_outside(name, transform):
    f, wanted = LOOPS[name]

    def take(total):
        match transform:
            case "jvp":
                return jax.jvp(
                    total, (jnp.asarray(XS), jnp.asarray(0.8)), (jnp.cos(XS), jnp.asarray(1.0))
                )[1]
            case "grad":
                return jax.grad(total, (0, 1))(XS, 0.8)
            case "hessian":
                return jax.hessian(total, (0, 1))(XS, 0.8)
            case "reverse over reverse":
                return jax.grad(lambda *args: jnp.sum(jax.grad(total)(*args) ** 2), (0, 1))(XS, 0.8)

    def sharded(xs, w):
        return jnp.sum(jnp.sin(on_each_device(f)(NS, xs, w)))

    def reference(xs, w):
        return sum(jnp.sin(wanted(int(n), x, w)) for n, x in zip(NS, xs, strict=True))

    assert_close(jax.jit(lambda: take(sharded))(), take(reference))


@pytest.mark.slow
def test_second_order_inside():
    hessian = lambda f: jax.jacfwd(jax.grad(f, 1), 1)
    got = jax.jit(on_each_device(hessian(loop)))(NS, XS, 0.8)
    assert_close(got, one_by_one(hessian(unrolled)))


def test_vmap_inside():
    """Lanes within devices: two levels of loops that stop at different steps."""

    def local(ns, xs, w):
        values = jax.vmap(loop, (0, 0, None))(ns, xs, w)
        grads = jax.vmap(jax.grad(loop, 1), (0, 0, None))(ns, xs, w)
        return values, grads

    sharded = jax.shard_map(local, mesh=MESH, in_specs=IN_SPECS, out_specs=P("d"))
    ns, xs = np.concatenate([NS, NS[::-1]]), np.concatenate([XS, XS / 2])
    each = [
        (unrolled(n, x, 0.8), jax.grad(unrolled, 1)(n, x, 0.8)) for n, x in zip(ns, xs, strict=True)
    ]
    assert_close(jax.jit(sharded)(ns, xs, 0.8), tuple(map(jnp.stack, zip(*each, strict=True))))


def test_gradient_of_a_mean_over_devices():
    """A collective after the loop, and its transpose."""

    def local(n, x, w):
        return lax.pmean(jnp.sin(loop(n[0], x[0], w)), "d")

    sharded = jax.shard_map(local, mesh=MESH, in_specs=IN_SPECS, out_specs=P())
    got = jax.jit(jax.value_and_grad(sharded, (1, 2)))(NS, XS, 0.8)

    def reference(n, xs, w):
        return sum(jnp.sin(unrolled(n, x, w)) for n, x in zip(NS, xs, strict=True)) / 4

    assert_close(got, jax.value_and_grad(reference, (1, 2))(None, jnp.asarray(XS), 0.8))


@pytest.mark.slow
@pytest.mark.parametrize("kind", kinds.KINDS)
def test_collectives_in_the_body(kind):
    """Devices in step, since the predicate is the same on each."""

    def local(x, w):
        step = lambda _, x: jnp.sin(w * x) + lax.psum(x, "d") / 8
        return kinds.loop(kind, step, x, 4, checkpoints=2)

    sharded = jax.shard_map(local, mesh=MESH, in_specs=(P("d"), P()), out_specs=P("d"))

    def reference(xs, w):
        for _ in range(4):
            xs = jnp.sin(w * xs) + jnp.sum(xs) / 8
        return xs

    def grads(f):
        return jax.value_and_grad(lambda xs, w: jnp.sum(f(xs, w) ** 2), (0, 1))

    got = jax.jit(grads(sharded))(XS, 0.8)
    assert_close(got, grads(reference)(jnp.asarray(XS), 0.8))


def test_a_predicate_that_is_a_collective():
    """Every device goes on until the sum over all is large enough."""

    def local(x, w):
        body = lambda x: x * w
        return loopkit.while_loop(lambda x: lax.psum(jnp.sum(x), "d") < 9.0, body, x, checkpoints=1)

    sharded = jax.shard_map(local, mesh=MESH, in_specs=(P("d"), P()), out_specs=P("d"))
    got = jax.jit(jax.grad(lambda xs, w: jnp.sum(sharded(xs, w)), (0, 1)))(XS, 2.0)
    assert_close(got, (jnp.full(4, 8.0), jnp.asarray(3 * 4 * np.sum(XS))))


@pytest.mark.slow
def test_a_loop_that_is_the_same_everywhere_stays_so():
    """Without varying operands its result may leave the shard_map unsharded."""
    local = lambda w: jax.value_and_grad(lambda w: loop(4, 0.3, w))(w)
    sharded = jax.shard_map(local, mesh=MESH, in_specs=P(), out_specs=P())
    assert_close(jax.jit(sharded)(0.8), jax.value_and_grad(lambda w: unrolled(4, 0.3, w))(0.8))


def test_a_carry_that_begins_the_same_everywhere():
    """The first step makes it vary."""

    def f(n, x, w):
        body = lambda c: (c[0] + 1, c[1] * w + x)
        return loopkit.while_loop(lambda c: c[0] < n, body, (0, 0.0))[1]

    def wanted(n, x, w):
        total = jnp.zeros(())
        for _ in range(n):
            total = total * w + x
        return total

    got = jax.jit(on_each_device(jax.value_and_grad(f, 1)))(NS, XS, 0.8)
    assert_close(got, one_by_one(jax.value_and_grad(wanted, 1)))


@pytest.mark.slow
def test_nested_loops_inside():
    def f(loop, n, x, w):
        for_each = lambda x, y: (loop(n, x * y, w), None)
        return for_each, x

    def local(n, x, w):
        body, x = f(loop, n, x, w)
        return loopkit.scan(body, x, jnp.asarray([0.5, 1.5]), checkpoints=1)[0]

    def wanted(n, x, w):
        body, x = f(unrolled, n, x, w)
        return body(body(x, 0.5)[0], 1.5)[0]

    got = jax.jit(on_each_device(jax.value_and_grad(local, 1)))(NS, XS, 0.8)
    assert_close(got, one_by_one(jax.value_and_grad(wanted, 1)))


@pytest.mark.slow
def test_sharded_arrays_without_shard_map():
    """The compiler partitions the loop and its gradient."""
    sharding = NamedSharding(MESH, P("d"))
    xs = jax.device_put(np.tile(XS, 4), sharding)

    def total(f):
        return lambda xs, w: jnp.sum(jnp.sin(f(4, xs, w)))

    x_bar, w_bar = jax.jit(jax.grad(total(loop), (0, 1)))(xs, 0.8)
    assert_close((x_bar, w_bar), jax.grad(total(unrolled), (0, 1))(jnp.tile(XS, 4), 0.8))
    assert x_bar.sharding.is_equivalent_to(sharding, 1)


@pytest.mark.slow
def test_lanes_over_sharded_arrays():
    """vmap with lanes on different devices."""
    sharding = NamedSharding(MESH, P("d"))
    ns, xs = jax.device_put((NS, XS), sharding)
    got = jax.jit(jax.vmap(jax.grad(loop, 1), (0, 0, None)))(ns, xs, 0.8)
    assert_close(got, one_by_one(jax.grad(unrolled, 1)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("compile", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("named", ["shard_map", "constraint"])
def test_a_mesh_that_only_the_body_names(named, compile):
    """`jax.jit` finds the devices of a program in its equations, and looks into no loop of ours."""
    spread_out = NamedSharding(MESH, P("d"))

    def wave(x):
        return jnp.sin(x) + lax.psum(x, "d")

    def body(x, w):
        if named == "constraint":
            return lax.with_sharding_constraint(jnp.sin(x) * w, spread_out), x
        return jax.shard_map(wave, mesh=MESH, in_specs=P("d"), out_specs=P("d"))(x * w), x

    def program(scan):
        def total(x):
            scanned = scan(body, x, jnp.arange(1.0, 4.0))
            return jnp.sum(scanned[0]) + jnp.sum(scanned[1] ** 2)

        gradient = jax.grad(total)
        return lambda x: (total(x), gradient(x), jax.jvp(gradient, (x,), (x,))[1])

    x = jnp.linspace(0.1, 0.8, 8)
    got, wanted = compile(program(loopkit.scan))(x), compile(program(lax.scan))(x)
    for g, w in zip(got, wanted, strict=True):
        assert_near(g, w)
        assert g.sharding.device_set == w.sharding.device_set


@pytest.mark.slow
def test_a_mesh_of_explicit_axes_that_only_types_and_the_body_name():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = jax.device_put(jnp.linspace(0.1, 0.8, 8), NamedSharding(mesh, P("d")))
    wave = jax.shard_map(
        lambda x: jnp.sin(x) + lax.psum(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P("d")
    )

    def outcome(scan):
        final = lambda x: scan(lambda x, _: (wave(x), None), x, length=2)[0]
        y, pullback = jax.vjp(final, x)
        return y, pullback(x)[0]

    for got, wanted in zip(outcome(loopkit.scan), outcome(lax.scan), strict=True):
        assert_near(got, wanted)
        assert jax.typeof(got) == jax.typeof(wanted)


@pytest.mark.exhaustive
@pytest.mark.parametrize("checkpoints", [None, 2, "all"])
@pytest.mark.parametrize("kind", ["while", "until", "buffer"])
def test_lanes_spread_over_a_mesh_of_explicit_axes(kind, checkpoints):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))

    def final(x):
        how = {"checkpoints": checkpoints}
        step = lambda x: 1.3 * x + jnp.sin(jnp.roll(x, 1))
        if kind == "while":
            return loopkit.while_loop(lambda x: x.sum() < 30, step, x, max_steps=20, **how)
        if kind == "buffer":
            write = lambda i, rows: rows.at[i].set(step(rows[i - 1]))
            rows = jnp.zeros((6, 3)).at[0].set(x)
            return loopkit.fori_loop(1, 6, write, rows, buffers=True, **how)
        scaled = lambda x, w: (step(x) * w, x)
        stops = lambda x, _: x.sum() > 30
        return loopkit.scan(scaled, x, jnp.linspace(1.0, 1.5, 8), until=stops, **how)[1]

    lanes = jax.vmap(final)
    slope = jax.grad(lambda x: jnp.sum(lanes(x) ** 2))
    found = lambda x: (lanes(x), slope(x), jax.vmap(jax.grad(lambda x: final(x).sum()))(x))
    x = jnp.linspace(0.1, 3.0, 24).reshape(8, 3)
    wanted = jax.jit(found)(x)
    with jax.set_mesh(mesh):
        got = jax.jit(found)(jax.device_put(x, NamedSharding(mesh, P("d"))))
    for g, w in zip(got, wanted, strict=True):
        assert_near(np.asarray(g), np.asarray(w))
        assert jax.typeof(g).sharding.spec[0] == "d"
