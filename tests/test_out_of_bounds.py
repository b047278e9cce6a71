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
from loopkit import Plan
from tolerances import DERIVATIVES

ROWS, WIDE = 5, 3
TABLE = jnp.sin(jnp.arange(ROWS * WIDE * 1.0) * 1.3 + 0.5).reshape(ROWS, WIDE)
AT = jnp.asarray([-(2**31) + 64, -6, -5, -1, 0, 2, 4, 5, 9, 127])
V = jnp.cos(jnp.arange(WIDE * 1.0) + 0.3)


def some(i):
    """Near `i`: in bounds, out of bounds, and one twice."""
    return jnp.stack([i, i + 1, 2 * i, i])


def pairs(i):
    return jnp.stack([jnp.stack([i, 0 * i]), jnp.stack([i + 1, i - 2])])


def gathered(x, starts, sizes, mode, **how):
    """lax.gather of windows of several rows, which start anywhere."""
    numbers = lax.GatherDimensionNumbers((1, 2), (), (0, 1)[: starts.shape[1]])
    return lax.gather(x, starts, numbers, sizes, mode=mode, **how)


def of_each(x, i, mode):
    """A gather with batching dimensions."""
    return jax.vmap(lambda row, k: row.at[k].get(mode=mode), (1, 0))(x, i)


MODES = (None, "clip", "fill", "promise_in_bounds")
READS = {
    # Modes of buffers as well.
    **{f"at[i].get {m}": lambda x, i, m=m: x.at[i].get(mode=m) for m in MODES},
    **{f"at[rows].get {m}": lambda x, i, m=m: x.at[some(i)].get(mode=m) for m in MODES},
    **{f"at[rows, i].get {m}": lambda x, i, m=m: x.at[some(i), i].get(mode=m) for m in MODES},
    "i": lambda x, i: x[i],
    "rows": lambda x, i: x[some(i)],
    "pairs": lambda x, i: x[pairs(i)],
    "rows, i": lambda x, i: x[some(i), i],
    "i, rows": lambda x, i: x[i, some(i)],
    "rows, rows": lambda x, i: x[some(i), some(i + 1)],
    ":, rows": lambda x, i: x[:, some(i)],
    "1:3, rows": lambda x, i: x[1:3, some(i)],
    "rows, 1:": lambda x, i: x[some(i), 1:],
    "rows, ::2": lambda x, i: x[some(i), ::2],
    "i, 1:": lambda x, i: x[i, 1:],
    "i, ::-1": lambda x, i: x[i, ::-1],
    "i, ::2": lambda x, i: x[i, ::2],
    "::2, i": lambda x, i: x[::2, i],
    "i, i": lambda x, i: x[i, i],
    "i, None, ...": lambda x, i: x[i, None, ...],
    "9": lambda x, i: x[9],
    "-9, ::2": lambda x, i: x[-9, ::2],
    "known, ::2": lambda x, i: x[jnp.asarray(9), ::2],
    "known rows": lambda x, i: x[np.asarray([1, -9, 7, 1])],
    "known rows, i": lambda x, i: x[np.asarray([1, 3]), i],
    "int8": lambda x, i: x[some(i).astype("int8")],
    "uint8": lambda x, i: x[some(i).astype("uint8")],
    "uint32": lambda x, i: x[some(i).astype("uint32")],
    "one uint32": lambda x, i: x[i.astype("uint32")],
    "one uint8": lambda x, i: x[i.astype("uint8")],
    "uint32 fill": lambda x, i: x.at[some(i).astype("uint32")].get(mode="fill", fill_value=2.0),
    "int32": lambda x, i: x[some(i).astype("int32")],
    "fill value": lambda x, i: x.at[some(i)].get(mode="fill", fill_value=3.5),
    "one fill value": lambda x, i: x.at[i].get(mode="drop", fill_value=3.5),
    "hints": lambda x, i: x.at[i + jnp.arange(3)].get(unique_indices=True, indices_are_sorted=True),
    "lane by lane": lambda x, i: jax.vmap(lambda k: x[k])(some(i)),
    "lane by lane, rows": lambda x, i: jax.vmap(lambda k: x[some(k)])(some(i)),
}
OF_ARRAYS = {
    **READS,
    **{
        f"take {m}": lambda x, i, m=m: jnp.take(x, some(i), 0, mode=m) for m in (*MODES[:3], "wrap")
    },
    "take of all": lambda x, i: jnp.take(x, some(i)),
    "take fill": lambda x, i: jnp.take(x, some(i), 1, fill_value=0.25),
    **{
        f"along {m}": lambda x, i, m=m: jnp.take_along_axis(x, pairs(i)[:, :1], 0, mode=m)
        for m in (*MODES, "one_hot")
    },
    "along rows": lambda x, i: jnp.take_along_axis(x, i + jnp.arange(15).reshape(5, 3), 1),
    "dynamic_slice": lambda x, i: lax.dynamic_slice(x, (i, i - 1), (2, 2)),
    "dynamic_slice, whole": lambda x, i: lax.dynamic_slice(x, (i, i), (2, 3)),
    "dynamic_slice, plain": lambda x, i: lax.dynamic_slice(
        x, (i, i), (2, 2), allow_negative_indices=False
    ),
    "dynamic_slice, uint32": lambda x, i: lax.dynamic_slice(
        x, (i.astype("uint32"), i.astype("uint32")), (2, 2)
    ),
    "dynamic_slice, uint8": lambda x, i: lax.dynamic_slice(
        x, (i.astype("uint8"), i.astype("uint8")), (2, 2)
    ),
    "dynamic_index": lambda x, i: lax.dynamic_index_in_dim(x, i, 1),
    "dynamic_slice_in_dim": lambda x, i: lax.dynamic_slice_in_dim(x, i, 3),
    **{f"gather {m}": lambda x, i, m=m: gathered(x, pairs(i)[:, :1], (2, 3), m) for m in MODES},
    **{f"gather two {m}": lambda x, i, m=m: gathered(x, pairs(i), (2, 2), m) for m in MODES},
    **{f"gather whole {m}": lambda x, i, m=m: gathered(x, pairs(i), (2, 3), m) for m in MODES},
    **{f"of each {m}": lambda x, i, m=m: of_each(x, some(i)[:3], m) for m in MODES},
    "batches of dynamic_slice": lambda x, i: jax.vmap(
        lambda row, k: lax.dynamic_slice(row, (k,), (2,)), (0, 0)
    )(x[:4], some(i)),
}

