"""Scans with `until` on several devices, each of which stops where its own values say."""

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
from test_shard_map import MESH, XS, loop
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


def test_a_loop_in_a_step_with_unread_results():
    """The inner loop's counter is not read: what is saved varies as it does with the counter."""
    test_until("while_loop", "constant", "grad", "all")


# Made when a test runs: a session with a single device imports this file, too.
MESHES = {
    "one axis": lambda: MESH,
    "two axes": lambda: Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("d", "e")),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "check"), in_turn(MESHES, [True, False]))
@pytest.mark.parametrize("transform", ["grad", later("hessian")])
def test_until_on_meshes(transform, mesh, check):
    mesh = MESHES[mesh]()
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
