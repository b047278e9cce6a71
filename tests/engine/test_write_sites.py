"""Write sites: which rows of a buffer are written once, and which follow from counters."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from loopkit import _jax
from loopkit._buffers.slices import read, write, write_p
from loopkit._buffers.window import Window
from loopkit._engine.facts.ranges import with_ranges
from loopkit._engine.facts.write_sites import (
    counted_columns,
    find_writes,
    with_fresh_writes,
    writes_once,
    writes_rows,
)
from loopkit._engine.primitives import while_p
from loopkit._jaxprs import equations

from .small_loops import make_loop
from .test_write_log import ROW, at, inner, numbers

FROM_THE_END = Window((0,), (0, 0), (1, 2), "drop", wrap=True)
ENDING = {"cond": lambda limit, carry: carry[0] < limit[0], "cond_consts": [6]}
ROW_OF_ONES = np.ones((1, 2))


def loop_of(step, init=None, **how):
    """Make a loop over a counter, another number and a buffer, unless `init` says otherwise."""
    init = [np.int32(0), np.int32(2), numbers(rows=12)] if init is None else init
    buffers = [i for i, v in enumerate(init) if np.ndim(v) == 2]
    body = lambda consts, carry, x: (step(*carry), [])
    loop, given = make_loop(body, [], init, buffers=buffers, **(how or {"length": 5}))
    return with_ranges(loop, given)


def put(b, i, window=ROW):
    return write(b, ROW_OF_ONES, at(i), window)


# ---------------------------------------------------------------- a single write


def test_rows_that_are_written_once():
    again = loop_of(lambda i, k, b: [i + 1, k, put(b, i % 2)])
    once = loop_of(lambda i, k, b: [i + 1, k, put(b, i)])
    read_too = loop_of(lambda i, k, b: [i + 1, k, put(read(b, at(i - 1), ROW)[1], i)])
    twice = loop_of(lambda i, k, b: [i + 1, k, put(put(b, i), k)])
    assert [writes_once(loop, 2) for loop in (again, once, read_too, twice)] == [0, 1, 1, 0]
    assert [writes_rows(loop, 2) for loop in (again, once, read_too, twice)] == [0, 1, 0, 0]


def test_rows_from_the_end():
    """A negative one is the last, which is written again if nobody knows when the loop ends."""

    def once(row, window, first=0):
        init = [np.int32(first), np.int32(2), numbers(rows=12)]
        loop = loop_of(lambda i, k, b: [i + 1, k, put(b, row(i), window)], init, **ENDING)
        return writes_once(loop, 2)

    assert once(lambda i: i, ROW)
    assert once(lambda i: i - 1, ROW)  # which is not written
    assert once(lambda i: i, FROM_THE_END)
    assert once(lambda i: i + 1, FROM_THE_END)
    assert not once(lambda i: i - 1, FROM_THE_END)
    assert not once(lambda i: i + 2 - 3, FROM_THE_END)
    beyond = lambda i: i + np.int32(2**31 - 9)  # from -10 on, if it starts at the largest integer
    assert not once(beyond, FROM_THE_END, first=2**31 - 1)
    assert once(lambda i: i + 2, FROM_THE_END, first=2**30 - 1)


def test_rows_of_which_nobody_knows_how_many_there_are():
    """Programs that are exported for any size may come around to the first row again."""
    (n,) = jax.export.symbolic_shape("n")

    def once(window):
        step = lambda i, k, b: [i + 1, k, put(b, i, window)]
        loop = loop_of(step)
        i, k, b = loop.carry_types
        types = [i, k, b.update(shape=(n, 2))]
        return writes_once(loop.replace(body=_jax.trace_closed(step, types, "step")), 2)

    assert once(ROW)
    assert not once(FROM_THE_END)


def columns(starts, kind=np.int32):
    """Return the counter that each column of a write's starts follows."""
    window = Window((0, 1), (0, 0), (1, 1), "drop", wrap=False)

    def step(i, k, b):
        found = starts(i, k)
        assert found.shape in [(1,), (2,)]
        one = ROW if found.shape == (1,) else window
        return [i + jnp.asarray(1, kind), k - 1, write(b, np.ones((1, one.sizes[1])), found, one)]

    loop = loop_of(step, [kind(0), np.int32(2), numbers()])
    j = _jax.open_jaxpr(loop.body)
    (eqn,) = [e for e in j.eqns if e.primitive is write_p]
    found = counted_columns(j, eqn.invars[2], loop)
    return [None if c is None else (c.leaf, c.offset) for c in found]


def test_what_is_added_to_a_counter():
    assert columns(lambda i, k: at(i)) == [(0, 0)]
    assert columns(lambda i, k: at(i + 2)) == [(0, 2)]
    assert columns(lambda i, k: at(3 + i)) == [(0, 3)]
    assert columns(lambda i, k: at(i - 2)) == [(0, -2)]
    assert columns(lambda i, k: at(i + 1 - 4)) == [(0, -3)]
    assert columns(lambda i, k: at(5 - i)) == [None]
    assert columns(lambda i, k: at(i + k)) == [None]
    assert columns(lambda i, k: at(i) + np.asarray([4], np.int32)) == [None]
    assert columns(lambda i, k: jnp.stack([i + 1, k])) == [(0, 1), (1, 0)]
    assert columns(lambda i, k: jnp.stack([i % 2, k - 1])) == [None, (1, -1)]


def test_counters_that_start_over():
    """Narrow ones do; of floats, what is added may be a fraction."""
    of = lambda kind: columns(lambda i, k: at(i.astype(np.int32)), kind)
    assert [of(kind) for kind in (np.int32, np.int64, np.uint32)] == [[(0, 0)]] * 3
    assert [of(kind) for kind in (np.int8, np.int16, np.float32, np.float64)] == [[None]] * 4
    assert columns(lambda i, k: at(i.astype(np.int8))) == [None]


