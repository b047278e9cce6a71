"""Second order: forward over reverse, reverse over forward, reverse over reverse, hessians."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import loopkit
from derivatives import assert_close, derivative, expected
from problems import CHECKPOINTS, PROBLEMS, Problem, named, tagged
from turns import in_turn

MAIN = named("while_scalar", "scan_until", "while_in_while")
OTHERS = [problem for problem in PROBLEMS if problem not in MAIN]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "pattern", "checkpoints"), in_turn(MAIN, ["fr", "rf", "rr"], CHECKPOINTS, of=3)
)
def test_second_order(problem: Problem, pattern, checkpoints):
    got = jax.jit(derivative(problem.flat_loop(checkpoints), pattern))
    assert_close(got(problem.vector()), expected(problem.name, pattern))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("problem", "pattern"), in_turn(OTHERS, ["fr", "rr"], of=4))
def test_second_order_of_every_loop(problem: Problem, pattern):
    got = jax.jit(derivative(problem.flat_loop(2), pattern))
    assert_close(got(problem.vector()), expected(problem.name, pattern))


OTHER_CARRIES = named("leaves_change_places", "params_in_the_carry", "stops_gradients", "dead_leaf")


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["ff", "rf"])
@pytest.mark.parametrize("problem", OTHER_CARRIES, ids=lambda problem: problem.name)
def test_second_order_of_a_tangent(problem: Problem, pattern):
    got = jax.jit(derivative(problem.flat_loop(2), pattern))
    assert_close(got(problem.vector()), expected(problem.name, pattern))


@pytest.mark.parametrize("pattern", ["fr", "rf", "rr"])
@pytest.mark.parametrize("problem", tagged("small"), ids=lambda problem: problem.name)
def test_second_order_without_jit(problem: Problem, pattern):
    got = derivative(problem.flat_loop(3), pattern)
    assert_close(got(problem.vector()), expected(problem.name, pattern))


def test_jax_checkpoint_around_a_loop():
    cubed = lambda x: loopkit.fori_loop(0, 3, lambda _, y: x * y, 1.0, checkpoints=1)
    second = jax.jit(jax.grad(jax.grad(jax.checkpoint(cubed))))
    assert_close(second(0.5), jnp.asarray(3.0))


@pytest.mark.slow
def test_a_pullback_that_jax_checkpoint_returns():
    """JAX transposes a call of `jax.checkpoint` only if none of its tangents is known."""

    def total(x, scan, remat, **how):
        f = lambda x: jnp.sum(scan(lambda c, _: (jnp.sin(c) * c, None), x, None, 6, **how)[0])
        y, pull = remat(lambda x: jax.vjp(f, x))(x)
        return jnp.sum(jnp.sin(remat(lambda pull, y: pull(jnp.cos(y))[0])(pull, y)))

    x = jnp.array([0.9, 1.7])
    slope = jax.grad(total)(x, loopkit.scan, jax.checkpoint, checkpoints=2)
    assert_close(slope, jax.grad(total)(x, lax.scan, lambda f: f))


def outer(jacobian, inner):
    return lambda f: jacobian(inner(f))


HESSIANS = {
    "hessian": jax.hessian,
    "jacfwd of jacfwd": outer(jax.jacfwd, jax.jacfwd),
    "jacrev of jacfwd": outer(jax.jacrev, jax.jacfwd),
    "jacrev of jacrev": outer(jax.jacrev, jax.jacrev),
    "jacfwd of grad": outer(jax.jacfwd, jax.grad),
    "jacrev of grad": outer(jax.jacrev, jax.grad),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [*[("while_scalar", kind) for kind in HESSIANS], ("scan_until", "hessian")],
)
def test_hessian(name, kind):
    (problem,) = named(name)
    x = problem.vector()
    reference = jax.grad(lambda x: jnp.sum(problem.flat_reference()(x) ** 2))
    rows = [jax.jvp(reference, (x,), (e,))[1] for e in jnp.eye(x.size)]
    loop = problem.flat_loop(3)
    got = jax.jit(HESSIANS[kind](lambda x: jnp.sum(loop(x) ** 2)))(x)
    assert_close(got, jnp.stack(rows))


@pytest.mark.exhaustive
@pytest.mark.parametrize("argnums", [(0, 1), (2, 0), (1, 1)], ids=str)
def test_mixed_second_derivative(argnums):
    (problem,) = named("while_vector")
    first, second = argnums

    def mixed(f):
        grad = jax.grad(lambda *args: jnp.sum(f(*args)), first)
        return jax.grad(lambda *args: jnp.sum(jnp.cos(grad(*args))), second)(*problem.args)

    assert_close(mixed(problem.loop(3)), mixed(problem.reference()))


@pytest.mark.slow
def test_linearize_of_a_gradient():
    (problem,) = named("while_in_while")
    x = problem.vector()
    grad = jax.grad(lambda x: jnp.sum(problem.flat_loop(2)(x)))
    wanted = jax.grad(lambda x: jnp.sum(problem.flat_reference()(x)))
    _, hessian_product = jax.linearize(grad, x)
    for e in jnp.eye(x.size):
        assert_close(hessian_product(e), jax.jvp(wanted, (x,), (e,))[1])


@pytest.mark.slow
def test_gradient_of_a_gradient_step():
    """The loop's own body takes a gradient, and the loop is differentiated."""

    def losses(loop):
        def trained(rate):
            def body(carry):
                step, w = carry
                return step + 1, w - rate * jax.grad(lambda w: jnp.sum(jnp.cos(w) * w))(w)

            return jnp.sum(loop(body, (0, jnp.asarray([0.3, 0.9])))[1] ** 2)

        return jax.value_and_grad(trained)(0.1)

    def unrolled(body, carry):
        for _ in range(4):
            carry = body(carry)
        return carry

    def looped(body, carry):
        return loopkit.while_loop(lambda c: c[0] < 4, body, carry)

    assert_close(losses(looped), losses(unrolled))


