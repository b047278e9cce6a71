"""Cotangents of constants that are read in slices: as JAX's own transpose has them, added in place.

A program is linear in a table and in a vector, and reads slices of the table at known indices.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from derivatives import assert_close
from loopkit import _jax
from loopkit._buffers.slices import read, read_p, write_p
from loopkit._buffers.window import Window
from loopkit._jaxprs import equations
from loopkit._jaxprs.slice_cotangents import passed_on
from tolerances import SAME_OPERATIONS

TABLE = _jax.ShapedArray((7, 6), jnp.dtype("float64"))
VECTOR = _jax.ShapedArray((3,), jnp.dtype("float64"))
AT = np.array([1, 5, 2, 5, 9, -3])
"""Indices, some out of bounds, one of them twice."""
INSIDE = np.array([1, 5, 2, 5, 0, 4])
U = np.array([0.5, -1.2, 0.8])


def dynamic_slices(at, table, v):
    block = lax.dynamic_slice(table, (at[0], at[2]), (2, 3))
    row = lax.dynamic_slice(table, (at[1], 0), (1, 6))
    moved_inside = lax.dynamic_slice(table, (at[4], at[1]), (2, 2))
    return [block @ U, row * 2.0, moved_inside, v * U]


def whole_axes(at, table, v):
    """A slice as long as its axis starts at 0, whatever its start says."""
    columns = lax.dynamic_slice(table, (at[4], at[0]), (7, 1))
    return [columns.sum() + v]


def narrow_indices(at, table, v):
    return [lax.dynamic_slice(table, (at[0].astype("int8"), at[2].astype("int8")), (1, 3)) * U + v]


def rows(at, table, v):
    return [table.at[at[:3]].get(mode="promise_in_bounds").sum() * U + v]


def clipped_rows(at, table, v):
    return [table.at[at[2:]].get(mode="clip"), v.sum()]


def filled_rows(at, table, v):
    return [table.at[at[2:]].get(mode="fill", fill_value=0), v.sum()]


def points(at, table, v):
    return [table.at[at[:3], at[1:4]].get(mode="promise_in_bounds") * U + v]


def columns(at, table, v):
    return [table.at[:, at[:2]].get(mode="promise_in_bounds")]


def clipped_blocks(at, table, v):
    """Slices longer than one element, their axes not in order."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(0, 2), collapsed_slice_dims=(), start_index_map=(1, 0)
    )
    starts = at.reshape(3, 2)
    return [lax.gather(table, starts, numbers, (2, 3), mode="clip")]


def dropped_blocks(at, table, v):
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
    )
    how = {"mode": "fill", "fill_value": 0}
    return [lax.gather(table, at.reshape(3, 2), numbers, (1, 4), **how)]


def along_an_axis(at, table, v):
    """A batch axis that table and indices share."""
    return [jnp.take_along_axis(table, at[None, :], 0, mode="clip")]


def of_each_lane(at, table, v):
    look = lambda row, i: lax.dynamic_index_in_dim(row, i, keepdims=False)
    return [jax.vmap(look)(table[:7], jnp.concatenate([at, at[:1]]))]


def several_reads(at, table, v):
    """Read the same rows twice, and a value that is a result as well as an operand."""
    a = lax.dynamic_slice(table, (at[0], 0), (1, 6))
    b = lax.dynamic_slice(table, (at[0], 1), (2, 3))
    return [a, (b * U).sum() + a[0, 0]]


def in_calls(at, table, v):
    inner = jax.jit(lambda table, i: lax.dynamic_slice(table, (i, 0), (1, 3)))
    outer = jax.jit(lambda v, i, table: inner(table, i) + inner(table, i + 1) * 2.0 + v)
    return [outer(v, at[2], table), lax.dynamic_slice(table, (at[1], 0), (1, 6))]


def two_constants(at, table, v):
    return [lax.dynamic_slice(v, (at[0],), (1,)) + lax.dynamic_slice(table, (at[0], 0), (1, 2))]


def buffer_reads(at, table, v):
    window = Window((0,), (0, 2), (1, 3), "clip", wrap=True)
    first, table = read(table, jnp.stack([at[5]]), window)
    second, table = read(table, jnp.stack([at[5], at[4]])[:, None], window)
    return [first * U + v, second]


READS_FIRST = (dynamic_slices, narrow_indices, rows, points, clipped_rows, filled_rows)
BLOCKS = (clipped_blocks, dropped_blocks, along_an_axis, of_each_lane)
OTHERS = (several_reads, in_calls, two_constants, buffer_reads)


def numbered(kind, seed):
    return jnp.asarray(np.cos(1.7 * np.arange(np.prod(kind.shape)) + seed).reshape(kind.shape))


