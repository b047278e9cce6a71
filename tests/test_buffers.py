"""Buffers against arrays: every index, every write, every transformation."""

import functools as ft
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from buffer_bodies import BODIES, XS, W, looped, reference, rows_from_rows, sorting
from derivatives import assert_close
from loopkit import Buffer, Plan
from tolerances import assert_near

pytestmark = pytest.mark.slow

ARRAY = jnp.arange(5 * 4 * 3.0).reshape(5, 4, 3)
TWO = jnp.asarray(2)
INDICES = [
    *(2, -1, 9, TWO, jnp.asarray(-2), jnp.asarray(7), (), ..., (4, 3, 2), (TWO, TWO, TWO)),
    *((TWO, slice(None)), (slice(1, 3), TWO), (slice(None, None, 2), TWO), (..., TWO)),
    *((slice(None, None, -1),), (TWO, ..., 1), (None, TWO), (TWO, None, slice(0, 2))),
    *(jnp.asarray([1, 3]), np.asarray([0, 2, 2]), (jnp.asarray([1, 3]), TWO)),
    (jnp.asarray([1, 3]), slice(None), jnp.asarray([0, 2])),
    (slice(None), jnp.asarray([1, 3]), jnp.asarray([0, 2])),
    (slice(None, None, 2), jnp.asarray([[1, 3]]), jnp.asarray([[0], [2]])),
    (TWO, slice(0, 3), jnp.asarray([0, 1, 2])),
    (np.asarray([True, False, True, True, False]),),
    (np.arange(20).reshape(5, 4) % 3 == 0,),
    (slice(None), np.arange(12).reshape(4, 3) % 5 == 0),
    (..., np.asarray([True, False, True])),
    (TWO, None, jnp.asarray([True, False, False, True])),
    (np.arange(60).reshape(5, 4, 3) % 7 == 0,),
    (np.asarray([True, False, True, False, False]), slice(1, 3), jnp.asarray([0, 2])),
    (np.zeros(0, bool),),
    (slice(None), jnp.asarray([0, -1]), None, 1),
    *((slice(1, 1),), (jnp.zeros((0,), int),), (jnp.asarray([9, -9, 1]),)),
    (slice(None, None, 2), slice(None, None, 3), slice(2, 0, -1)),
]


@pytest.mark.parametrize("index", INDICES, ids=lambda index: str(index).replace("\n", ""))
def test_reads_and_writes_are_those_of_arrays(index):
    buffer, want = Buffer(ARRAY), ARRAY[index]
    assert_close(buffer[index], want)
    filled = buffer.at[index].get(mode="fill")
    np.testing.assert_array_equal(filled, ARRAY.at[index].get(mode="fill"))
    values = jnp.cos(jnp.arange(want.size)).reshape(want.shape)
    for name in ("set", "add", "subtract", "multiply", "divide", "power", "min", "max"):
        for mode in (None, "clip"):
            got = jnp.asarray(getattr(buffer.at[index], name)(values, mode=mode))
            wanted = getattr(ARRAY.at[index], name)(values, mode=mode)
            assert_near(got, wanted)
    got = jnp.asarray(buffer.at[index].apply(jnp.sin))
    assert_near(got, ARRAY.at[index].apply(jnp.sin))


@pytest.mark.parametrize("mode", [None, "clip"])
def test_apply_heeds_pred_where_a_row_is_named_twice(mode):
    rows, pred = [0, 2, 0, -1, 9, 2], np.asarray([True, False, True, True, True, True])
    wanted = ARRAY
    for row, yes in zip(rows, pred, strict=True):
        wanted = wanted.at[row].apply(jnp.sin, mode=mode) if yes else wanted
    pred = pred[:, None, None]
    for index in (rows, np.asarray(rows), jnp.asarray(rows)):
        got = Buffer(ARRAY).at[index].apply(jnp.sin, pred=pred, mode=mode)
        assert_near(jnp.asarray(got), wanted)


@pytest.mark.parametrize("pred", [None, [True, True, False]], ids=str)
def test_what_is_written_over_has_no_gradient(pred):
    """If values are set at a row twice, the last one counts."""
    values = jnp.cos(jnp.arange(36.0)).reshape(3, 4, 3)
    pred = None if pred is None else jnp.asarray(pred)[:, None, None]

    def f(values):
        return jnp.sum(jnp.sin(jnp.asarray(Buffer(ARRAY).at[[0, 2, 2]].set(values, pred=pred))))

    counts = jnp.asarray([True, pred is not None, pred is None])[:, None, None]
    assert_close(jax.grad(f)(values), jnp.where(counts, jnp.cos(values), 0))


