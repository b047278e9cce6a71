"""Batching: vmap of every derivative, and every derivative of vmap."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from derivatives import assert_close, derivative, direction, in_numpy
from problems import CHECKPOINTS, Problem, named
from test_batched_operands import XS
from turns import in_turn

BATCHED = [
    *named("while_scalar", "scan_until", "while_in_while", "newton_root", "scan_xs_ys"),
    *named("carry_of_trees", "params_in_the_carry", "leaves_change_places"),
]


def lanes(problem: Problem, count: int = 3) -> jax.Array:
    """Arguments of several lanes, the first the problem's own; the lanes take different steps."""
    x = problem.vector()
    shifts = 0.2 * jnp.arange(1.0 * count)[:, None] * (1 + direction(x, 2) / 4)
    return x * (1 + shifts)


def one_by_one(problem: Problem, pattern: str, xs: jax.Array) -> jax.Array:
    """The derivative of the reference, lane by lane."""
    return np.stack([in_numpy(derivative(problem.flat_reference(x), pattern), x) for x in xs])


@pytest.mark.parametrize(("problem", "pattern"), in_turn(BATCHED, ["", "f", "r"]))
def test_vmap_of_a_derivative(problem: Problem, pattern):
    xs = lanes(problem)
    got = jax.jit(jax.vmap(derivative(problem.flat_loop(3), pattern)))(xs)
    assert_close(got, one_by_one(problem, pattern, xs))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pattern"),
    [(name, p) for name in ("while_scalar", "scan_until") for p in ("fr", "rf", "rr", "rfr")]
    + [("while_in_while", "fr"), ("params_in_the_carry", "rr"), ("leaves_change_places", "fr")],
)
def test_vmap_of_a_higher_derivative(name, pattern):
    (problem,) = named(name)
    xs = lanes(problem)
    got = jax.jit(jax.vmap(derivative(problem.flat_loop(3), pattern)))(xs)
    assert_close(got, one_by_one(problem, pattern, xs))


@pytest.mark.parametrize(
    ("name", "pattern"),
    [(name, p) for name in ("while_scalar", "scan_until") for p in ("f", "r", "fr", "rf", "rr")]
    + [("while_in_while", "r")],
)
def test_derivative_of_vmap(name, pattern):
    (problem,) = named(name)
    xs = lanes(problem)
    references = [problem.flat_reference(x) for x in xs]
    batched = jax.vmap(problem.flat_loop(2))

    def loop(flat):
        return batched(flat.reshape(xs.shape)).ravel()

    def reference(flat):
        rows = flat.reshape(xs.shape)
        return jnp.concatenate([f(row) for f, row in zip(references, rows, strict=True)])

    got = jax.jit(derivative(loop, pattern))(xs.ravel())
    assert_close(got, in_numpy(derivative(reference, pattern), xs.ravel()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "checkpoints"), in_turn(named("while_scalar", "scan_until"), CHECKPOINTS)
)
def test_checkpoints(problem: Problem, checkpoints):
    xs = lanes(problem, 4)
    got = jax.jit(jax.vmap(derivative(problem.flat_loop(checkpoints), "r")))(xs)
    assert_close(got, one_by_one(problem, "r", xs))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["while_scalar", "scan_until"])
def test_without_jit(name):
    (problem,) = named(name)
    xs = lanes(problem)
    got = jax.vmap(derivative(problem.flat_loop(3), "r"))(xs)
    assert_close(got, one_by_one(problem, "r", xs))


@pytest.mark.exhaustive
def test_mixed_types_and_keys():
    (problem,) = named("carry_of_mixed_types")
    xs = lanes(problem)
    got = jax.vmap(problem.loop())(xs[:, 0], xs[:, 1])
    each = [problem.reference(*x)(*x) for x in xs]
    assert_close(got, jax.tree.map(lambda *leaves: jnp.stack(leaves), *each))


# ---------------------------------------------------------------- where the axis is


