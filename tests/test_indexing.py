"""Indices into buffers: what they touch, and single reads and writes, without a loop."""

import itertools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from loopkit import Buffer
from loopkit._buffers.indexing import place
from loopkit._buffers.keywords import fill_value_of, mode_name
from loopkit._buffers.slices import read_p, write_p
from loopkit._buffers.window import Window

SHAPE = (5, 4, 3)
ROWS, COLUMNS = np.asarray([1, 3]), np.asarray([0, -1])


EVERY = slice(None)
LAYOUTS = [
    *((ROWS, EVERY, COLUMNS), (EVERY, ROWS, COLUMNS), (ROWS, COLUMNS), (1, EVERY, COLUMNS)),
    *((ROWS, None, COLUMNS), (None, ROWS, COLUMNS), (EVERY, ROWS), (ROWS[:, None], COLUMNS)),
    *((ROWS, slice(1, 3), -1), (EVERY, 1, None, COLUMNS), (..., COLUMNS, None), (None, 2, ..., 0)),
    *((slice(None, None, 2), ROWS, slice(2, 0, -1)), (slice(3, 1), ROWS), (slice(9), 0, 0)),
    *((slice(None, None, 2), slice(None, None, 3), slice(2, None, -2)), (np.arange(5) % 2 == 1, 0)),
    *((ROWS, EVERY, slice(None, None, 2)), (slice(4, 0, -2), EVERY, COLUMNS), ROWS, None, ...),
]


@pytest.mark.slow
def test_an_index_selects_what_it_does_in_numpy():
    """Elements, in their order; and back, from what was selected to the slices."""
    numbers = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    for index in LAYOUTS:
        found = place(SHAPE, index)
        window, starts = found.window, np.asarray(found.starts)
        first = np.broadcast_to(window.offsets, (*found.batch, 3)).copy()
        first[..., list(window.axes)] = starts % np.asarray(SHAPE)[list(window.axes)]
        grid = np.indices(window.sizes)
        first = np.expand_dims(np.moveaxis(first, -1, 0), tuple(range(-3, 0)))
        slices = numbers[tuple(np.expand_dims(grid, tuple(range(1, first.ndim - 3))) + first)]
        want = numbers[index]
        assert found.shape == want.shape
        np.testing.assert_array_equal(found.outward(slices), want)
        np.testing.assert_array_equal(found.inward(want), slices)


def test_an_integer_that_is_known_is_no_start():
    """Inside of the buffer; from its end if it is negative."""
    for at in range(-7, 7):
        window = place((5, 4), (at, slice(1, 3))).window
        if -5 <= at < 5:
            assert (window.axes, window.offsets) == ((), (at % 5, 1))
        else:
            assert (window.axes, window.offsets) == ((0,), (0, 1))
        assert window.sizes == (1, 2)


def test_which_rows_are_known_to_differ():
    """Those that may be the same are not: negative ones, and those that are moved inside."""
    for index, differ in {
        (0, 1): True,
        (2, 4): True,
        (2, 2): False,
        (-1, 2): False,
        (4, 5): False,
        (): True,
    }.items():
        assert place(SHAPE, np.asarray(index, int)).unique == differ
    rows, columns = np.asarray([[0], [4]]), np.asarray([0, 1, 2])
    assert place(SHAPE, (rows, columns)).unique
    assert not place(SHAPE, (rows, columns % 2)).unique
    assert not place(SHAPE, (rows, -columns)).unique
    assert not place(SHAPE, (-rows, columns)).unique
    assert not place(SHAPE, jnp.asarray([0, 0])).unique
    assert place(SHAPE, (jnp.asarray(3), slice(None, None, 2))).unique
    assert not jax.eval_shape(lambda i: jnp.zeros(place(SHAPE, i).unique), jnp.arange(2)).shape[0]


