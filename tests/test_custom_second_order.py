"""Second and third derivatives through rules that are not the derivative of their function.

One derivative uses the rule; the next is that of the rule's own code, as in an unrolled loop.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import loopkit
from derivatives import assert_close, derivative
from loopkit import _jax
from problems import CHECKPOINTS

pytestmark = pytest.mark.slow


@jax.custom_vjp
def false_vjp(x):
    """Linear in its cotangent, and wrong."""
    return jnp.sin(x)


false_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (-2.0 * ct * x,))


@jax.custom_vjp
def clipped_vjp(x):
    """Not linear in its cotangent."""
    return jnp.sin(x)


clipped_vjp.defvjp(
    lambda x: (jnp.sin(x), x), lambda x, ct: (jnp.clip(ct * jnp.cos(x), -0.3, 0.3) * x,)
)


@jax.custom_vjp
def straight_through(x):
    """Rounded, and differentiated as if it were not."""
    return jnp.round(4 * x) / 4


straight_through.defvjp(lambda x: (jnp.round(4 * x) / 4, None), lambda _, ct: (ct,))

RULES = {"false": false_vjp, "clipped": clipped_vjp, "straight_through": straight_through}


def scan(rule, theta, reverse=False, **settings):
    def step(x, row):
        x = rule(theta[0] * x + row) + 0.1 * x
        return x, x * theta[1]

    x, ys = settings.pop("loop", loopkit.scan)(
        step, theta[2:], jnp.linspace(0.1, 0.9, 5), reverse=reverse, **settings
    )
    return x, ys


def unrolled_scan(step, x, rows, reverse=False):
    order = range(len(rows))
    ys = [None] * len(rows)
    for i in reversed(order) if reverse else order:
        x, ys[i] = step(x, rows[i])
    return x, jnp.stack(ys)


def bounded(rule, theta, count=3, **settings):
    return loopkit.while_loop(
        lambda carry: carry[0] < count,
        lambda carry: (carry[0] + 1, rule(theta[0] * carry[1]) + theta[1] * carry[1]),
        (0, theta[2:]),
        max_steps=7,
        **settings,
    )[1]


def unrolled(rule, theta, count=3):
    x = theta[2:]
    for _ in range(count):
        x = rule(theta[0] * x) + theta[1] * x
    return x


def flat(f):
    return lambda theta: jnp.concatenate([jnp.ravel(v) for v in jax.tree.leaves(f(theta))])


THETA = jnp.asarray([1.1, 0.7, 0.3, -0.5])


@pytest.mark.parametrize("pattern", ["rr", "fr", "rrr", "frr"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_scan(rule, reverse, pattern):
    rule = RULES[rule]
    got = derivative(flat(lambda t: scan(rule, t, reverse)), pattern)
    wanted = derivative(flat(lambda t: scan(rule, t, reverse, loop=unrolled_scan)), pattern)
    assert_close(jax.jit(got)(THETA), wanted(THETA))


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize("rule", RULES)
def test_a_bound_that_is_not_reached(rule, checkpoints):
    rule = RULES[rule]
    got = derivative(lambda t: bounded(rule, t, checkpoints=checkpoints), "rr")
    assert_close(jax.jit(got)(THETA), derivative(lambda t: unrolled(rule, t), "rr")(THETA))


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_that_stops(reverse):
    until = lambda x, y: x[0] > 0.8
    got = flat(lambda t: scan(clipped_vjp, t, reverse, until=until))
    steps = int(
        scan(clipped_vjp, THETA, reverse, until=until, return_info=True, loop=info_of)[1].steps
    )
    assert 0 < steps < 5

    def wanted(theta):
        rows = jnp.linspace(0.1, 0.9, 5)
        rows = rows[5 - steps :] if reverse else rows[:steps]
        x, ys = scan(
            clipped_vjp,
            theta,
            reverse,
            loop=lambda s, x, _, reverse: unrolled_scan(s, x, rows, reverse),
        )
        blank = jnp.zeros((5 - steps, 2))
        return x, jnp.concatenate([blank, ys] if reverse else [ys, blank])

    assert_close(derivative(got, "rr")(THETA), derivative(flat(wanted), "rr")(THETA))


@pytest.mark.exhaustive
@pytest.mark.parametrize("until", [None, lambda x, y: x[0] > 0.8])
@pytest.mark.parametrize("rule", RULES)
def test_scan_along_other_axes(rule, until):
    """Rows lie last in xs and in ys; a step takes three columns of them."""

    def outputs(theta, in_axes, out_axes):
        def step(x, row):
            x = RULES[rule](theta[0] * x + row[0]) + 0.1 * x
            return x, jnp.outer(x, row) * theta[1]

        xs = jnp.sin(jnp.arange(15.0).reshape(5, 3)) * theta[3] + 1
        xs = jnp.moveaxis(xs, 0, in_axes)
        x, ys = loopkit.scan(step, theta[2:], xs, in_axes=in_axes, out_axes=out_axes, until=until)
        return x, jnp.moveaxis(ys, out_axes, 0)

    got = flat(lambda t: outputs(t, 1, 2))
    wanted = flat(lambda t: outputs(t, 0, 0))
    for pattern in ["rr", "fr"]:
        assert_close(*(jax.jit(derivative(f, pattern))(THETA) for f in (got, wanted)))
    batch = jnp.stack([THETA, 0.5 * THETA])
    second, want = jax.vmap(jax.jacrev(jax.jacrev(got)))(batch), jax.jit(jax.hessian(wanted))
    for theta, one in zip(batch, second, strict=True):
        assert_close(one, want(theta))


def info_of(*args, **settings):
    x, _, info = loopkit.scan(*args, **settings)
    return x, info


@pytest.mark.parametrize("rule", ["clipped", "straight_through"])
def test_lanes_that_stop_at_different_steps(rule):
    rule, counts = RULES[rule], jnp.asarray([2, 0, 4])
    thetas = jnp.stack([THETA, THETA * 0.5, THETA * -0.9])

    def together(thetas):
        return jax.vmap(lambda t, n: bounded(rule, t, n))(thetas, counts)

    def one_by_one(thetas):
        return jnp.stack([unrolled(rule, t, int(n)) for t, n in zip(thetas, counts, strict=True)])

    assert_close(derivative(together, "rr")(thetas), derivative(one_by_one, "rr")(thetas))
    second = jax.vmap(lambda t, n: derivative(lambda t: bounded(rule, t, n), "rr")(t))
    wanted = [
        derivative(lambda t, n=n: unrolled(rule, t, int(n)), "rr")(t)
        for t, n in zip(thetas, counts, strict=True)
    ]
    assert_close(second(thetas, counts), jnp.stack(wanted))


def test_every_direction_at_once():
    loss = lambda loop: lambda theta: jnp.sum(loop(clipped_vjp, theta) ** 2)
    jacobian = lambda loop: jax.jacrev(jax.grad(loss(loop)))(THETA)
    assert_close(jacobian(bounded), jacobian(unrolled))
    assert_close(jax.hessian(loss(bounded))(THETA), jax.hessian(loss(unrolled))(THETA))
    cotangents = jnp.eye(2)
    pulled = lambda loop: jax.jacfwd(
        lambda cts: jax.vmap(jax.vjp(lambda t: loop(clipped_vjp, t), THETA)[1])(cts)[0]
    )(cotangents)
    assert_close(pulled(bounded), pulled(unrolled))


def test_slices_of_a_scan_that_stops():
    """Those that are not read have no derivative, and the others their own."""
    step = lambda x, row: (clipped_vjp(x + row) + 0.5 * x, None)
    until = lambda x, _: x > 0.9
    rows = jnp.linspace(0.1, 0.5, 6)
    total = lambda rows: loopkit.scan(step, 0.2, rows, until=until)[0] ** 2

    def wanted(rows):
        x = 0.2
        for row in rows[:3]:
            x, _ = step(x, row)
        return x**2

    assert_close(total(rows), wanted(rows))
    hessian = lambda f: jax.jacrev(jax.grad(f))(rows)
    assert_close(jax.jit(lambda: hessian(total))(), hessian(wanted))


def test_a_loop_in_a_loop():
    def outer(inner):
        def run(theta):
            step = lambda x, _: (jnp.tanh(inner(clipped_vjp, jnp.append(theta[:2], x))), x)
            return step

        return lambda theta, loop: loop(run(theta), theta[2:], jnp.zeros(3))[0]

    got = lambda theta: outer(bounded)(theta, loopkit.scan)
    mixed = lambda theta: outer(bounded)(theta, lax.scan)
    wanted = lambda theta: outer(unrolled)(theta, unrolled_scan)
    kept = lambda theta: jax.checkpoint(got)(theta)
    for f in (got, mixed, kept):
        for pattern in ("rr", "fr"):
            assert_close(jax.jit(derivative(f, pattern))(THETA), derivative(wanted, pattern)(THETA))


def test_without_a_bound():
    def f(x):
        return loopkit.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, clipped_vjp(c[1])), (0.0, x)
        )[1]

    assert_close(
        jax.grad(f)(0.3), jax.grad(lambda x: clipped_vjp(clipped_vjp(clipped_vjp(x))))(0.3)
    )
    with pytest.raises(
        NotImplementedError,
        match=r"loopkit.while_loop: `body_fun` may call a function with a custom VJP in a second "
        r"derivative only if .* Pass `max_steps`",
    ):
        jax.grad(jax.grad(f))(0.3)


def test_carries_of_a_second_derivative_are_not_on_the_host():
    def loss(x):
        step = lambda x, _: (clipped_vjp(x), None)
        memory = {"device": "1 MB", "host": "1 MB"}
        return jnp.sum(loopkit.scan(step, x, None, 50, memory=memory)[0])

    x = jnp.linspace(0.1, 0.9, 40)
    slope = jax.grad(loss)
    assert slope(x).shape == x.shape
    expected = r"scan: `memory` cannot keep .* in a second derivative .* custom VJP, .* Got: check"
    with pytest.raises(NotImplementedError, match=expected):
        jax.grad(lambda x: jnp.sum(slope(x) ** 2))(x)


def test_a_second_derivative_without_the_first():
    """The second derivative needs only the number of steps from what was saved for the first."""

    def f(x):
        step = lambda x, row: (clipped_vjp(x) + row * x, None)
        return loopkit.scan(step, x, jnp.linspace(0.1, 0.5, 4))[0]

    def unrolled(x):
        for row in jnp.linspace(0.1, 0.5, 4):
            x = clipped_vjp(x) + row * x
        return x

    along = lambda x: jax.jvp(jax.grad(f), (x,), (1.0,))
    small, _ = _jax.dce(jax.make_jaxpr(along)(0.3), [False, True], [True])
    assert_close(_jax.call_jaxpr(small)(0.3), [jax.grad(jax.grad(unrolled))(0.3)])