@pytest.mark.slow
@pytest.mark.parametrize(("in_axis", "out_axis"), [(1, 0), (0, 1), (-1, -1), (2, 1)])
def test_axes(in_axis, out_axis):
    """Axes other than the first, of the carry and of the xs."""
    hs = jnp.cos(jnp.arange(24.0)).reshape(3, 4, 2)
    xs = jnp.sin(jnp.arange(15.0)).reshape(5, 3)

    def batched(scan):
        def one(h, x):
            def loss(h, x):
                h, ys = scan(lambda h, x: (jnp.sin(h + x), h * x), h, x)
                return jnp.sum(h * jnp.sum(ys, 0)), ys

            return jax.grad(loss, argnums=(0, 1), has_aux=True)(h, x)

        moved = jnp.moveaxis(hs, 0, in_axis)
        (h_bar, x_bar), ys = jax.vmap(
            one, in_axes=(in_axis, 1), out_axes=((out_axis, 0), out_axis)
        )(moved, xs)
        return h_bar, x_bar, ys

    assert_close(batched(loopkit.scan), batched(lax.scan))


# ---------------------------------------------------------------- scan with until, collectives


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize("pattern", ["vr", "rv", "frv", "rvf"])
def test_rows_that_no_lane_changes(pattern, checkpoints):
    """They end where a lane stops, and have its axis for that."""

    def run(scan, x):
        options = (
            {} if scan is lax.scan else {"until": lambda c, _: x > 0.5, "checkpoints": checkpoints}
        )
        c, ys = scan(lambda c, _: (jnp.sin(c) * 1.5, jnp.full((2, 3), 0.8)), x, None, 3, **options)
        return c + ys.sum() * x**2

    def one(x):  # a lane stops after one step, the other after three
        return jnp.where(x > 0.5, jnp.sin(x) * 1.5 + 4.8 * x**2, run(lax.scan, x))

    transforms = {
        "v": jax.vmap,
        "r": jax.grad,
        "f": lambda g: lambda x: jax.jvp(g, (x,), (1.3,))[1],
    }
    transforms["r over v"] = lambda g: jax.grad(lambda x: g(x).sum())
    transforms["f over v"] = lambda g: lambda x: jax.jvp(g, (x,), (1.3 + 0 * x,))[1]
    xs, found = jnp.array([0.3, 0.9]), []
    for g in (lambda x: run(loopkit.scan, x), one):
        for at, letter in enumerate(pattern):
            g = transforms[letter + " over v" * ("v" in pattern[:at])](g)
        found.append(jax.jit(g)(xs))
    assert_close(*found)


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["value", "grad"])
def test_lanes_of_a_scan_stop_where_they_stop(transform):
    """Rows past a lane's stop are zero in that lane only."""
    xs = jnp.asarray([0.5, 0.3, 0.2, 0.6])
    limits = jnp.asarray([0.1, 0.9, 5.0, 1.5])

    def run(limit, scale):
        return loopkit.scan(
            lambda h, x: (h + scale * x, h * scale + x),
            0.0,
            xs,
            until=lambda h, _: h > limit,
            return_info=True,
        )

    def rows(limit, scale, steps):
        h, ys = 0.0, []
        for x in xs[:steps]:
            h, y = h + scale * x, h * scale + x
            ys.append(y)
        return h, jnp.stack([*ys, *[jnp.zeros_like(scale)] * (4 - steps)])

    steps = [1, 3, 4, 4]
    if transform == "value":
        h, ys, info = jax.vmap(run, (0, None))(limits, 1.0)
        assert info.steps.tolist() == steps
        assert info.stopped.tolist() == [True, True, False, True]
        wanted = [rows(limit, jnp.asarray(1.0), n) for limit, n in zip(limits, steps, strict=True)]
        assert_close((h, ys), tuple(map(jnp.stack, zip(*wanted, strict=True))))
        return

    def loss(f):
        return lambda limit, scale, *steps: sum(map(jnp.sum, f(limit, scale, *steps)[:2]))

    got = jax.vmap(jax.grad(loss(run), 1), (0, None))(limits, 1.0)
    wanted = [
        jax.grad(lambda s, n=n, limit=limit: loss(rows)(limit, s, n))(1.0)
        for limit, n in zip(limits, steps, strict=True)
    ]
    assert_close(got, jnp.stack(wanted))


