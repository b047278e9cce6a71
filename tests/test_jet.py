"""Taylor mode, `jax.experimental.jet`: series through loops, against unrolled Python loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import jet

import loopkit
from derivatives import in_numpy

X = 0.4
XS = jnp.arange(1, 5) / 3
TERMS = 1.0, 0.3, -0.2, 0.5


def series_of(f, x, order):
    x = jnp.asarray(x)
    return jet.jet(f, (x,), ([t * jnp.ones_like(x) for t in TERMS[:order]],))


def compare(f, unrolled, orders=(3,), x=X):
    for order in orders:
        wanted = in_numpy(lambda x, order=order: series_of(unrolled, x, order), jnp.asarray(x))
        close = lambda a, b: np.testing.assert_allclose(a, b, 1e-11, 1e-13)
        jax.tree.map(close, series_of(f, x, order), wanted)


def step(x):
    return lambda i, c: jnp.tanh(c) * x + 1 / (1 + c)


def steps(count):
    def unrolled(x):
        c = x
        for i in range(count):
            c = step(x)(i, c)
        return c

    return unrolled


def scanned(x, **options):
    body = lambda c, y: (jnp.exp(c) * x + y * x, (c * y, jnp.ones(())))
    return loopkit.scan(body, x, XS * x, **options)


def scanned_in_python(x, order=(0, 1, 2, 3)):
    c, ys = x, [jnp.zeros(())] * 4
    for i in order:
        ys[i] = c * XS[i] * x
        c = jnp.exp(c) * x + XS[i] * x * x
    ones = jnp.zeros(4).at[jnp.array(order)].set(1)
    return c, (jnp.stack(ys), ones)


def while_five(x, **options):
    body = lambda c: (c[0] + 1, step(x)(0, c[1]))
    return loopkit.while_loop(lambda c: c[0] < 5, body, (0, x), **options)[1]


def replaced(x):
    with loopkit.replace_lax_loops():
        return jax.lax.fori_loop(0, 5, step(x), x)


FIVE_STEPS = {
    "while": while_five,
    "while, bounded": lambda x: while_five(x, max_steps=7),
    "while, throw": lambda x: while_five(x, max_steps=7, throw=True),
    "fori": lambda x: loopkit.fori_loop(0, 5, step(x), x),
    "fori, dynamic": lambda x: loopkit.fori_loop(0, jnp.int32(5 + 0 * x), step(x), x),
    "fori, finite": lambda x: loopkit.fori_loop(0, 5, step(x), x, debug="finite"),
    "jit": jax.jit(lambda x: loopkit.fori_loop(0, 5, step(x), x)),
    "checkpointed": loopkit.checkpointed(lambda x: jax.lax.fori_loop(0, 5, step(x), x)),
    "replaced": replaced,
    "nested": lambda x: loopkit.fori_loop(
        0, 2, lambda i, c: loopkit.fori_loop(0, i + 2, step(x), c), x
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FIVE_STEPS)
def test_five_steps(name):
    compare(FIVE_STEPS[name], steps(5))


@pytest.mark.slow
def test_all_orders():
    compare(FIVE_STEPS["fori"], steps(5), (1, 2, 3, 4))


def test_scan():
    compare(scanned, scanned_in_python)
    backward = lambda x: scanned_in_python(x, (3, 2, 1, 0))
    compare(lambda x: scanned(x, reverse=True), backward)


def test_until():
    found = lambda x: scanned(x, until=lambda c, _: c > 0.8)
    compare(found, lambda x: scanned_in_python(x, (0, 1)))


def test_jit_outside():
    f = lambda x: series_of(FIVE_STEPS["fori"], x, 3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-12), jax.jit(f)(X), f(X))


def test_derivatives_of_a_known_function():
    """`x ** 4` along `x + t`."""
    power = lambda x: loopkit.fori_loop(0, 3, lambda _, c: c * x, x)
    value, terms = jet.jet(power, (2.0,), ((1.0, 0.0, 0.0, 0.0),))
    np.testing.assert_allclose([value, *terms], [16, 32, 48, 48, 24], 1e-12)


def test_buffer():
    def loop(x):
        def body(c, i):
            v, b = c
            v = jnp.sin(v) * x + b[jnp.maximum(i - 1, 0)]
            return (v, b.at[i].set(v)), None

        init = x, loopkit.Buffer(jnp.zeros(3) + 0.1 * x)
        return loopkit.scan(body, init, jnp.arange(3))[0][1]

    def unrolled(x):
        v, b = x, [0.1 * x] * 3
        for i in range(3):
            v = jnp.sin(v) * x + b[max(i - 1, 0)]
            b[i] = v
        return jnp.stack(b)

    compare(loop, unrolled)


def test_leaves_that_do_not_move():
    """A PRNG key has no series, and a zero under a square root none of zeros, which would be NaN.

    The third leaf moves at first, and not after a step.
    """
    zero = jnp.zeros(())

    def body(x, c):
        key, root, _, v = c
        key, now = jax.random.split(key)
        return key, root, 1.0, v * x + jnp.sqrt(root) + jax.random.normal(now, dtype=v.dtype)

    init = lambda x: (jax.random.key(0), zero, x, x)

    def loop(x):
        return loopkit.fori_loop(0, 3, lambda _, c: body(x, c), init(x))[1:]

    def unrolled(x):
        c = init(x)
        for _ in range(3):
            c = body(x, c)
        return c[1], jnp.asarray(c[2]), c[3]

    compare(loop, unrolled)


@pytest.mark.parametrize("lanes", ["wait", "compact"])
def test_lanes(lanes):
    x = jnp.array([0.3, 0.5, 0.9])

    def loop(x):
        body = lambda c: c * (1 + x)
        return loopkit.while_loop(lambda c: c < 2, body, x + 0.1, lanes=lanes)

    unrolled = lambda x: (x + 0.1) * (1 + x) ** jnp.array([7.0, 3.0, 2.0])
    compare(jax.vmap(loop), unrolled, x=x)
    one = lambda x: series_of(loop, x, 2)
    both = jax.jit(jax.vmap(one))(x), in_numpy(lambda x: series_of(unrolled, x, 2), x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-11), *both)


def last_term(f):
    return lambda x: series_of(f, x, 2)[1][1]


@pytest.mark.parametrize(
    "derive", [jax.grad, pytest.param(jax.hessian, marks=pytest.mark.slow)], ids=["grad", "hessian"]
)
def test_derivatives_of_terms(derive):
    found, expected = (jax.jit(derive(last_term(f)))(X) for f in (FIVE_STEPS["fori"], steps(5)))
    np.testing.assert_allclose(found, expected, 1e-11)


@pytest.mark.slow
def test_a_jvp_and_a_series_inside():
    loop, unrolled = FIVE_STEPS["fori"], steps(5)
    pushed = lambda f: lambda x: jax.jvp(f, (x,), (x * x,))[1]
    compare(pushed(loop), pushed(unrolled), (2,))
    compare(last_term(loop), last_term(unrolled), (2,))


def test_a_gradient_inside():
    slope = jax.grad(FIVE_STEPS["fori"])
    text = (
        r"loopkit\.fori_loop: jax\.experimental\.jet must not go through a gradient of the loop\. "
        r"Take the gradient of what jet returns, or nest jax\.jvp\. Got: a gradient\."
    )
    with pytest.raises(NotImplementedError, match=text):
        series_of(slope, X, 2)
    loop = loopkit.checkpointed(jax.grad(lambda x: jax.lax.fori_loop(0, 5, step(x), x)))
    text = r"loopkit\.checkpointed: in the scan at .*test_jet.py.*: jax\.experimental\.jet must not"
    with pytest.raises(NotImplementedError, match=text):
        series_of(loop, X, 2)
