"""The ends of every range: no step, one step, no input, empty trees."""

import collections

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax import lax

import loopkit
from derivatives import assert_close
from problems import CHECKPOINTS


def power(x, n, **kwargs):
    """x^(2^n)"""
    return loopkit.while_loop(
        lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * c[1]), (0, x), **kwargs
    )[1]


# ---------------------------------------------------------------- few steps


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize("max_steps", [0, 1, 2, 3, 7])
def test_bounds_around_the_number_of_steps(max_steps, checkpoints):
    """Two steps, with bounds on either side, among them exactly two."""
    f = lambda x: power(x, 2, max_steps=max_steps, checkpoints=checkpoints)
    exponent = 2 ** min(max_steps, 2)
    wanted = (1.5**exponent, exponent * 1.5 ** (exponent - 1))
    assert_close(jax.value_and_grad(f)(1.5), jax.tree.map(jnp.asarray, wanted))


@pytest.mark.parametrize("max_steps", [None, 3])
def test_no_step(max_steps):
    f = lambda x: power(x, 0, max_steps=max_steps)
    assert_close(jax.jvp(f, (1.5,), (2.0,)), (jnp.asarray(1.5), jnp.asarray(2.0)))
    assert_close(jax.grad(jax.grad(f))(1.5), jnp.asarray(0.0))


@pytest.mark.slow
@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_short_scans(checkpoints, reverse, length):
    xs = {"x": jnp.asarray([[0.3, 0.4]])[:length]}

    def grads(scan, **kwargs):
        def f(h, xs, w):
            body = lambda h, x: (jnp.sin(w * h + x["x"]), {"y": h * w, "i": 3})
            h, ys = scan(body, h, xs, reverse=reverse, **kwargs)
            return jnp.sum(h) + jnp.sum(ys["y"]), ys

        return jax.value_and_grad(f, (0, 1, 2), has_aux=True)(jnp.asarray([0.1, 0.5]), xs, 0.7)

    assert_close(grads(loopkit.scan, checkpoints=checkpoints), grads(lax.scan))


@pytest.mark.parametrize("length", [0, 1, 3])
def test_short_scans_with_until(length):
    f = lambda h, x: (h + x, h * x)
    h, ys, info = loopkit.scan(
        f, 0.5, jnp.ones(length), until=lambda h, _: h > 1.0, return_info=True
    )
    steps = min(length, 1)
    assert_close((h, ys), (jnp.asarray(0.5 + steps), jnp.asarray([0.5, 0.0, 0.0])[:length]))
    assert (info.steps, info.stopped) == (steps, steps == 1)


def test_until_that_holds_at_the_last_step():
    f = lambda h, x: (h + x, h)
    _, _, info = loopkit.scan(f, 0.0, jnp.ones(3), until=lambda h, _: h > 2.5, return_info=True)
    assert (info.steps, info.stopped) == (3, True)


@pytest.mark.parametrize("length", [0, 1, 4])
def test_scan_without_xs(length):
    grad = jax.grad(lambda x: loopkit.scan(lambda x, _: (2 * x, x), x, length=length)[0])
    assert_close(grad(1.5), jnp.asarray(2.0**length))
    xs_of_nothing = loopkit.scan(lambda x, _: (x, x), 1.0, {"a": None}, length=length)[1]
    assert xs_of_nothing.shape == (length,)


@pytest.mark.parametrize(("lower", "upper"), [(0, 0), (5, 3), (-2, 2), (3, 4)])
@pytest.mark.parametrize("traced", [False, True])
def test_ranges(traced, lower, upper):
    def f(fori_loop, x, lower, upper):
        return fori_loop(lower, upper, lambda i, x: x * 1.5 + i, x)

    looped = lambda x, *bounds: f(loopkit.fori_loop, x, *bounds)
    if traced:
        got = jax.jit(jax.value_and_grad(looped))(0.3, lower, upper)
    else:
        got = jax.value_and_grad(looped)(0.3, lower, upper)
    steps = max(0, upper - lower)
    assert_close(got[0], f(lax.fori_loop, 0.3, lower, upper))
    assert_close(got[1], jnp.asarray(1.5**steps))


