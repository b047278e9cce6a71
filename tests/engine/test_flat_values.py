"""Flat values: how a loop holds rows of short axes and stacks of them, with the same results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from loopkit import _jax
from loopkit._engine.lowering import flat_values
from loopkit._engine.lowering.flat_values import Changes, Flat
from loopkit._engine.lowering.tiles import saved_bytes

from .small_loops import assert_same

STEPS = 4


def numbers(*shape):
    return np.sin(0.7 * np.arange(np.prod(shape)) + 0.2).reshape(shape)


ROW, PAIR, STACK = numbers(3, 2), numbers(2, 3, 2), numbers(STEPS, 3, 2)
LONG = numbers(1000, 3, 2)
"""A stack that is too large to be a row; `PAIR` may be either."""


def looped(step):
    """A loop of lax, of so many steps: step(k, *carry) -> carry."""
    below = lambda c: c[0] < STEPS
    advance = lambda c: (c[0] + 1, *step(c[0], *c[1:]))
    return lambda *init: lax.while_loop(below, advance, (0, *init))[1:]


def equation(step, *init):
    closed = jax.make_jaxpr(looped(step))(*init)
    (eqn,) = (e for e in closed.eqns if e.primitive is _jax.lax_while_p)
    assert eqn.params["cond_nconsts"] == eqn.params["body_nconsts"] == 0
    return eqn, [v.aval for v in eqn.invars]


def held(step, *init):
    """The changes of shape that a step takes, and how each leaf is held; the results stay."""
    eqn, types = equation(step, *init)
    changes, ways = flat_values._best(eqn, [], types)
    j = jax.make_jaxpr(looped(step))(*init)
    flat = jax.jit(lambda *v: flat_values._run_flat(j, v, Changes()))
    assert_same(flat(*init), jax.jit(looped(step))(*init))
    return changes.count, *ways[1:]


def next_rows(k, row, stack):
    before = lax.dynamic_index_in_dim(stack, (k + 1) % STEPS, 0)
    row = jnp.sin(row) + before[0]
    return row, lax.dynamic_update_slice(stack, row[None], (k, 0, 0))


def test_rows_and_stacks_of_them():
    assert held(next_rows, ROW, STACK) == (0, "row", "stack")
    assert held(lambda k, a, b: (jnp.exp(a) - b, b * 0.5 + k), LONG, LONG) == (0, "stack", "stack")


def test_a_stack_that_is_one_row():
    """Beside what is made of one number, or where a step wants all of it."""
    assert held(lambda k, v: [jnp.where(v > 0.5, v, 0.0)], PAIR) == (0, "row")
    whole = lambda k, v, w: (v * w.sum(), w * 0.9)
    assert held(whole, LONG, PAIR) == (0, "stack", "row")


def test_stacks_that_are_used_as_a_whole():
    assert held(lambda k, v: [jnp.roll(v, 1, 0)], LONG) == (0, None)
    assert held(lambda k, v: [v * jnp.flip(v, 1)], LONG) == (0, None)
    assert held(lambda k, v: [v * jnp.cumsum(v, 1)[5, 1, 0]], LONG) == (0, None)


def test_stacks_that_are_made_as_a_row():
    eqn, types = equation(lambda k, v: [jnp.full(v.shape, k.astype(float))], PAIR)
    assert flat_values._tried(eqn, [], types, [None, "stack"])[1] == {1}
    assert not flat_values._tried(eqn, [], types, [None, "row"])[1]


def test_rows_that_are_used_as_they_are_once():
    """A change of shape, and one that is spared."""
    turned = lambda v: v.reshape(6).at[0].set(0.5).reshape(3, 2)
    assert held(lambda k, v: [turned(v) * (v.T @ v).sum()], ROW) == (1, "row")


def test_functions_with_rules_of_their_own():
    assert held(lambda k, v: [jax.nn.relu(v - 0.1 * k)], ROW) == (0, "row")
    solved = lambda k, v: [jnp.linalg.solve(jnp.eye(3) * (2.0 + k), v)]
    assert held(solved, ROW) == (0, None)


def test_values_that_wait_for_each_other():
    wait = lambda k, row, stack: lax.optimization_barrier((row * 0.5, stack * 2.0))
    assert held(wait, ROW, LONG) == (0, "row", "stack")


# ---------------------------------------------------------------- one equation


def as_rows(value):
    return Flat(value.reshape(-1), value.shape)


def as_stack(value):
    return Flat(value.reshape(len(value), -1), value.shape, object())


def made(f, *values):
    """Return the shapes of the vectors that an equation makes of flat values, or None."""
    arrays = [v.value.reshape(v.shape) if isinstance(v, Flat) else v for v in values]
    j = _jax.open_jaxpr(jax.make_jaxpr(f)(*arrays))
    (eqn,), known = j.eqns, dict(zip(j.invars, values, strict=True))
    ins = [v.val if isinstance(v, _jax.Literal) else known[v] for v in eqn.invars]
    found = flat_values._flat_results(eqn, ins, Changes())
    if found is None:
        return None
    (out,) = found
    array = out.value if isinstance(out, Flat) else out
    assert_same([array.reshape(eqn.outvars[0].aval.shape)], [f(*arrays)])
    return array.shape if isinstance(out, Flat) else "plain"


@pytest.mark.slow
def test_what_is_elementwise():
    assert made(jnp.add, as_rows(ROW), as_rows(ROW)) == (6,)
    assert made(jnp.add, as_rows(ROW), ROW) == (6,)
    assert made(jnp.add, as_stack(STACK), as_stack(STACK)) == (STEPS, 6)
    assert made(jnp.add, as_stack(STACK), STACK) is None
    assert made(jnp.add, as_stack(PAIR), as_rows(PAIR)) == (2, 6)
    assert made(lambda v: v * 2.0, as_stack(STACK)) == (STEPS, 6)
    # Literals that are no arrays.
    assert made(lambda v: lax.clamp(0.1, v, 0.5), as_rows(ROW)) == (6,)
    assert made(lambda v: lax.mul(v, 2.0), as_rows(ROW)) == (6,)


def test_what_is_reduced():
    assert made(jnp.sum, as_rows(ROW)) == "plain"
    assert made(lambda v: v.sum(1), as_rows(ROW)) is None
    assert made(lambda v: v.sum(0), as_rows(PAIR)) is None
    assert made(lambda v: v.sum(1), as_rows(ROW[:, None])) == (6,)
    assert made(lambda v: v.sum((1, 3)), as_rows(numbers(3, 1, 2, 2))) is None
    assert made(lambda v: v.prod(1), as_rows(ROW[:, None])) is None
    assert made(jnp.sum, as_stack(STACK)) is None


def test_what_is_read_and_written():
    write = lambda stack, v: lax.dynamic_update_slice_p.bind(stack, v, 2, 0, 0)
    assert made(write, as_stack(STACK), as_rows(ROW[None])) == (STEPS, 6)
    assert made(write, as_stack(STACK), ROW[None]) == (STEPS, 6)
    assert made(write, as_stack(STACK), STACK[:2]) is None
    assert made(write, as_rows(PAIR), ROW[None, :1]) is None


def test_what_takes_another_shape():
    assert made(lambda v: v.reshape(3, 2), ROW.reshape(6)) == (6,)
    assert made(lambda v: v.reshape(2, 3), as_rows(ROW)) == (6,)
    assert made(lambda v: v.reshape(6), as_rows(ROW)) == "plain"
    assert made(lambda v: v.reshape(2, 6, 2), as_stack(STACK)) is None
    assert made(lambda v: v.reshape(2, 3), ROW) is None, "a row of no vector"
    assert made(lambda v: lax.broadcast(v, (3,)), np.array(0.3)) is None, "no row"


def test_changes_of_shape_are_counted_once():
    found = Changes()
    found.depth = 1
    stack = as_stack(jnp.asarray(STACK))
    for _ in range(2):
        assert found.plain(stack).shape == STACK.shape
        assert found.flat(stack).shape == (STACK.size,)
        assert found.flat(stack, (STEPS, -1)).shape == (STEPS, 6)
    assert found.count == 2


# ---------------------------------------------------------------- whether it pays


def test_what_has_rows_that_are_worth_it():
    """Stacks in loops, of which no other shape is wanted; nothing else."""
    pays = lambda f, *args: flat_values._pays(jax.make_jaxpr(f)(*args))
    assert pays(looped(next_rows), ROW, STACK)
    assert not pays(looped(lambda k, v: [v * 0.5]), ROW), "no stack"
    assert not pays(lambda v: v * 0.5, STACK), "no loop"
    assert not pays(lambda v: v, STACK)


def test_changes_of_shape_within_calls():
    turned = jax.jit(lambda v: jnp.cumsum(v.reshape(6)).reshape(3, 2))
    assert flat_values._reshapes(jax.make_jaxpr(looped(lambda k, v: [turned(v)]))(ROW)) == 2


@pytest.mark.parametrize("less", [0, 1])
def test_memory_that_is_worth_changes_of_shape(less, monkeypatch):
    """From so many bytes on; a product of matrices needs rows as they are."""

    def step(k, row, stack):
        row = jnp.tanh(row @ row)
        return row, lax.dynamic_update_slice(stack, row[None], (k, 0, 0))

    square, stack = numbers(4, 4), np.zeros((STEPS, 4, 4))
    j = jax.make_jaxpr(looped(step))(square, stack)
    saved = saved_bytes(jax.typeof(jnp.asarray(stack)))
    monkeypatch.setattr(flat_values, "MUCH", saved + less)
    assert flat_values._pays(j) == (not less)