@pytest.mark.exhaustive
def test_of_elements_that_are_named_twice_the_last_is_kept():
    elements = np.indices(SHAPE).reshape(3, -1)[:, np.random.default_rng(0).permutation(60)]
    for count, from_end in ((64, 0), (65, 5)):  # few are compared with each other, many sorted
        again = elements - np.asarray([[from_end], [0], [0]])
        both = np.concatenate([elements, again], 1)[:, :count]
        last = np.asarray(place(SHAPE, tuple(both)).last_of_equals(SHAPE, None))
        assert last.shape == (count, 1, 1, 1)
        np.testing.assert_array_equal(last.ravel(), [i + 60 >= count for i in range(count)])


@pytest.mark.exhaustive
def test_elements_that_are_named_twice_in_a_buffer_of_any_size():
    """More elements than 32 bits count, or a number of them that is not known yet."""
    large = 2**17, 2**17
    for count in (3, 99):
        rows = np.asarray([0, 2**15, *[2**15] * (count - 2)])
        columns = np.asarray([1, 1, *[0] * (count - 3), 1])
        chosen = place(large, (jnp.asarray(rows), jnp.asarray(columns)))
        last = chosen.last_of_equals(large, None).ravel()
        assert np.flatnonzero(last).tolist() == sorted({0, count - 2, count - 1} - {1})
    f = lambda x, i: Buffer(x).at[i, i].set(jnp.arange(4.0))[...]
    (n,) = jax.export.symbolic_shape("n")
    kinds = jax.ShapeDtypeStruct((3, n), "float64"), jax.ShapeDtypeStruct((4,), "int64")
    x, i = jnp.zeros((3, 5)), jnp.asarray([0, 2, 2, 1])
    np.testing.assert_array_equal(jax.export.export(jax.jit(f))(*kinds).call(x, i), f(x, i))


def test_starts_are_as_wide_as_they_need_to_be():
    rows = np.asarray([0, 1])
    assert place((2**31 - 1, 4), rows).starts.dtype == np.int32
    assert place((2**31, 4), rows).starts.dtype == np.int64
    assert place((4, 2**31), rows).starts.dtype == np.int64
    assert place((2**16, 2**16), rows).starts.dtype == np.int32


@pytest.mark.slow
def test_signs_of_an_index():
    """One of several is enough for what is negative to be from the end."""
    signed, unsigned = jnp.asarray([-1, 0]), jnp.asarray([1, 2], "uint8")
    numbers = np.arange(60.0).reshape(SHAPE)
    for index in ((unsigned, signed), (signed, unsigned)):
        np.testing.assert_array_equal(Buffer(numbers)[index], jnp.asarray(numbers)[index])
    assert place(SHAPE, (unsigned, signed)).window.wrap
    assert not place(SHAPE, (unsigned, unsigned)).window.wrap
    assert place(SHAPE, slice(None, None, 2), "drop").window.wrap


ONE = jnp.asarray(1)
READS = [
    *(ONE, (ONE, ONE), (ONE, slice(1, 3)), (ONE, slice(None, None, -1)), (..., ONE)),
    *((ONE, slice(None, None, 2)), (slice(None, None, 2), ONE), (ONE, slice(None, None, -2))),
    *((ONE, slice(0, 2), slice(None, None, 2)), (ONE, None), (slice(None, None, 2), None, ONE)),
    *(ROWS, (ROWS, ONE), (ONE, ROWS), (ROWS, slice(None, None, 2)), jnp.asarray([1, 3])),
]


def test_reads_promise_what_they_do_in_jax():
    """To be inside, where jax.numpy gathers; where it slices, they are moved there."""
    for index in READS:
        text = str(jax.make_jaxpr(lambda x, index=index: x[index])(jnp.zeros(SHAPE)))
        gathers = " gather[" in text
        assert gathers != ("dynamic_slice" in text)
        window = place(SHAPE, index).window
        assert window.mode == ("promise_in_bounds" if gathers else "clip")
        assert window.wrap


