"""Functions without a derivative, in the body of a loop: none is asked for that nobody needs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from derivatives import assert_close
from problems import CHECKPOINTS
from test_custom_rules import steps, unrolled


def host_cosine(x):
    """A NumPy function; jax cannot differentiate the call."""
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(np.cos, result, x, vmap_method="broadcast_all")


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_callbacks_on_values_without_gradients(checkpoints):
    def body_with(cosine):
        return lambda x: jnp.sin(x) * cosine(lax.stop_gradient(x)) + x / 2

    f = lambda x: steps(body_with(host_cosine), x, checkpoints=checkpoints)
    wanted = lambda x: unrolled(body_with(jnp.cos), x)
    assert_close(jax.value_and_grad(f)(0.7), jax.value_and_grad(wanted)(0.7))
    assert_close(jax.jvp(f, (0.7,), (1.0,)), jax.jvp(wanted, (0.7,), (1.0,)))
    assert_close(jax.jit(jax.hessian(f))(0.7), jax.hessian(wanted)(0.7))


@pytest.mark.slow
def test_callbacks_in_lanes():
    ns, xs = np.asarray([3, 0, 1]), jnp.asarray([0.7, 0.2, -0.5])
    f = lambda n, x: steps(lambda x: x * host_cosine(lax.stop_gradient(x)), x, count=n)
    wanted = lambda n, x: unrolled(lambda x: x * jnp.cos(lax.stop_gradient(x)), x, count=n)
    each = [jax.grad(wanted, 1)(int(n), x) for n, x in zip(ns, xs, strict=True)]
    assert_close(jax.vmap(jax.grad(f, 1))(ns, xs), jnp.stack(each))


def raises_when_differentiated(kind):
    def rule(*_):
        raise AssertionError("differentiated")

    if kind == "custom_jvp":
        opaque = jax.custom_jvp(jnp.cos)
        opaque.defjvp(rule)
    else:
        opaque = jax.custom_vjp(jnp.cos)
        opaque.defvjp(lambda x: (jnp.cos(x), x), rule)
    return opaque


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize("kind", ["custom_jvp", "custom_vjp"])
def test_a_leaf_without_tangent_is_not_differentiated(kind, checkpoints):
    """The second leaf starts from a constant and nothing differentiable enters it."""
    opaque = raises_when_differentiated(kind)

    def f(x):
        body = lambda c: (jnp.sin(c[0]) * c[1], opaque(c[1]))
        return steps(body, (x, 0.3), checkpoints=checkpoints)[0]

    def wanted(x):
        return unrolled(lambda c: (jnp.sin(c[0]) * c[1], jnp.cos(c[1])), (x, 0.3))[0]

    assert_close(jax.grad(f)(0.7), jax.grad(wanted)(0.7))
    assert_close(jax.jvp(f, (0.7,), (1.0,)), jax.jvp(wanted, (0.7,), (1.0,)))


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_a_cotangent_nobody_needs_never_enters_the_body(checkpoints):
    """The second leaf depends on x, but what is differentiated does not depend on it."""
    opaque = raises_when_differentiated("custom_vjp")

    def f(x):
        body = lambda c: (jnp.sin(c[0]), opaque(c[1]) * c[0])
        first, second = steps(body, (x, x), checkpoints=checkpoints)
        return first, second

    grad, aux = jax.grad(f, has_aux=True)(0.7)
    assert_close(grad, jax.grad(lambda x: unrolled(jnp.sin, x))(0.7))
    assert jnp.isfinite(aux)


def test_the_cotangent_of_ys_nobody_needs():
    opaque = raises_when_differentiated("custom_vjp")

    def f(x):
        carry, ys = loopkit.scan(lambda x, _: (jnp.sin(x), opaque(x)), x, length=3)
        return carry, ys

    grad, _ = jax.grad(f, has_aux=True)(0.7)
    assert_close(grad, jax.grad(lambda x: unrolled(jnp.sin, x, count=3))(0.7))


def test_a_cotangent_that_is_needed_does_raise():
    opaque = raises_when_differentiated("custom_vjp")
    with pytest.raises(AssertionError, match="differentiated"):
        jax.grad(lambda x: steps(opaque, x))(0.7)