@pytest.mark.exhaustive
def test_the_jacobian_of_a_jacobian_in_reverse():
    def final(scan):
        step = lambda w: lambda x, _: (jnp.sin(x * w), None)
        return lambda w: jnp.sin(scan(step(w), jnp.asarray([0.3, 0.4]), None, 3)[0])

    ours, own, w = final(loopkit.scan), final(jax.lax.scan), jnp.asarray([1.0, 0.7])
    assert_close(jax.jacrev(jax.jacrev(ours))(w), jax.jacrev(jax.jacrev(own))(w))
    norm = lambda f: jax.grad(lambda w: jnp.sum(jax.jacrev(f)(w) ** 2))(w)
    assert_close(norm(ours), norm(own))


@pytest.mark.exhaustive
@pytest.mark.parametrize("result", [0, 1], ids=["carry", "ys"])
def test_where_one_result_alone_is_curved(result):
    def f(x):
        return (lambda c, row: (jnp.sin(c), c * row), lambda c, row: (0.5 * c, jnp.sin(c)))[result]

    def value(x, scan):
        carry, ys = scan(f(x), x, jnp.arange(3.0))
        return jnp.sum(ys) + carry

    for second in (lambda f: jax.grad(jax.grad(f)), lambda f: jax.jacfwd(jax.grad(f))):
        got, wanted = (second(lambda x, s=s: value(x, s))(0.7) for s in (loopkit.scan, lax.scan))
        assert_close(got, wanted)


def test_tangents_of_which_there_are_many_where_the_primal_moves():
    def many(x, scan):
        f = lambda x: scan(lambda c, row: (jnp.sin(c * x) + row, c * c), x, jnp.arange(3.0))
        return jax.vmap(jax.linearize(f, x)[1])(jnp.arange(1.0, 3.0))

    got, wanted = (
        jax.jvp(lambda x, s=s: many(x, s), (0.7,), (1.0,)) for s in (loopkit.scan, lax.scan)
    )
    assert_close(got, wanted)


