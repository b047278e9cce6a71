"""Loops on several devices: inside jax.shard_map, around it, and over sharded arrays."""

import functools as ft
import itertools

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
from loopkit import _jax
from problems import CHECKPOINTS
from tolerances import assert_near
from turns import in_turn

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


@pytest.mark.parametrize("name", LOOPS)
def test_gradient_of_a_replicated_parameter_inside(name):
    """The cotangent of what does not vary between devices is their sum, the same on each."""
    f, wanted = LOOPS[name]
    got = jax.jit(on_each_device(jax.grad(f, (1, 2)), out_specs=(P("d"), P())))(NS, XS, 0.8)
    x_bar, w_bar = one_by_one(jax.grad(wanted, (1, 2)))
    assert_close(got, (x_bar, jnp.sum(w_bar)[None]))


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


def test_sharded_arrays_without_shard_map():
    """The compiler partitions the loop and its gradient."""
    sharding = NamedSharding(MESH, P("d"))
    xs = jax.device_put(np.tile(XS, 4), sharding)

    def total(f):
        return lambda xs, w: jnp.sum(jnp.sin(f(4, xs, w)))

    x_bar, w_bar = jax.jit(jax.grad(total(loop), (0, 1)))(xs, 0.8)
    assert_close((x_bar, w_bar), jax.grad(total(unrolled), (0, 1))(jnp.tile(XS, 4), 0.8))
    assert x_bar.sharding.is_equivalent_to(sharding, 1)


def test_lanes_over_sharded_arrays():
    """vmap with lanes on different devices."""
    sharding = NamedSharding(MESH, P("d"))
    ns, xs = jax.device_put((NS, XS), sharding)
    got = jax.jit(jax.vmap(jax.grad(loop, 1), (0, 0, None)))(ns, xs, 0.8)
    assert_close(got, one_by_one(jax.grad(unrolled, 1)))


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


# ---------------------------------------------------------------- what the step of a device holds


@jax.custom_jvp
def ruled(x, w):
    return jnp.sin(x * w) + w


@ruled.defjvp
def _(primals, tangents):
    (x, w), (t_x, t_w) = primals, tangents
    return ruled(x, w), jnp.cos(x * w) * (t_x * w + x * t_w) + t_w


@jax.custom_vjp
def ruled_backward(x, w):
    return jnp.sin(x * w) + w * x


ruled_backward.defvjp(
    lambda x, w: (ruled_backward(x, w), (x, w)),
    lambda r, ct: (ct * (jnp.cos(r[0] * r[1]) + 1) * r[1], ct * (jnp.cos(r[0] * r[1]) + 1) * r[0]),
)


def halved(c, w):
    """A loop with a buffer."""
    body = lambda i, rows: rows.at[i].set(jnp.sin(rows[i - 1] * w))
    return loopkit.fori_loop(1, 3, body, jnp.zeros(3).at[0].set(c), buffers=True).sum()


STEPS = {
    "plain": lambda c, t, w: jnp.sin(w * c) + t,
    "scan": lambda c, t, w: t + lax.scan(lambda c, k: (jnp.sin(w * c) + k * w, None), c, XS)[0],
    "scan of loopkit": lambda c, t, w: (
        t + loopkit.scan(lambda c, k: (jnp.sin(w * c) + k * w, None), c, XS, checkpoints=2)[0]
    ),
    "while_loop": lambda c, t, w: t + loop(2, c, w),
    "fori_loop of lax": lambda c, t, w: lax.fori_loop(0, 2, lambda i, c: jnp.sin(w * c) + i, c) + t,
    "cond": lambda c, t, w: lax.cond(t > 0.2, lambda c: jnp.sin(w * c), lambda c: c * w, c) + t,
    "jit": lambda c, t, w: jax.jit(lambda c, w: jnp.sin(w * c) + t)(c, w),
    "custom_jvp": lambda c, t, w: ruled(c, w) + t,
    "custom_vjp": lambda c, t, w: ruled_backward(c, w + 0 * c) + t,
    "checkpoint": lambda c, t, w: jax.checkpoint(lambda c: jnp.sin(w * c) + jnp.cos(w))(c) + t,
    "solve": lambda c, t, w: jnp.linalg.solve(jnp.eye(2) * (3 + w), jnp.ones(2) * c + w)[0] + t,
    "grad": lambda c, t, w: jax.grad(lambda c: loop(2, c, w))(c) + t * c,
    "buffer": lambda c, t, w: halved(c, w) + t,
    "integers": lambda c, t, w: jnp.sin(w * c) * jnp.arange(3)[jnp.int32(4 * t) % 3] + c,
}
VARIES = {
    "carry": lambda x, xs, w: (x, xs, w),
    "xs": lambda x, xs, w: (0.3, xs * x, w),
    "constant": lambda x, xs, w: (0.3 + 0 * x, xs, w * x),
}
ENDS = {
    "carry": lambda c, _: c[0] > lax.axis_index("d"),
    "xs": lambda c, _: c[1] > 0.9,
    "constant": lambda c, _: c[0] > 2,
}