def test_a_list_is_an_array_of_rows():
    """Every write takes a list as rows, even if it names a row twice."""
    for rows in ([1, 2], [1, 1], [[1, 0], [0, 1]]):
        for name in ("multiply", "divide", "power", "min", "max"):
            got = getattr(Buffer(ARRAY).at[rows], name)(3.0)
            wanted = getattr(ARRAY.at[np.asarray(rows)], name)(3.0)
            assert_near(jnp.asarray(got), wanted)


@pytest.mark.parametrize("batched", list(itertools.product([0, None], repeat=3)), ids=str)
def test_vmap_of_every_combination(batched):
    """Batched and unbatched buffers, indices and predicates, and their derivatives."""

    def results(make):
        def f(b, i, pred, v):
            if make is Buffer:
                y = Buffer(b).at[i].set(v, pred=pred)
            else:
                y = jnp.where(pred, b.at[i].set(v), b)
            y = y.at[jnp.stack([i, i + 1])].add(y[i - 1] * v)
            whole = jnp.asarray(y)
            return jnp.sum(jnp.sin(whole) * whole[i])

        b = jnp.stack([ARRAY, ARRAY * 2, ARRAY * 3]) if batched[0] == 0 else ARRAY
        i = jnp.asarray([0, 2, 4]) if batched[1] == 0 else jnp.asarray(3)
        pred = jnp.asarray([True, False, True]) if batched[2] == 0 else jnp.asarray(True)
        v = jnp.cos(jnp.arange(36.0)).reshape(3, 4, 3)
        axes = (*batched, 0)

        def total(b, v):
            return jnp.sum(jax.vmap(f, axes)(b, i, pred, v))

        second = jax.jvp(jax.grad(total, (0, 1)), (b, v), (b * 0.1, jnp.sin(v)))
        return second, jax.jit(jax.vmap(jax.grad(f, (0, 3)), axes))(b, i, pred, v)

    assert_close(results(Buffer), results(jnp.asarray))


# ---------------------------------------------------------------- in loops


# How loops go, and what they keep: residuals, carries, one checkpoint for all.
WAYS = [
    *[("fori", None), ("scan", "all"), ("until", 2), ("while", Plan(1))],
    *[("while", Plan(2, 2, "residuals")), ("scan", Plan(2, 2, "carries")), ("while", Plan(9))],
]


def first_order(f):
    return jax.value_and_grad(f, (0, 1))(XS, W)


def second_order(f):
    """Forward over reverse gives the first derivatives in both modes too."""
    return jax.jvp(jax.value_and_grad(f, (0, 1)), (XS, W), (jnp.sin(XS), jnp.sin(W)))


def in_other_orders(f):
    twice = jax.grad(lambda w: jnp.sum(jnp.sin(jax.grad(f, 1)(XS, w))))
    return jax.hessian(f, 1)(XS, W), twice(W)


@ft.cache
def expected(body, derivatives):
    return derivatives(reference(body))


@pytest.mark.parametrize(("kind", "checkpoints"), WAYS, ids=range(len(WAYS)))
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_gradients(body, kind, checkpoints):
    f = looped(body, kind, checkpoints)
    assert_close(jax.jit(lambda: first_order(f))(), expected(body, first_order))


@pytest.mark.parametrize("checkpoints", [Plan(2, 2, "residuals"), Plan(1), "all"], ids=range(3))
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_second_derivatives(body, checkpoints):
    f = looped(body, "while", checkpoints)
    assert_close(jax.jit(lambda: second_order(f))(), expected(body, second_order))
    if body in (rows_from_rows, sorting):
        assert_close(jax.jit(lambda: in_other_orders(f))(), expected(body, in_other_orders))


@pytest.mark.parametrize("checkpoints", [Plan(2, 2, "residuals"), Plan(1), "all"], ids=range(3))
@pytest.mark.parametrize("kind", ["while", "until"])
@pytest.mark.parametrize("body", [rows_from_rows, sorting], ids=lambda body: body.__name__)
def test_lanes_that_stop_apart(body, kind, checkpoints):
    f, n = looped(body, kind, checkpoints), jnp.asarray([2, 6, 4])
    ws = jnp.stack([W, W * 2, W / 2])
    grads = jax.vmap(jax.value_and_grad(f, (0, 1)), (None, 0, 0))
    one = [
        jax.value_and_grad(reference(body, int(k)), (0, 1))(XS, w)
        for k, w in zip(n, ws, strict=True)
    ]
    assert_close(jax.jit(grads)(XS, ws, n), jax.tree.map(lambda *v: jnp.stack(v), *one))