def test_out_of_bounds():
    """From -9 to 9, for two of five rows."""
    starts = np.arange(-9, 10)[:, None]
    from_end = np.where(starts < 0, starts + 5, starts)
    for mode, wrap, reads in itertools.product(
        ("clip", "drop", "promise_in_bounds"), (True, False), (True, False)
    ):
        window = Window((0,), (0, 0), (2, 4), mode, wrap)
        assert wrap == (window == Window((0,), (0, 0), (2, 4), mode))
        wanted = from_end if wrap else starts
        within = ((wanted >= 0) & (wanted <= 3))[:, 0]
        how = {"reads": True} if reads else {}
        at, inside = window.starts_in((5, 4), starts, **how)
        if mode == "clip" or (reads and mode == "promise_in_bounds"):
            assert inside is None
            wanted = np.clip(wanted, 0, 3)
        else:
            np.testing.assert_array_equal(inside, within)
        np.testing.assert_array_equal(at, wanted)
        np.testing.assert_array_equal(window.inside((5, 4), starts), within)
    everything = Window((), (0,), (5,), "clip")
    assert everything.inside((5,), np.zeros((3, 0), int)).tolist() == [True] * 3


def test_whether_a_slice_fits():
    (n,) = jax.export.symbolic_shape("n")
    fits = lambda sizes, shape: Window((), (0,) * len(shape), sizes, "clip").fits(shape)
    assert fits((2, 3), (2, 3))
    assert not fits((3, 3), (2, 3))
    assert not fits((2, 4), (2, 3))
    assert fits((7, n, n), (n, n, 7))
    assert not fits((n, 4), (n, 3))


@pytest.mark.slow
def test_a_buffer_of_unknown_size():
    """Exported, it is read and written as one of the size that it is given."""

    def f(x, i):
        b = Buffer(x).at[i, i - 2].set(7.0).at[i - 9].add(2.0)
        return b.at[:, i].multiply(b[-1, :1])[...], b[i - 2], b[0, 1]

    (n,) = jax.export.symbolic_shape("n")
    x, i = jax.ShapeDtypeStruct((n, 4), "float64"), jax.ShapeDtypeStruct((), "int64")
    exported = jax.export.export(jax.jit(f))(x, i)
    x = jnp.arange(20.0).reshape(5, 4)
    for got, want in zip(exported.call(x, 1), f(x, 1), strict=True):
        np.testing.assert_array_equal(got, want)


TYPES = "bfloat16", "complex64", "int8", "uint32", "bool"


def test_what_is_read_out_of_bounds():
    for dtype in TYPES:
        x = jnp.ones(2, dtype)
        for value in (None, 1):
            want = x.at[5].get(mode="fill", fill_value=value)
            got = fill_value_of(x.dtype, value)
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got.astype(complex), want.astype(complex))


def test_names_of_modes():
    """Modes may be strings, or jax's own names."""
    modes = jax.lax.GatherScatterMode
    for mode, name in {
        None: None,
        "CLIP": "clip",
        "fill": "drop",
        modes.CLIP: "clip",
        modes.FILL_OR_DROP: "drop",
        modes.PROMISE_IN_BOUNDS: "promise_in_bounds",
    }.items():
        assert mode_name("set", mode) == name
    with pytest.raises(
        ValueError, match=r"must be one of drop, .*[.] .*Got: <GatherScatterMode.ONE_HOT"
    ):
        mode_name("set", modes.ONE_HOT)
    with pytest.raises(
        ValueError, match=r"`mode` of `.at\[...\].get` must be one of .*[.] .*Got: 3\."
    ):
        mode_name("get", 3)


@pytest.mark.slow
def test_types_of_what_is_written():
    """Nothing but precision is lost."""
    for have, want, fits in (
        *(("float64", "float32", True), ("int64", "int8", True), ("int8", "uint8", True)),
        *(("bool", "int8", True), ("int64", "float16", True), ("float64", "complex64", True)),
        *(("float32", "int64", False), ("int8", "bool", False), ("complex64", "float64", False)),
    ):
        ref = Buffer(jnp.zeros(3, want)).at[1]
        if fits:
            assert ref.set(jnp.ones((), have))[:].tolist() == [0, 1, 0]
        else:
            with pytest.raises(
                TypeError, match=f"values of the dtype of .*, {want}[.] .*Got: {have}"
            ):
                ref.set(jnp.ones((), have))
    with pytest.raises(TypeError, match=r"needs values of .*, float64[.] .*Got: key<"):
        Buffer(jnp.zeros(3)).at[1].set(jax.random.key(0))