@pytest.mark.slow
def test_a_tangent_that_is_a_number_of_python():
    """The first derivative has many directions at once."""

    def of(scan):
        f = lambda x: jnp.stack([scan(lambda c, _: (jnp.sin(c) * x, None), x, None, 4)[0], x**2])
        return jax.jvp(jax.jacrev(f), (0.8,), (1.0,))

    assert_close(of(loopkit.scan), of(jax.lax.scan))


def stepwise(step, x, rows, **_):
    """The scan of an unrolled loop, which takes no settings."""
    ys = []
    for row in rows:
        x, y = step(x, row)
        ys.append(y)
    return x, jnp.stack(ys)


def loss_of(scan, settings):
    """A loss of weights, a first carry, and rows, in which each of them meets the others."""

    def loss(w, x, rows):
        step = lambda x, row: ((new := jnp.tanh(w @ x + row)), new * x)
        x, ys = scan(step, x, rows, **settings)
        return jnp.sum(x**3) + jnp.sum(jnp.sin(ys))

    return loss


WEIGHTS = jnp.asarray([[0.5, -0.3], [0.2, 0.7]])
FIRST, ROWS = jnp.asarray([0.4, -0.6]), jnp.linspace(-0.5, 0.9, 10).reshape(5, 2)
ALONG = jnp.asarray([[[1.0, 2.0], [0.5, -1.0]], [[0.3, -0.2], [1.5, 0.4]]])


def mixed(loss):
    """Tangents of the first carry, cotangents of the weights."""
    gradient = lambda x: jax.grad(loss)(WEIGHTS, x, ROWS)
    return jax.jvp(gradient, (FIRST,), (FIRST + 1,))


def of_lanes(loss, x=FIRST, w=WEIGHTS):
    """Lanes of carries and of directions; the weights are the same in all lanes."""

    def product(x, along):
        return jax.jvp(lambda w: jax.grad(loss, (0, 2))(w, x, ROWS), (w,), (along,))[1]

    return jax.vmap(product)(jnp.stack([x, 2 * x]), ALONG)


def of_directions(loss):
    return jax.vmap(lambda x: of_lanes(loss, x))(jnp.stack([FIRST, -FIRST]))


def of_cotangents(loss):
    """Lanes of cotangents alone, and of directions beside them."""
    several = lambda w: loss(w, FIRST, ROWS) * jnp.asarray([1.0, -2.0]) + w[0]
    pulled_back = lambda ct: lambda w: jax.vjp(several, w)[1](ct)[0]
    one = lambda ct, along: jax.jvp(pulled_back(ct), (WEIGHTS,), (along,))[1]
    return jax.vmap(one, (0, None))(jnp.eye(2), ALONG[0]), jax.vmap(one)(jnp.eye(2), ALONG)


def gradient_of_lanes(loss):
    total = lambda w, x: sum(jnp.sum(v * v) for v in jax.tree.leaves(of_lanes(loss, x, w)))
    return jax.grad(total, (0, 1))(WEIGHTS, FIRST)


SETTINGS = {
    "default": {},
    "all": {"checkpoints": "all"},
    "2": {"checkpoints": 2},
    "residuals": {"checkpoints": loopkit.Plan(2, segment=2, store="residuals")},
    "until": {"until": lambda x, _: x[0] > 9},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "settings"),
    in_turn(
        [mixed, of_lanes, of_directions, of_cotangents, gradient_of_lanes],
        SETTINGS,
        of=2,
    ),
)
def test_forward_over_reverse(way, settings):
    wanted = way(loss_of(stepwise, {}))
    got = jax.jit(lambda: way(loss_of(loopkit.scan, SETTINGS[settings])))()
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert_close(g, w)
