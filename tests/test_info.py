"""Steps taken and why the loop ended; `throw`; `unroll`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import loopkit
from derivatives import assert_close, derivative, in_numpy
from problems import named


def double(x, **kwargs):
    """Until x reaches 8."""
    return loopkit.while_loop(lambda x: x < 8.0, lambda x: 2 * x, x, return_info=True, **kwargs)


@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.parametrize(
    ("start", "max_steps", "steps", "stopped"),
    [
        (1.0, None, 3, True),
        (9.0, None, 0, True),
        (1.0, 5, 3, True),
        (1.0, 3, 3, True),  # the predicate is false as the bound is reached
        (1.0, 2, 2, False),
        (1.0, 0, 0, False),
        (9.0, 0, 0, True),
    ],
)
def test_while_loop(start, max_steps, steps, stopped, checkpoints):
    x, info = double(start, max_steps=max_steps, checkpoints=checkpoints)
    assert isinstance(info, loopkit.LoopInfo)
    assert (x, info.steps, info.stopped) == (start * 2**steps, steps, stopped)
    assert (info.steps.dtype, info.stopped.dtype) == (jnp.int32, jnp.bool_)


@pytest.mark.parametrize(
    ("limit", "steps", "stopped"), [(0.5, 1, True), (2.5, 3, True), (3.5, 4, True), (9.0, 4, False)]
)
@pytest.mark.parametrize("reverse", [False, True])
def test_scan(reverse, limit, steps, stopped):
    carry, ys, info = loopkit.scan(
        lambda c, x: (c + x, c + x),
        0.0,
        jnp.ones(4),
        reverse=reverse,
        until=lambda _, y: y > limit,
        return_info=True,
    )
    assert (carry, info.steps, info.stopped) == (steps, steps, stopped)
    rows = [1.0, 2.0, 3.0, 4.0][:steps] + [0.0] * (4 - steps)
    assert ys.tolist() == (rows[::-1] if reverse else rows)


def test_scan_without_until():
    _, _, info = loopkit.scan(lambda c, x: (c, x), 0.0, jnp.ones(4), return_info=True)
    assert (info.steps, info.stopped) == (4, False)


@pytest.mark.every_case
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("max_steps", "steps", "stopped"), [(None, 4, True), (4, 4, True), (3, 3, False), (0, 0, False)]
)
def test_fori_loop(max_steps, steps, stopped, traced):
    def f(upper):
        return loopkit.fori_loop(
            1, upper, lambda i, x: x + i, 0, max_steps=max_steps, return_info=True
        )

    total, info = jax.jit(f)(5) if traced else f(5)
    assert (total, info.steps, info.stopped) == (sum(range(1, 1 + steps)), steps, stopped)


def test_lanes():
    starts = jnp.asarray([1.0, 9.0, 3.0, 0.1])
    _, info = jax.vmap(lambda x: double(x, max_steps=4))(starts)
    assert info.steps.tolist() == [3, 0, 2, 4]
    assert info.stopped.tolist() == [True, True, True, False]


@pytest.mark.slow
def test_beside_derivatives():
    def f(x):
        x, info = double(x)
        return x * info.steps.astype(x.dtype), info

    for grad, info in (jax.grad(f, has_aux=True)(1.0), jax.jit(jax.grad(f, has_aux=True))(1.0)):
        assert (grad, info.steps, info.stopped) == (24.0, 3, True)
    _, tangent = jax.jvp(lambda x: f(x)[0], (1.0,), (1.0,))
    assert tangent == 24.0


# ---------------------------------------------------------------- throw


@pytest.mark.parametrize("jit", [False, True])
def test_throw_where_the_bound_is_reached(jit):
    def f(x):
        return loopkit.while_loop(lambda x: x < 8.0, lambda x: 2 * x, x, max_steps=2, throw=True)

    f = jax.jit(f) if jit else f
    assert f(3.0) == 12.0
    assert f(9.0) == 9.0
    with pytest.raises(Exception, match=r"loopkit\.while_loop: .*`max_steps`"):
        jax.block_until_ready(f(1.0))


@pytest.mark.slow
def test_throw_in_derivatives_and_lanes():
    def f(x):
        return loopkit.while_loop(lambda x: x < 8.0, lambda x: 2 * x, x, max_steps=2, throw=True)

    assert jax.grad(f)(3.0) == 4.0
    assert jax.vmap(jax.grad(f))(jnp.asarray([3.0, 9.0, 4.0])).tolist() == [4.0, 1.0, 2.0]
    with pytest.raises(Exception, match=r"loopkit\.while_loop: .*`max_steps`"):
        jax.block_until_ready(jax.grad(f)(1.0))
    with pytest.raises(Exception, match=r"loopkit\.while_loop: .*`max_steps`"):
        jax.block_until_ready(jax.vmap(f)(jnp.asarray([3.0, 1.0])))


def test_throw_without_a_bound():
    out = loopkit.while_loop(lambda x: x < 8.0, lambda x: 2 * x, 1.0, throw=True)
    assert out == 8.0


def test_throw_is_an_equinox_error():
    """So that equinox's settings (EQX_ON_ERROR) apply."""
    f = lambda x: loopkit.while_loop(lambda x: x < 8, lambda x: 2 * x, x, max_steps=1, throw=True)
    with pytest.raises(eqx.EquinoxRuntimeError, match="max_steps"):
        jax.block_until_ready(eqx.filter_jit(f)(1.0))


