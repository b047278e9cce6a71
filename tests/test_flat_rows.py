"""Buffers and tables whose rows have several short axes: they are carried as vectors."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

import loopkit
from derivatives import assert_close
from kinds import loop
from loopkit._engine.passes.flat_rows import SHORT
from loopkit._jaxprs import equations
from turns import later

N = 5
XS = jnp.asarray(np.cos(np.arange(N * 6.0)).reshape(N, 3, 2))
FIRST = jnp.asarray(np.sin(np.arange((N + 1) * 6.0)).reshape(N + 1, 3, 2))
W = jnp.array(0.7)


def once(i, rows, xs, w):
    return rows.at[i].set(xs[i] * w * (i + 1))


def from_before(i, rows, xs, w):
    return rows.at[i + 1].set(jnp.sin(rows[i] * w) + xs[i])


def again(i, rows, xs, w):
    rows = rows.at[i % 2].add(rows[(i + 1) % 2] * w)
    return rows.at[2].multiply(jnp.cos(xs[i]))


def by_arrays(i, rows, xs, w):
    there = jnp.stack([i, (i + 2) % (N + 1)])
    return rows.at[there].set(rows[there] * w + xs[jnp.array([0, 3])] * xs[i])


def by_slices(i, rows, xs, w):
    two = lax.dynamic_slice_in_dim(xs, i, 2)
    return rows.at[1:3].set(rows[2:4] * w + two).at[-1].add(xs[-1])


def where_positive(i, rows, xs, w):
    if isinstance(rows, loopkit.Buffer):
        rows = rows.at[i].set(xs[i] * w, pred=xs[i] > 0)
        return rows.at[i + 1].add(rows[i], pred=i > 2)
    rows = rows.at[i].set(jnp.where(xs[i] > 0, xs[i] * w, rows[i]))
    return rows.at[i + 1].add(jnp.where(i > 2, rows[i], 0))


def in_a_call(i, rows, xs, w):
    @jax.jit
    def write(rows, xs, w):
        return rows.at[i].set(jnp.tanh(xs[i] * w + rows[i + 1]))

    return write(rows, xs, w)


def in_a_loop(i, rows, xs, w):
    def inner(k, rows):
        return rows.at[k].set(rows[k + 1] * w + xs[i] * xs[k])

    if isinstance(rows, loopkit.Buffer):
        return loopkit.fori_loop(0, 3, inner, rows)
    for k in range(3):
        rows = inner(k, rows)
    return rows


FACTORS = jnp.cos(jnp.arange(6.0)).reshape(3, 2)


def by_a_row(i, rows, xs, w):
    """Slices meet another row, a number, a mask, and equations that need their axes."""
    row = jnp.where(rows[i] * FACTORS > 0.1, jnp.sin(rows[i]) * w, jnp.clip(xs[i], -0.5, 0.5))
    row = row * FACTORS - 0.1 * jnp.roll(row, 1, 0) + row.sum(1, keepdims=True)
    return rows.at[i + 1].set(jax.nn.softplus(row)[::-1])


FLAT = once, from_before, again, by_arrays, by_slices, where_positive, in_a_call, in_a_loop
FLAT += (by_a_row,)


def of_parts(i, rows, xs, w):
    return rows.at[i, 1].set(rows[i, 0] * w).at[i + 1].add(xs[i])


def of_all(i, rows, xs, w):
    return rows.at[i].set(rows[i] * w + jnp.sum(jnp.asarray(rows)) * xs[i])


WHOLE = of_parts, of_all


def reference(body):
    def f(w, xs, first):
        rows = first
        for i in range(N):
            rows = body(i, rows, xs, w)
        return rows

    return f


def looped(body, kind, checkpoints):
    def f(w, xs, first):
        step = lambda i, rows: body(i, rows, xs, w)
        below = lambda i, rows: jnp.sum(rows[i]) < 1e6  # the predicate looks at the rows, too
        how = {"buffers": True, "checkpoints": checkpoints}
        return loop(kind, step, first, N, most=N + 2, also=below, **how)

    return f


def loss(f):
    return lambda w, xs, first: jnp.sum(jnp.sin(f(w, xs, first)))


WIDE = jnp.linspace(0.5, 1.5, 9)
MODES = {
    "value": lambda f: f(W, XS, FIRST),
    "jvp": lambda f: jax.jvp(f, (W, XS, FIRST), (W, jnp.sin(XS), jnp.cos(FIRST))),
    "grad": lambda f: jax.grad(loss(f), (0, 1, 2))(W, XS, FIRST),
    "hessian": lambda f: jax.hessian(loss(f), (0, 2))(W, XS, FIRST),
    "rev over rev": lambda f: jax.grad(lambda w: jax.grad(loss(f))(w, XS, FIRST) ** 2)(W),
    "lanes": lambda f: jax.vmap(jax.grad(loss(f), (0, 2)), (0, None, None))(WIDE, XS, FIRST),
    "grad of lanes": lambda f: jax.grad(
        lambda w: jnp.sum(jax.vmap(f, (0, None, None))(w, XS, FIRST) ** 3)
    )(WIDE),
    "lanes of all": lambda f: jax.vmap(jax.grad(loss(f), (0, 1, 2)), (0, 2, -1))(
        *(WIDE[:2], jnp.stack([XS, XS * 2], 2), jnp.stack([FIRST, -FIRST], -1))
    ),
}
OTHER_WAYS = [
    *[(mode, "while", 2) for mode in MODES if mode not in ("grad", "lanes of all")],
    *[(mode, "fori", None) for mode in ("grad", "lanes")],
    *[(mode, "while", "all") for mode in ("grad", "lanes")],
]


def cases():
    """Yield cases: quick ones take one of two modes for every second body."""
    for k, body in enumerate([*FLAT, *WHOLE]):
        both = [(mode, "while", 2) for mode in ("grad", "lanes of all")]
        yield pytest.param(body, *both[k // 2 % 2], marks=() if k % 2 else pytest.mark.exhaustive)
        for way in (both[1 - k // 2 % 2], *OTHER_WAYS):
            yield later(body, *way)


@ft.cache
def expected(body, mode):
    return MODES[mode](reference(body))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("body", "mode", "kind", "checkpoints"), list(cases()))
def test_rows_are_those_of_a_python_loop(body, mode, kind, checkpoints):
    got = jax.jit(lambda: MODES[mode](looped(body, kind, checkpoints)))()
    assert_close(got, expected(body, mode))


def loops_of(f, *args):
    """The loops in a function, the outermost first."""
    eqns = equations.all_equations(jax.make_jaxpr(f)(*args))
    return [eqn.params["loop"] for eqn in eqns if "loop" in eqn.params]


def carried(f, *args):
    """The shapes that the outermost loop carries and reads."""
    loop = loops_of(f, *args)[0]
    return [t.shape for t in loop.carry_types], [t.shape for t in loop.const_types]


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["fori", "while"])
@pytest.mark.parametrize("body", FLAT)
def test_rows_taken_whole_are_vectors(body, kind):
    carry, consts = carried(looped(body, kind, None), W, XS, FIRST)
    assert (N + 1, 6) in carry
    assert (N + 1, 3, 2) not in carry
    assert (N, 6) in consts
    assert (N, 3, 2) not in consts


def row_shapes(loop):
    """How many results of equations in a step end in the axes of a row."""
    types = (v.aval for eqn in equations.all_equations(loop.body) for v in eqn.outvars)
    return sum(t.shape[-2:] == (3, 2) for t in types)


@pytest.mark.slow
def test_elementwise_steps_are_of_vectors():
    """Another row, and one that is carried, are vectors as well; the derivative is of vectors."""

    def f(w, xs, row, first, in_python=False):
        def body(i, carry):
            rows, row = carry
            row = jnp.where(row > w, xs[i] * FACTORS, jnp.tanh(rows[i]) + w * row)
            return rows.at[i + 1].set(row), row

        if in_python:
            rows, row = ft.reduce(lambda carry, i: body(i, carry), range(N), (first, row))
        else:
            rows, row = loopkit.fori_loop(0, N, body, (first, row), buffers=lambda c: c[0])
        return jnp.sum(jnp.sin(rows)) + jnp.sum(row**2)

    unrolled = ft.partial(f, in_python=True)

    args = W, XS, FACTORS * 0.5, FIRST
    loops = loops_of(jax.grad(f, (0, 1, 2, 3)), *args)
    assert loops
    assert not any(map(row_shapes, loops))
    assert_close(*(jax.grad(g, (0, 1, 2, 3))(*args) for g in (f, unrolled)))


def test_rows_are_shown_as_they_are_written(capsys):
    """An equation without results gets them with their axes."""

    def body(i, rows):
        row = rows[i] + 1
        jax.debug.callback(lambda row: print(row.shape), row)
        return rows.at[i + 1].set(row)

    loopkit.fori_loop(0, 2, body, FIRST, buffers=True)
    jax.effects_barrier()
    assert capsys.readouterr().out == "(3, 2)\n" * 2


@pytest.mark.parametrize("body", WHOLE)
def test_other_rows_keep_their_axes(body):
    carry, consts = carried(looped(body, "fori", None), W, XS, FIRST)
    assert (N + 1, 3, 2) in carry
    assert (N, 6) in consts


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("shape", "flat"),
    [
        ((4, SHORT - 1), (4 * SHORT - 4,)),
        ((4, SHORT), (4, SHORT)),  # enough for a vector unit
        ((3, 1), (3, 1)),  # a vector
        ((0, 3), (0, 3)),
        ((2, 3, 4), (24,)),
    ],
)
def test_only_short_axes_are_made_one(shape, flat):
    f = lambda xs: loopkit.fori_loop(0, N, lambda i, b: b.at[i].set(xs[i]), 0 * xs, buffers=True)
    carry, _ = carried(f, jnp.ones((N, *shape)))
    assert (N, *flat) in carry


@pytest.mark.slow
def test_slices_are_moved_inside_as_lax_moves_them():
    def f(xs):
        # Beyond the start also once it has been counted from the end.
        read = lambda i: lax.dynamic_slice_in_dim(xs, i - 2 * N + 1, 1)[0]
        return loopkit.fori_loop(0, N, lambda i, b: b.at[i].set(read(i)), 0 * xs, buffers=True)

    wanted = [lax.dynamic_slice_in_dim(XS, jnp.asarray(i - 2 * N + 1), 1)[0] for i in range(N)]
    assert (N, 6) in carried(f, XS)[1]
    assert_close(f(XS), jnp.stack(wanted))


def test_the_same_step_alone_and_in_a_loop():
    """Alone it carries flat rows; in a loop around it those of that loop, as they are."""
    step = lambda k, rows: rows.at[k].set(2 * rows[k])
    alone = lambda rows: loopkit.fori_loop(0, N, step, rows, buffers=True)

    def inside(rows):
        def outer(i, rows):
            rows = loopkit.fori_loop(0, N, step, rows)
            return rows.at[i, 0].set(1.0)  # not whole rows

        return loopkit.fori_loop(0, N, outer, rows, buffers=True)

    assert (N + 1, 6) in carried(alone, FIRST)[0]
    shapes = [t.shape for loop in loops_of(inside, FIRST) for t in loop.carry_types]
    assert shapes.count((N + 1, 3, 2)) == 2
    assert (N + 1, 6) not in shapes


@pytest.mark.slow
def test_elements_of_a_tensor_array_are_vectors():
    def f(w, xs):
        ta = loopkit.TensorArray.empty(N, jax.ShapeDtypeStruct((3, 2), XS.dtype))
        body = lambda i, ta: ta.append(jnp.sin(xs[i] * w))
        return loopkit.fori_loop(0, N, body, ta).stack()

    assert (N, 6) in carried(f, W, XS)[0]
    got = jax.grad(lambda w, xs: jnp.sum(f(w, xs) ** 2), (0, 1))(W, XS)
    want = jax.grad(lambda w, xs: jnp.sum(jnp.sin(xs * w) ** 2), (0, 1))(W, XS)
    assert_close(got, want)


def test_rows_of_an_outer_loop_are_flat_in_the_loops_inside():
    """The inner loops carry what the outer one does: no reshape stands between them."""
    loops = loops_of(looped(in_a_loop, "fori", None), W, XS, FIRST)
    assert len(loops) == 2
    assert all((N + 1, 6) in [t.shape for t in loop.carry_types] for loop in loops)


def test_rows_are_read_after_an_inner_loop():
    def f(rows, loop):
        inner = lambda k, rows: rows.at[k].set(jnp.sin(rows[k + 1]))

        def outer(i, rows):
            rows = loop(0, N, inner, rows)
            return rows.at[i].add(rows[i + 1] * rows[0])

        how = {} if loop is lax.fori_loop else {"buffers": True}
        return loop(0, N, outer, rows, **how)

    assert (N + 1, 6) in carried(lambda rows: f(rows, loopkit.fori_loop), FIRST)[0]
    assert_close(f(FIRST, loopkit.fori_loop), f(FIRST, lax.fori_loop))


@pytest.mark.slow
def test_integers_and_weak_types():
    table = jnp.arange(N * 6).reshape(N, 3, 2)

    def f(first):
        body = lambda i, b: b.at[i].set(table[i] * 2)
        return loopkit.fori_loop(0, N, body, first, buffers=True)

    assert_close(f(jnp.zeros((N, 3, 2), int)), 2 * table)
    weak = jnp.broadcast_to(jnp.asarray(1), (N, 3, 2))
    assert_close(f(weak), 2 * table)
    assert (N, 6) in carried(f, weak)[0]


@pytest.mark.parametrize("grad", [False, True])
def test_steps_keep_the_names_and_settings_they_were_written_with(grad):
    def f(w, xs):
        def body(i, rows):
            with jax.named_scope("attention"), set_xla_metadata(part="heads"):
                row = jnp.sin(xs[i] * w)
            return rows.at[i].set(row)

        return jnp.sum(loopkit.fori_loop(0, N, body, jnp.zeros((N, 3, 2)), buffers=True))

    assert (N, 6) in carried(f, W, XS)[0]
    lowered = jax.jit(jax.grad(f) if grad else f).lower(W, XS)
    assert 'part = "heads"' in lowered.as_text()
    assert "attention" in lowered.as_text(debug_info=True)