WAYS = ("set", "add", "multiply", "min", "max")
INDICES = {
    "i": lambda i: i,
    "rows": some,
    "rows, i": lambda i: (some(i), i),
    "i, 1:": lambda i: (i, slice(1, None)),
    "::2, i": lambda i: (slice(None, None, 2), i),
    "uint8": lambda i: some(i).astype("uint8"),
    "uint32": lambda i: some(i).astype("uint32"),
    "one uint32": lambda i: i.astype("uint32"),
}


def written(x, i, way, index, mode, **how):
    """One write of a row that depends on what is there."""
    index = INDICES[index](i)
    shape = jax.eval_shape(lambda x: x.at[index].get(), x).shape
    values = 1.5 + jnp.sin(jnp.float64(i) + np.arange(1.0 * np.prod(shape)))
    return getattr(x.at[index], way)(values.reshape(shape) * x[0, 0], mode=mode, **how)


def differentiable(way, index):
    """jax has no derivative of a product at indices that may be equal."""
    return way != "multiply" or index in ("i", "i, 1:", "::2, i", "one uint32")


# jax's own tangent of an extremum compares with other rows, or is NaN, where an index is out of
# bounds and not dropped, or is far out of bounds and has no sign.
WRITES = {
    f"{way} {index} {mode}": ft.partial(written, way=way, index=index, mode=mode)
    for way in WAYS
    for index in INDICES
    for mode in (None, "clip", "drop", "promise_in_bounds")
    if differentiable(way, index)
    and not (
        way in ("min", "max") and (mode in ("clip", "promise_in_bounds") or index == "one uint32")
    )
}
WRITES["set hints"] = lambda x, i: x.at[i + jnp.arange(3)].set(
    jnp.outer(V, x[0]), unique_indices=True, indices_are_sorted=True
)
OF_ARRAYS_TOO = {
    **WRITES,
    "dynamic_update_slice": lambda x, i: lax.dynamic_update_slice(x, x[1:3, 1:] * 2, (i, i - 1)),
    "dynamic_update_index": lambda x, i: lax.dynamic_update_index_in_dim(x, x[0] * V, i, 0),
}


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
