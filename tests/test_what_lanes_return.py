"""Lanes that make room in loops with more than a carry: ys, bounds, buffers, lists, reports."""

import functools as ft
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import loopkit
import test_nested_lanes as nested
from derivatives import assert_close
from test_lanes import NS, XS
from turns import in_turn


class Layout(NamedTuple):
    lanes_of: Callable
    """Runs a function in all lanes."""
    ns: np.ndarray
    xs: np.ndarray
    widths: tuple[int, ...]


LAYOUTS = {
    "one axis": Layout(jax.vmap, NS, XS, (4, 2)),
    "two axes": Layout(nested.table, nested.NS, nested.GRID, nested.WIDTHS),
}


def both(layout, f, *args, around=lambda f: f):
    """Equal to lanes that wait, to the last digits."""
    ways = layout.widths, "wait"
    got, want = (jax.jit(around(layout.lanes_of(ft.partial(f, how))))(*args) for how in ways)
    assert_close(got, want)
    return got


@pytest.mark.exhaustive
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("layout", "checkpoints"), [("one axis", 3), ("two axes", None)])
def test_rows_are_written_where_they_belong(layout, checkpoints, reverse):
    """Cases: shared inputs, inputs of each lane, outputs along another axis, and keys."""
    layout = LAYOUTS[layout]
    own = jnp.sin(jnp.arange(10.0 * layout.ns.size)).reshape(*layout.ns.shape, 10)

    def run(lanes, n, x, rows):
        def step(c, x):
            i, h, key = c
            h, key = jnp.sin(h + x[0] * x[1]), jax.random.fold_in(key, i)
            return (i + 1, h, key), (h * jnp.arange(2.0), i, jax.random.key_data(key))

        loop = lambda h: loopkit.scan(
            *(step, (0, h, jax.random.key(3)), (jnp.cos(jnp.arange(10.0)), rows)),
            reverse=reverse,
            until=lambda c, _: c[0] > n,
            out_axes=(1, 0, 0),
            lanes=lanes,
            return_info=True,
            checkpoints=checkpoints,
        )
        (i, h, key), ys, info = loop(x)
        slope = jax.grad(lambda h: jnp.sum(jnp.sin(loop(h)[1][0])))(x)
        return i, h, key, ys, info, slope

    info = both(layout, run, layout.ns, layout.xs, own)[4]
    np.testing.assert_array_equal(info.steps, np.minimum(layout.ns + 1, 10))
    np.testing.assert_array_equal(info.stopped, True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("checkpoints", [None, 2, "all"])
@pytest.mark.parametrize(("layout", "least"), [("one axis", -9), ("two axes", None)])
def test_the_bound_counts_the_steps_of_all_phases(layout, least, checkpoints):
    layout = LAYOUTS[layout]

    def run(lanes, n, x):
        goes_on = lambda c: (c[0] < n) if least is None else (c[0] < n) & (c[1] > least)
        body = lambda c: (c[0] + 1, jnp.sin(c[1]) * 1.1)
        how = {"max_steps": 4, "lanes": lanes, "return_info": True, "checkpoints": checkpoints}
        loop = lambda x: loopkit.while_loop(goes_on, body, (0, x), **how)
        return loop(x), jax.grad(lambda x: loop(x)[0][1])(x)

    (_, info), _ = both(layout, run, layout.ns, layout.xs)
    np.testing.assert_array_equal(info.steps, np.minimum(layout.ns, 4))
    np.testing.assert_array_equal(info.stopped, layout.ns <= 4)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bound_that_is_too_low_is_an_error(layout):
    lanes_of, ns, _, widths = LAYOUTS[layout]
    loop = lambda n: loopkit.while_loop(
        lambda c: c < n, lambda c: c + 1, 0, max_steps=4, lanes=widths, throw=True
    )
    few = np.minimum(ns, 4)
    np.testing.assert_array_equal(lanes_of(loop)(few), few)
    with pytest.raises(Exception, match="`max_steps` must be enough"):
        jax.block_until_ready(lanes_of(loop)(ns))


@pytest.mark.exhaustive
@pytest.mark.parametrize("bound", in_turn([None, 12]))
@pytest.mark.parametrize(("layout", "with_list"), [("one axis", False), ("two axes", True)])
def test_buffers(layout, with_list, bound):
    """Rows that are read, added to and overwritten; those of a lane move with it."""
    layout = LAYOUTS[layout]

    def run(lanes, n, x):
        def body(c):
            i, h, rows, found = c
            h = jnp.sin(h + rows[i % 5])
            rows = rows.at[(i + 1) % 5].set(h).at[0].add(h * 0.1)
            return i + 1, h, rows, found.append(h) if with_list else None

        def total(x):
            found = loopkit.TensorArray.empty(9, x) if with_list else None
            init = (0, x, x * jnp.arange(1.0, 6.0), found)
            how = {"buffers": lambda c: c[2], "lanes": lanes, "max_steps": bound}
            _, h, rows, found = loopkit.while_loop(lambda c: c[0] < n, body, init, **how)
            total = h + jnp.sum(jnp.cos(rows))
            return total + jnp.sum(found.stack() ** 2) if with_list else total

        return jax.value_and_grad(total)(x), jax.grad(jax.grad(total))(x)

    both(layout, run, layout.ns, layout.xs)
    value = lambda lanes, n, x: run(lanes, n, x)[0][0]
    slopes = lambda f: lambda n, x: jax.grad(lambda x: jnp.sum(f(n, x)))(x)
    both(layout, value, layout.ns, layout.xs, around=slopes)


@pytest.mark.exhaustive
def test_buffers_of_nested_lanes():
    """A lane that is to go on in the next phase writes nothing while other rows are in this."""
    ns = np.random.default_rng(3).integers(0, 9, (3, 6))

    def run(lanes, n, x):
        body = lambda c: (c[0] + 1, c[1].at[c[0]].add(x * c[0]))
        how = {"buffers": lambda c: c[1], "lanes": lanes}
        return loopkit.while_loop(lambda c: c[0] < n, body, (0, jnp.ones(9)), **how)[1]

    rows = lambda lanes: jax.jit(
        jax.vmap(jax.vmap(jax.value_and_grad(lambda x, n: jnp.sum(run(lanes, n, x) ** 2))))
    )(jnp.tile(XS, (3, 1)), ns)
    assert_close(rows((4, 2)), rows("wait"))


@pytest.mark.exhaustive
def test_tensor_arrays():
    def run(lanes, n, x):
        def body(c):
            i, h, rows = c
            return i + 1, jnp.sin(h), rows.append(h)

        def total(x):
            init = (0, x, loopkit.TensorArray.empty(9, x))
            rows = loopkit.while_loop(lambda c: c[0] < n, body, init, lanes=lanes)[2]
            return jnp.sum(rows.stack() ** 2), rows.size

        return jax.value_and_grad(total, has_aux=True)(x)

    both(LAYOUTS["one axis"], run, NS, XS)


@pytest.mark.slow
def test_lanes_that_ask_the_host_are_not_run_again():
    """A gradient is that of what the host returned, which is something else each time."""
    draws, number = np.random.default_rng(0), jax.ShapeDtypeStruct((), np.float64)

    def run(n, x):
        drawn = lambda: io_callback(lambda: np.float64(draws.random()), number)
        body = lambda c: (c[0] + 1, c[1] * x * drawn())
        how = {"max_steps": 6, "lanes": (3, 1)}
        return loopkit.while_loop(lambda c: c[0] < n, body, (0, 1.0), **how)[1]

    ns, xs = np.arange(5), np.linspace(0.5, 1.5, 5)
    values, slopes = jax.vmap(jax.value_and_grad(run, 1))(ns, xs)
    assert_close(slopes * xs, values * ns.astype(float))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("one axis", marks=pytest.mark.exhaustive),
        pytest.param("two axes", marks=pytest.mark.slow),
    ],
)
def test_steps_report_once(layout):
    """Each real step of each lane, also under a gradient."""
    lanes_of, ns, xs, widths = LAYOUTS[layout]
    seen = []

    def run(n, x):
        def body(c):
            jax.debug.callback(lambda i, n: seen.append((int(n), int(i))), c[0], n)
            return c[0] + 1, jnp.sin(c[1])

        return loopkit.while_loop(lambda c: c[0] < n, body, (0, x), lanes=widths)[1]

    for f in (run, jax.grad(run, 1), lambda n, x: jax.jvp(ft.partial(run, n), (x,), (x,))):
        seen.clear()
        jax.block_until_ready(lanes_of(f)(ns, xs))
        jax.effects_barrier()
        real = [(n, i) for n, i in seen if i < n]
        assert sorted(real) == sorted((int(n), i) for n in ns.ravel() for i in range(n))