@pytest.mark.parametrize("kind", ["while", "scan"])
@pytest.mark.parametrize("checkpoints", [Plan(2, 2, "residuals"), Plan(1)], ids=range(2))
def test_batches(kind, checkpoints):
    """Batches of arguments, of cotangents alone, and of residuals stored one by one."""
    f, wanted = looped(rows_from_rows, kind, checkpoints), reference(rows_from_rows)
    ws = jnp.stack([W, W * 2, W / 2])
    batch = lambda f: jax.vmap(jax.grad(f, (0, 1)), (None, 0))(XS, ws)
    assert_close(jax.jit(lambda: batch(f))(), batch(wanted))
    rows = lambda f: lambda w: jnp.sin(w) * f(XS, w)
    assert_close(jax.jit(jax.jacrev(rows(f)))(W), jax.jacrev(rows(wanted))(W))

    def kept(f):
        """The trace of pulling back under another vmap than that of the forward pass."""
        _, back = jax.vjp(lambda ws: jax.lax.map(lambda w: f(XS, w), ws), ws)
        return jax.vmap(back)(jnp.eye(3))

    assert_close(jax.jit(lambda: kept(f))(), kept(wanted))


@pytest.mark.parametrize("unroll", [2, 3])
def test_unrolled_steps_that_do_not_count_write_nothing(unroll):
    f, wanted = looped(rows_from_rows, "while", Plan(2, 3), unroll), reference(rows_from_rows)
    assert_close(
        jax.jit(jax.value_and_grad(f, (0, 1)))(XS, W), jax.value_and_grad(wanted, (0, 1))(XS, W)
    )


@pytest.mark.parametrize("named", [True, None])
def test_an_inner_loop_takes_the_buffer_of_an_outer_one(named):
    """Edit-distance-like: each cell from its neighbours; lanes of the outer loop stop apart."""

    def table(xs, n):
        def cell(i, j, t):
            best = jnp.logaddexp(t[i - 1, j], t[i, j - 1])
            return t.at[i, j].set(best + xs[i, 0] * xs[j, 1])

        def row(carry):
            i, t = carry
            t = loopkit.fori_loop(1, 6, lambda j, t: cell(i, j, t), t, buffers=named)
            return i + 1, t

        t = jnp.zeros((6, 6)).at[0].set(xs[:, 0])
        out = loopkit.while_loop(lambda c: c[0] < n, row, (1, t), buffers=lambda c: c[1])
        return jnp.sum(out[1] ** 2)

    def unrolled(xs, n):
        t = jnp.zeros((6, 6)).at[0].set(xs[:, 0])
        for i in range(1, n):
            for j in range(1, 6):
                best = jnp.logaddexp(t[i - 1, j], t[i, j - 1])
                t = t.at[i, j].set(best + xs[i, 0] * xs[j, 1])
        return jnp.sum(t**2)

    ns = jnp.asarray([2, 5])
    got = jax.jit(jax.vmap(jax.value_and_grad(table), (None, 0)))(XS, ns)
    wanted = [jax.value_and_grad(unrolled)(XS, int(n)) for n in ns]
    assert_close(got, jax.tree.map(lambda *v: jnp.stack(v), *wanted))


def test_buffers_that_change_places():
    """Anything but the buffer itself in its place is written over all of it, lane by lane."""

    def f(n, a, b, use):
        def body(carry):
            i, a, b = carry
            return i + 1, b, a.at[0].add(b[1])

        how = {"buffers": (False, True, True)} if use else {}
        _, a, b = loopkit.while_loop(lambda c: c[0] < n, body, (0, a, b), **how)
        return jnp.sum(a * jnp.arange(3.0) + b**2)

    args = (jnp.asarray([1, 4, 2]), jnp.arange(3.0), jnp.sin(jnp.arange(3.0)))
    run = lambda use: jax.jit(jax.vmap(jax.grad(lambda *a: f(*a, use), (1, 2)), (0, None, None)))(
        *args
    )
    assert_close(run(True), run(False))


def test_without_jit():
    f, wanted = looped(rows_from_rows, "while", None), reference(rows_from_rows)
    with jax.disable_jit():
        assert_close(f(XS, W), wanted(XS, W))


