"""Lanes that make room once they have stopped: every number is that of lanes that wait."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from derivatives import assert_close, derivative, direction, in_numpy
from problems import CHECKPOINTS, Problem, named
from test_nan_safety import BODIES, transformed, unrolled
from turns import in_turn

# Those that end for other arguments, too.
STOPPING = named(
    *("while_scalar", "while_vector", "newton_root", "scan_until", "scan_until_reverse"),
    *("reaches_its_bound", "fori_traced_bound", "carry_of_trees"),
    *("leaves_change_places", "while_in_while", "scan_in_while"),
)
WIDTHS = [(2,), (3, 1), (5, 4, 2)]


def rows(problem: Problem, count: int = 5) -> jax.Array:
    """Arguments of several lanes, the first the problem's own, which take different steps."""
    x = problem.vector()
    return x * (1 + 0.15 * jnp.arange(float(count))[:, None] * (1 + direction(x, 2) / 4))


def one_by_one(problem: Problem, pattern: str, xs: jax.Array) -> jax.Array:
    return np.stack([in_numpy(derivative(problem.flat_reference(x), pattern), x) for x in xs])


@pytest.mark.parametrize(
    ("problem", "pattern", "widths"), in_turn(STOPPING, ["", "f", "r"], WIDTHS, of=10)
)
def test_vmap_of_a_derivative(problem: Problem, pattern, widths):
    xs = rows(problem)
    one = derivative(problem.flat_loop(3, lanes=widths), pattern)
    assert_close(jax.jit(jax.vmap(one))(xs), one_by_one(problem, pattern, xs))


def of_all(problem: Problem, xs, **how):
    """The lanes together, of all arguments in one vector, and the same in Python."""
    batched = jax.vmap(problem.flat_loop(**how))
    references = [problem.flat_reference(x) for x in xs]

    def reference(flat):
        each = zip(references, flat.reshape(xs.shape), strict=True)
        return jnp.concatenate([f(row) for f, row in each])

    return lambda flat: batched(flat.reshape(xs.shape)).ravel(), reference