# ---------------------------------------------------------------- unroll


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "unroll"),
    [
        *[("while_scalar", 2), ("while_scalar", 8)],
        *[("scan_until", 3), ("scan_xs_ys", 3)],
    ],
)
def test_unrolling_changes_nothing(name, unroll):
    """Steps that do not fill an iteration, more steps than there are, and all derivatives."""
    (problem,) = named(name)
    x = problem.vector()
    f = problem.flat_loop(2, unroll=unroll)
    for pattern in ("", "f", "r", "fr"):
        wanted = in_numpy(derivative(problem.flat_reference(), pattern), x)
        assert_close(jax.jit(derivative(f, pattern))(x), wanted)
    lanes = jnp.stack([x, 1.15 * x])
    wanted = [in_numpy(derivative(problem.flat_reference(row), "r"), row) for row in lanes]
    assert_close(jax.vmap(derivative(f, "r"))(lanes), jnp.stack(wanted))


@pytest.mark.parametrize("unroll", [1, 2, 5])
def test_unrolling_reports_the_same(unroll):
    x, info = double(1.0, unroll=unroll)
    assert (x, info.steps, info.stopped) == (8.0, 3, True)
    x, info = double(1.0, unroll=unroll, max_steps=2)
    assert (x, info.steps, info.stopped) == (4.0, 2, False)


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [2, 4])
def test_unrolled_steps_that_are_not_taken_are_not_evaluated(unroll):
    """The fourth step would take the root of a negative number."""

    def f(n, w):
        body = lambda c: (c[0] + 1, c[1] + w * jnp.sqrt(n - c[0]))
        return loopkit.while_loop(lambda c: c[0] < n, body, (0.0, 0.0), unroll=unroll)[1]

    wanted = jax.grad(lambda n, w: w * (jnp.sqrt(n) + jnp.sqrt(n - 1) + jnp.sqrt(n - 2)), (0, 1))
    assert_close(jax.grad(f, (0, 1))(3.0, 0.5), wanted(3.0, 0.5))


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [True, False, 0, 1, 3, 100])
def test_unroll_of_scan_and_fori_loop(unroll):
    f = lambda x: loopkit.scan(lambda x, _: (1.5 * x, x), x, length=4, unroll=unroll)[0]
    assert jax.grad(f)(1.0) == 1.5**4
    f = lambda x: loopkit.fori_loop(0, 4, lambda _, x: 1.5 * x, x, unroll=unroll)
    assert jax.grad(f)(1.0) == 1.5**4


def test_split_transpose_is_accepted():
    """In its place among the positional arguments of jax.lax.scan."""
    f = lambda x: loopkit.scan(lambda h, x: (1.5 * h * x, h), x, jnp.ones(3), None, False, 1, True)[
        0
    ]
    assert jax.grad(f)(1.0) == 1.5**3


@pytest.mark.every_case
@pytest.mark.parametrize(
    "settings",
    [
        {"until": lambda h, y: h > 2},
        {"checkpoints": 2},
        {"memory": "1 MB"},
        {"truncate": 2},
        {"out_axes": -1},
        {"out_axes": None},
        {"every": 2},
        {"reduce": "sum"},
        {"progress": "line"},
    ],
)
def test_split_transpose_is_for_scans_as_those_of_lax(settings):
    def run():
        step = lambda h, x: (1.5 * h * x, jnp.ones(2) * h)
        return loopkit.scan(step, 1.0, jnp.ones(3), _split_transpose=True, **settings)

    named = "checkpoints" if "memory" in settings else next(iter(settings))
    expected = f"`_split_transpose` can be True only if the loop stores .*with `{named}`"
    with pytest.raises(ValueError, match=expected):
        run()