def test_an_empty_list_is_of_integers():
    assert Buffer(jnp.zeros(SHAPE))[[]].shape == (0, 4, 3)
    for index, got in (([1.5], "an array of float64"), (np.True_, "np.True_")):
        with pytest.raises(TypeError, match=f"must consist of integers[.] .*Got: {got}"):
            Buffer(jnp.zeros(SHAPE))[index]
    for index in (np.asarray(True), jnp.asarray(True)):
        with pytest.raises(TypeError, match=r"must consist of integers[.] .*Got: an array of bool"):
            Buffer(jnp.zeros(SHAPE))[index]


@pytest.mark.slow
def test_rows_that_are_named_twice():
    """The last value that is set is kept, and has the derivative; all values that are added
    count."""
    rows, pred = jnp.asarray([0, 2, 2, 0]), jnp.asarray([True, True, True, False])
    values, weights = jnp.asarray([1.0, 2.0, 3.0, 4.0]), jnp.asarray([10.0, 20.0, 30.0])

    def f(values):
        b = Buffer(jnp.ones(3)).at[rows]
        return jnp.stack([b.set(values)[:], b.set(values, pred=pred)[:], b.add(values)[:]])

    found, back = jax.vjp(f, values)
    assert found.tolist() == [[4, 1, 3], [1, 1, 3], [6, 1, 6]]
    slopes = [back(jnp.zeros((3, 3)).at[i].set(weights))[0].tolist() for i in range(3)]
    assert slopes == [[0, 0, 30, 10], [10, 0, 30, 0], [10, 30, 30, 10]]


@pytest.mark.exhaustive
def test_filled_where_nothing_is():
    b = Buffer(jnp.arange(6.0).reshape(3, 2))
    for index in (7, -4, jnp.asarray([1, 3]), (slice(None), jnp.asarray([1, 2]))):
        want = b[...].at[index].get(mode="fill")
        np.testing.assert_array_equal(b.at[index].get(mode="fill"), want)
        assert bool(jnp.isnan(want).any())
        got = b.at[index].get(mode=jax.lax.GatherScatterMode.FILL_OR_DROP, fill_value=9)
        np.testing.assert_array_equal(got, jnp.nan_to_num(want, nan=9.0))
    assert b.at[1].get(mode="fill").tolist() == [2, 3]


def test_what_comes_next_comes_after_a_read():
    """In the same function; one that is traced leaves nothing in a buffer that it closes over."""

    def f(x):
        b = Buffer(x)
        b[1]
        return b.at[1].set(2.0)[...]

    eqns = jax.make_jaxpr(f)(jnp.ones(3)).eqns
    first, then, _ = (eqn for eqn in eqns if eqn.primitive in (read_p, write_p))
    assert then.invars[0] is first.outvars[1]
    b = Buffer(jnp.arange(3.0))
    assert jax.jit(lambda i: b[i])(1) == 1
    assert b[:].tolist() == [0, 1, 2]


def test_pred_where_a_row_is_named_twice():
    """One by one, as if the others had not been named."""
    rows, pred = np.asarray([0, 2, 9, 0, 2]), np.asarray([True, False, False, True, True])
    values = np.asarray([4.0, 0.1, 0.2, 0.5, 6.0])
    ways = {"multiply": np.multiply, "power": np.power, "min": np.minimum, "max": np.maximum}
    for name, of in {**ways, "divide": np.divide, "subtract": np.subtract}.items():
        array = np.asarray([2.0, 3.0, 5.0, 7.0])
        got = getattr(Buffer(array).at[rows], name)(values, pred=pred, mode="clip")
        for row, value in zip(rows[pred], values[pred], strict=True):
            array[row] = of(array[row], value)
        np.testing.assert_allclose(got[:], array, 1e-15)
