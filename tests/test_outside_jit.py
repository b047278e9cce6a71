"""Functions through `checkpointed` outside jit: compiled as a whole, where that does the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from derivatives import assert_close
from turns import in_turn


def steps(x):
    """Equations of many kinds around a loop."""
    y = jnp.sin(x) * jnp.cos(x) + jnp.exp(-x)
    y = lax.fori_loop(0, 3, lambda _, y: y * x + jnp.tanh(y), y)
    return jnp.sum(y / (1 + y * y))


def with_rules(x):
    return steps(jax.nn.relu(x)) + jax.nn.silu(x).sum()


WAYS = {
    "value": lambda f, x: f(x),
    "grad": lambda f, x: jax.grad(f)(x),
    "second": lambda f, x: jax.grad(lambda x: jax.grad(f)(x).sum())(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,))[1],
    "vmap": lambda f, x: jax.vmap(f)(jnp.stack([x, 2 * x])),
    "vmap of grad": lambda f, x: jax.vmap(jax.grad(f))(jnp.stack([x, 2 * x])),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", in_turn(WAYS, of=3))
def test_outside_jit_a_program_is_compiled_as_a_whole(how, compilations):
    """A program runs as a whole, and not one equation after another, which takes Python long."""
    x = jnp.linspace(0.5, 1.5, 3 + list(WAYS).index(how))
    for f in (steps, with_rules):
        wanted = WAYS[how](f, x)
        replaced = loopkit.checkpointed(lambda x, f=f: f(x))
        if f is with_rules:  # nobody knows what a rule is equal to: one is compiled when it is used
            WAYS[how](replaced, x)
        compilations.clear()
        assert_close(WAYS[how](replaced, x), wanted)
        assert 0 < len(compilations) < 8
        compilations.clear()
        assert_close(WAYS[how](replaced, x), wanted)
        assert compilations == []


@pytest.mark.exhaustive
def test_outside_jit_a_program_that_is_not_pure_is_run_as_it_is():
    seen, x = [], jnp.linspace(0.5, 1.5, 3)

    def reports(x):
        jax.debug.callback(lambda v: seen.append(float(v)), x[0])
        return steps(x)

    replaced = loopkit.checkpointed(reports)
    for _ in range(3):
        seen.clear()
        assert_close(jax.grad(replaced)(x), jax.grad(steps)(x))
        jax.effects_barrier()
        assert seen == [0.5]
    grow = lambda x: lax.fori_loop(0, 3, lambda _, y: y * 2, x)
    donates = loopkit.checkpointed(jax.jit(grow, donate_argnums=0))
    for _ in range(3):
        y = x + 0.0
        assert_close(donates(y), 8 * x)
        assert y.is_deleted()
    with pytest.raises((RuntimeError, ValueError), match=r"deleted|donated"):
        donates(y)


@pytest.mark.slow
def test_outside_jit_arrays_may_be_on_several_devices():
    first, second = jax.devices()[:2]
    a, b = jax.device_put(jnp.arange(3.0), first), jax.device_put(jnp.arange(3.0), second)
    apart = loopkit.checkpointed(lambda a, b: (steps(a + 1), steps(b + 1)))
    moves = loopkit.checkpointed(lambda a, b: steps(a + 1) + steps(jax.device_put(b, first) + 1))
    for _ in range(3):
        x, y = apart(a, b)
        assert (x.devices(), y.devices()) == ({first}, {second})
        assert_close(moves(a, b), steps(a + 1) * 2)
        assert_close(jax.grad(moves, argnums=1)(a, b), jax.grad(steps)(a + 1))


@pytest.mark.exhaustive
def test_outside_jit_without_jit():
    x, f = jnp.linspace(0.5, 1.5, 3), loopkit.checkpointed(steps)
    seen = []
    watched = loopkit.checkpointed(lambda x: (seen.append(type(x)), steps(x))[1])
    for _ in range(3):
        with jax.disable_jit():
            assert_close(jax.grad(f)(x), jax.grad(steps)(x))
            assert_close(watched(x), steps(x))
        assert_close(jax.grad(f)(x), jax.grad(steps)(x))
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        f(x * jnp.nan)


@pytest.mark.slow
def test_outside_jit_what_is_closed_over_is_differentiated():
    x = jnp.linspace(0.5, 1.5, 3)
    outer = lambda w: loopkit.checkpointed(lambda x: with_rules(x * w))(x)
    table = np.linspace(1.0, 2.0, 3)
    closes = loopkit.checkpointed(lambda x: steps(x * table))
    for w in (0.5, 0.6, 0.7):
        assert_close(jax.grad(outer)(w), jax.grad(lambda w: with_rules(x * w))(w))
        twice = jax.grad(jax.grad(lambda w: with_rules(x * w)))
        assert_close(jax.grad(jax.grad(outer))(w), twice(w))
        assert_close(jax.grad(closes)(x), jax.grad(lambda x: steps(x * table))(x))
