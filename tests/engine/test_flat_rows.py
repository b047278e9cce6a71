"""Flat rows: the arrays of a loop that have them, if inner loops and predicates take them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from loopkit import _jax
from loopkit._buffers.slices import read, write
from loopkit._buffers.window import Window
from loopkit._engine.loop import CarryLeaf, Const, Loop, Rewritten
from loopkit._engine.passes.flat_rows import flat_rows
from loopkit._engine.primitives import while_p

from .small_loops import assert_same, make_loop, run

SHAPE, FLAT = (5, 3, 2), (5, 6)
ROW = Window((0,), (0, 0, 0), (1, 3, 2), "drop")
TABLE, ROWS = (np.sin(1.3 * np.arange(30) + k).reshape(SHAPE) for k in range(2))


def row(table, n):
    return lax.dynamic_slice(table, (n, 0, 0), (1, 3, 2))


def next_row(table, n, rows):
    old, rows = read(rows, (n - 1)[None], ROW)
    return write(rows, jnp.sin(old) + row(table, n), n[None], ROW)


def shapes(loop, operands):
    """Those of the constants and of the carry, once what can be is flat; the results stay."""
    new = flat_rows(loop)
    if isinstance(new, Rewritten):
        flat, _ = new.loop.split(new.map_operands(operands.flat))
        assert_same(new.map_results(run(new.loop, flat)), run(loop, operands))
        loop = new.loop
    return [t.shape for t in loop.const_types], [t.shape for t in loop.carry_types]


def of_steps(step, shape=SHAPE, **how):
    """A loop of a table and a counter, and of a buffer that `step(table, n, rows)` returns."""
    body = lambda consts, carry, _: ([carry[0] + 1, step(consts[0], *carry)], [])
    table, rows = (np.resize(v, shape) for v in (TABLE, ROWS))
    return make_loop(body, [table], [1, rows], length=3, buffers=[1], **how)


def test_a_buffer_that_is_the_only_leaf():
    body = lambda consts, carry, x: ([next_row(*consts, *x, *carry)], [])
    assert shapes(*make_loop(body, [TABLE], [ROWS], [np.arange(1, 4)], buffers=[0])) == (
        [FLAT],
        [FLAT],
    )


def gathered(table, at, sizes, **how):
    """Slices of a table at an array of indices."""
    how = {"start_index_map": (0,), "collapsed_slice_dims": (), **how}
    return lax.gather(table, at[:, None], lax.GatherDimensionNumbers(**how), sizes, mode="clip")


def test_slices_at_an_array_of_indices():
    """Their first axis kept, or not; of buffers, and with axes that would come before others."""

    def step(table, n, rows):
        at = jnp.stack([n, n + 2])
        two = gathered(table, at, (2, 3, 2), offset_dims=(1, 2, 3))
        one = gathered(table, at, (1, 3, 2), offset_dims=(1, 2), collapsed_slice_dims=(0,))
        old, rows = read(rows, at[:, None], ROW)
        return write(rows, old * 0.5 + two[:, 1:] * one[:, None], at[:, None], ROW)

    assert shapes(*of_steps(step)) == ([FLAT], [(), FLAT])

    def turned(table, n, rows):
        at = jnp.stack([n, n + 2])
        new = gathered(table, at, (1, 3, 2), offset_dims=(0, 1), collapsed_slice_dims=(0,))
        return write(rows, jnp.moveaxis(new, 2, 0)[:1], n[None], ROW)

    assert shapes(*of_steps(turned)) == ([SHAPE], [(), FLAT])


def test_masks_of_rows_and_of_their_elements():
    window = Window((0,), (0, 0, 0), (1, 2, 2), "drop")

    def step(table, n, rows):
        new = lax.dynamic_slice(table, (n, 0, 0), (1, 2, 2))
        rows = write(rows, new, n[None], window, mask=new > 0)
        return write(rows, new, (n - 1)[None], window, mask=(n > 1).reshape(1, 1, 1))

    assert shapes(*of_steps(step, (5, 2, 2))) == ([(5, 4)], [(), (5, 4)])


# ---------------------------------------------------------------- loops in a step


def test_a_loop_inside_with_a_constant_of_its_predicate():
    inner, _ = make_loop(
        lambda consts, carry, _: ([carry[0] + 1, next_row(*consts, *carry)], []),
        [TABLE],
        [0, ROWS],
        cond=lambda limit, carry: carry[0] < limit[0],
        cond_consts=[3],
        buffers=[1],
    )

    def step(table, n, rows):
        return while_p.bind(n + 1, table, n, rows, loop=inner)[1]

    assert shapes(*of_steps(step)) == ([FLAT], [(), FLAT])


def test_a_table_that_the_predicate_of_a_loop_inside_reads():
    """The steps of the inner loop read the table, too; their last input is not read."""
    inner, _ = make_loop(
        lambda consts, carry, _: ([carry[0] + 1, row(consts[0], carry[0]).sum()], []),
        [TABLE],
        [0, 0.0],
        cond=lambda tables, carry: row(tables[0], carry[0]).sum() < 1.5,
        cond_consts=[TABLE],
        length=4,
    )

    def step(table, n, rows):
        found = while_p.bind(table, table, n, 0.0, loop=inner)[1]
        return write(rows, jnp.full((1, 3, 2), found), n[None], ROW)

    assert shapes(*of_steps(step)) == ([SHAPE], [(), FLAT])


def test_a_table_that_a_loop_inside_takes_by_rows():
    """It carries the table as well, and its ys are the rows."""
    inner, _ = make_loop(
        lambda _, carry, x: ([carry[0], carry[1] + 1.0], [x[0]]), [], [TABLE, 0.0], [TABLE]
    )

    def step(table, n, rows):
        _, total, ys = while_p.bind(table, 0.0, table, loop=inner)
        return write(rows, row(ys, n) + total, n[None], ROW)

    assert shapes(*of_steps(step)) == ([SHAPE], [(), FLAT])


# ---------------------------------------------------------------- what keeps its axes


def test_rows_of_which_the_predicate_reads_a_part():
    def below(_, carry):
        n, rows = carry
        return lax.dynamic_slice(rows, (n, 1, 0), (1, 1, 2)).sum() < 5

    assert shapes(*of_steps(next_row, cond=below)) == ([FLAT], [(), SHAPE])


def test_a_table_among_others():
    def step(table, n, rows):
        long = jnp.concatenate([table, rows[:0], rows[:0], rows[:0]])
        return write(rows, row(long, n), n[None], ROW)

    assert shapes(*of_steps(step)) == ([SHAPE], [(), FLAT])


@pytest.mark.parametrize(
    ("shape", "flat"), [((5, 3, 2, 1), FLAT), ((5, 3, 2, 0), None), ((5, 3, 1), None)]
)
def test_last_axes_of_one_and_of_none(shape, flat):
    window = Window((0,), (0,) * len(shape), (1, *shape[1:]), "drop")

    def step(table, n, rows):
        return write(rows, lax.dynamic_index_in_dim(table, n, 0), n[None], window)

    assert shapes(*of_steps(step, shape)) == ([flat or shape], [(), flat or shape])


@pytest.mark.parametrize("sizes", ["b, 3, 2", "5, 3, b"])
def test_sizes_that_nobody_knows(sizes):
    shape = jax.export.symbolic_shape(sizes)
    integer, number = (_jax.ShapedArray((), jnp.dtype(kind)) for kind in (int, float))
    table = _jax.ShapedArray(shape, number.dtype)

    def step(table, n, total):
        return [n + 1, total + lax.dynamic_slice(table, (n, 0, 0), (1, *shape[1:])).sum()]

    body = _jax.trace_closed(step, [table, integer, number], "step")
    loop = Loop(None, body, 0, (Const(),), (CarryLeaf(),) * 2, (), (), length=3)
    assert flat_rows(loop) is loop


def test_what_has_the_shape_of_a_row():
    """A constant and a leaf are vectors as rows are, and a buffer of that shape stays as it is."""
    one = Window((0,), (0, 0), (1, 2), "drop")

    def body(consts, carry, _):
        n, rows, row, small = carry
        row = row * consts[1] + jnp.sin(row)
        rows = next_row(consts[0], n, write(rows, row[None], n[None], ROW))
        return [n + 1, rows, row, write(small, row[:1], (n - 1)[None], one)], []

    factor = np.linspace(0.5, 1.5, 6).reshape(3, 2)
    made = make_loop(body, [TABLE, factor], [1, ROWS, factor - 1, factor], length=3, buffers=[1, 3])
    assert shapes(*made) == ([FLAT, (6,)], [(), FLAT, (6,), (3, 2)])
