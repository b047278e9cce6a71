"""Flags behind which JAX keeps its next generation: loops compute the same with and without."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import loopkit
from derivatives import assert_close

XS = jnp.array([0.3, -0.7, 1.1, 0.4])


@pytest.fixture
def scan3():
    """Makes `lax.scan` a loop over references."""
    if not hasattr(jax.config, "jax_scan3"):
        pytest.skip("this JAX does not have the flag")
    jax.config.update("jax_scan3", True)
    yield
    jax.config.update("jax_scan3", False)


@pytest.fixture
def remat3():
    """Makes an operation that is an object of what is under `jax.checkpoint`."""
    if not hasattr(jax.config, "jax_remat3"):
        pytest.skip("this JAX does not have the flag")
    jax.config.update("jax_remat3", True)
    yield
    jax.config.update("jax_remat3", False)


def step(c, x):
    return jnp.sin(c) * x + 0.1, c * x


def along(c, xs, **how):
    """The steps of a scan, in Python."""
    ys, order = [], range(len(xs))
    for i in reversed(order) if how.get("reverse") else order:
        c, y = step(c, xs[i])
        ys.append(y)
    return c, jnp.stack(ys[::-1] if how.get("reverse") else ys)


def total(loop, **how):
    def f(x):
        c, ys = loop(x, x * XS, **how)
        return c + (ys * jnp.arange(1.0, 5.0)).sum()

    return f


def in_modes(f, x):
    """Derivatives in three orders of the modes, and lanes."""
    lanes = jnp.stack([x, 2 * x])
    second = jax.jvp(jax.grad(f), (x,), (jnp.ones_like(x),))
    return jax.jacfwd(f)(x), second, jax.vmap(jax.value_and_grad(f))(lanes)


slope = jax.value_and_grad
X = jnp.asarray(0.8)
WAYS = {
    "a scan of lax": lambda x, xs, **how: lax.scan(step, x, xs, **how),
    "in a jitted function": jax.jit(
        lambda x, xs, **how: lax.scan(step, x, xs, **how), static_argnames="reverse"
    ),
    "in a while loop": lambda x, xs, **how: lax.while_loop(
        lambda s: s[2] < 1, lambda s: (*lax.scan(step, s[0], xs, **how), s[2] + 1), (x, xs, 0)
    )[:2],
}


@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_scans_of_lax_are_replaced(way, reverse, scan3):
    f, wanted = total(WAYS[way], reverse=reverse), slope(total(along, reverse=reverse))(X)
    assert_close(jax.jit(slope(loopkit.checkpointed(f, strict=True)))(X), wanted)
    with loopkit.replace_lax_loops(strict=True):
        assert_close(jax.jit(slope(lambda x: f(x)))(X), wanted)
    assert jax.config.jax_scan3


def test_explain_lists_a_scan_of_lax(scan3):
    assert [e.name for e in loopkit.explain(total(WAYS["a scan of lax"]), X)] == ["lax.scan"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS)
def test_replaced_scans_in_every_mode(way, scan3):
    replaced = loopkit.checkpointed(total(WAYS[way], reverse=True), strict=True)
    got = jax.jit(lambda x: in_modes(replaced, x))(X)
    assert_close(got, in_modes(total(along, reverse=True), X))


def test_a_scan_that_is_left_is_lax_as_it_was(scan3):
    """The one with a primitive that has a gradient, and can be reversed."""
    f = total(WAYS["a scan of lax"], reverse=True)
    left = loopkit.checkpointed(f, only=lambda site: False, strict=False)
    assert " scan[" in str(jax.make_jaxpr(left)(X))
    assert_close(slope(left)(X), slope(total(along, reverse=True))(X))


@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("checkpoints", ["all", None])
def test_scans_of_ones_own(checkpoints, reverse, scan3):
    def loop(x, xs):
        return loopkit.scan(step, x, xs, reverse=reverse, checkpoints=checkpoints)

    wanted = slope(total(along, reverse=reverse))(X)
    assert_close(slope(total(loop))(X), wanted)
    assert_close(jax.jit(slope(total(loop)))(X), wanted)


@jax.custom_vjp
def scanned(x):
    return along(x, XS)[0]


def _backward(x, ct):
    return (lax.scan(lambda c, w: (c * w * jnp.cos(x), None), ct, XS, reverse=True)[0],)


scanned.defvjp(lambda x: (scanned(x), x), _backward)


@pytest.mark.slow
def test_scans_of_lax_in_steps_and_in_rules(scan3):
    def nested(x):
        inner = lambda c, x: lax.scan(step, c, x * XS)[0]
        return loopkit.scan(lambda c, x: (inner(c, x) + scanned(c), None), x, XS)[0]

    def unrolled(x):
        for w in XS:
            x = along(x, w * XS)[0] + with_rule(x)
        return x

    with_rule = jax.custom_vjp(lambda x: along(x, XS)[0])
    by_steps = lambda x, ct: (jnp.prod(XS) * jnp.cos(x) ** 4 * ct,)
    with_rule.defvjp(lambda x: (with_rule(x), x), by_steps)
    assert_close(jax.jit(slope(nested))(X), slope(unrolled)(X))


def test_a_scan_that_was_traced_with_the_flag_is_an_error(scan3):
    closed = jax.make_jaxpr(lambda x: lax.scan(step, x, XS)[0])(X)
    before = lambda x: jax.extend.core.jaxpr_as_fun(closed)(x)[0]
    wanted = r"checkpointed: a scan that was traced under `jax_scan3` .* Got: the loop at \S+"
    with pytest.raises(NotImplementedError, match=wanted):
        loopkit.checkpointed(before)(X)
    with (
        loopkit.replace_lax_loops(),
        pytest.raises(NotImplementedError, match="replace_lax_loops: a scan that was traced"),
    ):
        before(X)
    assert before(X).shape == ()
    wanted = r"a step must not run a scan that was traced under .* in the loop at .*test_next_jax"
    with pytest.raises(NotImplementedError, match=wanted):
        loopkit.scan(lambda c, _: (before(c), None), X, length=2)


@pytest.mark.slow
def test_checkpoint_in_the_step_of_a_loop_in_a_loop_of_lanes(remat3):
    starts, counts = jnp.array([0.3, -0.7, 1.1]), jnp.array([3, 1, 2])
    inner = lambda x, wrap: loopkit.fori_loop(0, 1, lambda _, x: wrap(jnp.sin)(x), x, max_steps=5)

    def total(starts, wrap):
        steps = lambda a, n: loopkit.fori_loop(0, n, lambda _, x: inner(x, wrap), a, lanes=(2, 1))
        return jax.vmap(steps)(starts, counts).sum()

    got = jax.jit(lambda x: slope(total)(x, jax.checkpoint))(starts)
    assert_close(got, slope(total)(starts, lambda f: f))