def test_the_last_of_equal_indices_is_kept():
    rows = jnp.asarray([0, 2, 0, 2, 2])

    def f(v):
        return jnp.asarray(Buffer(jnp.zeros(3)).at[rows].set(v))

    assert_close(f(jnp.arange(1.0, 6)), jnp.asarray([3.0, 0, 5]))
    assert_close(jax.jacrev(f)(jnp.ones(5))[2], jnp.asarray([0.0, 0, 0, 0, 1]))
    many = jnp.asarray(np.arange(200) % 3)
    got = jnp.asarray(Buffer(jnp.zeros(3)).at[many].set(jnp.arange(200.0)))
    assert_close(got, jnp.asarray([198.0, 199, 197]))


def test_indices_that_write_nothing_are_in_no_ones_way():
    """Neither those out of bounds, nor those that `pred` leaves out, one by one or in part."""
    table = Buffer(jnp.zeros((5, 5))).at[jnp.asarray([1, 0]), jnp.asarray([0, 5])]
    assert_close(jnp.asarray(table.set(jnp.asarray([1.0, 2.0])))[1, 0], 1.0)
    rows = jnp.asarray([0, 0, -7, 0])

    def f(v, pred):
        return jnp.asarray(Buffer(jnp.zeros((2, 3))).at[rows].set(v, pred=pred))

    v = jnp.arange(1.0, 13).reshape(4, 3)
    pred = jnp.asarray([[True], [True], [True], [False]])
    assert_close(f(v, pred)[0], v[1])
    with_start = table.buffer.at[rows % 2, 1:4].set(v, pred=pred & jnp.asarray([True, True, False]))
    assert_close(jnp.asarray(with_start)[:2, 1:4], jnp.stack([v[1], v[2]]).at[:, 2].set(0))
    part = pred.at[1].set(False) | jnp.asarray([False, False, True])
    wanted = jnp.asarray([1.0, 2.0, 12.0])
    assert_close(jax.jit(jax.vmap(f))(v[None], part[None])[0, 0], wanted)
    grads = jax.grad(lambda v: jnp.sum(f(v, part)[0] * wanted))(v)
    assert_close(grads.at[0, :2].set(0).at[3, 2].set(0), jnp.zeros((4, 3)))
    assert_close(jnp.stack([grads[0, 0], grads[0, 1], grads[3, 2]]), wanted)


@pytest.mark.parametrize("shape", [(0,), (0, 2), (3, 0)])
@pytest.mark.parametrize("checkpoints", [None, Plan(1), "all"], ids=range(3))
def test_buffers_without_elements(shape, checkpoints):
    def f(x):
        def step(i, rows):
            return rows.at[i].set(jnp.sin(rows[i - 1]) * x).at[jnp.stack([i, i])].add(x)

        how = {"buffers": True, "checkpoints": checkpoints}
        return 2 * x + jnp.sum(loopkit.fori_loop(0, 4, step, jnp.zeros(shape), **how))

    assert_close(jax.vmap(jax.value_and_grad(f))(XS[0]), (2 * XS[0], jnp.full(2, 2.0)))


def test_as_an_array():
    buffer = Buffer(ARRAY)
    assert (buffer.shape, buffer.ndim, buffer.size, len(buffer)) == ((5, 4, 3), 3, 60, 5)
    assert repr(buffer) == "Buffer(float64[5,4,3])"
    assert len(list(buffer)) == 5
    assert_close(jnp.asarray(buffer), ARRAY)


WAYS_TO_KEEP = [None, "all", Plan(5, 100, "residuals"), Plan(5, 100, "carries")]


@pytest.mark.parametrize("checkpoints", WAYS_TO_KEEP, ids=range(len(WAYS_TO_KEEP)))
@pytest.mark.parametrize("batch", [None, 4])
def test_in_place(batch, checkpoints):
    """Neither rows, nor their cotangents, nor those of a table that steps read are copied."""

    def f(xs):
        def body(c, _):
            i, ys = c
            y = xs[i] * jnp.sin(ys[i - 1])
            ys = ys.at[i].set(y)
            return (i + 1, ys.at[i // 2].multiply(y)), None

        how = {"buffers": lambda c: c[1], "checkpoints": checkpoints}
        (_, ys), _ = loopkit.scan(body, (0, jnp.ones_like(xs)), None, 500, **how)
        return jnp.sum(ys)

    shape, mapped = ((500, 7), f) if batch is None else ((batch, 500, 7), jax.vmap(f))
    for grad in (False, True):
        assert loopkit.in_place_report(mapped, jnp.ones(shape), grad=grad, min_bytes=500 * 7 * 8)