# ---------------------------------------------------------------- of tangents


def marks(step):
    """Whether each write of a linear step is fresh, and alone."""
    types = [jax.typeof(jnp.asarray(v)) for v in (np.int32(1), np.ones((1, 2)), numbers())]
    linear = _jax.trace_closed(step, types, "linear")
    new = with_fresh_writes(linear, [(2, 0)])
    found = [e.params for e in equations.all_equations(new) if e.primitive is write_p]
    return [(how["fresh"], how["alone"]) for how in found]


def test_writes_beside_which_nothing_touches_the_buffer():
    read_of = lambda i, b: read(b, at(i), ROW)
    plain = lambda i, v, b: write(b, v, at(i), ROW)
    assert marks(lambda i, v, b: [plain(i, v, b)]) == [(True, True)]
    assert marks(lambda i, v, b: [plain(i, v, b), b.sum()]) == [(True, False)]
    assert marks(lambda i, v, b: [plain(i, v, read_of(i + 1, b)[1])]) == [(True, False)]
    assert marks(lambda i, v, b: read_of(i + 1, plain(i, v, b))[::-1]) == [(True, False)]
    twice = lambda i, v, b: [plain(i + 1, v, plain(i, v, b))]
    assert marks(twice) == [(True, False)] * 2
    assert marks(lambda i, v, b: [plain(i, v, b) * 2]) == [(False, False)]


# ---------------------------------------------------------------- loops in a step


def spans_of(step, init=None, **how):
    """Return the operand and the result that say where the rows of the last leaf begin and end.

    None if it is not known what is written, () if it is known and has to be logged.
    """
    loop = loop_of(step, init, **(how or ENDING))
    sites = find_writes(loop, loop.carry_count - 1)
    if sites is None:
        return None
    (site,) = sites.values()
    return tuple((s.before, s.after) for s in site.spans)


def rows_until(n, b, limit):
    """Rows from n on; as many as are not known."""
    each = lambda consts, carry, x: ([carry[0] + 1, put(carry[1], carry[0])], [])
    return inner([limit], [n, b], each, **ENDING)


def test_a_loop_whose_steps_are_not_known():
    """Displaced rows cannot be logged, in a call either."""

    def rows(n, b, k):
        each = lambda consts, carry, x: ([carry[0] + 1, put(carry[1], carry[0] % 2)], [])
        return inner([k], [n, b], each, **ENDING)

    called = jax.jit(rows)
    assert spans_of(lambda i, k, b: [i + 1, k, rows(i, b, k)[1]]) is None
    assert spans_of(lambda i, k, b: [i + 1, k, called(i, b, k)[1]]) is None
    two = lambda i, b: inner([], [i, b], lambda _, c, x: ([c[0] + 1, put(c[1], 0)], []), length=2)
    assert spans_of(lambda i, k, b: [i + 1, k, two(i, b)[1]]) == ()


def test_a_buffer_that_a_loop_stacks():
    def step(i, k, b):
        each = lambda consts, carry, x: ([carry[0] + 1], [jnp.ones(2) * carry[0].astype(float)])
        return [i + 1, k, inner([], [i], each, length=12)[1]]

    assert spans_of(step) is None


def around(middle, outer=lambda out: out, length=None):
    """A loop of consts and a carry (number, number, buffer) around another one, in a step."""

    def step(i, k, b):
        how = {"length": length} if length else ENDING
        return outer(inner([k + 5, k], [i, k, b], middle, **how))

    return step


def test_loops_in_loops():
    """They go on where those inside them ended: behind two constants and one of the predicate."""

    def on(consts, carry, x):
        n, m, b = carry
        n, b = rows_until(n, b, consts[1])
        return [n, m + 1, b], []

    def on_with_the_second(consts, carry, x):
        m, n, b = carry
        n, b = rows_until(n, b, consts[1])
        return [m + 1, n, b], []

    assert spans_of(around(on)) == ((3, 0),)
    assert spans_of(around(on, length=3)) == ((2, 0),)
    assert spans_of(around(on_with_the_second)) == ((4, 1),)


def test_loops_in_loops_that_do_not_go_on():
    def starting_elsewhere(consts, carry, x):
        n, m, b = carry
        n, b = rows_until(n * m, b, consts[1])
        return [n, m + 1, b], []

    def ending_elsewhere(consts, carry, x):
        n, m, b = carry
        end, b = rows_until(n, b, consts[1])
        return [end - 1, m + 1, b], []

    def crossed(consts, carry, x):
        n, m, b = carry
        end, b = rows_until(n, b, consts[1])
        return [m + 1, end, b], []

    for middle in (starting_elsewhere, ending_elsewhere):
        assert spans_of(around(middle)) is None
    assert spans_of(around(crossed, lambda out: [out[1], out[0], out[2]])) is None


def test_calls_in_a_step():
    def called(k, n, b):
        n, b = rows_until(n, b, k)
        return b, n

    def step(i, k, b):
        b, i = jax.jit(called)(k, i, b)
        return [i, k, b]

    assert spans_of(step) == ((1, 1),)


def test_rows_from_where_inputs_say():
    """A beginning and an end for each of three: none is where the others went on."""
    beginnings = np.arange(3, dtype=np.int32)

    def middle(consts, carry, x):
        n, b = rows_until(x[0], carry[0], x[0] + 2)
        return [b], [n]

    def step(i, k, b):
        loop, _ = make_loop(middle, [], [np.zeros(b.shape)], [beginnings], buffers=[0])
        b, k = while_p.bind(b, k, loop=loop)
        return [i + 1, k, b]

    assert spans_of(step, [np.int32(0), beginnings, numbers(rows=12)]) is None
