"""Functions of which some parts, or all, have no loops: traced once, read anew, not written to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from derivatives import assert_close
from problems import named

PLAIN = named("while_scalar", "while_vector", "scan_xs_ys", "scan_reverse", "while_in_while")
PLAIN += named("fori_traced_bound", "carry_of_mixed_types", "params_in_the_carry")


def test_a_function_with_loops_is_traced_once():
    calls = []

    def f(x):
        calls.append(x)
        return lax.fori_loop(0, 3, lambda _, y: jnp.sin(y), x)

    replaced = loopkit.checkpointed(f)
    replaced(1.0), replaced(2.0), jax.grad(replaced)(1.0)
    assert len(calls) == 1


def test_a_function_without_loops_is_traced_once_and_then_called():
    calls = []

    def f(x, name):
        calls.append((name, x))
        return jnp.sin(x)

    replaced, x = loopkit.checkpointed(f), jnp.asarray(1.0)
    for _ in range(3):
        replaced(x, "a")
    jax.grad(replaced)(x, "a")
    concrete = [not isinstance(v, jax.core.Tracer) for _, v in calls]
    assert concrete == [False, True, True, True, False]
    assert all(isinstance(v, jax.Array) for _, v in calls)
    replaced(1.0, "a"), replaced(np.float32(1.0), "a")
    assert all(isinstance(v, jax.Array) for _, v in calls)  # as where it is traced
    calls.clear()
    jax.jit(replaced, static_argnums=1)(x, "c")
    assert len(calls) == 1
    calls.clear()
    replaced(x, "b"), replaced(jnp.ones(2), "b")
    assert len(calls) == 4  # other arguments may have it run a loop


@pytest.mark.slow
def test_gradients_of_a_function_with_a_rule_are_compiled_once(compilations):
    def f(x):
        y = lax.fori_loop(0, 3, lambda _, y: jax.nn.relu(y) * x, x)
        return y * jax.nn.relu(x) * jnp.sin(x)

    x = jnp.asarray(0.5)
    for _ in range(3):
        compilations.clear()
        slope = jax.grad(loopkit.checkpointed(lambda x: f(x)))(x)
        assert_close(slope, 5 * x**4 * jnp.sin(x) + x**5 * jnp.cos(x))
    assert compilations == []


class Scale:
    by = 2.0


@pytest.mark.slow
@pytest.mark.parametrize("act", [jnp.sin, jax.nn.relu], ids=["plain", "with a rule"])
def test_a_function_without_loops_reads_anew_what_it_closes_over(act):
    scale, table = Scale(), {"large": jnp.full(20_000, 2.0)}

    def f(x):
        return act(x) * scale.by * table["large"][0]

    replaced, x = loopkit.checkpointed(f), jnp.asarray(0.5)
    for by in (2.0, 3.0, 4.0):
        scale.by = by
        table["large"] = jnp.full(20_000, by + 1)
        for one in (x, 0.5):
            assert_close(replaced(one), f(x))
            assert_close(jax.grad(replaced)(one), jax.grad(f)(x))
            assert_close(jax.vmap(replaced)(x[None]), f(x)[None])
        assert_close(jax.jit(lambda x, by: replaced(x))(x, by), f(x))


def test_a_loop_that_a_function_has_later_is_replaced_where_it_is_differentiated():
    switch = Scale()

    def f(x):
        if switch.by == 2.0:
            return x * 2
        return lax.while_loop(lambda y: y < 100.0, lambda y: y * y, x)

    replaced, x = loopkit.checkpointed(f), jnp.asarray(3.0)
    assert_close(replaced(x), x * 2)
    switch.by = 3.0
    assert_close(replaced(x), jnp.asarray(6561.0))
    assert_close(jax.grad(replaced)(x), jnp.asarray(8 * 3.0**7))


def test_arguments_of_a_function_without_loops_are_not_written_to():
    replaced = loopkit.checkpointed(lambda xs: xs.append(xs[0]) or sum(xs))
    xs = [jnp.ones(2)]
    for _ in range(3):
        assert_close(replaced(xs), jnp.full(2, 2.0))
    assert len(xs) == 1


@pytest.mark.slow
def test_a_rule_with_a_loop_in_a_function_without():
    @jax.custom_jvp
    def f(x):
        return x * x

    f.defjvp(lambda p, t: (f(*p), t[0] * lax.while_loop(lambda y: y < 100, jnp.square, *p)))
    replaced, x = loopkit.checkpointed(f), jnp.asarray(3.0)
    for _ in range(2):
        assert_close(replaced(x), x * x)
        for g in (jax.grad, lambda h: jax.jit(jax.grad(h)), lambda h: jax.grad(jax.jit(h))):
            assert_close(g(replaced)(x), jnp.asarray(6561.0))
            assert_close(jax.grad(g(replaced))(x), jnp.asarray(8 * 3.0**7))
    of = lambda w: loopkit.checkpointed(lambda x: f(x * w))(jnp.asarray(1.0))
    for _ in range(2):
        assert_close(jax.grad(jax.grad(of))(x), jnp.asarray(8 * 3.0**7))
