"""Reads and writes out of bounds: values and derivatives are those of lax, whatever is kept."""

import functools as ft
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kinds
import loopkit
from index_programs import OF_ARRAYS, OF_ARRAYS_TOO, READS, ROWS, TABLE, WRITES, V
from loopkit import Plan
from tolerances import DERIVATIVES

AT = jnp.asarray([-(2**31) + 64, -6, -5, -1, 0, 2, 4, 5, 9, 127])


# ---------------------------------------------------------------- loops


def scanned(step, c, loop, **how):
    return loop.scan(step, c, AT, **how)


def summed(kind, step, c, loop, **how):
    """Add up what another loop reads."""

    def body(k, state):
        c, total = state
        c, y = step(c, AT[k])
        return c, jax.tree.map(jnp.add, total, y)

    y = jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype), jax.eval_shape(step, c, AT[0])[1])
    if "buffers" in how:
        how["buffers"] = lambda state, inner=how["buffers"]: inner(state[0])
    if loop is lax:  # of which a while_loop has no gradient
        return kinds.loop("fori", body, (c, y), len(AT), loops=lax)
    return kinds.loop(kind, body, (c, y), len(AT), most=12, **how)


LOOPS = {kind: ft.partial(summed, kind) for kind in ("fori", "while")} | {"scan": scanned}


@ft.cache
def weights(shape):
    """Numbers that are no multiples of each other, so that no two rows change places unseen."""
    return (1 + np.sin(np.arange(1.0 * np.prod(shape)))).reshape(shape)


def weighed(found, c):
    return jax.tree.map(lambda y: jnp.sin(y * weights(y.shape)) * c, found)


def in_a_row(found, c):
    """All at once: it takes less to compile."""
    row = jnp.concatenate([y.ravel() for y in jax.tree.leaves(found)])
    return weighed(row, c)


def reads_of_constants(reads, xs, kind, loop, **how):
    def step(c, i):
        return c * 0.9, in_a_row({n: f(xs[n], i) for n, f in reads.items()}, c)

    return LOOPS[kind](step, 1.3, loop, **how)[1]


def reads_of_carry(reads, xs, kind, loop, **how):
    def step(s, i):
        c, xs = s
        found = {n: f(xs[n], i) for n, f in reads.items()}
        return (c * 0.9, {n: x * 0.8 for n, x in xs.items()}), in_a_row(found, c)

    return LOOPS[kind](step, (1.3, xs), loop, **how)[1]


def reads_of_slices(reads, xs, kind, loop, **how):
    """Read from slices of the xs that are arrays themselves."""

    def step(c, x):
        i, xs = x
        return c * 0.9, in_a_row({n: f(xs[n], i) for n, f in reads.items()}, c)

    stacked = {n: jnp.stack([x * (1 + k) for k in range(len(AT))]) for n, x in xs.items()}
    return loop.scan(step, 1.3, (AT, stacked), **how)[1]


def reads_of_buffers(reads, xs, kind, loop, **how):
    """Each also written to, so that they are carried."""

    def step(s, i):
        c, xs = s
        found = {n: f(xs[n], i) for n, f in reads.items()}
        return (c * 0.9, {n: x.at[2].multiply(0.8) for n, x in xs.items()}), in_a_row(found, c)

    if loop is not lax:
        how["buffers"] = lambda s: s[1]
    return LOOPS[kind](step, (1.3, xs), loop, **how)[1]


def writes_of_carry(writes, xs, kind, loop, **how):
    def step(s, i):
        c, xs = s
        new = {n: f(xs[n], i) for n, f in writes.items()}
        return (c * 0.9, new), weighed({n: x[1] for n, x in new.items()}, c)

    (_, xs), ys = LOOPS[kind](step, (1.3, xs), loop, **how)
    return weighed({n: jnp.asarray(x) for n, x in xs.items()}, 0.7), ys


def writes_of_buffers(writes, xs, kind, loop, **how):
    if loop is not lax:
        how["buffers"] = lambda s: s[1]
    return writes_of_carry(writes, xs, kind, loop, **how)


SOURCES = {
    "constants": (reads_of_constants, OF_ARRAYS),
    "carry": (reads_of_carry, OF_ARRAYS),
    "slices": (reads_of_slices, OF_ARRAYS),
    "buffers": (reads_of_buffers, READS),
    "written carry": (writes_of_carry, OF_ARRAYS_TOO),
    "written buffers": (writes_of_buffers, WRITES),
}


# ---------------------------------------------------------------- derivatives


def tables(what):
    return {n: TABLE * (1 + 0.01 * k) for k, n in enumerate(what)}


