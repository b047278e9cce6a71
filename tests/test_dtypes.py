"""Every type that an array can have, in the carry, the xs and the ys."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from derivatives import assert_close
from problems import CHECKPOINTS
from tolerances import assert_near


def power(x, n, **kwargs):
    """x^(2^n)"""
    return loopkit.while_loop(
        lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * c[1]), (0, x), **kwargs
    )[1]


# ---------------------------------------------------------------- dtypes


FLOATS = ["bfloat16", "float16", "float32", "float64", "complex64", "complex128"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
def test_inexact_dtypes(dtype):
    x = jnp.asarray([0.5, -0.25], dtype)

    def f(x):
        y = power(x, 3, checkpoints=1)
        return jnp.real(jnp.sum(y))

    grad = jax.grad(f)(x)
    assert grad.dtype == power(x, 1).dtype == jnp.dtype(dtype)
    assert_near(grad, 8 * np.asarray(x, "complex128") ** 7)
    tangent = jax.jvp(lambda x: power(x, 3), (x,), (x,))[1]
    assert tangent.dtype == jnp.dtype(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64", "bool"])
def test_exact_dtypes(dtype):
    """Beside a float, in the carry, the xs and the ys."""
    exact = jnp.asarray([1, 0, 1], dtype)

    def run(scan):
        def f(x):
            body = lambda c, e: ((c[0] ^ e, jnp.sin(c[1] + e.astype(float))), (c[0] & e, c[1]))
            (last, x), (bits, ys) = scan(body, (exact[0], x), exact)
            return x + jnp.sum(ys), (last, bits)

        return jax.value_and_grad(f, has_aux=True)(0.3)

    assert_close(run(loopkit.scan), run(lax.scan))


@pytest.mark.slow
def test_complex_parameters():
    """The gradient of a real function of complex arguments, and holomorphic ones."""
    z, w = 0.3 + 0.4j, 0.5 - 0.2j

    def unrolled(z, w):
        for _ in range(3):
            z = z * w + jnp.conj(z)
        return z

    def looped(z, w):
        return loopkit.fori_loop(0, 3, lambda _, z: z * w + jnp.conj(z), z, checkpoints=1)

    real = lambda f: jax.grad(lambda z, w: jnp.abs(f(z, w)) ** 2, (0, 1))(z, w)
    assert_close(real(looped), real(unrolled))
    holomorphic = jax.grad(lambda z: power(z, 3), holomorphic=True)
    assert_close(holomorphic(z), jnp.asarray(8 * z**7))


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_typed_keys(checkpoints):
    """Keys in the carry, in the xs and in the ys: the same numbers in recomputation."""

    def run(scan, **kwargs):
        def f(x):
            def body(carry, key):
                own, x = carry
                own, draw = jax.random.split(own)
                noise = jax.random.normal(draw) + jax.random.normal(key)
                return (own, jnp.sin(x * noise)), (draw, x * noise)

            keys = jax.random.split(jax.random.key(1), 5)
            (key, x), (draws, ys) = scan(body, (jax.random.key(0), x), keys, **kwargs)
            return x + jnp.sum(ys), (key, draws)

        return jax.value_and_grad(f, has_aux=True)(0.3)

    assert_close(run(loopkit.scan, checkpoints=checkpoints), run(lax.scan))


@pytest.mark.slow
def test_keys_in_a_while_loop_with_lanes():
    def f(x, key):
        def body(carry):
            key, x = carry
            key, draw = jax.random.split(key)
            return key, x * jax.random.uniform(draw, minval=1.1, maxval=2.0)

        return loopkit.while_loop(lambda c: c[1] < 5.0, body, (key, x), checkpoints=1)

    keys, xs = jax.random.split(jax.random.key(0), 4), jnp.asarray([1.0, 2.0, 4.0, 6.0])
    lanes, ends = jax.vmap(f)(xs, keys)
    grads = jax.vmap(jax.grad(lambda x, key: f(x, key)[1]))(xs, keys)
    assert_close(grads, ends / xs)
    assert lanes.dtype == keys.dtype


def test_legacy_keys():
    body = lambda c: (jax.random.split(c[0])[0], c[1] * jax.random.uniform(c[0]), c[2] + 1)
    init = jax.random.PRNGKey(0), 1.0, 0
    wanted = lax.while_loop(lambda c: c[2] < 3, body, init)
    assert_close(loopkit.while_loop(lambda c: c[2] < 3, body, init), wanted)


@pytest.mark.slow
def test_numpy_and_python_scalars():
    """An initial value may be anything that jax takes for an array."""
    for one in (1.0, np.float64(1.0), np.ones(()), jnp.ones(())):
        assert_close(power(one * 1.5, 1), jnp.asarray(2.25))
    assert power(np.float32(1.5), 1).dtype == jnp.float32
    xs = [1.0, 2.0], np.arange(2)
    wanted = lax.scan(lambda c, x: (c + x[1], c), 0, (np.asarray(xs[0]), xs[1]))
    assert_close(loopkit.scan(lambda c, x: (c + x[1], c), 0, (np.asarray(xs[0]), xs[1])), wanted)


WEAK = {
    "float stays weak": (0.0, lambda x: x + 1.5),
    "float meets float32": (0.0, lambda x: x + jnp.float32(1.5)),
    "int stays weak": (0, lambda x: x + 1),
    "int meets int32": (0, lambda x: x + jnp.int32(1)),
    "int meets float32": (0, lambda x: x + jnp.float32(1.5)),
    "strong meets weak": (jnp.float32(0.0), lambda x: x + 1.5),
    "float32 replaced by weak": (jnp.float32(0.0), lambda x: jnp.asarray(1.5) + x),
    "complex": (0.0, lambda x: x + jnp.complex64(1.5)),
}


@pytest.mark.parametrize("kind", WEAK)
@pytest.mark.parametrize("which", ["while_loop", "scan", "fori_loop"])
def test_weak_types_are_promoted_as_in_lax(which, kind):
    init, body = WEAK[kind]

    def run(loops):
        match which:
            case "while_loop":
                return loops.while_loop(lambda x: jnp.abs(x) < 3, body, init)
            case "scan":
                return loops.scan(lambda x, _: (body(x), x), init, length=2)
            case "fori_loop":
                return loops.fori_loop(0, 2, lambda _, x: body(x), init)

    got, wanted = run(loopkit), run(lax)
    assert_close(got, wanted)
    types = lambda tree: [(x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]
    assert types(got) == types(wanted)


@pytest.mark.slow
def test_single_precision_by_default():
    """Without x64 nothing is double."""
    with jax.enable_x64(False):
        out, info = loopkit.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 1.5), (0, 1.0), return_info=True
        )
        grad = jax.grad(lambda x: power(x, 2, checkpoints=1))(1.5)
    assert [leaf.dtype for leaf in out] == ["int32", "float32"]
    assert (info.steps.dtype, grad.dtype) == ("int32", "float32")


# ---------------------------------------------------------------- float0


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_cotangents_of_integers_are_float0(checkpoints):
    def f(n, x, table):
        body = lambda c: (c[0] + 1, c[1] * table[c[0]].astype(float))
        return loopkit.while_loop(
            lambda c: c[0] < n, body, (0, x), checkpoints=checkpoints, max_steps=4
        )

    (step, x), pullback = jax.vjp(f, 3, 0.5, jnp.asarray([2, 3, 4, 5]))
    assert (step, x) == (3, 12.0)
    zero = np.zeros((), jax.dtypes.float0)
    n_bar, x_bar, table_bar = pullback((zero, jnp.asarray(1.0)))
    assert (n_bar.dtype, table_bar.dtype) == (jax.dtypes.float0, jax.dtypes.float0)
    assert table_bar.shape == (4,)
    assert x_bar == 24.0


def test_gradient_with_allow_int():
    grad = jax.grad(lambda n, x: power(x, n), argnums=(0, 1), allow_int=True)
    n_bar, x_bar = grad(2, 1.5)
    assert n_bar.dtype == jax.dtypes.float0
    assert_close(x_bar, jnp.asarray(4 * 1.5**3))


def test_key_arguments_have_float0_cotangents():
    f = lambda key, x: power(x, 2) * jax.random.uniform(key)
    key_bar, _ = jax.grad(f, argnums=(0, 1), allow_int=True)(jax.random.key(0), 1.5)
    assert key_bar.dtype == jax.dtypes.float0


@pytest.mark.parametrize("bounds", [(0, 3), (0, np.int16(3))], ids=str)
def test_traced_bounds_are_as_weak_as_in_lax(bounds):
    def total(loop):
        return jax.jit(lambda m, n: loop(m, n, lambda i, x: x + i, jnp.int16(0)))(*bounds)

    got, wanted = total(loopkit.fori_loop), total(lax.fori_loop)
    assert (jax.typeof(got), int(got)) == (jax.typeof(wanted), int(wanted))