@pytest.mark.slow
def test_collectives_over_the_batched_axis():
    """An unbatched predicate leaves the lanes in step, so that they may talk."""

    def run(loop):
        def one(x):
            def body(carry):
                step, x = carry
                return step + 1, jnp.sin(x) + lax.pmean(x, "lanes") / 2

            return loop(lambda c: c[0] < 4, body, (0, x))[1]

        batched = jax.vmap(one, axis_name="lanes")
        return jax.value_and_grad(lambda x: jnp.sum(batched(x) ** 2))(jnp.asarray(XS))

    def unrolled(cond, body, carry):
        for _ in range(4):
            carry = body(carry)
        return carry

    assert_close(run(loopkit.while_loop), run(unrolled))


@pytest.mark.exhaustive
@pytest.mark.parametrize("checkpoints", in_turn(CHECKPOINTS))
def test_a_mask_that_only_the_step_number_decides(checkpoints):
    """One lane saves the step number alone; its batched step must not ask for the state as well."""

    def last(scan, x):
        def step(carry, _):
            i, x = carry
            return (i + 1, jnp.where((jnp.arange(3) + i) % 3 > 0, x * 1.5, 0.0)), None

        return scan(step, (0, x), length=2)[0][1] @ jnp.arange(1.0, 4.0)

    mine = functools.partial(loopkit.scan, checkpoints=checkpoints)
    x = jnp.arange(6.0).reshape(2, 3)
    for take in jax.grad, jax.hessian:
        got, wanted = (jax.vmap(take(functools.partial(last, s)))(x) for s in (mine, lax.scan))
        assert_close(got, wanted)


def eight_steps(curved, **how):
    def body(c, _):
        return (jnp.sin(c) if curved else c) * 1.5, c

    return lambda x: loopkit.scan(body, x, None, 8, until=lambda c, _: c < 0.02, **how)[0]


ALONE = jnp.array([0.3, 0.1, 0.01])
SLOPES = {"grad": jax.grad, "hessian": jax.hessian, "jacfwd": jax.jacfwd}


@functools.cache
def slopes_alone(curved, name):
    slope = SLOPES[name](eight_steps(curved))
    return jnp.stack([slope(x) for x in ALONE])


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [None, 1, 2, 8, "all"])
@pytest.mark.parametrize("unroll", [3, 5])
@pytest.mark.parametrize("curved", [False, True])
def test_unrolled_steps_beyond_the_bound_do_not_count(curved, unroll, checkpoints):
    """Eight steps, the last iteration has more; one lane stops before."""
    f = eight_steps(curved, unroll=unroll, checkpoints=checkpoints)
    got = jax.jit(jax.vmap(lambda x: {name: take(f)(x) for name, take in SLOPES.items()}))(ALONE)
    assert_close(got, {name: slopes_alone(curved, name) for name in SLOPES})


@pytest.mark.slow
def test_axes_of_tangents_of_which_some_are_zeros():
    """A rule says that one of the ys has no slope, in zeros: they have both axes all the same."""

    @jax.custom_jvp
    def flat(x):
        return jnp.cos(x)

    flat.defjvp(lambda p, t: (flat(*p), jnp.zeros_like(p[0])))

    def f(x):
        step = lambda c, row: (jnp.sin(c) * row, (flat(c), c * row))
        return loopkit.scan(step, x, jnp.arange(1.0, 4.0))

    tangents = jnp.arange(6.0).reshape(2, 3) - 1.5
    linear = jax.linearize(f, 0.7)[1]
    slope = jax.jvp(f, (0.7,), (1.0,))[1]
    wanted = jax.tree.map(lambda s: jnp.multiply.outer(tangents, s), slope)
    assert_close(jax.vmap(jax.vmap(linear))(tangents), wanted)
    assert_close(jax.jit(jax.vmap(jax.vmap(linear, 0), 1, 1))(tangents), wanted)


@pytest.mark.slow
def test_pullbacks_of_lanes_that_were_run_one_by_one():
    """Residuals that each lane saved are stacked, and all lanes go back together."""

    def f(x):
        step = lambda c, row: (jnp.sin(c * x) + row, c * c)
        return loopkit.scan(step, x, jnp.arange(5.0), checkpoints=2)[0]

    xs, cts = jnp.linspace(0.3, 1.1, 3), jnp.arange(1.0, 4.0)
    pulls = lax.map(lambda x: jax.vjp(f, x)[1], xs)
    got = jax.vmap(lambda pull, ct: pull(ct)[0])(pulls, cts)
    assert_close(got, jnp.stack([jax.grad(f)(x) for x in xs]) * cts)
