"""Reads and writes of a table, at indices that may be out of its bounds."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROWS, WIDE = 5, 3
TABLE = jnp.sin(jnp.arange(ROWS * WIDE * 1.0) * 1.3 + 0.5).reshape(ROWS, WIDE)
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