def stepped(scan, step, what, x, xs, w):
    first, xs, w = VARIES[what](x, xs, w)
    body = lambda c, t: ((c[0] + 1, STEPS[step](c[1], t, w)), c[1] * w)
    (_, last), ys = scan(body, (0, jnp.asarray(first)), xs, until=ENDS[what])
    return last + ys.sum() + 0 * x


def stepped_on(mesh, scan, step, what, check):
    local = lambda x, xs, w: stepped(scan, step, what, x[0], xs, w)[None]
    specs = P("d"), P(), P()
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("d"), check_vma=check)


def masked_scan(f, init, xs, until):
    """Step by step, those after the last masked; where types do not say what varies."""
    carry, go, rows = jax.tree.map(jnp.asarray, init), True, []
    for x in xs:
        new, y = f(carry, x)
        stop = until(new, y)
        carry = jax.tree.map(lambda a, b, go=go: jnp.where(go, a, b), new, carry)
        rows.append(jnp.where(go, y, jnp.zeros_like(y)))
        go = go & ~stop
    return carry, jnp.stack(rows)


STEP_XS, W = jnp.asarray([0.1, 0.5, 0.2, 0.7]), jnp.asarray(0.8)
SQUARE = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("d", "e"))


def taken(transform, f, x):
    total = lambda x, xs, w: jnp.sum(jnp.sin(f(x, xs, w)))
    match transform:
        case "jvp":
            return jax.jvp(f, (x, STEP_XS, W), (jnp.cos(x), STEP_XS, W))
        case "grad":
            return jax.grad(total, (0, 1, 2))(x, STEP_XS, W)
        case "hessian":
            return jax.hessian(total, (0, 2))(x, STEP_XS, W)


def until_cases():
    """Each step with each of what varies: of three, one gradient is quick."""
    for (k, step), (w, what) in itertools.product(enumerate(STEPS), enumerate(VARIES)):
        turn = (k + w) % len(VARIES)
        forward = "grad" if step == "custom_vjp" else "jvp"  # which it does not have
        quick = [("grad", 2)] if turn == 0 else []
        slow = [(forward if turn == 0 else "grad", "all")]
        yield from (pytest.param(step, what, *how) for how in quick)
        slow += [(forward, 2)] if turn == 1 else []
        yield from (pytest.param(step, what, *how, marks=pytest.mark.slow) for how in slow)


@pytest.mark.parametrize(("step", "what", "transform", "checkpoints"), list(until_cases()))
def test_until(step, what, transform, checkpoints):
    """One of carry, xs and constants differs between devices, which stop where theirs says."""
    mine = lambda *args, **how: loopkit.scan(*args, checkpoints=checkpoints, **how)
    got = jax.jit(lambda x: taken(transform, stepped_on(MESH, mine, step, what, True), x))
    # Without the checks of JAX what varies is not told apart.
    wanted = stepped_on(MESH, masked_scan, step, what, False)
    assert_close(got(XS), jax.jit(lambda x: taken(transform, wanted, x))(XS))


MESHES = {"one axis": MESH, "two axes": SQUARE}


@pytest.mark.parametrize(("mesh", "check"), in_turn(MESHES, [True, False]))
@pytest.mark.parametrize("transform", ["grad", pytest.param("hessian", marks=pytest.mark.slow)])
def test_until_on_meshes(transform, mesh, check):
    mesh = MESHES[mesh]
    x = XS[: mesh.shape["d"]]
    # The other step has the other transformation.
    step = ("scan", "buffer")[((mesh is MESH) + check + (transform == "grad")) % 2]
    f = stepped_on(mesh, loopkit.scan, step, "carry", check)
    wanted = stepped_on(mesh, masked_scan, step, "carry", False)
    got = jax.jit(lambda x: taken(transform, f, x))(x)
    assert_close(got, jax.jit(lambda x: taken(transform, wanted, x))(x))


def test_gradient_inside_of_until():
    """Cotangents of what is the same everywhere are summed over the devices, once."""

    def local(scan, x, xs, w):
        f = lambda x, xs, w: stepped(scan, "scan", "carry", x, xs, w)
        x_bar, xs_bar, w_bar = jax.grad(f, (0, 1, 2))(x[0], xs, w)
        if scan is masked_scan:
            xs_bar, w_bar = lax.psum((xs_bar, w_bar), "d")
        return x_bar[None], xs_bar, w_bar

    specs = P("d"), P(), P()
    take = lambda scan, check: jax.jit(
        jax.shard_map(
            ft.partial(local, scan), mesh=MESH, in_specs=specs, out_specs=specs, check_vma=check
        )
    )(XS, STEP_XS, 0.8)
    assert_close(take(loopkit.scan, True), take(masked_scan, False))


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


