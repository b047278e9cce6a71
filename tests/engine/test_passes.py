"""Loops made of loops, each pass alone: rows made flat, and lanes that go on together."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from loopkit import _jax
from loopkit._buffers.slices import read, write
from loopkit._buffers.window import Window
from loopkit._engine.lanes.predicates import axes_between_lanes, lockstep
from loopkit._engine.loop import CarryLeaf, Const, Input, Loop, Output, Rewritten, run_rewritten
from loopkit._engine.passes import PASSES, ready
from loopkit._engine.passes.flat_rows import SHORT, flat_rows
from loopkit._jaxprs import equations

from .small_loops import assert_same, make_loop, run, types_of

# ---------------------------------------------------------------- flat rows

STEPS = 3
SHAPE = (5, 3, 2)
ROW = Window((0,), (0, 0, 0), (1, 3, 2), "drop")
PART = Window((0, 1), (0, 0, 0), (1, 1, 2), "clip")


def numbers(shape, seed=0):
    return np.sin(1.3 * np.arange(np.prod(shape)) + seed).reshape(shape)


def next_row(table, n, rows):
    """Reads and writes of whole rows."""
    old, rows = read(rows, (n - 1)[None], ROW)
    new = jnp.sin(old + lax.dynamic_index_in_dim(table, n, 0))
    return write(rows, new, n[None], ROW)


def masked(table, n, rows):
    """Elements of a row, and slices at places that are known."""
    new = table[1:3] * 2.0 + lax.dynamic_slice_in_dim(table, n, 2)
    window = Window((0,), (0, 0, 0), (2, 3, 2), "clip")
    return write(rows, new, n[None], window, mask=new > 0)


def masked_whole(table, n, rows):
    new = lax.dynamic_index_in_dim(table, n, 0)
    return write(rows, new, n[None], ROW, mask=jnp.reshape(n > 1, (1, 1, 1)), add=True)


def several(table, n, rows):
    """Rows at an array of indices."""
    at = jnp.stack([n, n + 2])[:, None]
    old, rows = read(rows, at, ROW)
    found = table[jnp.stack([n, n])]
    return write(rows, old * 0.5 + found[:, None], at, ROW)


def reshaped(table, n, rows):
    """A table that is also read in another shape."""
    return write(rows, jnp.full((1, 3, 2), table.reshape(15, 2).sum()), n[None], ROW)


def called(table, n, rows):
    return jax.jit(lambda n, rows, table: next_row(table, n, rows))(n, rows, table)


def part_of_a_row(table, n, rows):
    """Two axes of three are taken whole, of which one is the last: nothing to make one."""
    old, rows = read(rows, jnp.stack([n, n]), PART)
    return write(rows, old + table.sum(), jnp.stack([n, n - 1]), PART)


def part_written(table, n, rows):
    return write(rows, jnp.full((1, 1, 2), 0.5), jnp.stack([n, n - 1]), PART)


def all_of_the_table(table, n, rows):
    """The table is used in its own shape."""
    return write(rows, (table * 2.0).sum(0, keepdims=True), n[None], ROW)


FLAT = [
    (next_row, (2,), (0, 2)),
    (masked, (2,), (0, 2)),
    (masked_whole, (2,), (0, 2)),
    (several, (2,), (0, 2)),
    (reshaped, (2,), (0, 2)),
    (called, (2,), (0, 2)),
    (part_of_a_row, (0,), (0, 0)),
    (part_written, (2,), (0, 0)),
    (all_of_the_table, (0,), (0, 2)),
]


def loop_over_rows(step, shape=SHAPE, buffers=(1,)):
    def body(consts, carry, x):
        n, rows = carry
        return [n + 1, step(consts[0], n, rows)], [n * 2]

    init = [1, numbers(shape, seed=1)]
    return make_loop(body, [numbers(shape)], init, length=STEPS, buffers=buffers)


@pytest.mark.parametrize(
    ("step", "consts", "carry"), FLAT, ids=lambda v: getattr(v, "__name__", "")
)
def test_flat_rows(step, consts, carry):
    loop, operands = loop_over_rows(step)
    flat = flat_rows(loop)
    if not any(consts) and not any(carry):
        assert flat is loop
        return
    flatter, _ = flat.loop.split(flat.map_operands(operands.flat))
    for values, counts in ((flatter.consts, consts), (flatter.init[1:], carry[1:])):
        assert [v.shape for v in values] == [(5, 6) if n else SHAPE for n in counts]
    assert flat.loop.carry == loop.carry
    assert_same(flat.map_results(run(flat.loop, flatter)), run(loop, operands))


def test_no_step_reshapes_a_buffer():
    loop, _ = loop_over_rows(called)
    flat = flat_rows(loop)
    whole = [
        eqn.primitive.name
        for eqn in equations.all_equations(flat.loop.body)
        for v in eqn.outvars
        if v.aval.size == np.prod(SHAPE)
    ]
    assert set(whole) == {"loopkit_read", "loopkit_write"}


def test_what_has_no_flat_rows():
    loop, _ = loop_over_rows(next_row)
    # Of a buffer of a loop around it, that loop decides.
    inner = loop.replace(carry=(loop.carry[0], loop.carry[1]._replace(outer=True)))
    other = flat_rows(inner).loop
    assert [t.shape for t in other.carry_types[1:]] == [SHAPE]
    assert [t.shape for t in other.const_types] == [(5, 6)]
    none, _ = loop_over_rows(all_of_the_table, buffers=())
    assert flat_rows(none) is none
    long = (5, 3, SHORT)
    window = Window((0,), (0, 0, 0), (1, 3, SHORT), "drop")
    step = lambda table, n, rows: write(rows, table[1:2], n[None], window)
    loop, _ = loop_over_rows(step, shape=long)
    assert flat_rows(loop) is loop
    loop, _ = loop_over_rows(lambda table, n, rows: rows + table, shape=SHAPE)
    assert flat_rows(loop) is loop


def test_axes_of_size_one_are_left():
    window = Window((0,), (0, 0, 0), (1, 1, 6), "drop")
    step = lambda table, n, rows: write(rows, table[:1], n[None], window)
    loop, _ = loop_over_rows(step, shape=(5, 1, 6))
    assert flat_rows(loop) is loop


# ---------------------------------------------------------------- lanes in step

AXIS = "lanes"
LANES = 3


def in_lanes(fun):
    """Return the result of `fun()` between lanes."""
    found = []
    jax.vmap(lambda x: found.append(fun()) or x, axis_name=AXIS)(np.zeros(LANES))
    return found[0]


@ft.cache
def speaking():
    """Predicate and body: what a lane adds is the mean of all."""
    scalar, integer = types_of([0.0, 0])

    def asks(limit, n, h, fixed):
        return [h < limit]

    def step(w, n, h, fixed, x):
        mean = lax.pmean(h, AXIS)
        return [n + 1, h + w * mean + x, fixed, h * 2.0]

    def made():
        cond = _jax.trace_closed(asks, [scalar, integer, scalar, scalar], "asks")
        body = _jax.trace_closed(step, [scalar, integer, scalar, scalar, scalar], "step")
        leaves = (CarryLeaf(),) * 3
        loop = Loop(cond, body, 1, (Const(),), leaves, (Input(),), (Output(),), length=8)
        assert axes_between_lanes(loop) == (AXIS,)
        return loop, lockstep(loop)

    return in_lanes(made)


def test_lanes_go_on_together():
    """Those that have stopped stay as they are, are read by the others, and return no y."""
    new = speaking()[1].loop
    any_goes_on, held = new.cond, new.body
    limit, w, fixed = np.array([1.0, 2.0, 4.0]), 0.3, np.arange(3.0)
    n, h, xs = np.zeros(LANES, int), np.array([0.6, 0.3, 0.2]), 0.1 * np.arange(1.0, 9.0)
    over = lambda jaxpr, axes: jax.jit(jax.vmap(_jax.call_jaxpr(jaxpr), axes, axis_name=AXIS))
    asks = over(any_goes_on, (0, 0, 0, 0))
    step = over(held, (0, None, 0, 0, 0, None))
    counts = []
    for x in xs:
        active = h < limit
        counts.append(int(active.sum()))
        assert np.asarray(asks(limit, n, h, fixed)[0]).tolist() == [active.any()] * LANES
        got = step(limit, w, n, h, fixed, x)
        y = np.where(active, h * 2.0, 0.0)
        n, h = np.where(active, n + 1, n), np.where(active, h + w * h.mean() + x, h)
        assert_same(got, [n, h, fixed, y])
    assert {0, LANES} < set(counts)
    assert counts == sorted(counts, reverse=True)


def test_what_is_not_held():
    """Leaves that no step changes, and buffers, into which a stopped lane writes nothing."""
    loop, together = speaking()
    held = together.loop.body
    assert equations.forwarded(held)[:3] == [None, None, 4]
    carry = [CarryLeaf(), CarryLeaf(buffer=True), CarryLeaf()]
    other = in_lanes(lambda: lockstep(loop.replace(carry=tuple(carry)))).loop.body
    step = lambda jaxpr: jax.vmap(_jax.call_jaxpr(jaxpr), axis_name=AXIS)
    stopped, h = np.zeros(LANES), np.arange(1.0, 4.0)
    operands = [stopped, stopped, np.zeros(LANES, int), h, h, stopped + 0.5]
    assert_same(jax.jit(step(held))(*operands)[1:2], [h])
    assert_same(jax.jit(step(other))(*operands)[:2], [np.zeros(LANES, int), h + 0.5])


def test_which_lanes_speak():
    number = types_of([0.0])
    asks = _jax.trace_closed(lambda x: [x < 1], number, "asks")

    def traced(fun, cond=asks):
        body = _jax.trace_closed(lambda x: [fun(x)], number, "step")
        return Loop(cond, body, 0, (), (CarryLeaf(),), (), (), 3)

    between = lambda fun, cond=asks: in_lanes(lambda: axes_between_lanes(traced(fun, cond)))
    assert between(lambda x: lax.psum(x, AXIS)) == (AXIS,)
    assert between(lambda x: x + lax.axis_index(AXIS).astype(x.dtype)) == ()
    assert between(lambda x: jnp.sin(x)) == ()
    assert between(lambda x: lax.psum(x, AXIS), None) == ()
    assert axes_between_lanes(traced(jnp.sin)) == ()


# ---------------------------------------------------------------- all of them


@ft.cache
def of_all_kinds():
    """Leaves that stay, among them a table; a buffer read after it is written; xs, ys, a flag."""

    def body(consts, carry, x):
        (w,), (n, table, _, rows, scale, h) = consts, carry
        old, rows = read(rows, n[None], ROW)
        rows = write(rows, old * w + table[n], n[None], ROW)
        before, rows = read(rows, (n + 1)[None], ROW)
        h = jnp.sin(h * scale + before.sum() + x[0])
        return [n + 1, table, h < 0.9, rows, scale, h], [h * x[1], n]

    cond = lambda consts, carry: carry[2] & (carry[5] * carry[4] < consts[0])
    init = [0, numbers(SHAPE), True, numbers(SHAPE, seed=2), 0.7, 0.1]
    xs = [numbers((4,)), numbers((2, 4)).T]
    more = {"cond": cond, "cond_consts": [5.0], "buffers": [3]}
    loop, operands = make_loop(body, [0.4], init, xs, **more)
    carry = [leaf._replace(flag=i == 2) for i, leaf in enumerate(loop.carry)]
    return loop.replace(carry=tuple(carry)), operands


def followed(loop, operands, passes):
    values = operands.flat
    bind = lambda *values: run(loop, loop.split(values)[0])
    return run_rewritten(bind, passes, values)


@pytest.mark.slow
@pytest.mark.parametrize("rewrite", PASSES)
def test_a_pass_changes_no_result(rewrite):
    loop, operands = of_all_kinds()
    new = rewrite(loop)
    passes = [new] if isinstance(new, Rewritten) else []
    last = new.loop if passes else new
    assert_same(followed(last, operands, passes), run(loop, operands))
    again = rewrite(last)
    assert again is last, "what it is for is done"


def test_all_passes_in_turn():
    loop, operands = of_all_kinds()
    last, passes = ready(loop)
    assert ready(loop)[0] is last
    assert_same(followed(last, operands, passes), run(loop, operands))
    # Names and flags go with their leaves; what stays is a constant, of flat rows.
    assert [leaf.name for leaf in last.carry] == ["carry 0", "carry 2", "carry 3", "carry 5"]
    assert [(leaf.buffer, leaf.flag) for leaf in last.carry][1:3] == [(False, True), (True, False)]
    assert [t.shape for t in last.const_types] == [(), (5, 6), ()]
    assert [t.shape for t in last.carry_types] == [(), (), (5, 6), ()]
    assert len(passes) == 2