def results(source, kind, loop, mode, what=None, **how):
    """Return the results of one transformation, by the name of a read or a write."""
    run, table = SOURCES[source]
    what = table if what is None else {n: table[n] for n in what}
    f = lambda xs: run(what, xs, kind, loop, **how)

    def total(xs):
        # NaN is filled in: it is not part of the total.
        leaves = jax.tree.leaves(f(xs))
        return sum(jnp.sum(jnp.where(jnp.isnan(y), 0.0, y)) for y in leaves)

    xs = tables(what)
    along = {n: jnp.cos(3 * x) for n, x in xs.items()}
    lanes = {n: jnp.stack([x, 2 * x]) for n, x in xs.items()}
    transformed = {
        "value": lambda: f(xs),
        "jvp": lambda: jax.jvp(f, (xs,), (along,)),
        "grad": lambda: jax.grad(total)(xs),
        "forward over reverse": lambda: jax.jvp(jax.grad(total), (xs,), (along,))[1],
        "reverse over reverse": lambda: jax.grad(
            lambda xs: sum(jnp.sum(jnp.sin(g)) for g in jax.tree.leaves(jax.grad(total)(xs)))
        )(xs),
        "lanes": lambda: jax.vmap(jax.grad(total))(lanes),
    }
    return jax.jit(transformed[mode])()


@ft.cache
def wanted(source, kind, mode, what):
    return results(source, kind, lax, mode, what)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    wrong = []
    for (path, g), w in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        if g.dtype != w.dtype or not np.allclose(g, w, DERIVATIVES, DERIVATIVES, equal_nan=True):
            wrong.append(jax.tree_util.keystr(path))
    assert not wrong


CHECKPOINTS = [None, 1, 2, "all", Plan(2, 2, "residuals"), Plan(2, 2, "carries")]
KINDS = ["scan", "fori", "while"]
TRANSFORMED = ["grad", "value", "jvp", "forward over reverse", "reverse over reverse", "lanes"]
OFTEN = {"constants": ["scan", "while"], "buffers": ["fori"], "written buffers": ["scan"]}
PARTS = 5


def cases():
    """Sources with all else as it comes, or with up to two things that are not, which take turns;
    each with a part of the reads or writes, which take turns too."""
    axes = SOURCES, KINDS, TRANSFORMED, range(len(CHECKPOINTS))
    for at in itertools.product(*(range(len(axis)) for axis in axes)):
        source, kind, mode, k = (list(axis)[i] for axis, i in zip(axes, at, strict=True))
        other = sum(i != 0 for i in at[1:])
        its_turn = {0: True, 1: sum(at) % 2, 2: sum(at[1:]) % len(SOURCES) == at[0]}
        if its_turn.get(other) and (source != "slices" or kind == "scan"):
            # Constants and buffers together have each read.
            quick = kind in OFTEN.get(source, ()) and (mode, k) == ("grad", 0)
            marks = () if quick else pytest.mark.exhaustive
            yield pytest.param(source, kind, mode, k, sum(at) % PARTS, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "kind", "mode", "checkpoints", "part"), list(cases()))
def test_as_lax(source, kind, mode, checkpoints, part):
    what = tuple(SOURCES[source][1])[part::PARTS]
    got = results(source, kind, loopkit, mode, what, checkpoints=CHECKPOINTS[checkpoints])
    assert_same(got, wanted(source, kind, mode, what))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "how",
    [{"memory": 4000}, {"unroll": 3}, {"checkpoints": Plan(4)}],
    ids=["memory", "unroll", "plan"],
)
@pytest.mark.parametrize("source", ["constants", "buffers"])
def test_options_change_no_number(source, how):
    names = "rows", "i", "pairs", "hints", "at[rows].get clip", "at[rows].get fill", "uint8"
    got = results(source, "scan", loopkit, "grad", names, **how)
    assert_same(got, wanted(source, "scan", "grad", names))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["grad", "jvp"])
def test_rows_that_steps_promise_to_write_once(mode):
    """A counter that comes from before the start: there the cotangents read are of other rows."""

    def f(loop, x, **how):
        def body(i, rows):
            return rows.at[i - ROWS - 2].set(jnp.sin(x[i] * V), mode="promise_in_bounds")

        return jnp.sum(loop.fori_loop(0, ROWS, body, TABLE, **how) ** 2)

    modes = {
        "grad": lambda f: jax.grad(f)(TABLE[:, 0]),
        "jvp": lambda f: jax.jvp(f, (TABLE[:, 0],), (TABLE[:, 1],)),
    }
    assert_same(
        modes[mode](lambda x: f(loopkit, x, buffers=True)), modes[mode](lambda x: f(lax, x))
    )
