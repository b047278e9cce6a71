"""Loops of which `vmap` batches some operands alone: predicates, carries, constants, tangents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from derivatives import assert_close
from trials.in_numpy import eagerly


def grow(n, x, w, checkpoints=2):
    """x <- sin(w x) + x / 2, n times."""

    def body(carry):
        step, x = carry
        return step + 1, jnp.sin(w * x) + x / 2

    return loopkit.while_loop(lambda c: c[0] < n, body, (0, x), checkpoints=checkpoints)[1]


def grow_in_python(n, x, w):
    for _ in range(int(n)):
        x = jnp.sin(w * x) + x / 2
    return x


NS, XS, WS = np.asarray([2, 0, 5]), np.asarray([0.3, 0.7, -0.4]), np.asarray([1.1, 0.8, 1.3])


@pytest.mark.parametrize("in_axes", [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0)])
@pytest.mark.parametrize("transform", ["value", "jvp", "grad", "hessian"])
def test_each_operand_batched_alone(transform, in_axes):
    """The predicate's, the carry's, and the body's: in the last case the body batches the carry."""

    def transformed(f):
        def at(n, x, w):
            g = lambda xw: f(n, *xw)
            xw = jnp.stack([x, w])
            match transform:
                case "value":
                    return g(xw)
                case "jvp":
                    return jax.jvp(g, (xw,), (jnp.asarray([1.0, -0.3]),))[1]
                case "grad":
                    return jax.grad(g)(xw)
                case "hessian":
                    return jax.hessian(g)(xw)

        return at

    args = [a if axis == 0 else a[2] for a, axis in zip((NS, XS, WS), in_axes, strict=True)]
    got = jax.jit(jax.vmap(transformed(grow), in_axes))(*args)
    rows = [
        [args[i] if axis is None else args[i][k] for i, axis in enumerate(in_axes)]
        for k in range(3)
    ]
    with eagerly():
        each = [np.asarray(transformed(grow_in_python)(*row)) for row in rows]
    assert_close(got, np.stack(each))


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [None, 2])
def test_only_the_tangent_is_batched(checkpoints):
    directions = jnp.asarray([[1.0, 0.0], [0.3, -2.0], [0.0, 0.0]])

    def pushed(f, v):
        return jax.jvp(f, (0.3, 1.1), (v[0], v[1]))[1]

    got = jax.vmap(lambda v: pushed(lambda x, w: grow(4, x, w, checkpoints), v))(directions)
    each = [pushed(lambda x, w: grow_in_python(4, x, w), v) for v in directions]
    assert_close(got, jnp.stack(each))


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [None, 2])
def test_only_the_cotangent_is_batched(checkpoints):
    weights = jnp.asarray([1.0, -0.3, 0.0])
    _, pullback = jax.vjp(lambda x, w: grow(4, x, w, checkpoints), 0.3, 1.1)
    _, wanted = jax.vjp(lambda x, w: grow_in_python(4, x, w), 0.3, 1.1)
    each = [jnp.stack(leaves) for leaves in zip(*[wanted(w) for w in weights], strict=True)]
    assert_close(jax.vmap(pullback)(weights), tuple(each))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jacfwd", "jacrev"])
def test_a_batched_direction_does_not_batch_the_primal(kind):
    """Whatever is recomputed, is recomputed once and not for every row of the Jacobian."""
    shapes = set()

    def host(x):
        shapes.add(np.shape(x))
        return np.cos(x)

    def body(carry):
        step, x = carry
        frozen = lax.stop_gradient(x[0])
        aside = jax.pure_callback(
            host, jax.ShapeDtypeStruct((), "float64"), frozen, vmap_method="expand_dims"
        )
        return step + 1, jnp.sin(x) * aside

    def loop(x):
        return loopkit.while_loop(lambda c: c[0] < 5, body, (0, x), checkpoints=2)[1]

    match kind:
        case "jacfwd":
            jax.jacfwd(loop)(jnp.ones(3))
        case "jacrev":
            jax.jacrev(loop)(jnp.ones(3))
    assert shapes == {()}


