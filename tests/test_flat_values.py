"""Rows computed as vectors while a program is lowered, as on a TPU; here on a CPU."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import loopkit
from derivatives import assert_close, derivative, expected
from loopkit import _jax
from loopkit._engine.lowering import flat_values
from loopkit._engine.lowering.flat_values import MUCH, of_vectors
from loopkit._engine.lowering.scratch import with_scratch
from loopkit._engine.lowering.tiles import padded_bytes
from loopkit._engine.primitives import dual_p, forward_p, pullback_p, while_p
from problems import PROBLEMS, Problem
from test_flat_rows import FLAT, MODES, looped, reference
from turns import in_turn

PRIMITIVES = while_p, dual_p, forward_p, pullback_p
T, ROW = 7, (3, 2)
X = jnp.cos(jnp.arange(6.0)).reshape(ROW)


@pytest.fixture
def on_tpu():
    """Programs for a CPU are lowered as those for a TPU."""
    jax.clear_caches()
    for primitive in PRIMITIVES:
        evaluate = _jax.evaluations[primitive]
        _jax.lower_by(primitive, evaluate, of_vectors(evaluate), "cpu")
    yield
    for primitive in PRIMITIVES:
        evaluate = _jax.evaluations[primitive]
        _jax.lower_by(primitive, evaluate, with_scratch(evaluate), "cpu")
    jax.clear_caches()


def shapes(function, *args):
    """The types of what loops carry, in the text of the program."""
    text = jax.jit(function).lower(*args).as_text()
    lines = [line for line in text.splitlines() if "stablehlo.while" in line or ": tensor<" in line]
    return "\n".join(lines)


def elementwise(x, n, **options):
    def step(carry):
        k, x, total = carry
        x = jnp.where(x > 0.9, x * 0.5, jnp.sin(x) + 0.1 * k)
        return k + 1, x, total + jnp.exp(-x)

    start = 0, x, jnp.zeros(ROW)
    found = loopkit.while_loop(lambda c: c[0] < n, step, start, max_steps=T, **options)
    return jnp.sum(found[1] ** 2) + jnp.sum(found[2] * x)


def mixed(x, n, **options):
    """Rows are also turned, and summed along an axis."""

    def step(x, _):
        y = jnp.sin(x) * n
        return x + 0.1 * jnp.roll(y, 1, 0) + y.sum(1, keepdims=True) * jnp.cos(x), y[0]

    x, ys = loopkit.scan(step, x, None, T, **options)
    return jnp.sum(x**2) + jnp.sum(ys)


def in_loops(x, n, **options):
    def outer(x, k):
        inner = lambda i, x: jnp.tanh(x * 1.1 + 0.1 * i + k)
        return loopkit.fori_loop(0, n, inner, x, max_steps=T), x

    x, ys = loopkit.scan(outer, x, jnp.arange(3.0), **options)
    return jnp.sum(x * ys.sum(0))


def with_rules(x, n, **options):
    """Steps that call functions with derivatives of their own."""

    def step(x, _):
        return jax.nn.softplus(jax.nn.relu(x) - 0.3 * jax.nn.silu(x)) * n * 0.1, None

    return jnp.sum(loopkit.scan(step, x, None, T, **options)[0] ** 2)


BODIES = elementwise, mixed, in_loops, with_rules


WAYS = in_turn(BODIES, ["all", None, 2], ["grad", "lanes", "second order", "unrolled"], of=8)


@pytest.mark.slow
@pytest.mark.parametrize(("body", "checkpoints", "how"), WAYS)
def test_derivatives(body, checkpoints, how, on_tpu):
    options = {"checkpoints": checkpoints} | ({"unroll": 3} if how == "unrolled" else {})
    plain = lambda x, n: jax.grad(lambda x: body(x, n))(x)
    kept = lambda x, n: jax.grad(lambda x: body(x, n, **options))(x)
    args, into = (X, 5), lambda f: f
    if how == "lanes":
        args, into = (jnp.stack([X, X + 0.1, -X]), jnp.array([5, 0, 3])), jax.vmap
    if how == "second order":
        into = lambda f: jax.jacfwd(f)
    got = jax.jit(into(kept))(*args)
    jax.clear_caches()
    for primitive in PRIMITIVES:
        evaluate = _jax.evaluations[primitive]
        _jax.lower_by(primitive, evaluate, with_scratch(evaluate), "cpu")
    assert_close(got, jax.jit(into(plain))(*args))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("body", "checkpoints", "mode"),
    in_turn(FLAT, [2, "all"], ["grad", "jvp", "lanes of all"], of=12),
)
def test_buffers(body, checkpoints, mode, on_tpu):
    got = jax.jit(lambda: MODES[mode](looped(body, "while", checkpoints)))()
    wanted = MODES[mode](reference(body))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert_close(a, b)


TURNS = in_turn(PROBLEMS, ["f", "r", "rr"], ["all", None], of=24)


@pytest.mark.slow
@pytest.mark.parametrize(("problem", "pattern", "checkpoints"), TURNS)
def test_every_problem(problem: Problem, pattern, checkpoints, on_tpu):
    got = jax.jit(derivative(problem.flat_loop(checkpoints), pattern))(problem.vector())
    assert_close(got, expected(problem.name, pattern))


def stacked(x, w, step=lambda x, w: jnp.tanh(x * w), most=T):
    def body(carry):
        k, x = carry
        return k + 1, step(x, w)

    below = lambda carry: jnp.max(carry[1]) < 5
    options = {"max_steps": most, "checkpoints": "all"}
    return jnp.sum(loopkit.while_loop(below, body, (0, x), **options)[1])


def test_what_is_stacked_is_vectors(on_tpu):
    text = shapes(jax.grad(stacked, (0, 1)), X, X)
    assert f"tensor<{T}x6x" in text
    assert f"tensor<{T}x3x2x" not in text


def test_not_where_it_takes_more_changes_of_shape_unless_it_saves_much(on_tpu):
    """A product of matrices needs rows as they are."""
    step = lambda x, w: jnp.tanh(x @ w)
    types = jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((4, 4), jnp.float32)
    text = shapes(jax.grad(lambda x, w: stacked(x, w, step), (0, 1)), *types)
    assert f"tensor<{T}x4x4x" in text
    length = MUCH // 3000
    text = shapes(jax.grad(lambda x, w: stacked(x, w, step, length), (0, 1)), *types)
    assert f"tensor<{length}x16x" in text
    assert f"tensor<{length}x4x4x" not in text


def test_programs_for_a_cpu_are_as_they_were():
    text = shapes(jax.grad(stacked, (0, 1)), X, X)
    assert f"tensor<{T}x3x2x" in text


def test_what_tiles_take():
    assert padded_bytes((1000, 10, 5), 4) == 1000 * 8 * 128 * 4
    assert padded_bytes((1000, 50), 4) == 50 // 8 * 8 * 1024 * 4 + 8 * 1024 * 4
    assert padded_bytes((7,), 4) == 28


def test_rows_are_made_of_one_number_or_of_as_many_as_they_have():
    def made(f, value):
        (eqn,) = jax.make_jaxpr(f)(value).eqns
        found = flat_values._flat_results(eqn, [value], flat_values.Changes())
        return None if found is None else found[0].value.shape

    assert made(lambda v: lax.broadcast(v, ROW), jnp.ones(())) == (6,)
    assert made(lambda v: v.reshape(ROW), jnp.ones(6)) == (6,)
    assert made(lambda v: lax.broadcast_in_dim(v, ROW, (1,)), jnp.ones(2)) is None


def test_changes_of_shape_are_those_between_rows_and_others_in_loops():
    def count(step):
        stop = lambda c: c[0] < T
        loop = lambda x: lax.while_loop(stop, lambda c: (c[0] + 1, step(c[1])), (0, x))
        return flat_values._reshapes(jax.make_jaxpr(loop)(X))

    assert count(lambda x: jnp.sin(x.reshape(6)).reshape(ROW)) == 2
    assert count(lambda x: jnp.sin(x.reshape(2, 3)).reshape(ROW)) == 0
    assert flat_values._reshapes(jax.make_jaxpr(lambda x: x.reshape(6))(X)) == 0


@pytest.mark.slow
def test_stacks_that_are_read_as_a_whole_keep_their_shape(on_tpu):
    """Rows of which a step reads more than one, or a part."""

    def f(x):
        def step(k, s):
            x, rows = s
            rows = lax.dynamic_update_slice(rows, x[None], (k, 0, 0))
            return x + jnp.sin(rows).sum(0), rows

        return loopkit.fori_loop(0, 4, step, (x, jnp.zeros((T, *ROW))))[0]

    def by_hand(x):
        rows = jnp.zeros((T, *ROW))
        for k in range(4):
            rows = rows.at[k].set(x)
            x = x + jnp.sin(rows).sum(0)
        return x

    assert_close(jax.jit(f)(X), by_hand(X))
    slope = lambda f: jax.jit(jax.grad(lambda x: jnp.sum(f(x) ** 2)))
    assert_close(slope(f)(X), slope(by_hand)(X))