@pytest.mark.parametrize("transform", [lambda f: f, jax.grad], ids=["value", "gradient"])
@pytest.mark.parametrize(("f", "enough", "says"), [(listed, 3, "capacity"), (raising, 9, "max_st")])
def test_errors_at_run_time(f, enough, says, transform):
    """What raises them is the same on all devices; what they hang on is not."""
    xs = jnp.array([0.3, 0.5, 0.7, 0.9])
    local = lambda bound: lambda x: transform(lambda x: f(x, bound))(x[0])[None]
    on_each = lambda bound: jax.jit(
        jax.shard_map(local(bound), mesh=MESH, in_specs=P("d"), out_specs=P("d"))
    )
    assert_close(on_each(enough)(xs), jnp.stack([transform(lambda x: f(x, enough))(x) for x in xs]))
    with pytest.raises(Exception, match=says):
        jax.block_until_ready(on_each(2)(xs))


def test_keys_that_differ_between_devices():
    """Their zeros stand for them in what is only transposed, and differ between devices too."""

    def noisy(loops, x):
        key = jax.random.key(jnp.uint32(1000 * jnp.abs(x)))
        draw = lambda i: jax.random.normal(jax.random.fold_in(key, i))
        inner = lambda y: loops.scan(lambda y, i: (jnp.sin(y + draw(i)), None), y, jnp.arange(2))[0]
        return loops.fori_loop(0, 3, lambda _, y: inner(y) + x, x)

    def gradients(loops):
        f = lambda x: jax.grad(lambda x: noisy(loops, x))(x[0])[None]
        return jax.jit(jax.shard_map(f, mesh=MESH, in_specs=P("d"), out_specs=P("d")))(XS)

    assert_close(gradients(loopkit), gradients(lax))


def test_zeros_of_keys():
    """They vary as their type says, however that came about."""

    def f(x):
        key = jax.random.key(jnp.uint32(10 * x[0]))
        assert jax.typeof(_jax.zeros(jax.typeof(key))) == jax.typeof(key)
        return x

    jax.jit(jax.shard_map(f, mesh=MESH, in_specs=P("d"), out_specs=P("d")))(jnp.abs(XS))


COUNTING = {
    "carries": ("int64", 1, {"truncate": 1}),
    "residuals": ("int32", 1, {}),
    "residuals that are made again": ("int32", 200, {"checkpoints": 2}),
    "carries on the host": ("int64", 1, {"checkpoints": loopkit.Plan(8, host=True)}),
}
"""The type of what is the same everywhere, how large the rest is, and how the loop is run."""


@pytest.mark.parametrize("stored", COUNTING)
def test_what_is_stored_differs_between_devices_in_part(stored):
    """What is held behind one barrier stays of its type, also if that is the same everywhere."""
    dtype, size, how = COUNTING[stored]
    cut = lax.stop_gradient if "truncate" in how else lambda v: v

    def summed(scan, x):
        step = lambda c, _: ((jnp.sin(c[0]) * jnp.cos(c[1]), 2 * c[1] + 1), jnp.sort(1.5 * c[0]))
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


def test_a_residual_that_is_the_same_everywhere():
    """Of an inner loop, how many steps it took: each device saves it in rows of its own."""
    some = np.linspace(0.3, 0.8, 3)

    def f(x, n, fori_loop, **how):
        def body(_, c):
            read = lambda c: jax.jit(lambda x: x * some)(c)  # by a constant of the inner loop
            return jnp.sin(c) * fori_loop(0, 1, lambda _, z: jnp.sin(x) * z + 0 * len(read(c)), x)

        return jnp.sum(fori_loop(0, n, body, x, **how))

    lanes, counts = jnp.reshape(jnp.linspace(-0.9, 0.9, 12), (4, 3)), jnp.array([1, 4, 0, 3])
    slopes = lambda x, n: jax.grad(f)(x[0], n[0], loopkit.fori_loop, max_steps=4)[None]
    sharded = jax.shard_map(slopes, mesh=MESH, in_specs=P("d"), out_specs=P("d"))
    python = lambda first, last, body, c: ft.reduce(lambda c, i: body(i, c), range(first, last), c)
    wanted = [jax.grad(f)(x, int(n), python) for x, n in zip(lanes, counts, strict=True)]
    assert_close(jax.jit(sharded)(lanes, counts), jnp.stack(wanted))