# ---------------------------------------------------------------- trees


@pytest.mark.slow
def test_empty_carries():
    assert loopkit.while_loop(lambda _: False, lambda c: c, ()) == ()
    carry, ys = loopkit.scan(lambda c, x: (c, 2 * x), None, jnp.arange(3.0))
    assert carry is None
    assert_close(ys, jnp.asarray([0.0, 2.0, 4.0]))
    grad = jax.grad(
        lambda w: jnp.sum(loopkit.scan(lambda c, x: (c, w * x), None, jnp.arange(3.0))[1])
    )
    assert_close(grad(1.0), jnp.asarray(3.0))


@pytest.mark.slow
def test_trees_of_every_kind():
    Pair = collections.namedtuple("Pair", "left right")
    linear = eqx.nn.Linear(2, 2, key=jax.random.key(0), dtype=jnp.float64)
    params, static = eqx.partition(linear, eqx.is_array)

    def run(scan):
        def f(params, carry):
            def body(carry, x):
                layer = eqx.combine(params, static)
                right = jax.tree.map(lambda r: layer(r) * x, carry.right)
                return Pair({"n": carry.left["n"] + 1}, right), (right, None)

            carry, (ys, nothing) = scan(body, carry, jnp.asarray([0.3, 0.5]))
            assert nothing is None
            return sum(map(jnp.sum, jax.tree.leaves((carry.right, ys))))

        carry = Pair({"n": 0}, [jnp.ones(2), (), None, collections.OrderedDict(z=jnp.zeros(2))])
        return jax.grad(f)(params, carry)

    assert_close(run(loopkit.scan), run(lax.scan))


def test_results_have_the_type_of_the_carry():
    class Box(eqx.Module):
        value: jax.Array
        unit: str = eqx.field(static=True)

    out = loopkit.while_loop(
        lambda box: box.value < 3, lambda box: Box(box.value * 2, box.unit), Box(1.0, "metre")
    )
    assert isinstance(out, Box)
    assert out.unit == "metre"
    assert out.value == 4.0


SETTINGS = [{}, {"checkpoints": 1}, {"checkpoints": 2}, {"checkpoints": "all"}, {"memory": "1 MB"}]


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("bound", [1, 2, 5])
def test_fewer_steps_than_the_bound(bound, settings):
    """A loop of few bytes keeps residuals, and one of more keeps carries."""

    def run(x, n):
        body = lambda c: (c[0] + 1, jnp.sin(c[1]) * jnp.cos(c[1]))
        return loopkit.while_loop(lambda c: c[0] < n, body, (0, x), max_steps=bound, **settings)[1]

    def unrolled(x, n):
        for _ in range(n):
            x = jnp.sin(x) * jnp.cos(x)
        return x

    slopes = lambda f: jax.grad(lambda x, n: jnp.sum(jnp.sin(f(x, n))))
    of_loop = jax.jit(slopes(run))
    for size in (3, 50, 2000):
        x = jnp.linspace(-1.0, 1.0, size)
        for n in range(bound + 1):
            assert_close(of_loop(x, n), slopes(unrolled)(x, n))
        counts = jnp.array([bound, 0])
        got = jax.jit(jax.vmap(slopes(run)))(jnp.stack([x, x]), counts)
        assert_close(got[0], slopes(unrolled)(x, bound))
        assert_close(got[1], slopes(unrolled)(x, 0))


@pytest.mark.slow
@pytest.mark.parametrize("bound", [1, 2])
def test_second_derivatives_of_no_step(bound):
    def f(x, n):
        body = lambda c: (c[0] + 1, jnp.sin(c[1]) + jnp.sin(c[1]).mean())
        c = loopkit.while_loop(lambda c: c[0] < n, body, (0, x), max_steps=bound)
        return jnp.sum(jnp.sin(c[1]))

    x = jnp.linspace(-1.0, 1.0, 9)
    twice = jax.jit(jax.jacrev(jax.jacfwd(f)))
    assert_close(twice(x, 0), jnp.diag(-jnp.sin(x)))