@pytest.mark.parametrize(
    ("problem", "pattern", "widths"), in_turn(STOPPING, ["f", "r"], WIDTHS, of=9)
)
def test_derivative_of_vmap(problem: Problem, pattern, widths):
    xs = rows(problem)
    loop, reference = of_all(problem, xs, lanes=widths)
    got = jax.jit(derivative(loop, pattern))(xs.ravel())
    assert_close(got, in_numpy(derivative(reference, pattern), xs.ravel()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "pattern", "inside"),
    in_turn(named("while_scalar", "scan_until"), ["fr", "rf", "rr", "ff"], [False, True], of=4),
)
def test_second_derivatives(problem: Problem, pattern, inside):
    xs = rows(problem, 4)
    if inside:
        got = jax.jit(jax.vmap(derivative(problem.flat_loop(3, lanes=(2, 1)), pattern)))(xs)
        assert_close(got, one_by_one(problem, pattern, xs))
    else:
        loop, reference = of_all(problem, xs, lanes=(2, 1))
        got = jax.jit(derivative(loop, pattern))(xs.ravel())
        assert_close(got, in_numpy(derivative(reference, pattern), xs.ravel()))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("problem", "checkpoints"), in_turn(named("while_scalar", "scan_until"), CHECKPOINTS)
)
def test_checkpoints(problem: Problem, checkpoints):
    xs = rows(problem)
    loop, reference = of_all(problem, xs, lanes=(3, 1), checkpoints=checkpoints)
    got = jax.jit(derivative(loop, "r"))(xs.ravel())
    assert_close(got, in_numpy(derivative(reference, "r"), xs.ravel()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", in_turn(["while_scalar", "scan_until"]))
def test_without_jit(name):
    (problem,) = named(name)
    xs = rows(problem)
    loop, reference = of_all(problem, xs, lanes=(3, 1))
    assert_close(loop(xs.ravel()), reference(xs.ravel()))
    assert_close(
        derivative(loop, "r")(xs.ravel()), in_numpy(derivative(reference, "r"), xs.ravel())
    )
    got = jax.vmap(derivative(problem.flat_loop(lanes=(3, 1)), "r"))(xs)
    assert_close(got, one_by_one(problem, "r", xs))


# ---------------------------------------------------------------- what is batched


NS = np.asarray([2, 0, 5, 3, 1, 9])
XS = np.asarray([0.3, 0.7, -0.4, 0.9, -0.1, 0.2])
WS = np.asarray([1.1, 0.8, 1.3, 0.4, 0.6, 0.9])


def grow(n, x, w, **how):
    """x <- sin(w x) + x / 2, n times."""
    body = lambda c: (c[0] + 1, jnp.sin(w * c[1]) + c[1] / 2)
    return loopkit.while_loop(lambda c: c[0] < n, body, (0, x), **{"lanes": (4, 2), **how})[1]


def grow_in_python(n, x, w):
    for _ in range(int(n)):
        x = jnp.sin(w * x) + x / 2
    return x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transform", "in_axes"),
    in_turn(
        ["value", "jvp", "grad", "hessian"],
        [(0, None, None), (0, 0, None), (0, None, 0), (0, 0, 0)],
        of=4,
    ),
)
def test_each_operand_batched_alone(transform, in_axes):
    def at(f):
        def one(n, x, w):
            g = lambda args: f(n, *args)
            return {
                "value": lambda args: g(args),
                "jvp": lambda args: jax.jvp(g, (args,), (jnp.asarray([1.0, -0.3]),))[1],
                "grad": jax.grad(g),
                "hessian": jax.hessian(g),
            }[transform](jnp.stack([x, w]))

        return one

    args = [a if axis == 0 else a[2] for a, axis in zip((NS, XS, WS), in_axes, strict=True)]
    got = jax.jit(jax.vmap(at(grow), in_axes))(*args)
    of_lane = lambda k: [a if axis is None else a[k] for a, axis in zip(args, in_axes, strict=True)]
    assert_close(got, jnp.stack([at(grow_in_python)(*of_lane(k)) for k in range(6)]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("lanes", [(4, 2), (2,)])
@pytest.mark.parametrize("axes", [((0, 0, None), (None, None, 0)), ((None, 0, None), (0, None, 0))])
def test_nested_vmap(axes, lanes):
    """The inner lanes narrow, those around wait for each other; or the outer ones, if they alone
    differ in the predicate.
    """
    inner, outer = axes
    run = ft.partial(grow, lanes=lanes)
    table = lambda f: jax.vmap(jax.vmap(f, inner), outer)
    together = lambda f: jax.value_and_grad(f, (1, 2))
    pick = lambda i, j: [(a[i], a[j])[b == 0] for a, b in zip((NS, XS, WS), inner, strict=True)]
    want = [[together(grow_in_python)(*pick(i, j)) for j in range(6)] for i in range(6)]
    stack = lambda values: jax.tree.map(lambda *v: jnp.stack(v), *values)
    assert_close(jax.jit(table(together(run)))(NS, XS, WS), stack([stack(row) for row in want]))


@pytest.mark.exhaustive
def test_nested_lanes():
    """Lanes of lanes, each of which has steps of its own."""
    ns = np.random.default_rng(0).integers(0, 8, (3, 6))
    table = lambda f: lambda x: jax.vmap(jax.vmap(lambda n: f(n, x, 0.9)))(ns)
    loss = lambda f: lambda x: jnp.sum(jnp.sin(table(f)(x)))
    python = lambda x: sum(jnp.sin(grow_in_python(n, x, 0.9)) for n in ns.ravel())
    for lanes in ((4, 2), "wait"):
        run = ft.partial(grow, lanes=lanes)
        assert_close(jax.jit(jax.grad(loss(run)))(0.3), jax.grad(python)(0.3))
        assert_close(jax.jit(jax.hessian(loss(run)))(0.3), jax.hessian(python)(0.3))
        total = lambda x, row, run=run: jnp.sum(jax.vmap(run, (0, None, None))(row, x, 0.9))
        rows = jax.vmap(jax.grad(total), (None, 0))(0.3, ns)
        want = [sum(jax.grad(grow_in_python, 1)(n, 0.3, 0.9) for n in row) for row in ns]
        assert_close(rows, jnp.stack(want))


@pytest.mark.slow
def test_outer_lanes_of_few_inner_ones():
    """Two lanes, which are too few, in each of twelve, which are not."""
    ns = np.stack([np.tile(NS, 2), np.repeat(NS, 2)], 1)
    few = lambda n, x: jnp.sum(jax.vmap(lambda n: grow(n, x, 0.9, lanes="compact"))(n))
    slope = lambda n, x: jax.grad(grow_in_python, 1)(n, x, 0.9)
    want = [slope(a, x) + slope(b, x) for (a, b), x in zip(ns, np.tile(XS, 2), strict=True)]
    assert_close(jax.jit(jax.vmap(jax.grad(few, 1)))(ns, np.tile(XS, 2)), jnp.stack(want))


@pytest.mark.exhaustive
def test_all_lanes_alike_and_none_that_goes_on():
    for ns in (np.full(6, 4), np.zeros(6, int), np.asarray([0, 0, 0, 0, 0, 7])):
        got = jax.vmap(jax.value_and_grad(grow, (1, 2)), (0, 0, None))(ns, XS, 0.9)
        each = [
            jax.value_and_grad(grow_in_python, (1, 2))(n, x, 0.9)
            for n, x in zip(ns, XS, strict=True)
        ]
        assert_close(got, jax.tree.map(lambda *v: jnp.stack(v), *each))


def test_lanes_do_not_depend_on_their_order():
    """To the last bit, and where many stop in one step."""
    xs = np.linspace(-1, 1, 64)
    ns = np.random.default_rng(1).integers(0, 4, 64) ** 3
    run = jax.jit(jax.vmap(ft.partial(grow, w=0.9, lanes=(16, 4))))
    order = np.random.default_rng(2).permutation(64)
    np.testing.assert_array_equal(run(ns, xs)[order], run(ns[order], xs[order]))


@pytest.mark.parametrize(
    ("body", "transform"), in_turn(BODIES, ["value", "jvp", "grad", "hessian"], of=5)
)
def test_lanes_that_have_stopped_cannot_put_nan_anywhere(body, transform):
    ns = np.asarray([2.0, 0.0, 4.0, 1.0])

    def loop(args, lanes=(2, 1)):
        n, x, w = args
        step = lambda c: (c[0] + 1.0, body(c[0], n, c[1], w))
        return loopkit.while_loop(lambda c: c[0] < n, step, (0.0, x), lanes=lanes)[1]

    got = jax.jit(jax.vmap(transformed(loop, transform), (0, 0, None)))(ns, XS[:4], 0.8)
    each = [
        transformed(lambda args, n=n: unrolled(body, *args, int(n)), transform)(n, x, 0.8)
        for n, x in zip(ns, XS, strict=False)
    ]
    assert_close(got, jnp.stack(each))
    if transform == "grad":  # of what lanes share
        total = lambda w: jnp.sum(jax.vmap(lambda n, x: loop((n, x, w)))(ns, XS[:4]))
        assert_close(jax.jit(jax.grad(total))(0.8), jnp.sum(jnp.stack(each)[:, 2]))
