"""Steps on several devices: rules, predicates, keys and numbers that differ between them."""

import functools as ft
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import loopkit
from derivatives import assert_close
from loopkit import _jax
from test_shard_map import MESH, NS, XS, loop, on_each_device, one_by_one
from turns import in_turn, later


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
    "integers": lambda c, t, w: jnp.sin(w * c) * jnp.arange(3.0)[jnp.int32(4 * t) % 3] + c,
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
        yield from (later(step, what, *how) for how in slow)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "what", "transform", "checkpoints"), list(until_cases()))
def test_until(step, what, transform, checkpoints):
    """One of carry, xs and constants differs between devices, which stop where theirs says."""
    mine = lambda *args, **how: loopkit.scan(*args, checkpoints=checkpoints, **how)
    got = jax.jit(lambda x: taken(transform, stepped_on(MESH, mine, step, what, True), x))
    # Without the checks of JAX what varies is not told apart.
    wanted = stepped_on(MESH, masked_scan, step, what, False)
    assert_close(got(XS), jax.jit(lambda x: taken(transform, wanted, x))(XS))


MESHES = {"one axis": MESH, "two axes": SQUARE}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "check"), in_turn(MESHES, [True, False]))
@pytest.mark.parametrize("transform", ["grad", later("hessian")])
def test_until_on_meshes(transform, mesh, check):
    mesh = MESHES[mesh]
    x = XS[: mesh.shape["d"]]
    # The other step has the other transformation.
    step = ("scan", "buffer")[((mesh is MESH) + check + (transform == "grad")) % 2]
    f = stepped_on(mesh, loopkit.scan, step, "carry", check)
    wanted = stepped_on(mesh, masked_scan, step, "carry", False)
    got = jax.jit(lambda x: taken(transform, f, x))(x)
    assert_close(got, jax.jit(lambda x: taken(transform, wanted, x))(x))


@pytest.mark.slow
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


@pytest.mark.parametrize("transform", [lambda f: f, jax.grad], ids=["value", "gradient"])
@pytest.mark.parametrize(("f", "enough", "says"), [(listed, 3, "capacity"), (raising, 9, "max_st")])
def test_errors_at_run_time(f, enough, says, transform):
    """The function that raises is the same on all devices; the values that it tests are not."""
    xs = jnp.array([0.3, 0.5, 0.7, 0.9])
    local = lambda bound: lambda x: transform(lambda x: f(x, bound))(x[0])[None]
    on_each = lambda bound: jax.jit(
        jax.shard_map(local(bound), mesh=MESH, in_specs=P("d"), out_specs=P("d"))
    )
    assert_close(on_each(enough)(xs), jnp.stack([transform(lambda x: f(x, enough))(x) for x in xs]))
    with pytest.raises(Exception, match=says):
        jax.block_until_ready(on_each(2)(xs))


def test_a_check_that_is_the_same_on_devices_of_which_some_have_stopped():
    def f(x, **how):
        count = lambda: loopkit.while_loop(lambda i: i < 2, lambda i: i + 1, 0, max_steps=3, **how)
        return loopkit.while_loop(lambda y: y < 2, lambda y: y * y + count(), x, **how, max_steps=9)

    each = lambda x: f(x[0], throw=True)[None]
    sharded = jax.shard_map(each, mesh=MESH, in_specs=P("d"), out_specs=P("d"))
    x = jnp.linspace(-0.9, 2.4, 4)
    wanted = [lax.while_loop(lambda y: y < 2, lambda y: y * y + 2, v) for v in x]
    assert_close(jax.jit(sharded)(x), jnp.stack(wanted))


def test_what_a_checked_loop_returns_is_the_same_on_devices_of_which_some_have_stopped():
    """An inner loop reads a list, which is checked, and the list is the same everywhere."""

    def body(y):
        start = loopkit.TensorArray.empty(4, jnp.zeros(()))
        pick = lambda c, _: ((c[0] + c[1].read(2), c[1]), None)
        (more, kept), _ = loopkit.scan(pick, (y, start), None, 2)
        return y * y + more + jnp.sum(kept.stack()) + 1

    x = jnp.linspace(-0.9, 2.4, 4)
    each = lambda x: loopkit.while_loop(lambda y: y < 2, body, x[0], max_steps=9)[None]
    sharded = jax.shard_map(each, mesh=MESH, in_specs=P("d"), out_specs=P("d"))
    wanted = [lax.while_loop(lambda y: y < 2, lambda y: y * y + y + 1, v) for v in x]
    assert_close(jax.jit(sharded)(x), jnp.stack(wanted))


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
    sharded = jax.shard_map(slopes, mesh=MESH, in_specs=P("d"), out_specs=P("d"))
    python = lambda first, last, body, c: ft.reduce(lambda c, i: body(i, c), range(first, last), c)
    wanted = [jax.grad(f)(x, int(n), python) for x, n in zip(lanes, counts, strict=True)]
    assert_close(jax.jit(sharded)(lanes, counts), jnp.stack(wanted))


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
