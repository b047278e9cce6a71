"""Loops in a step, without what nobody uses of them: nothing else than the numbers must stay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from derivatives import assert_close
from loopkit._engine.rules import vmap

KEYS = jnp.array([[3, 0, 7, 1, 40, 2], [0, 0, 1, 5, 9, 33]])
STEPS = 7


def inner(x, key, w, settings):
    """Steps of which each reads a bit of a key that has no derivative."""

    def body(c):
        i, x, key = c
        return i + 1, jnp.where(key % 2 == 0, jnp.sin(x * w), x * w * x + 0.1), key // 2

    if settings is None:
        c = (0, x, key)
        for _ in range(STEPS):
            go, new = c[2] > 0, body(c)
            c = jax.tree.map(lambda n, o, go=go: jnp.where(go, n, o), new, c)
        return c[1]
    start = (0, x, key)
    return loopkit.while_loop(lambda c: c[2] > 0, body, start, max_steps=STEPS, **settings)[1]


def outer(x, keys, w, settings, how):
    step = lambda c: (c[0] + 1, inner(c[1], keys[c[0]], w, settings) * 1.1)
    n = len(keys)
    if settings is None:
        c = (0, x)
        for _ in range(n):
            c = step(c)
        return c[1] ** 2
    return loopkit.while_loop(lambda c: c[0] < n, step, (0, x), max_steps=n, **how)[1] ** 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", [{"checkpoints": "all"}, {"checkpoints": 2}], ids=str)
@pytest.mark.parametrize("settings", [{"checkpoints": "all"}, {"checkpoints": 2}], ids=str)
def test_lanes_of_what_is_not_read(settings, how):
    """The residuals of the inner loop depend on a key that the way back does not read."""
    x, w = jnp.asarray(0.3), jnp.asarray(0.9)
    gradient = lambda *of: lambda x, keys, w: jax.grad(outer, (0, 2))(x, keys, w, *of)
    lanes = lambda *of: jax.jit(jax.vmap(gradient(*of), (None, 0, None)))(x, KEYS, w)
    assert_close(lanes(settings, how), lanes(None, None))


@pytest.mark.exhaustive
def test_lanes_that_are_run_on_what_is_there(monkeypatch):
    """The lanes of the residuals have to be found out from the residuals."""
    seen = []
    spread = vmap.spread
    monkeypatch.setattr(vmap, "spread", lambda *args: seen.append(args) or spread(*args))
    monkeypatch.setitem(globals(), "STEPS", STEPS + 1)  # loops that were not batched before
    all_of_them = {"checkpoints": "all"}
    test_lanes_of_what_is_not_read(all_of_them, all_of_them)
    assert seen


@pytest.mark.slow
def test_a_matrix_that_is_read_where_lanes_of_what_is_stored_are_found_out():
    """It has no axis of lanes, and goes to all of them as it is."""
    w, x = jnp.array([[0.9, -0.4], [0.3, 1.1]]), jnp.array([0.3, -0.5])

    def inner(x, key, while_loop):
        step = lambda c: (jnp.where(c[1] % 2 == 0, jnp.sin(w @ c[0]), w @ c[0] / 2), c[1] // 2)
        return while_loop(lambda c: c[1] > 0, step, (x, key))[0]

    def outer(x, keys, while_loop):
        step = lambda c: (c[0] + 1, inner(c[1], keys[c[0]], while_loop) * 1.1)
        return jnp.sum(while_loop(lambda c: c[0] < len(keys), step, (0, x))[1] ** 2)

    def ours(go, step, init):
        return loopkit.while_loop(go, step, init, max_steps=STEPS, checkpoints="all")

    lanes = lambda slope, loop: jax.jit(jax.vmap(lambda keys: slope(outer)(x, keys, loop)))(KEYS)
    assert_close(lanes(jax.grad, ours), lanes(jax.jacfwd, jax.lax.while_loop))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [100, 10_000])
@pytest.mark.parametrize("checkpoints", [None, 3])
def test_a_buffer_that_an_inner_loop_writes_to(rows, checkpoints):
    """It is neither in the checkpoints nor in the residuals of a step."""

    def outer(x, loops):
        def step(c):
            count, x, out = c
            x = jnp.sin(x) * 1.1
            stop = count + 2

            def write(c):
                count, out = c
                return count + 1, out.at[count].set(x * count)

            count, out = loops.while_loop(lambda c: c[0] < stop, write, (count, out))
            return count, x, out

        start = (0, x, jnp.zeros(rows))
        return jnp.sum(loops.while_loop(lambda c: c[0] < 50, step, start)[2] ** 2)

    f = loopkit.checkpointed(lambda x: outer(x, jax.lax), checkpoints=checkpoints)
    x = jnp.asarray(0.7)
    compiled = jax.jit(jax.grad(f)).lower(x).compile()
    wanted = jax.jit(jax.jacfwd(lambda x: outer(x, jax.lax)))(x)
    np.testing.assert_allclose(compiled(x), wanted, rtol=1e-12)
    # The array, its cotangent, and copies of each; not one for each checkpoint.
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 8 * rows + 20_000


@pytest.mark.slow
def test_what_only_residuals_need_is_kept():
    """The inner loop keeps a product with `w`, which no result that is used needs."""

    def nested(scan):
        def f(w):
            def step(total, z):
                inner = lambda c, _: ((c[0] + 0.1, c[1] + jnp.exp(c[0] * w)), None)
                return total + scan(inner, (z, 0.0), None, length=5)[0][1], None

            return scan(step, 0.0, jnp.ones(7))[0]

        return f

    wanted = jax.grad(nested(jax.lax.scan))(0.7)
    assert_close(jax.grad(nested(loopkit.scan))(0.7), wanted)
    assert_close(jax.grad(loopkit.checkpointed(nested(jax.lax.scan)))(0.7), wanted)


def one_result(a):
    return jax.lax.fori_loop(0, 3, lambda _, x: jnp.sin(x * a), a)


def two_results(a):
    """From what is computed before."""
    each = lambda _, c: (jnp.sin(c[0] * 1.5), jnp.cos(c[1]) * c[0])
    return sum(jax.lax.fori_loop(0, 3, each, (jnp.sin(a), a * 2)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("of_a", [one_result, two_results])
def test_a_derivative_in_fewer_inputs_than_it_was_linearised_in(of_a):
    def f(a, b):
        def step(c, _):
            total, b = c
            return (total + of_a(a) + jnp.sin(b), jnp.cos(b)), None

        return jax.lax.scan(step, (0.0, b), None, 5)[0][0]

    of = lambda f: jax.linearize(f, 0.3, 0.4)[1]
    ours, own = of(loopkit.checkpointed(f)), of(f)
    wanted = own(0.0, 1.0)
    assert_close(jax.grad(lambda t: ours(0.0, t))(1.0), wanted)
    assert_close(jax.jacrev(lambda t: ours(0.0, t))(1.0), wanted)
    along = lambda f: lambda b: jax.linearize(f, 0.3, b)[1](0.0, b)
    assert_close(jax.grad(along(loopkit.checkpointed(f)))(0.4), jax.grad(along(f))(0.4))


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [None, "all"])
def test_a_constant_of_which_only_functions_are_read(checkpoints):
    """The constant of the inner loop is a carry leaf of the outer one."""

    def f(c, scan, **how):
        def step(c, _):
            inner = lambda x, _: (x * jnp.sin(c) + jnp.exp(c), None)
            return jnp.cos(c + scan(inner, 0.3, None, 5, **how)[0]), None

        return scan(step, c, None, 4)[0]

    ours = lambda c: f(c, loopkit.scan, checkpoints=checkpoints)
    assert_close(jax.grad(ours)(0.7), jax.grad(lambda c: f(c, jax.lax.scan))(0.7))


@pytest.mark.exhaustive
def test_a_loop_that_logs_takes_all_its_inputs():
    def h(w, scan, **how):
        def step(c, z):
            def inner(c, unused_init):
                x, rows, i, total = c
                q = rows[(i * 3 + 1) % 16]
                rows = rows.at[(i * 5) % 16].set(jnp.tanh(q * w + x))
                return (jnp.sin(x + q), rows, i + 1, total + jnp.sin(q)), None

            init = (jnp.ones(2) * z, jnp.ones((16, 2)) * c[1], 0, jnp.zeros(2))
            x, rows, _, total = scan(inner, init, jnp.arange(30.0), **how)[0]
            return (c[0] + total.sum() + rows.sum(), jnp.sin(c[1] + x.sum())), None

        return scan(step, (0.0, w), jnp.linspace(0.1, 1.0, 7))[0][0]

    ours = lambda w: h(w, loopkit.scan, checkpoints=4, buffers=lambda c: c[1])
    assert_close(jax.grad(ours)(0.7), jax.grad(lambda w: h(w, jax.lax.scan))(0.7))
