"""Errors of buffers: their indices, what steps write, and which leaves are buffers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from loopkit import Buffer

pytestmark = pytest.mark.every_case

ARRAY = jnp.arange(5 * 4 * 3.0).reshape(5, 4, 3)
TWO = jnp.asarray(2)


@pytest.mark.parametrize(
    ("index", "error", "text"),
    [
        ((0, 0, 0, 0), IndexError, "at most 3 entries"),
        ((..., ...), IndexError, "at most one ellipsis"),
        (1.5, TypeError, "must consist of integers[.] .*Got: 1.5"),
        (True, TypeError, "must consist of integers[.] .*Got: True"),
        (jnp.ones(2), TypeError, "Got: an array of float64"),
    ],
)
def test_bad_index(index, error, text):
    with pytest.raises(error, match=text):
        Buffer(ARRAY)[index]


YES = np.ones((5, 4, 3), bool)
MASKS = {
    "too long": (YES[[0] * 6, 0, 0], "(5,)", 0, "(6,)"),
    "too short": (YES[:4, 0, 0], "(5,)", 0, "(4,)"),
    "nothing in it": (~YES[:4, 0, 0], "(5,)", 0, "(4,)"),
    "one element": (YES[:1, 0, 0], "(5,)", 0, "(1,)"),
    "of jax": (jnp.asarray(YES[:2, 0, 0]), "(5,)", 0, "(2,)"),
    "a list": ([True, False], "(5,)", 0, "(2,)"),
    "one axis of two": (YES[:, :3, 0], "(5, 4)", 0, "(5, 3)"),
    "two axes swapped": (YES[:, :, 0].T, "(5, 4)", 0, "(4, 5)"),
    "all axes": (YES[:, :, :2], "(5, 4, 3)", 0, "(5, 4, 2)"),
    "on the wrong axis": ((slice(None), YES[:, 0, 0]), "(4,)", 1, "(5,)"),
    "after an integer": ((TWO, YES[:, 0, 0]), "(4,)", 1, "(5,)"),
    "after None": ((None, YES[:4, 0, 0]), "(5,)", 0, "(4,)"),
    "after an ellipsis": ((..., YES[0, :, 0]), "(3,)", 2, "(4,)"),
    "two axes after an ellipsis": ((..., YES[:, :, 0]), "(4, 3)", 1, "(5, 4)"),
    "before an ellipsis": ((YES[0, 0], ...), "(5,)", 0, "(3,)"),
    "after another mask": ((YES[..., 0], YES[0, :, 0]), "(3,)", 2, "(4,)"),
    "beside an array": ((jnp.asarray([0, 1]), YES[:2, 0, 0]), "(4,)", 1, "(2,)"),
}


@pytest.mark.parametrize("kind", MASKS)
def test_masks_of_the_wrong_shape(kind):
    index, want, axis, got = MASKS[kind]
    if kind != "a list":  # which jax.numpy does not take at all
        with pytest.raises(IndexError):
            ARRAY[index]
    text = (
        rf"^loopkit\.Buffer: a mask must have the shape {re.escape(want)} of the axes that it "
        rf"covers, from axis {axis} of a buffer of shape \(5, 4, 3\)\. Put .* "
        rf"Got: {re.escape(got)}\.$"
    )
    ref = Buffer(ARRAY).at[index]
    uses = [lambda: Buffer(ARRAY)[index], ref.get, lambda: ref.apply(jnp.sin)]
    names = "set", "add", "subtract", "multiply", "divide", "power", "min", "max"
    uses += [lambda name=name: getattr(ref, name)(1.0) for name in names]
    for use in uses:
        with pytest.raises(IndexError, match=text):
            use()
    with pytest.raises(IndexError, match=text):
        loopkit.fori_loop(0, 2, lambda _, b: b.at[index].set(1.0), ARRAY, buffers=True)


def test_masks_of_too_many_axes():
    for index in (YES[None], (TWO, YES[..., 0], TWO), (YES, 0), (YES[..., 0], YES[..., 0])):
        with pytest.raises(
            IndexError, match=r"Buffer: an index must have at most 3 entries, .*[.] .*Got: \d"
        ):
            Buffer(ARRAY)[index]


def test_traced_masks_and_slices():
    for mask in (jnp.ones(5, bool), jnp.ones((5, 4), bool), jnp.ones(6, bool)):
        for use in (lambda m: Buffer(ARRAY)[m], lambda m: Buffer(ARRAY).at[m].set(1.0)):
            with pytest.raises(IndexError, match="must be known when the loop is traced"):
                jax.jit(use)(mask)
    with pytest.raises(IndexError, match="a slice must have static ends"):
        jax.jit(lambda i: Buffer(ARRAY)[i:])(1)


def test_bad_writes():
    ref = Buffer(jnp.arange(3)).at[0]
    with pytest.raises(TypeError, match="values of the dtype of the buffer, int64"):
        ref.set(1.5)
    with pytest.raises(TypeError, match=r"`pred` of `.at\[...\].set` must be bools"):
        ref.set(1, pred=1)
    for wrong in (lambda r: r.set(jnp.ones(4)), lambda r: r.multiply(jnp.ones((2, 3)))):
        with pytest.raises(ValueError, match=r"must broadcast to \[3\], the shape of the indexed"):
            wrong(Buffer(jnp.zeros((4, 3))).at[0])
    with pytest.raises(ValueError, match=r"`pred` of `.at\[...\].set` must broadcast to \[\]"):
        ref.set(1, pred=jnp.array([True, False]))
    with pytest.raises(ValueError, match=r"`mode` of `.at\[...\].add` must be one of drop"):
        ref.add(1, mode="wrap")
    with pytest.raises(TypeError, match="takes mode, pred, unique_indices"):
        ref.max(1, foo=1)
    with pytest.raises(TypeError, match="Got: wrap_negative_indices"):
        ref.set(1, wrap_negative_indices=False)
    assert ref.set(7, wrap_negative_indices=True)[0] == 7
    with pytest.raises(TypeError, match="`len` needs a buffer with an axis"):
        len(Buffer(1.0))


@pytest.mark.parametrize(
    ("buffers", "error", "text"),
    [
        (lambda c: 3, TypeError, "must return leaves of the carry"),
        ((True, 1), TypeError, "must be a function or a tree of bools[.] .*Got: 1"),
        ((True, True, True), ValueError, "must be a prefix of the tree of the carry"),
    ],
)
def test_bad_buffers(buffers, error, text):
    with pytest.raises(error, match=f"loopkit.while_loop: `buffers` {text}"):
        loopkit.while_loop(lambda c: c[0] < 2, lambda c: c, (1, 2.0), buffers=buffers)


def test_the_tree_of_buffers_is_compared_with_that_of_the_value():
    text = r"fori_loop: `buffers` .* Got: PyTreeDef\(\(\*,\)\) for a carry .*\(\(\*, \*\)\)\."
    with pytest.raises(ValueError, match=text):
        loopkit.fori_loop(0, 2, lambda i, c: c, (1, 2.0), buffers=(True,))


def test_what_only_arrays_can_do():
    buffer = loopkit.Buffer(jnp.ones(3))
    with pytest.raises(
        TypeError, match=r"cannot be assigned to[.] Write `b = b\.at\[i\]\.set\(x\)`[.] Got"
    ):
        buffer[jnp.asarray(0)] = 1.0
    with pytest.raises(AttributeError, match=r"loopkit\.Buffer: a buffer has no `sum`\. Read the"):
        buffer.sum()