def test_untouched_outputs_stay_unbatched():
    def loop(x, w):
        return loopkit.while_loop(
            lambda c: c[0] < 4, lambda c: (c[0] + 1, c[1] * w, jnp.sin(c[2])), (0, x, w)
        )

    out = jax.vmap(loop, in_axes=(0, None), out_axes=(None, 0, None))(jnp.asarray(XS), 0.5)
    assert_close(out[1], XS * 0.5**4)
    assert out[2].shape == ()


@pytest.mark.exhaustive
def test_nested_vmap():
    """One axis for the predicate, another for the body, and a derivative outside and between."""

    def table(f):
        return lambda w: jax.vmap(jax.vmap(f, (0, 0, None)), (None, None, 0))(NS, XS, w)

    got = jax.jit(table(jax.value_and_grad(grow, argnums=(1, 2))))(WS)
    grad = jax.value_and_grad(grow_in_python, argnums=(1, 2))
    rows = [[grad(n, x, w) for n, x in zip(NS, XS, strict=True)] for w in WS]
    wanted = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *row) for row in rows]
    wanted = jax.tree.map(lambda *leaves: jnp.stack(leaves), *wanted)
    assert_close(got, wanted)
    outer = jax.grad(lambda w: jnp.sum(table(grow)(w)))(jnp.asarray(WS))
    assert_close(outer, jnp.sum(wanted[1][1], axis=1))


@pytest.mark.slow
def test_nested_vmap_over_one_operand():
    ws = jnp.asarray([[0.5, 1.1], [0.9, 1.2], [0.3, 0.6]])
    got = jax.vmap(jax.vmap(jax.grad(grow, 2), (None, None, 0)), (0, 0, 0))(NS, XS, ws)
    grad, rows = jax.grad(grow_in_python, 2), zip(NS, XS, ws, strict=True)
    each = [[grad(n, x, w) for w in row] for n, x, row in rows]
    assert_close(got, jnp.asarray(each))


@pytest.mark.slow
def test_no_lane_takes_a_step():
    values, grads = jax.vmap(jax.value_and_grad(grow, 1))(np.zeros(3, int), XS, WS)
    assert_close((values, grads), (jnp.asarray(XS), jnp.ones(3)))


@pytest.mark.slow
def test_one_lane():
    got = jax.vmap(jax.grad(grow, 2))(NS[2:], XS[2:], WS[2:])
    assert_close(got, jax.grad(grow_in_python, 2)(NS[2], XS[2], WS[2])[None])


@pytest.mark.slow
def test_no_lane():
    empty = jnp.zeros(0)
    assert jax.vmap(jax.grad(grow, 1))(jnp.zeros(0, int), empty, empty).shape == (0,)


@pytest.mark.slow
def test_jacobians_in_lanes():
    """vmap of jacrev: a batch of cotangents inside a batch of lanes."""

    def loop(n, x):
        return grow(n, x, jnp.asarray([1.1, 0.8]))

    def unrolled(n, x):
        return grow_in_python(n, x, jnp.asarray([1.1, 0.8]))

    xs = jnp.stack([XS, WS], axis=1)
    got = jax.jit(jax.vmap(jax.jacrev(loop, 1)))(NS, xs)
    assert_close(
        got, jnp.stack([jax.jacrev(unrolled, 1)(n, x) for n, x in zip(NS, xs, strict=True)])
    )
    got = jax.jit(jax.vmap(jax.jacfwd(jax.jacrev(loop, 1), 1)))(NS, xs)
    wanted = [jax.jacfwd(jax.jacrev(unrolled, 1), 1)(n, x) for n, x in zip(NS, xs, strict=True)]
    assert_close(got, jnp.stack(wanted))