def transposes(program, at, count=2):
    """The transposed jaxpr, and that of JAX, on the same cotangents; and the jaxpr."""
    types = [TABLE, VECTOR]
    known = [jax.typeof(jnp.asarray(at))]
    linear = _jax.trace_closed(program, [*known, *types], "linear")
    cts = [numbered(t, i) for i, t in enumerate(linear.out_avals)]
    so_far = [numbered(t, 10 + i) for i, t in enumerate(types[:count])]

    def ours(at, so_far, cts):
        run = lambda *moving: passed_on(linear, [at], moving, count)
        return jax.linear_transpose(run, *types)([*so_far, *cts])

    def of_jax(at, so_far, cts):
        run = lambda *moving: _jax.call_jaxpr(linear)(at, *moving)
        found = jax.linear_transpose(run, *types)(cts)
        return tuple(
            a + b for a, b in zip(found, [*so_far, *[0.0] * (2 - len(so_far))], strict=True)
        )

    operands = jnp.asarray(at), so_far, cts
    both = jax.jit(lambda *args: (ours(*args), of_jax(*args)))(*operands)
    return *both, jax.make_jaxpr(ours)(*operands)


def as_large_as_the_table(jaxpr):
    """The primitives that make something as large as the table."""
    return {
        eqn.primitive.name
        for eqn in equations.all_equations(jaxpr)
        for v in eqn.outvars
        if _jax.elements(v.aval) >= _jax.elements(TABLE) and not equations.is_call(eqn)
    }


@pytest.mark.parametrize(
    "program", [*READS_FIRST, *BLOCKS, *OTHERS, columns, whole_axes], ids=lambda f: f.__name__
)
def test_as_jax_has_them(program):
    at = AT if program not in (rows, points, columns, several_reads, in_calls) else INSIDE
    got, wanted, jaxpr = transposes(program, at)
    assert_close(got, wanted, SAME_OPERATIONS)
    # The cotangents that come in are handed on; slices are added to them.
    assert as_large_as_the_table(jaxpr) <= {"loopkit_read", "loopkit_write"}


def test_what_is_no_read_is_left_to_jax():
    def program(at, table, v):
        return [table @ jnp.ones(6), table[2] + v.sum()]

    got, wanted, jaxpr = transposes(program, AT)
    assert_close(got, wanted, SAME_OPERATIONS)
    assert as_large_as_the_table(jaxpr) - {"loopkit_read", "loopkit_write"}


def test_what_is_filled_with_a_number_is_left_to_jax():
    def program(at, table, v):
        return [table.at[at].get(mode="fill", fill_value=np.nan)]

    got, wanted, jaxpr = transposes(program, AT)
    assert_close(got, wanted, SAME_OPERATIONS)
    assert not any(e.primitive in (read_p, write_p) for e in equations.all_equations(jaxpr))


@pytest.mark.parametrize("dtype", ["uint8", "int16"])
def test_more_rows_than_an_index_can_count(dtype):
    large = _jax.ShapedArray((300, 2), jnp.dtype("float64"))
    at = jnp.array([100, 7, 101], dtype)

    def program(at, table):
        return [
            lax.dynamic_slice(table, (at[0], at[1]), (3, 1)),
            table.at[at].get(mode="clip"),
            table.at[at].get(mode="fill", fill_value=0),
        ]

    linear = _jax.trace_closed(program, [jax.typeof(at), large], "linear")
    cts = [numbered(t, i) for i, t in enumerate(linear.out_avals)]

    @jax.jit
    def both(at, so_far, cts):
        ours = jax.linear_transpose(lambda t: passed_on(linear, [at], [t], 1), large)
        of_jax = jax.linear_transpose(lambda t: _jax.call_jaxpr(linear)(at, t), large)
        return ours([so_far, *cts])[0], of_jax(cts)[0] + so_far

    got, wanted = both(at, numbered(large, 9), cts)
    assert_close(got, wanted, SAME_OPERATIONS)


def test_only_the_first_tangents_are_constants():
    got, wanted, jaxpr = transposes(two_constants, AT, count=1)
    assert_close(got, wanted, SAME_OPERATIONS)
    written = [e.invars[0].aval for e in jaxpr.eqns if e.primitive is write_p]
    assert [t.shape for t in written] == [TABLE.shape]


def test_a_read_hands_on_what_the_next_one_reads():
    """So that cotangents go through all reads in a row, the last one first."""
    linear = _jax.trace_closed(
        lambda table: [table[1] + table[3], lax.dynamic_slice(table, (2, 0), (1, 6))],
        [TABLE],
        "linear",
    )
    jaxpr = jax.make_jaxpr(lambda table: passed_on(linear, [], [table], 1))(numbered(TABLE, 0))
    reads = [eqn for eqn in jaxpr.eqns if eqn.primitive is read_p]
    (table,) = jaxpr.jaxpr.invars
    tables = [table, *(eqn.outvars[-1] for eqn in reads)]
    assert [eqn.invars[0] for eqn in reads] == tables[:-1]
    assert jaxpr.jaxpr.outvars[0] is tables[-1]
