"""Lanes of several axes, which narrow as one set: every number is that of a lane alone."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import loopkit
from derivatives import assert_close, derivative
from loopkit import _jax
from loopkit._engine.lanes.batched_loop import batch_loop, waiting
from problems import Problem
from test_lanes import STOPPING, WS, XS, grow, grow_in_python, one_by_one, rows
from trials.in_numpy import eagerly
from turns import in_turn

NS = np.random.default_rng(0).integers(0, 9, (4, 6))
WIDTHS = (8, 3)
run = ft.partial(grow, lanes=WIDTHS)


def table(f, *axes):
    """vmap of vmap."""
    axes = axes or (0, 0)
    return jax.vmap(jax.vmap(f, axes[1]), axes[0])


def stacked(trees):
    return jax.tree.map(lambda *v: jnp.stack(v), *trees)


def of_each(f, *args):
    """Run the function in one lane after the other."""
    count = NS.size
    flat = [a.reshape(count, *a.shape[2:]) for a in args]
    with eagerly():
        found = stacked([f(*(a[k] for a in flat)) for k in range(count)])
    return jax.tree.map(lambda v: v.reshape(*NS.shape, *v.shape[1:]), found)


# ---------------------------------------------------------------- every loop, in every mode


@pytest.mark.parametrize(("problem", "pattern"), in_turn(STOPPING, ["", "f", "r", "rf"], of=5))
def test_derivatives_in_each_lane(problem: Problem, pattern):
    xs = rows(problem, 6)
    one = derivative(problem.flat_loop(3, lanes=(4, 2)), pattern)
    got = jax.jit(table(one))(xs.reshape(2, 3, -1))
    assert_close(got.reshape(6, *got.shape[2:]), one_by_one(problem, pattern, xs))


@pytest.mark.parametrize("how", [{}, {"checkpoints": "all"}, {"checkpoints": 2}], ids=str)
def test_after_the_same_function_of_one_lane(how):
    """The derivative of a step is cached apart from that of its lanes, which has other shapes."""

    looped = ft.partial(loopkit.while_loop, max_steps=9, lanes="compact", **how)

    def shrink(a, loop=looped):
        return loop(lambda a: a.sum() > 0.4, lambda a: lax.cumsum(a, reverse=True) * 0.3, a)

    def in_python(goes_on, step, a):
        for _ in range(8):
            a = jnp.where(goes_on(a), step(a), a)
        return a

    def both(one):
        of_one = lambda x: (jax.vmap(one)(x) ** 2).sum()
        of_all = lambda xs: jax.vmap(of_one)(xs).sum()
        return jax.grad(of_one)(xs[0]), jax.grad(of_all)(xs), jax.grad(of_one)(xs[1])

    xs = jnp.arange(1.0, 13.0).reshape(2, 2, 3) / 10
    wanted = both(ft.partial(shrink, loop=in_python))
    assert_close(both(shrink), wanted)
    assert_close(jax.jit(lambda: both(shrink))(), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("problem", "pattern"), in_turn(STOPPING, ["f", "r", "rf"], of=4))
def test_derivatives_of_all_lanes(problem: Problem, pattern):
    xs = rows(problem, 6)
    references = [problem.flat_reference(x) for x in xs]
    one = problem.flat_loop(3, lanes=(4, 2))
    got = lambda flat: table(one)(flat.reshape(2, 3, -1)).ravel()

    def want(flat):
        each = zip(references, flat.reshape(xs.shape), strict=True)
        return jnp.concatenate([f(row) for f, row in each])

    found, wanted = (derivative(f, pattern)(xs.ravel()) for f in (jax.jit(got), want))
    assert_close(found, wanted)


SLOPE = jax.grad(grow_in_python, 1)
MODES = {
    "vmap of vmap": lambda one: table(one),
    "jit between": lambda one: jax.vmap(jax.jit(jax.vmap(one))),
    "three": lambda one: (
        lambda n, x: jax.vmap(table(one))(n.reshape(2, 2, 6), x.reshape(2, 2, 6)).reshape(4, 6)
    ),
    "transposed": lambda one: lambda n, x: jax.vmap(jax.vmap(one, 0, 0), 1, 1)(n, x),
    "remat": lambda one: table(jax.checkpoint(one)),
}
OF_ALL = {
    "grad": lambda f, n, x: jax.grad(lambda x: jnp.sum(f(n, x)))(x),
    "jvp": lambda f, n, x: jax.jvp(lambda x: f(n, x), (x,), (jnp.ones_like(x),))[1],
    "linearize": lambda f, n, x: jax.linearize(lambda x: f(n, x), x)[1](jnp.ones_like(x)),
    "rows": lambda f, n, x: jax.vmap(
        jax.grad(lambda x, n: jnp.sum(f(jnp.stack([n, n]), jnp.stack([x, x]))[0]))
    )(x, n),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "of", "jit"), in_turn(MODES, ["value", "each", *OF_ALL], [False, True], of=4)
)
def test_modes(mode, of, jit):
    xs = np.linspace(-1, 1, 24).reshape(4, 6)
    many = MODES[mode](lambda n, x: (jax.grad(run, 1) if of == "each" else run)(n, x, 0.9))
    f = many if of in ("value", "each") else ft.partial(OF_ALL[of], many)
    if mode == "three" and of == "rows":
        return
    wanted = grow_in_python if of == "value" else SLOPE
    got = (jax.jit(f) if jit else f)(NS, xs)
    assert_close(got, of_each(lambda n, x: jnp.asarray(wanted(n, x, 0.9)), NS, xs))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("axes", "order"),
    in_turn(
        [
            ((0, 0, None), (0, None, 0)),
            ((0, None, 0), (0, 0, None)),
            ((0, None, None), (0, 0, 0)),
            ((0, 0, 0), (None, 0, None)),
            ((None, 0, 0), (0, None, 0)),
            ((0, 0, 0), (0, None, None)),
        ],
        ["value and grad", "hessian"],
    ),
)
def test_what_one_axis_has_alone(axes, order):
    """Operands that lanes of the other axis share; and axes of which only one differs in length."""
    outer, inner = axes
    sizes = [4, 6]

    def of_shape(values, k):
        has = [n for n, axis in zip(sizes, (outer[k], inner[k]), strict=True) if axis == 0]
        return np.resize(values, has)

    args = [of_shape(v, k) for k, v in enumerate((NS, XS, WS))]
    at = lambda f: jax.value_and_grad(f, (1, 2)) if order != "hessian" else jax.hessian(f, (1, 2))
    got = jax.jit(table(at(ft.partial(grow, lanes=(3, 2))), outer, inner))(*args)

    def pick(k, i, j):
        index = [p for p, axis in zip((i, j), (outer[k], inner[k]), strict=True) if axis == 0]
        return args[k][tuple(index)]

    want = [
        stacked([at(grow_in_python)(*(pick(k, i, j) for k in range(3))) for j in range(6)])
        for i in range(4)
    ]
    assert_close(got, stacked(want))


# ---------------------------------------------------------------- what a loop has beside its carry


def both(f, *args, around=lambda f: f):
    """Equal to lanes that wait, to the last digits."""
    got, want = (jax.jit(around(table(ft.partial(f, how))))(*args) for how in (WIDTHS, "wait"))
    assert_close(got, want)
    return got


GRID = np.linspace(-1, 1, 24).reshape(4, 6)


@pytest.mark.slow
def test_loops_in_loops():
    """Inner loops whose lanes are of two axes, in a loop that has them, too."""

    def outer(lanes, n, x):
        def step(x, k):
            return jnp.cos(grow((n + k) % 5, x, 0.9, lanes=lanes)), x

        def total(x):
            last, ys = loopkit.scan(step, x, jnp.arange(3))
            return last + jnp.sum(ys**2)

        return jax.value_and_grad(total)(x), jax.grad(jax.grad(total))(x)

    both(outer, NS, GRID)
    value = lambda lanes, n, x: outer(lanes, n, x)[0][0]
    both(value, NS, GRID, around=lambda f: lambda n, x: jax.grad(lambda x: jnp.sum(f(n, x)))(x))


@pytest.mark.slow
def test_a_step_with_lanes_of_its_own():
    """The inner axis is inside a step, the outer one around the loop."""

    def outer(lanes, n, x):
        def step(x, k):
            return jnp.mean(jax.vmap(lambda n: grow((n + k) % 5, x, 0.9, lanes=lanes))(n)), None

        return loopkit.scan(step, x, jnp.arange(3))[0]

    def slopes(lanes):
        f = ft.partial(outer, lanes)
        total = lambda x: jnp.sum(jax.vmap(f)(NS, x))
        each = jax.vmap(jax.grad(f, 1))(NS, GRID[:, 0])
        return jax.vmap(f)(NS, GRID[:, 0]), jax.grad(total)(GRID[:, 0]), each

    assert_close(jax.jit(slopes, static_argnums=0)((4, 2)), slopes("wait"))


@pytest.mark.exhaustive
def test_lanes_that_have_stopped_cannot_put_nan_anywhere():
    body = lambda i, n, x: jnp.sqrt(n - i) * x  # infinite slope after the last step

    def rooted(n, x, lanes=WIDTHS):
        step = lambda c: (c[0] + 1.0, body(c[0], n, c[1]))
        return loopkit.while_loop(lambda c: c[0] < n, step, (0.0, x), lanes=lanes)[1]

    def unrolled(n, x):
        i = 0.0
        while i < n:
            i, x = i + 1.0, body(i, n, x)
        return x

    ns = NS.astype(float)
    got = jax.jit(table(jax.grad(rooted, 1)))(ns, GRID)
    assert_close(got, of_each(jax.grad(unrolled, 1), ns, GRID))


@pytest.mark.exhaustive
def test_names_of_axes():
    """Lanes that read others wait for them, those of the other axis do not matter."""

    def read(lanes, n, x):
        body = lambda c: (c[0] + 1, jnp.sin(c[1]) + lax.psum(c[1], "lane") / 9)
        return loopkit.while_loop(lambda c: c[0] < n, body, (0, x), lanes=lanes)[1]

    for names in (("lane", "other"), ("other", "lane"), ("other", None)):
        one = read if "lane" in names else (lambda lanes, n, x: run(n, x, 0.9, lanes=lanes))

        def program(lanes, names=names, one=one):
            inner = jax.vmap(ft.partial(one, lanes), axis_name=names[1])
            f = jax.vmap(inner, axis_name=names[0])
            return f(NS, GRID), jax.grad(lambda x: jnp.sum(f(NS, x)))(GRID)

        assert_close(program((3, 2)), program("wait"))


@pytest.mark.slow
def test_devices():
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    if mesh.size < 2:
        pytest.skip("one device")
    for check in (True, False):

        def program(lanes, check=check):
            f = table(lambda n, x: run(n, x, 0.9, lanes=lanes))
            return jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=check)

        total = lambda lanes: lambda x: jnp.sum(jnp.sin(program(lanes)(NS, x)))
        assert_close(jax.jit(program((4, 2)))(NS, GRID), program("wait")(NS, GRID))
        assert_close(jax.jit(jax.grad(total((4, 2))))(GRID), jax.jit(jax.grad(total("wait")))(GRID))


@jax.custom_vjp
def sloped(x):
    """A sine with one and a half times its slope."""
    return jnp.sin(x)


sloped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (1.5 * g * jnp.cos(x),))


@pytest.mark.exhaustive
def test_a_derivative_in_steps_of_lanes_that_narrow_outside_jit():
    """The rule is the user's, so what is compiled is spelled out, derivatives in steps too."""
    slope = jax.grad(lambda x: loopkit.scan(lambda c, _: (sloped(c), None), x, None, 2)[0])

    def f(x):
        step = lambda c: c + 0.1 * slope(c)
        inner = lambda c: loopkit.while_loop(
            lambda c: c < 0.9, step, c, max_steps=3, lanes=(3, 2, 1)
        )
        return loopkit.scan(lambda c, _: (inner(c) + 0.05, None), x, None, 3)[0]

    def unrolled(x):
        for _ in range(3):
            for _ in range(3):
                if x < 0.9:
                    x = x + 0.1 * 1.5**2 * jnp.cos(jnp.sin(x)) * jnp.cos(x)
            x = x + 0.05
        return x

    xs = jnp.linspace(0.1, 1.0, 3)
    assert_close(jax.vmap(f)(xs), jnp.stack([unrolled(x) for x in xs]))


@pytest.mark.parametrize("first", [False, True])
def test_lanes_of_a_step_wait_where_they_must(first):
    """A batched loop is kept apart for the two: a layout of saved values lets no lanes narrow."""

    def goes(x):
        grows = lambda c: c * (1 + x)
        return loopkit.while_loop(lambda c: c < 2, grows, x, max_steps=9, lanes="compact")

    outer = lambda x: loopkit.scan(lambda c, _: (c + goes(x + 0 * c), None), x, length=3)[0]
    loop_in = lambda jaxpr: next(
        eqn.params["loop"] for eqn in _jax.open_jaxpr(jaxpr).eqns if "loop" in eqn.params
    )
    loop = loop_in(jax.make_jaxpr(outer)(0.3))
    flags = loop.split([True] * loop.operand_count)[0]
    for waits in (first, not first):
        with waiting(waits):
            batched = batch_loop(loop, _jax.axis(32), flags).loop
        assert (loop_in(batched.body).lane is None) == waits
