"""TensorArray: a list of arrays, inside loops and outside."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from derivatives import assert_close
from kinds import KINDS, loop
from loopkit import TensorArray
from turns import in_turn

THREE = jnp.arange(3.0)


def filled(count, capacity=0):
    array = TensorArray.empty(capacity, THREE)
    for i in range(count):
        array = array.append(THREE + i)
    return array


def test_grows_by_doubling():
    array = filled(5)
    assert (len(array), array.size, array.capacity) == (5, 5, 8)
    assert_close(array.stack(), THREE + jnp.arange(5.0)[:, None])
    assert_close(array.read(4), THREE + 4)
    assert_close(array[-2], THREE + 3)
    assert filled(5, 100).capacity == 100
    assert [filled(n).capacity for n in range(6)] == [0, 1, 2, 4, 4, 8]
    assert repr(array) == "TensorArray(5 of float64[3], capacity 8)"


@pytest.mark.slow
def test_appending_copies_nothing(monkeypatch):
    """Appended elements are stored when all of them are needed, not one by one."""
    stored = []
    settled = TensorArray._settled
    monkeypatch.setattr(TensorArray, "_settled", lambda self: (stored.append(1), settled(self))[1])
    array = filled(1000)
    assert array[-1] is array._tail[-1][0]  # read from where it waits
    assert not stored
    assert array.stack().shape == (1000, 3)
    array = array.append(THREE)
    assert array.read(1000) is THREE
    assert array.append(THREE)._tail is array._tail
    assert len(stored) == 1


@pytest.mark.slow
def test_the_old_one_stays_as_it_was():
    array = filled(2, 2)
    one, other = array.append(THREE * 10), array.append(THREE * 20)
    one, third = one.append(THREE), one.write(0, THREE * 30)
    assert_close(other.stack()[2], THREE * 20)
    assert_close(one.stack()[2:], jnp.stack([THREE * 10, THREE]))
    assert_close(third.stack()[::2], jnp.stack([THREE * 30, THREE * 10]))
    assert_close(array.stack(), filled(2).stack())
    stored = TensorArray.from_array(array.stack())
    one, other = stored.append(THREE * 10), stored.append(THREE * 20)
    two, third = one.append(THREE), one.append(THREE * 30)
    assert_close(one.stack()[2:], THREE[None] * 10)
    assert_close(other.stack()[2:], THREE[None] * 20)
    assert_close(two.stack()[2:], jnp.stack([THREE * 10, THREE]))
    assert_close(third.stack()[2:], jnp.stack([THREE * 10, THREE * 30]))


def test_write():
    array = filled(2).write(0, THREE * 7).write(5, THREE * 9).write(-1, THREE * 8)
    assert_close(array.stack(), jnp.stack([THREE * 7, THREE + 1, *[THREE * 0] * 3, THREE * 8]))
    assert array.capacity == 8
    assert TensorArray.empty(4, THREE).write(7, THREE).capacity == 8
    assert_close(filled(4, 4).write(4, THREE * 0).stack()[3:], jnp.stack([THREE + 3, THREE * 0]))


def test_trees():
    array = TensorArray.from_array({"a": jnp.ones((3, 2)), "b": jnp.arange(3)})
    array = array.append({"a": jnp.zeros(2), "b": 7})
    stacked = array.stack()
    assert_close(stacked["a"], jnp.asarray([[1.0, 1], [1, 1], [1, 1], [0, 0]]))
    assert stacked["b"].tolist() == [0, 1, 2, 7]
    assert [int(e["b"]) for e in array.unstack()] == [0, 1, 2, 7]
    leaves, tree = jax.tree.flatten(array)
    assert [v.shape for v in leaves] == [(6, 2), (6,), ()]
    assert len(tree.unflatten(leaves)) == 4
    spec = {"a": jax.ShapeDtypeStruct((2,), jnp.float32), "b": 0}
    assert TensorArray.empty(2, spec).stack()["a"].dtype == jnp.float32


def test_concat_and_back():
    array = filled(4)
    assert_close(array.concat(), jnp.concatenate([THREE + i for i in range(4)]))
    assert_close(TensorArray.from_array(array.stack()).stack(), array.stack())
    blocks = jnp.arange(24.0).reshape(2, 3, 4)
    assert_close(TensorArray.from_array(blocks).concat(), blocks.reshape(6, 4))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "checkpoints"), in_turn(KINDS, [None, 2, "all"], of=3))
def test_in_a_loop_it_is_a_buffer(kind, checkpoints):
    def f(x, n):
        def add(array):
            assert isinstance(array._data[0], loopkit.Buffer)
            return array.append(jnp.sin(array.read(-1)) * x)

        array, how = TensorArray.empty(9, x).append(x), {"checkpoints": checkpoints}
        n = 5 if kind in ("fori", "scan") else n  # a number that is known
        array = loop(kind, lambda _, array: add(array), array, n, start=1, most=8, **how)
        return jnp.sum(array.stack() ** 2), array

    def unrolled(x, n):
        rows = [x]
        for _ in range(1, n):
            rows.append(jnp.sin(rows[-1]) * x)
        return jnp.sum(jnp.stack(rows) ** 2)

    (_, array), grad = jax.jit(jax.value_and_grad(f, has_aux=True))(THREE, 5)
    assert (len(array), array.capacity) == (5, 9)
    assert_close(grad, jax.grad(unrolled)(THREE, 5))
    if kind in ("until", "while"):
        grads = jax.vmap(jax.grad(lambda x, n: f(x, n)[0]), (None, 0))
        want = jnp.stack([jax.grad(unrolled)(THREE, n) for n in (2, 5)])
        assert_close(jax.jit(grads)(THREE, jnp.asarray([2, 5])), want)
    if kind == "scan":
        along = lambda f: jax.jvp(jax.grad(lambda x: f(x, 5)), (THREE,), (THREE + 1,))
        looped = lambda *a: f(*a)[0]
        assert_close(jax.jit(lambda: along(looped))(), along(unrolled))
        whole = 9 * 300 * 8
        assert loopkit.in_place_report(
            lambda x: f(x, 5)[0], jnp.ones(300), grad=True, min_bytes=whole
        )


def test_under_jit():
    @jax.jit
    def f(array, x):
        array = array.append(x)
        array = array.write(array.size, x * 2)
        return array, array.read(array.size - 1), array.stack(), len(array.unstack())

    array, last, rows, count = f(filled(2, 4), THREE * 5)
    assert len(array) == 4
    assert count == 4
    assert_close(last, THREE * 10)
    assert_close(rows, array.stack())
    partly = jax.jit(lambda a: (a.stack(), a.size))(filled(2, 4).write(3, THREE))
    assert_close(partly[0], filled(2).write(3, THREE).stack())
    many = jax.jit(jax.vmap(lambda a, x: a.append(x), (None, 0)))(filled(2, 4), jnp.ones((5, 3)))
    assert many.stack().shape == (5, 4, 3)


def test_an_index_that_is_not_known():
    """In an array whose number of elements is known, or is not; negative ones from the end."""
    array, new = filled(3, 5), np.full(3, 9.0)
    f = lambda array, i: (array.write(i, new).stack(), array.read(i))
    of_known, of_unknown = jax.jit(lambda i: f(array, i)), jax.jit(f)
    before = np.asarray(THREE + jnp.arange(3.0)[:, None])
    for i in range(-3, 3):
        after = np.zeros((5, 3))
        after[:3] = before
        after[:3][i] = new
        for rows, row in (of_known(i), of_unknown(array, i)):
            np.testing.assert_array_equal(rows, after)
            np.testing.assert_array_equal(row, before[i])


@pytest.mark.slow
def test_functions_that_are_traced_leave_nothing_in_it():
    """Neither what they append, nor what of it they have stored."""
    both = TensorArray.from_array((jnp.zeros((1, 3)), jnp.zeros(1)))
    both = both.append((THREE, jnp.asarray(2.0)))
    tail = both._tail

    def f(x):
        more = both.append((x, jnp.asarray(2.0))).append((x, x[0]))
        return more.stack(), both.stack()

    with jax.checking_leaks():
        (more, _), some = jax.jit(f)(THREE)
        jax.jvp(f, (THREE,), (THREE,))
    assert len(tail) == 1
    assert_close(more[1:], jnp.stack([THREE] * 3))
    assert_close(both.stack(), some)

    def twice(x):
        array = TensorArray.empty(1, x).append(x)
        rows = jax.jit(lambda: array.stack())()
        total = jnp.sum(rows * array.stack())
        assert not array._tail  # of the function that made it
        return total

    assert_close(jax.grad(twice)(THREE), 2 * THREE)


def test_rows_past_the_last_element_are_zeros():
    """Whatever is there, where the number of elements is not known."""
    leaves, tree = jax.tree.flatten(filled(2, 4))
    array = tree.unflatten([leaves[0] + 1, leaves[1]])
    assert_close(jax.jit(lambda array: array.stack())(array)[2:], jnp.zeros((2, 3)))


def test_gradient_outside_jit():
    f = lambda x: jnp.sum(filled(3).append(x * 2).append(x).stack() ** 2)
    assert_close(jax.grad(f)(THREE), 2 * 4 * THREE + 2 * THREE)


PAST = "must stay within the capacity of 4, which is fixed in a loop and under jax.jit"


def test_past_the_capacity():
    def loop(n):
        body = lambda c: (c[0] + 1, c[1].append(THREE))
        return loopkit.while_loop(lambda c: c[0] < n, body, (0, TensorArray.empty(4, THREE)))[1]

    assert len(jax.jit(loop)(4)) == 4
    for f in (loop, jax.jit(loop)):
        with pytest.raises(Exception, match=PAST):
            jax.block_until_ready(f(5))
    with pytest.raises(Exception, match=PAST):
        jax.block_until_ready(jax.jit(lambda a: a.append(THREE).append(THREE))(filled(3, 4)))


def test_as_a_tree_of_other_things():
    """Equinox puts None in it, and `jax.vmap` takes its axes, which are no size."""
    array = filled(1, 4)
    both = lambda array: eqx.combine(*eqx.partition(array, eqx.is_inexact_array)).append(THREE)
    assert_close(both(array).stack(), jax.jit(both)(array).stack()[:2])
    assert "None" in repr(eqx.partition(array, eqx.is_inexact_array)[1])
    total = lambda array: (array.append(THREE).stack() ** 2).sum()
    slopes = eqx.filter_jit(eqx.filter_grad(total))(array)
    assert_close(slopes.read(0), 2 * array.read(0))
    axes, two = jax.tree.map(lambda _: 0, array), jax.tree.map(lambda v: jnp.stack([v, v]), array)
    assert_close(jax.vmap(total, (axes,))(two), jnp.full(2, total(array)))


def test_in_a_python_loop():
    assert [float(x) for x in TensorArray.from_array(jnp.arange(3.0))] == [0, 1, 2]
    # Under jit, as many as there is room for.
    total = jax.jit(lambda array: sum(array))(TensorArray.empty(np.int64(4), 0.0).append(2.0))
    assert total == 2


@pytest.mark.exhaustive
def test_random_keys():
    """They are elements as others are: JAX neither pads nor converts them."""
    key, data = jax.random.key, jax.random.key_data
    array = TensorArray.empty(0, key(0))
    for i in range(3):
        array = array.append(key(i))
    assert_close(data(array.write(1, key(7)).stack()), data(jnp.stack([key(0), key(7), key(2)])))
    for value in (1.5, jax.random.key(0, impl="rbg")):
        with pytest.raises(TypeError, match=r"append: `element` must be key<fry>\[\][.] .*Got:"):
            array.append(value)
    with pytest.raises(
        TypeError, match=r"append: `element` must be float64\[3\][.] .*Got: key<fry>"
    ):
        filled(1).append(jax.random.split(key(0), 3))

    def noisy(x, loop, drawn, count=4):
        def body(i, c):
            draw = jax.random.fold_in(key(1), i)
            return jnp.sin(c[0]) * (1 + jax.random.uniform(draw)), c[1].append(draw)

        x, drawn = loop(0, count, body, (x, drawn))
        return x * jax.vmap(jax.random.uniform)(drawn.stack()).sum()

    ours = lambda x, count=4: noisy(x, loopkit.fori_loop, TensorArray.empty(4, key(0)), count)
    python = lambda x: noisy(x, in_python, TensorArray.empty(0, key(0)))
    for mode in (lambda f: f, jax.grad, jax.hessian):
        assert_close(jax.jit(mode(ours))(0.3), mode(python)(0.3))
        assert_close(jax.vmap(mode(ours))(THREE), jax.vmap(mode(python))(THREE))
    with pytest.raises(Exception, match="must stay within the capacity of 4"):
        jax.block_until_ready(jax.jit(lambda x: ours(x, 5))(0.3))


def in_python(first, last, body, carry):
    for i in range(first, last):
        carry = body(i, carry)
    return carry


def test_errors():
    array = filled(2)
    with pytest.raises(ValueError, match=r"TensorArray.empty: `capacity` must be an int >= 0"):
        TensorArray.empty(-1, THREE)
    with pytest.raises(ValueError, match=r"TensorArray.empty: `element` must have an array in it"):
        TensorArray.empty(2, {})
    with pytest.raises(ValueError, match=r"TensorArray.empty: `element` must have an array in it"):
        TensorArray.empty(2, {"a": "red"})
    with pytest.raises(TypeError, match=r"append: `element` must be float64\[3\][.] .*Got: 'red'"):
        array.append("red")
    red = np.array(["red"])
    for call, where in (
        (lambda: array.append(red), "append: `element`"),
        (lambda: TensorArray.empty(2, {"a": red}), r"empty: `element\['a'\]`"),
        (lambda: TensorArray.from_array([red]), r"from_array: `array\[0\]`"),
    ):
        with pytest.raises(TypeError, match=rf"TensorArray\.{where} must be an array[.] .*Got:"):
            call()
    with pytest.raises(TypeError, match=r"append: `element` must be int64\[\][.] .*Got: float64"):
        TensorArray.empty(2, 0).append(1.7)
    with pytest.raises(
        ValueError, match=r"from_array: `array` must have leaves with leading axes of one"
    ):
        TensorArray.from_array({"a": jnp.ones(2), "b": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"of one length[.] Stack the elements .*Got: no arrays"):
        TensorArray.from_array({})
    with pytest.raises(
        IndexError, match=r"read: `index` must be the index of an element[.] .*Got: 2 for 2"
    ):
        array.read(2)
    with pytest.raises(
        IndexError, match=r"write: `index` must be the index of an element[.] .*Got: -3"
    ):
        array.write(-3, THREE)
    with pytest.raises(TypeError, match=r"read: `index` must be one integer[.] .*Got: 1.5"):
        array.read(1.5)
    with pytest.raises(TypeError, match=r"append: `element` must have the structure"):
        array.append((THREE,))
    with pytest.raises(
        TypeError, match=r"append: `element` must be float64\[3\][.] .*Got: float64"
    ):
        array.append(jnp.ones(2))
    with pytest.raises(
        TypeError, match=r"write: `element` must be float64\[3\][.] .*Got: complex128"
    ):
        array.write(0, jnp.asarray(THREE, complex))
    with pytest.raises(TypeError, match=r"`len` needs a known number of elements[.] Use `.size`"):
        jax.jit(len)(array)
    with pytest.raises(ValueError, match=r"concat: `self` must have elements with an axis"):
        TensorArray.from_array(np.ones(3)).concat()


def test_a_cotangent_can_be_printed():
    """Its size has no cotangent: JAX puts an array without values there."""
    array = TensorArray.empty(2, 0.0).append(1.5)
    slope = jax.grad(lambda array: jnp.sum(array.stack() ** 2), allow_int=True)(array)
    assert repr(slope) == "TensorArray(? of float64[], capacity 2)"
    assert_close(jax.tree.leaves(slope)[0], jnp.array([3.0, 0.0]))
