"""Predicates may ask what has no derivative, wherever they are evaluated: none is taken of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import loopkit
from derivatives import assert_close
from turns import in_turn


@jax.custom_vjp
def backward_alone(x):
    return 2 * x


backward_alone.defvjp(lambda x: (2 * x, None), lambda _, ct: (2 * ct,))


def told_by_the_host(x):
    far = lambda x: np.asarray(x) > 3
    kind = jax.ShapeDtypeStruct((), bool)
    return jax.pure_callback(far, kind, x, vmap_method="expand_dims")


STOPPING = {
    "the host": told_by_the_host,
    "a rule for reverse mode": lambda x: backward_alone(x) > 6,
    "other lanes": lambda x: lax.pmax(x, "lanes") > 3,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("checkpoints", [None, 2, "all"])
@pytest.mark.parametrize("kind", STOPPING)
def test_until_may_ask_what_has_no_derivative(kind, checkpoints):
    def final(rate, stops):
        until = lambda c, _: stops(c * rate)
        step = lambda c, _: (c * rate + jnp.sin(c), None)
        return loopkit.scan(step, 0.8, length=9, until=until, checkpoints=checkpoints)[0]

    def outcome(stops):
        slope = jax.grad(lambda rate: final(rate, stops))
        tangents = lambda rate: jax.jvp(slope, (rate,), (1.0,))
        run = lambda rate: (*tangents(rate), jax.jvp(lambda r: final(r, stops), (rate,), (1.0,)))
        return jax.vmap(run, axis_name="lanes")(jnp.asarray([1.1]))

    assert_close(outcome(STOPPING[kind]), outcome(lambda x: x > 3))


def written(x):
    """A carry with a buffer, a step that writes to it, and what comes of both."""
    step = lambda c: (1.3 * c[0], c[1].at[c[2]].set(c[0]), c[2] + 1)
    return (x, jnp.zeros(9), 0), step, lambda c: c[0] + jnp.sum(c[1] ** 2)


READS = {
    "a carry": lambda c, _: c[0],
    "a row": lambda c, _: 1.3 * c[1][c[2] - 1],
    "the buffer": lambda c, _: jnp.max(c[1]) * 1.3,
    "what it closes over": lambda c, rate: rate * 1.3 ** c[2].astype(float),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("reads", "kind", "checkpoints"),
    in_turn(READS, ["the host", "a rule for reverse mode"], [None, 2]),
)
def test_beside_buffers(reads, kind, checkpoints):
    how = {"buffers": lambda c: c[1], "checkpoints": checkpoints}

    def until(rate, stops):
        c, step, told = written(rate)
        stop = lambda c, _: stops(READS[reads](c, rate))
        return told(loopkit.scan(lambda c, _: (step(c), None), c, None, 9, until=stop, **how)[0])

    def while_(rate, stops):
        c, step, told = written(rate)
        go = lambda c: (c[2] == 0) | ~stops(READS[reads](c, rate))
        return told(loopkit.while_loop(go, step, c, max_steps=9, **how))

    both = lambda rate, stops: jnp.stack([until(rate, stops), 2 * while_(rate, stops)])
    slopes = lambda stops: lambda rate: jax.jacrev(both)(rate, stops)
    outcome = lambda stops: jax.jit(lambda x: jax.jvp(slopes(stops), (x,), (1.0,)))(0.8)
    assert_close(outcome(STOPPING[kind]), outcome(lambda x: x > 3))


@pytest.mark.slow
def test_a_list_beside_what_is_asked():
    def final(x, stops):
        step = lambda c, _: ((1.3 * c[0], c[1].append(c[0])), None)
        until = lambda c, _: stops(c[0])
        rows = loopkit.TensorArray.empty(9, x)
        x, rows = loopkit.scan(step, (x, rows), length=9, until=until)[0]
        return x + rows.stack().sum()

    outcome = lambda stops: jax.value_and_grad(final)(0.8, stops)
    assert_close(outcome(told_by_the_host), outcome(lambda x: x > 3))


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"throw": True}, {"debug": "finite"}], ids=str)
def test_of_a_loop_that_may_fail(how):
    """`throw` asks the predicate once more, or first."""

    def final(rate, stops):
        go = lambda c: ~stops(c * rate)
        return loopkit.while_loop(go, lambda c: c * rate, 0.8, max_steps=30, **how)

    outcome = lambda stops: jax.value_and_grad(final)(1.1, stops)
    assert_close(outcome(told_by_the_host), outcome(lambda x: x > 3))


def test_a_predicate_that_reads_a_row_has_no_copy_of_the_buffer():
    def f(x, rows):
        step = lambda c: (c[0] + 1, c[1].at[c[0]].set(jnp.sin(c[1][c[0] - 1]) + x))
        go = lambda c: (c[0] < 1000) & jnp.all(c[1][c[0] - 1] < 3)
        how = {"max_steps": 999, "buffers": lambda c: c[1]}
        return loopkit.while_loop(go, step, (1, rows), **how)[1]

    rows = jnp.zeros((1001, 100))
    assert loopkit.in_place_report(jax.jit(f, donate_argnums=1), 0.3, rows)


# ---------------------------------------------------------------- what a predicate calls


def reporting(kind, seen):
    """A loop of four steps whose predicate tells the host a number that has a tangent."""

    def emits_level(x):
        io_callback(lambda x: seen.append(float(x)), None, x)

    def go(c):
        emits_level(c[1] * c[2][0] if "buffers" in kind else c[1])
        return c[0] < 4

    def step(c):
        return c[0] + 1, jnp.sin(c[1]), c[2].at[c[0] + 1].set(c[1])

    def f(x):
        how = {"buffers": lambda c: c[2]} if "buffers" in kind else {}
        how |= {"throw": {"throw": True}, "debug": {"debug": "finite"}}.get(kind, {})
        init = (0, x, jnp.ones(6) * x)
        if "until" in kind:
            stop = lambda c, _: ~go(c)
            return loopkit.scan(lambda c, _: (step(c), None), init, None, 9, until=stop, **how)[0][
                1
            ]
        return loopkit.while_loop(go, step, init, max_steps=9, **how)[1]

    return f


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["until", "until, buffers", "while, buffers", "throw", "debug"])
def test_what_is_told_without_an_answer(kind):
    """The host hears as often of a predicate in a derivative as in the value."""
    seen = []
    f = reporting(kind, seen)
    jax.block_until_ready(f(0.3))
    jax.effects_barrier()
    told = seen.copy()
    assert len(told) >= 4
    for transform in jax.grad, jax.hessian:
        seen.clear()
        jax.block_until_ready(jax.jit(transform(f))(0.3))
        jax.effects_barrier()
        assert_close(jnp.asarray(seen), jnp.asarray(told))
    sines = lambda x: jnp.sin(jnp.sin(jnp.sin(jnp.sin(x))))
    assert_close(jax.grad(f)(0.3), jax.grad(sines)(0.3))


def test_a_second_call_outside_jit_traces_no_predicate():
    """It is asked of numbers, once."""
    traced = []

    def go(c):
        traced.append(isinstance(c[0], jax.core.Tracer))
        return c[0] < 3

    step = lambda c: (c[0] + 1, c[1].at[c[0]].set(1.0))
    buffers, init = lambda c: c[1], (jnp.asarray(0), jnp.zeros(5))
    for _ in range(2):
        traced.clear()
        loopkit.while_loop(go, step, init, max_steps=4, buffers=buffers)
    assert traced == [False]
