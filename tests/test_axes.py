"""scan over any axis, truncated; and batches in blocks."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from derivatives import assert_close, derivative
from program_of_loops import inexact_vector

W = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3))) * 0.4
H = jnp.full((2, 3), 0.1)
LENGTH = 7


def step(h, x, w):
    h = jnp.tanh(h @ w + x)
    return h, h * 2


def in_python(x, w, h, axis, out_axis, reverse, steps, truncate):
    ys = [jnp.zeros_like(h)] * LENGTH
    for t in range(steps):
        row = LENGTH - 1 - t if reverse else t
        if truncate and t and t % truncate == 0:
            h = lax.stop_gradient(h)
        h, ys[row] = step(h, jnp.take(x, row, axis), w)
    return h, jnp.stack(ys, out_axis)


def inputs(axis):
    shape = [2, 3]
    shape.insert(axis % 3, LENGTH)
    return jnp.asarray(np.random.default_rng(1).normal(size=shape))


WAYS = itertools.product(
    (0, 1, -1), (0, 1, -1), (False, True), (None, 5), (None, 2, "all"), (None, 1, 3, 4)
)
CASES = [
    pytest.param(*way, marks=() if number % 3 == 0 else pytest.mark.exhaustive)
    for number, way in enumerate(itertools.islice(WAYS, 5, None, 29))
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("axis", "out_axis", "reverse", "stop", "checkpoints", "truncate"), CASES)
def test_axes_and_truncation(axis, out_axis, reverse, stop, checkpoints, truncate):
    def looped(x, w, h):
        until = None if stop is None else lambda c, _: c[1] >= stop
        counted = lambda c, x: ((step(c[0], x, w)[0], c[1] + 1), step(c[0], x, w)[1])
        (h, _), ys = loopkit.scan(
            counted,
            (h, 0),
            x,
            reverse=reverse,
            until=until,
            in_axes=axis,
            out_axes=out_axis,
            truncate=truncate,
            checkpoints=checkpoints,
        )
        return h, ys

    def reference(x, w, h):
        return in_python(x, w, h, axis, out_axis, reverse, stop or LENGTH, truncate)

    at = inputs(axis), W, H
    along = jax.tree.map(jnp.cos, at)
    assert_close(jax.jvp(looped, at, along), jax.jvp(reference, at, along))

    def pulled(f):
        return lambda *at: jax.vjp(f, *at)[1](jax.tree.map(jnp.sin, reference(*at)))

    got = jax.jit(lambda: jax.jvp(pulled(looped), at, along))()
    assert_close(got, jax.jvp(pulled(reference), at, along))


@pytest.mark.exhaustive
def test_axes_under_vmap():
    xs = jnp.stack([inputs(1), inputs(1) / 2], 1)

    def loss(x):
        return jnp.sum(
            loopkit.scan(lambda h, x: step(h, x, W), H, x, in_axes=1, out_axes=1)[1] ** 3
        )

    def reference(x):
        return jnp.sum(in_python(x, W, H, 1, 1, False, LENGTH, None)[1] ** 3)

    assert_close(jax.vmap(jax.grad(loss), 1, 1)(xs), jax.vmap(jax.grad(reference), 1, 1)(xs))


@jax.tree_util.register_pytree_node_class
class Pair:
    """A tree that insists on what it holds, as some dataclasses do."""

    def __init__(self, a, b):
        assert isinstance(a, jax.Array)
        assert a.shape == b.shape
        self.a, self.b = a, b

    def tree_flatten(self):
        return (self.a, self.b), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"truncate": 2}, {"until": lambda c, _: c.a > 9}])
def test_trees_that_hold_nothing_but_arrays(settings):
    step = lambda c, x: (Pair(c.a * x.a, c.b + x.b), Pair(c.a, x.b))
    args = Pair(jnp.float64(1), jnp.float64(0)), Pair(jnp.arange(1.0, 4.0), jnp.ones(3))
    got = loopkit.scan(step, *args, **settings)
    assert_close(jax.tree.leaves(got), jax.tree.leaves(jax.lax.scan(step, *args)))


def test_blocks_of_trees_that_hold_nothing_but_arrays():
    rows = Pair(jnp.arange(5.0), jnp.ones(5))
    got = loopkit.blocked(lambda p: Pair(p.a * 2, p.b), block=2)(rows)
    assert_close((got.a, got.b), (rows.a * 2, rows.b))


@pytest.mark.slow
def test_whole_inputs_and_last_outputs():
    table = jnp.arange(4.0)

    def f(total, x):
        return total + x["row"] * x["table"].sum(), {"each": total, "last": (total * 2, None)}

    axes = {"row": 0, "table": None}

    def loss(xs):
        total, ys = loopkit.scan(f, 1.0, xs, in_axes=axes, out_axes={"each": 0, "last": None})
        assert ys["each"].shape == (3,)
        return total + ys["last"][0] + ys["each"].sum()

    def reference(xs):
        total, each = 1.0, []
        for row in xs["row"]:
            each.append(total)
            total = total + row * xs["table"].sum()
        return total + each[-1] * 2 + sum(each)

    xs = {"row": jnp.array([0.3, 0.5, 0.2]), "table": table}
    assert_close(jax.value_and_grad(loss)(xs), jax.value_and_grad(reference)(xs))


def test_no_residuals_past_the_truncation():
    def residual_bytes(truncate, memory=None):
        def loss(x):
            return loopkit.scan(
                lambda h, _: (jnp.sin(h) * h, None),
                x,
                length=512,
                truncate=truncate,
                memory=memory,
            )[0].sum()

        compiled = jax.jit(jax.grad(loss)).lower(jnp.ones(1000)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert residual_bytes(8) < 40 * 8000
    assert residual_bytes(8) < residual_bytes(None)
    assert residual_bytes(128, memory="1 MB") < 1_064_000
    for memory in [9000, 2]:
        with pytest.raises(ValueError, match=f"in each of the 2 loops that.*Got: {memory} bytes"):
            residual_bytes(128, memory=memory)


def test_a_truncated_scan_has_no_single_plan():
    with pytest.raises(ValueError, match="`checkpoints` cannot be a Plan together with `truncate`"):
        loopkit.scan(lambda h, _: (h, None), 0.0, length=9, truncate=3, checkpoints=loopkit.Plan(4))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"in_axes": 3}, "loopkit.scan: `in_axes` must name axes of the arrays[.] .*Got: axis 3"),
        ({"in_axes": 0.5}, "loopkit.scan: `in_axes` must hold ints or None"),
        ({"in_axes": (0, 0)}, "loopkit.scan: `in_axes` must be a tree prefix of `xs`"),
        (
            {"out_axes": -4},
            "loopkit.scan: `out_axes` must name axes of the arrays[.] .*Got: axis -4",
        ),
        ({"truncate": 0}, "loopkit.scan: `truncate` must be an int >= 1"),
        (
            {"in_axes": None},
            "`length` must say how many steps to.*[.] .*Got: `xs` without leaves to",
        ),
    ],
)
def test_errors(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        loopkit.scan(lambda h, x: (h, x), 0.0, inputs(0), **settings)


def test_numbers_are_no_array_to_scan_over():
    message = r"Make an array of `xs`, .*Got: `xs` with leaves that are no arrays, such as 1.5, and"
    with pytest.raises(ValueError, match=message):
        loopkit.scan(lambda h, x: (h + x, h), 0.0, [1.5, 2.0])


# ---------------------------------------------------------------- blocks


def rows(a, w):
    return jnp.cumsum(jnp.sin(a * w), 1), {"sum": a.sum(1)}


@pytest.mark.parametrize("block", [None, 1, 4, 7, 20])
def test_blocked(block):
    a, w = jnp.arange(42.0).reshape(14, 3), jnp.arange(3.0)
    f = loopkit.blocked(rows, block=block, in_axes=(0, None))
    assert_close(f(a, w), rows(a, w))

    def grads(f):
        def loss(a, w):
            left, right = f(a, w)
            return jnp.sum(left**2) + jnp.sum(right["sum"] ** 3)

        return jax.grad(loss, (0, 1))(a, w)

    assert_close(grads(f), grads(rows))
    doubled = loopkit.blocked(lambda x: x * 2, block=block, in_axes=1, out_axes=np.int64(-1))
    assert_close(doubled(a.T), a.T * 2)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("settings", "args", "message"),
    [
        ({"in_axes": None}, (H,), r"`args` must have an array with rows[.] .*Got: none"),
        (
            {"in_axes": (0, 0)},
            (H,),
            r"`in_axes` must have an entry for each positional argument[.] .*Got: \(0, 0\) for 1",
        ),
        ({}, (H, H.T), r"`args\[1\]` must have equally many rows in.*[.] .*Got: 3 rows, and 2"),
        ({}, (H, 2.0), r"`args\[1\]` must have a leading axis to scan over"),
        ({"out_axes": "first"}, (H,), r"`out_axes\b.* must hold ints or None[.] .*Got: 'first'"),
    ],
)
def test_what_has_no_blocks(settings, args, message):
    with pytest.raises((TypeError, ValueError), match=r"loopkit\.blocked: " + message):
        loopkit.blocked(lambda x, *_: x * 2, block=1, **settings)(*args)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["f", "fr", "rr"])
def test_derivatives_of_blocks(pattern):
    a = jnp.arange(42.0).reshape(14, 3)

    def smooth(a, *, scale):
        step = lambda h, x: (jnp.sin(h + x), h * x)
        return loopkit.scan(step, scale[:, 0], a, in_axes=1, out_axes=1)

    def of(f):
        return lambda w: inexact_vector(f(jnp.sin(a * w.sum()), scale=a * w))

    w = jnp.array([0.1, 0.3, -0.2])
    in_blocks = loopkit.blocked(smooth, block=4)
    assert_close(derivative(of(in_blocks), pattern)(w), derivative(of(smooth), pattern)(w))


@pytest.mark.slow
def test_blocks_under_vmap_and_jit():
    a = jnp.arange(84.0).reshape(2, 14, 3)
    f = loopkit.blocked(rows, block=4, in_axes=(0, None))
    assert_close(jax.jit(jax.vmap(f, (0, None)))(a, a[0, 0]), jax.vmap(rows, (0, None))(a, a[0, 0]))


def test_blocks_keep_their_rows():
    with pytest.raises(
        ValueError, match=r"loopkit.blocked: `fn` must return as many rows as it gets"
    ):
        loopkit.blocked(lambda x: x.sum(0), block=4)(jnp.ones((14, 3)))
    with pytest.raises(ValueError, match=r"loopkit.blocked: `block` must be an int >= 1"):
        loopkit.blocked(rows, block=0)


@pytest.mark.slow
def test_rows_without_elements_are_joined():
    step = lambda c, x: (c * x, (jnp.zeros((0, 2)) * c, c))
    found = loopkit.scan(step, 2.0, jnp.arange(1.0, 8.0), truncate=3)
    wanted = loopkit.scan(step, 2.0, jnp.arange(1.0, 8.0))
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, wanted)
    assert found[1][1].tolist() == wanted[1][1].tolist()
    assert loopkit.TensorArray.empty(3, jnp.zeros((2, 0))).concat().shape == (0, 0)


@pytest.mark.every_case
@pytest.mark.parametrize("out_axis", [0, 1, 2, -1])
def test_many_small_rows_are_stacked_where_asked(out_axis):
    """Where rows lie in memory depends on their type, and not on how many there are."""
    rows = jnp.arange(6000.0).reshape(1000, 2, 3)
    _, ys = loopkit.scan(lambda carry, x: (carry, x), 0.0, rows, out_axes=out_axis)
    np.testing.assert_array_equal(ys, jnp.moveaxis(rows, 0, out_axis))
