"""Lanes that have stopped read what they began with, slice by slice."""

import re

import jax
import jax.numpy as jnp
import pytest

import loopkit
from buffer_bodies import BODIES, W, first_rows, rows_from_rows
from derivatives import assert_close
from loopkit._buffers.slices import read, write
from loopkit._buffers.window import Window
from loopkit._engine.lanes import safe_inputs

STOPS = jnp.asarray([[1, 5, 3], [4, 0, 2]])


def total(body, checkpoints):
    def run(xs, w, stop):
        step = lambda c: (c[0] + 1, body(c[0] + 1, c[1], xs, w))
        how = {"buffers": lambda c: c[1], "max_steps": 6, "checkpoints": checkpoints}
        rows = loopkit.while_loop(lambda c: c[0] < stop, step, (0, first_rows(w)), **how)[1]
        return jnp.sum(jnp.cos(rows))

    return run


def test_buffers_that_are_chosen_of_slice_by_slice():
    """Those of which a step does nothing else than read and write slices."""

    def sliced(body):
        step = lambda c: (c[0] + 1, body(c[0], c[1]))
        stops, how = (lambda c: c[0] < 3), {"buffers": lambda c: c[1]}
        f = lambda rows: loopkit.while_loop(stops, step, (0, rows), **how)
        (eqn,) = (e for e in jax.make_jaxpr(f)(jnp.ones(4)).eqns if "loop" in e.params)
        loop = eqn.params["loop"]
        return safe_inputs.is_sliced(loop.body, loop.const_count + 1)

    assert sliced(lambda i, rows: rows.at[i].set(jnp.sin(rows[i - 1])))
    assert sliced(lambda i, rows: jax.jit(lambda rows: rows.at[i].set(rows[0]))(rows))
    whole = lambda f: safe_inputs.is_sliced(jax.make_jaxpr(f)(jnp.ones(4)), 0)
    assert not whole(jnp.sum)
    assert not whole(jax.jit(lambda rows: rows.reshape(2, 2)))


ROW = Window((0,), (0, 0), (1, 2), "drop", wrap=False)
COLUMN = Window((1,), (0, 0), (3, 1), "drop", wrap=False)


def in_call(rows, i):
    """A row is written, another is read; and there is something that nobody computes."""

    def inside(rows, i):
        old, rows = read(rows, i[None], ROW)
        return jnp.sin(old), 1.0, write(rows, old + 1, 1 - i[None], ROW)

    return jax.jit(inside)(rows, i)


def test_what_is_sliced_in_a_call_is_so_behind_it():
    """A value read inside a call is not a buffer, and may be used in any way."""

    def sliced(rows, i):
        old, one, rows = in_call(rows, i)
        new, rows = read(rows, i[None], ROW)
        return jnp.cos(old) * one + new, rows

    def whole(rows, i):
        return in_call(rows, i)[2] * 2.0

    of = lambda f: safe_inputs.is_sliced(jax.make_jaxpr(f)(jnp.ones((3, 2)), 0), 0)
    assert of(sliced)
    assert not of(whole)


@pytest.mark.parametrize("window", [ROW, COLUMN], ids=["lanes", "no lanes"])
def test_lanes_that_are_not_active_read_what_was_there_first(window):
    """Three lanes are the rows; behind a call, too. The starts of four slices are given."""

    def step(rows, starts):
        old, rows = read(rows, starts, window)
        again, _, rows = in_call(rows, jnp.int32(0))
        new, rows = read(rows, starts, window)
        return old, again, new, rows

    rows = jnp.sin(jnp.arange(6.0)).reshape(3, 2)
    first = rows + 10
    starts = jnp.asarray([[0], [1], [1], [0]])
    active = jnp.asarray([False, True, False])
    program = jax.make_jaxpr(step)(rows, starts)
    found = safe_inputs.call_sliced(program, [rows, starts], {0: first}, active)
    seen = lambda rows: jnp.where(active[:, None], rows, first)
    written = rows.at[1].set(seen(rows)[0] + 1)
    of = lambda rows: read(seen(rows), starts, window)[0]
    wanted = [of(rows), jnp.sin(seen(rows)[:1]), of(written), written]
    for f, w in zip(found, wanted, strict=True):
        assert_close(f, w)


def gradients(body, checkpoints):
    run, xs = total(body, checkpoints), jnp.sin(jnp.arange(24.0)).reshape(2, 6, 2) + 1.2
    both = lambda f: jax.vmap(jax.vmap(f, (None, None, 0)), (0, None, 0))
    of_lanes = jax.jit(both(jax.grad(run, (0, 1))))(xs, W, STOPS)
    of_sum = jax.jit(jax.grad(lambda xs, w: both(run)(xs, w, STOPS).sum(), (0, 1)))(xs, W)
    return of_lanes, of_sum


def between_buffers(body, checkpoints, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(safe_inputs, "is_sliced", lambda *_: False)
        return gradients(body, checkpoints)


@pytest.mark.exhaustive
def test_as_if_buffers_were_chosen(monkeypatch):
    wanted = between_buffers(rows_from_rows, None, monkeypatch)
    assert_close(gradients(rows_from_rows, None), wanted)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("body", "checkpoints"), list(zip(BODIES, [3, "all"] * 4, strict=False)))
def test_as_if_buffers_were_chosen_whatever_is_kept(body, checkpoints, monkeypatch):
    wanted = between_buffers(body, checkpoints, monkeypatch)
    assert_close(gradients(body, checkpoints), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [None, 2, "all"])
def test_rows_without_a_derivative_are_not_read(checkpoints):
    """Where a lane stops, the next row is zero, and the square root has no derivative there."""

    def loss(x, stop):
        rows = jnp.zeros((40, 2)).at[:4].set(x)
        body = lambda c: (c[0] + 1, c[1].at[0].add(jnp.sqrt(c[1][c[0]])))
        how = {"buffers": lambda c: c[1], "max_steps": 9, "checkpoints": checkpoints}
        return jnp.sum(loopkit.while_loop(lambda c: c[0] < stop, body, (1, rows), **how)[1])

    xs, stops = jnp.arange(1.0, 17.0).reshape(2, 4, 2), jnp.asarray([4, 2])
    every = lambda xs: jax.vmap(loss)(xs, stops).sum()
    wanted = 1 + jnp.where((jnp.arange(4) > 0) & (jnp.arange(4) < stops[:, None]), 1.0, 0.0)[
        ..., None
    ] / (2 * jnp.sqrt(xs))
    assert_close(jax.jit(jax.grad(every))(xs), wanted)


@pytest.mark.exhaustive
def test_no_step_chooses_between_buffers(monkeypatch):
    def loss(x):
        def one(stop):
            body = lambda c: (c[0] + 1, c[1].at[c[0]].set(jnp.sin(c[1][c[0] - 1] * x)))
            init = (1, jnp.ones((500, 3)) * x)
            how = {"buffers": lambda c: c[1], "max_steps": 499}
            return jnp.sum(loopkit.while_loop(lambda c: c[0] < stop, body, init, **how)[1])

        return jax.vmap(one)(jnp.asarray([200, 499])).sum()

    def choices():
        compiled = jax.jit(jax.grad(lambda x: loss(x))).lower(jnp.ones(3)).compile()
        return len(re.findall(r"= f64\[2,500,3\]\S* select\(", compiled.as_text()))

    once = choices()
    with monkeypatch.context() as patched:
        patched.setattr(safe_inputs, "is_sliced", lambda *_: False)
        assert choices() > once
    assert once <= 1, "before the first step, for lanes that take none"
