"""Buffers check what they are called with, and their flags."""

import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from argument_calls import ALL_LOOPS, X, empty, refused

OPERATIONS = {
    "add": lambda b: b + 1,
    "right add": lambda b: 1 + b,
    "in place": lambda b: exec("b += 1", {"b": b}),
    "product": lambda b: b @ b,
    "array": lambda b: b * X,
    "power": lambda b: 2**b,
    "negative": lambda b: -b,
    "absolute": abs,
    "float": float,
    "int": int,
    "bool": bool,
    "if": lambda b: 1 if b else 0,
    "equal": lambda b: b == 1,
    "not equal": lambda b: b != 1,
    "less": lambda b: b < 1,
    "range": range,
    "round": round,
    "invert": lambda b: ~b,
    "and": lambda b: b & True,
}


@pytest.mark.every_case
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operators_of_buffers(operation):
    text = r"Buffer: a buffer has no operators[.] Read .*`b\.at\[i\]\.set`[.] Got: `__\w+__` of a"
    for b in (loopkit.Buffer(X), loopkit.Buffer(X).at[0]):
        with pytest.raises(TypeError, match=text):
            OPERATIONS[operation](b)

    def body(_, b):
        OPERATIONS[operation](b)
        return b

    with pytest.raises(TypeError, match=text):
        loopkit.fori_loop(0, 2, body, X, buffers=True)


def test_values_that_are_no_arrays():
    ref = loopkit.Buffer(X).at[0]
    names = "set", "add", "subtract", "multiply", "divide", "power", "min", "max"
    for name in names:
        for value in (None, "x", object()):
            text = rf"Buffer\.at\[...\]\.{name}: `values` must be an array[.] Pass numbers[.] Got: "
            with pytest.raises(TypeError, match=text):
                getattr(ref, name)(value)
    with pytest.raises(TypeError, match=r"Buffer\.at\[...\]\.apply: `func` must be a function"):
        ref.apply(3)
    with pytest.raises(
        TypeError, match=r"Buffer\.at\[...\]\.set: `pred` must be an array[.] .*Got:"
    ):
        ref.set(1.0, pred="x")
    with pytest.raises(TypeError, match=r"Buffer\.at\[...\]\.get: `fill_value` must be an array"):
        ref.get(mode="fill", fill_value="x")
    with pytest.raises(TypeError, match="Got: wrap_negative_indices"):
        ref.get(wrap_negative_indices="yes")
    for value in (None, "x", object()):
        with pytest.raises(
            TypeError, match=r"Buffer: `value` must be an array[.] Pass numbers[.] Got: "
        ):
            loopkit.Buffer(value)
    assert float(ref.subtract([1.0][0])[0]) == -1
    np.testing.assert_array_equal(loopkit.Buffer(X).at[:].subtract([1.0, 2.0, 3.0])[:], -1)


@pytest.mark.every_case
@pytest.mark.parametrize(
    "buffers",
    [
        *(lambda c: c + 1, lambda c: c[1] + 1, lambda c: c[5], lambda c: c.x, lambda c: c["x"]),
        *(lambda: 1, lambda c: 3, lambda c: jnp.sin(c[1])),
    ],
)
def test_functions_that_return_no_leaves(buffers):
    text = (
        r"`buffers` must return leaves of the carry that it is given[.] Pass a function of.* Got: "
    )
    with pytest.raises(TypeError, match=rf"loopkit\.while_loop: {text}"):
        loopkit.while_loop(lambda c: c[0] < 2, lambda c: c, (1, 2.0), buffers=buffers)
    with pytest.raises(TypeError, match=rf"loopkit\.fori_loop: {text}"):
        loopkit.fori_loop(0, 2, lambda _, c: c, (1, 2.0), buffers=buffers)


def test_flags_of_buffers():
    for call in ALL_LOOPS:
        for wrong in ("x", 1, 2.0):
            refused(call, "buffers", wrong, TypeError)
    with pytest.raises(
        TypeError, match=r"`buffers` must be a function or a tree of bools[.] .*Got: 'x'"
    ):
        loopkit.fori_loop(0, 2, lambda _, c: c, (1.0, X), buffers=(False, "x"))
    seen = []

    def body(_, c):
        seen.append(tuple(isinstance(v, loopkit.Buffer) for v in c))
        return c

    loopkit.fori_loop(0, 2, body, (1.0, X), buffers=(np.False_, np.True_))
    assert set(seen) == {(False, True)}


def test_a_tensor_array_is_not_made_by_its_class():
    for given in ((), ([1], 2, 3), (X,)):
        with pytest.raises(TypeError, match=r"TensorArray: an array must be made with `empty` or "):
            loopkit.TensorArray(*given)
    array = loopkit.TensorArray.from_array(X)
    for index in (None, "0", 1.0, True, np.True_, np.arange(1), [0], jnp.arange(2), slice(2)):
        for use in (array.read, lambda i: array.write(i, 1.0)):
            with pytest.raises(TypeError, match=r"TensorArray\.\w+: `index` must be one integer"):
                use(index)
    for index in (0, np.int8(0), jnp.int32(0), np.array(0)):
        assert float(array[index]) == 0
    for element in ("x", None, {}, [object()]):
        with pytest.raises((TypeError, ValueError), match=r"TensorArray\.empty: `element"):
            empty(element=element)
