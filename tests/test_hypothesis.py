"""Random programs, random lengths, random budgets, against the Python loop.

Programs are data: a table of op codes that the body looks up, so that one compiled loop runs all of
them. A few bodies are also written out, for what a table cannot show to the compiler.
"""

import functools as ft

import hypothesis as hyp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from derivatives import assert_close
from tolerances import DERIVATIVES

pytestmark = pytest.mark.slow

OPS = [
    lambda x, y, w, i: (x + w * y, y),
    lambda x, y, w, i: (jnp.sin(x), y),
    lambda x, y, w, i: (y, x),
    lambda x, y, w, i: (x * y, y),
    lambda x, y, w, i: (x, jnp.tanh(w * x + y)),
    lambda x, y, w, i: (x, y * jnp.cos(i * w)),
    lambda x, y, w, i: (x / (1 + y * y), x),
    lambda x, y, w, i: (lax.stop_gradient(x), y + x / 2),
    lambda x, y, w, i: (jnp.where(x > y, x, w), y),
]
LINES = 3
"""Operations in a body."""

codes = st.lists(st.integers(0, len(OPS) - 1), min_size=LINES, max_size=LINES)
values = st.floats(-1.5, 1.5, width=16)
ILL_CONDITIONED = 10 * DERIVATIVES
"""The tolerance for programs that are ill-conditioned, as some drawn ones are."""
CONFIGURATIONS = [
    # (checkpoints, unroll, max_steps)
    (1, 1, None),
    (2, 1, None),
    (3, 2, 6),
    (4, 1, 7),
    (5, 3, None),
    (6, 1, 5),
    (None, 1, None),
    (None, 2, 8),
    ("all", 1, 8),
    ("all", 2, 5),
]
QUIET = hyp.settings(deadline=None, derandomize=True, database=None)


def python_steps(program, steps, x, y, w):
    for i in range(steps):
        for code in program:
            x, y = OPS[code](x, y, w, i)
    return x, y


@ft.cache
def compiled(checkpoints, unroll, max_steps):
    """Values and gradients of the loop that runs a table of op codes for `steps` steps."""

    def loop(x, y, w, program, steps):
        def body(carry):
            i, x, y = carry
            for line in range(LINES):
                x, y = lax.switch(program[line], OPS, x, y, w, i)
            return i + 1, x, y

        (_, x, y), info = loopkit.while_loop(
            lambda carry: carry[0] < steps,
            body,
            (0, x, y),
            checkpoints=checkpoints,
            unroll=unroll,
            max_steps=max_steps,
            return_info=True,
        )
        return x - 2 * y, info.steps

    return jax.jit(jax.value_and_grad(loop, (0, 1, 2), has_aux=True))


@pytest.mark.parametrize(("checkpoints", "unroll", "max_steps"), CONFIGURATIONS, ids=str)
@hyp.settings(QUIET, max_examples=20)
@hyp.given(program=codes, steps=st.integers(0, 12), x=values, y=values, w=values)
def test_programs(checkpoints, unroll, max_steps, program, steps, x, y, w):
    run = compiled(checkpoints, unroll, max_steps)
    (value, taken), grads = run(x, y, w, np.asarray(program), steps)
    wanted = steps if max_steps is None else min(steps, max_steps)

    def reference(x, y, w):
        x, y = python_steps(program, wanted, x, y, w)
        return jnp.asarray(x - 2 * y, "float64")

    assert taken == wanted
    expected = jax.value_and_grad(reference, (0, 1, 2))(x, y, w)
    assert_close((value, grads), jax.tree.map(jnp.asarray, expected), ILL_CONDITIONED)


@pytest.mark.parametrize("checkpoints", [2, None])
@hyp.settings(QUIET, max_examples=15)
@hyp.given(
    lanes=st.lists(st.tuples(codes, st.integers(0, 6), values, values), min_size=3, max_size=3),
    w=values,
)
def test_lanes(checkpoints, lanes, w):
    """Three programs at once, each for its own number of steps, and a shared parameter."""
    programs, steps, xs, ys = map(np.asarray, zip(*lanes, strict=True))
    (values_, taken), grads = lanes_compiled(checkpoints)(xs, ys, w, programs, steps)
    assert taken.tolist() == steps.tolist()
    each = []
    for program, n, x, y in zip(programs, steps, xs, ys, strict=True):

        def reference(x, y, w, program=program, n=n):
            x, y = python_steps(program, int(n), x, y, w)
            return jnp.asarray(x - 2 * y, "float64")

        each.append(jax.value_and_grad(reference, (0, 1, 2))(x, y, w))
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    assert_close((values_, grads), expected, ILL_CONDITIONED)


@ft.cache
def lanes_compiled(checkpoints):
    return jax.jit(jax.vmap(compiled(checkpoints, 1, None), (0, 0, None, 0, 0)))


@hyp.settings(QUIET, max_examples=12)
@hyp.given(
    program=st.lists(st.integers(0, len(OPS) - 1), min_size=1, max_size=5),
    length=st.integers(0, 6),
    stop=st.none() | st.integers(1, 6),
    checkpoints=st.sampled_from([None, 1, 2, 3, 4, 5, 6, "all"]),
    unroll=st.integers(1, 3),
    reverse=st.booleans(),
    x=values,
    w=values,
)
def test_scans(program, length, stop, checkpoints, unroll, reverse, x, w):
    """Bodies that are written out, lengths that are static, rows of ys."""
    xs = np.linspace(0.5, 1.5, length)

    def step(x, y, w, i):
        for code in program:
            x, y = OPS[code](x, y, w, i)
        return x, y

    def loop(x, w, xs):
        def body(carry, row):
            i, x = carry
            x, y = step(x, row, w, i)
            return (i + 1, x), x * y

        until = None if stop is None else lambda carry, _: carry[0] >= stop
        (_, x), ys = loopkit.scan(
            body,
            (0, x),
            xs,
            reverse=reverse,
            unroll=unroll,
            until=until,
            checkpoints=checkpoints,
        )
        return x + jnp.sum(ys**2)

    def reference(x, w, xs):
        total, rows = 0.0, range(length)[::-1] if reverse else range(length)
        for i, row in enumerate(rows[:stop]):
            x, y = step(x, xs[row], w, i)
            total = total + (x * y) ** 2
        return jnp.asarray(x + total, "float64")

    got = jax.value_and_grad(loop, (0, 1, 2))(x, w, xs)
    expected = jax.value_and_grad(reference, (0, 1, 2))(x, w, jnp.asarray(xs))
    assert_close(got, jax.tree.map(jnp.asarray, expected), ILL_CONDITIONED)
