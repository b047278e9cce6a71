"""No cotangent is not a cotangent of zeros.

A value that a loop only compares with has no derivative. Behind a square root at 0, whose slope is
infinite, zeros in its place would be NaN; behind a rule that is not linear, a finite wrong number.
Each loop is compared with the same steps in Python.
"""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kinds
import loopkit
from derivatives import assert_close
from tolerances import assert_near
from turns import in_turn

STEPS = 3


def in_python(step, c, consts, xs):
    for x in xs:
        c = step(c, consts, x)
    return c


def by_scan(step, c, consts, xs, **how):
    return loopkit.scan(lambda c, x: (step(c, consts, x), None), c, xs, **how)[0]


def by_while(step, c, consts, xs, **how):
    return kinds.loop("while", lambda _, c, x: step(c, consts, x), c, STEPS, xs=xs, **how)


def by_fori(step, c, consts, xs, stop=STEPS, **how):
    return kinds.loop("fori", lambda _, c, x: step(c, consts, x), c, stop, xs=xs, **how)


def by_buffer(step, c, consts, xs):
    def body(i, state):
        c, rows = state
        c = step(c, consts, jax.tree.map(lambda x: x[i], xs))
        return c, rows.at[i].set(c["y"])

    rows = jnp.zeros(STEPS)
    c, rows = loopkit.fori_loop(0, STEPS, body, (c, rows), buffers=lambda s: s[1])
    return c | {"y": rows[-1] + 0 * c["y"]}


def nested(outer, inner):
    def run(step, c, consts, xs, **how):
        def whole(c, consts, x):
            once = jax.tree.map(lambda x: jnp.broadcast_to(x, (STEPS, *jnp.shape(x))), x)
            return inner(lambda c, consts, x: step(c, consts, x), c, consts, once)

        return outer(whole, c, consts, xs, **how)

    return run


def python_nested(step, c, consts, xs):
    return in_python(
        lambda c, consts, x: in_python(step, c, consts, [x] * STEPS), c, consts, unstacked(xs)
    )


def of_lax(step, c, consts, xs):
    loop = lambda c, consts, xs: lax.scan(lambda c, x: (step(c, consts, x), None), c, xs)[0]
    return loopkit.checkpointed(loop)(c, consts, xs)


def unstacked(xs):
    return [jax.tree.map(lambda x, k=k: x[k], xs) for k in range(STEPS)]


LOOPS = {
    "scan": by_scan,
    "scan, one checkpoint": lambda *a: by_scan(*a, checkpoints=1),
    "scan, every step stored": lambda *a: by_scan(*a, checkpoints="all"),
    "scan with until": lambda *a: by_scan(*a, until=lambda c, _: c["y"] > 1e9),
    "truncated, never": lambda *a: by_scan(*a, truncate=STEPS),
    "while": by_while,
    "while, bounded": lambda *a: by_while(*a, most=9),
    "while, every step stored": lambda *a: by_while(*a, most=9, checkpoints="all"),
    "fori": by_fori,
    "fori to a traced bound": lambda step, c, consts, xs: by_fori(
        step, c, consts, xs, stop=jnp.int32(STEPS + 0 * c["y"])
    ),
    "buffers": by_buffer,
    "a loop of lax": of_lax,
}
NESTS = {
    "scan in scan": nested(by_scan, by_scan),
    "while in scan": nested(by_scan, by_while),
    "scan in while": nested(by_while, by_scan),
    "while in while": nested(by_while, by_while),
    "fori in fori": nested(by_fori, by_fori),
    "lax in scan": nested(by_scan, of_lax),
}


def compared_with(way, steep, x, run):
    """y after steps that compare it with `steep`, which comes into the loop in some way."""

    def step(c, consts, at):
        bound = {"constant": consts, "xs": at}[way] if way in ("constant", "xs") else c["bound"]
        y = jnp.where(c["y"] > bound, 0.5 * c["y"] * jnp.sin(x), c["y"])
        if way == "carry":
            return {"y": y, "bound": bound}
        return {"y": y, "bound": 0.9 * bound} if way == "moved" else {"y": y}

    c = {"y": x * x, "bound": steep} if way in ("carry", "moved") else {"y": x * x}
    xs = jnp.stack([steep] * STEPS) if way == "xs" else jnp.zeros(STEPS)
    return run(step, c, steep if way == "constant" else 0.0, xs)["y"]


MODES = {
    "grad": jax.grad,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (1.0,))[1],
    "jitted grad": lambda f: jax.jit(jax.grad(f)),
    "linearize": lambda f: lambda x: jax.linear_transpose(jax.linearize(f, x)[1], x)(1.0)[0],
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, x]))[1],
    "vmap over cotangents": lambda f: lambda x: jax.vmap(jax.vjp(f, x)[1])(jnp.ones(2))[0][0],
    "hessian": jax.hessian,
    "grad of grad": lambda f: jax.grad(jax.grad(f)),
    "grad of jvp": lambda f: jax.grad(lambda x: jax.jvp(f, (x,), (1.0,))[1]),
}
WAYS = ["constant", "xs", "carry", "moved"]


def crossed(loops, often, modes):
    """Each loop with each way in; the modes are dealt out to the ways, from another one on for
    each loop. Those of a few loops are run often."""
    cases = []
    for k, loop in enumerate(loops):
        hands = np.array_split(np.roll(modes, -k), len(WAYS))[::-1]
        for way, some in zip(WAYS, hands, strict=True):
            slow = () if loop in often or way == "constant" else pytest.mark.exhaustive
            cases.append(pytest.param(loop, way, some, marks=slow, id=f"{loop}-{way}"))
    return cases


OFTEN = {"scan", "while"}
REVERSE = ["grad", "jitted grad", "hessian", "grad of grad", "vmap of grad"]


def agree(f, g, modes):
    for name in modes:
        got, wanted = MODES[name](f)(jnp.asarray(1.0)), result(g, name)
        assert np.isfinite(wanted), name
        assert_near(got, wanted, what=name)


@ft.cache
def result(f, mode):
    return jax.jit(MODES[mode](f))(jnp.asarray(1.0))


@ft.cache
def reference(way, run, steep=lambda x: jnp.sqrt(x - 1.0)):
    return lambda x: compared_with(way, lax.stop_gradient(steep(x)), x, run)


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "way", "modes"), crossed(LOOPS, OFTEN, list(MODES)))
def test_compared_with(loop, way, modes):
    f = lambda x: compared_with(way, jnp.sqrt(x - 1.0), x, LOOPS[loop])
    # Every carry has a tangent in forward mode, as in lax, and in Python.
    forward = {"jvp", "grad of jvp"} if way == "moved" else set()
    agree(f, reference(way, python_of), [m for m in modes if m not in forward])


def python_of(step, c, consts, xs):
    return in_python(step, c, consts, unstacked(xs))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("nest", "way", "modes"), crossed(NESTS, (), 2 * REVERSE))
def test_compared_with_in_a_nest(nest, way, modes):
    f = lambda x: compared_with(way, jnp.sqrt(x - 1.0), x, NESTS[nest])
    agree(f, reference(way, python_nested), modes)


@jax.custom_vjp
def hook(v):
    return v


hook.defvjp(lambda v: (v, None), lambda _, ct: (ct + 1.0,))


FIRST_ORDER = ["grad", "vmap of grad", "jitted grad", "vmap over cotangents"]
TENTH = lambda x: 0.1 * x


@pytest.mark.parametrize(("loop", "way", "modes"), crossed(LOOPS, OFTEN, FIRST_ORDER))
def test_rules_before_a_loop_hear_of_cotangents_only(loop, way, modes):
    """A custom VJP that is not linear makes something of zeros, and is not asked without any."""
    f = lambda x: compared_with(way, 0.1 * hook(x), x, LOOPS[loop])
    agree(f, reference(way, python_of, TENTH), modes)


@pytest.mark.slow
@pytest.mark.parametrize("loop", in_turn(LOOPS))
def test_what_cannot_be_reversed_may_stand_before_a_loop(loop):
    halved = lambda x: lax.while_loop(lambda v: v > 0.1, lambda v: v / 2, x)
    f = lambda x: compared_with("constant", halved(x), x, LOOPS[loop])
    g = lambda x: compared_with("constant", lax.stop_gradient(halved(x)), x, python_of)
    agree(f, g, np.roll(["grad", "jitted grad", "grad of grad"], list(LOOPS).index(loop))[:2])


WITHOUT_A_DERIVATIVE = {
    "argmin": lambda c, b: c["y"] * jnp.argmin(jnp.stack([b, c["y"] + 1.0])).astype(float),
    "index": lambda c, b: jnp.stack([0.5, 0.25])[jnp.int32(b > 2.0)] * c["y"],
    "rounded": lambda c, b: c["y"] * (1.0 + jnp.floor(b)),
    "stopped": lambda c, b: c["y"] * jnp.cos(lax.stop_gradient(b)),
    "zero tangent": lambda c, b: c["y"] * (1.0 + flat(b)),
}


THREE = ["scan", "while", "scan, every step stored"]


@jax.custom_jvp
def flat(x):
    return jnp.cos(x)


flat.defjvp(lambda p, t: (flat(*p), jnp.zeros_like(p[0])))


@pytest.mark.parametrize(("loop", "kind"), in_turn(THREE, WITHOUT_A_DERIVATIVE))
def test_values_used_without_a_derivative(loop, kind):
    use = WITHOUT_A_DERIVATIVE[kind]

    def value(run, steep):
        def f(x):
            step = lambda c, bound, _: {"y": jnp.sin(x) + use(c, bound)}
            return run(step, {"y": x}, steep(x), jnp.zeros(STEPS))["y"]

        return f

    f = value(LOOPS[loop], lambda x: jnp.sqrt(x - 1.0))
    g = value(python_of, lambda x: lax.stop_gradient(jnp.sqrt(x - 1.0)))
    turn = 2 * THREE.index(loop) + list(WITHOUT_A_DERIVATIVE).index(kind)
    agree(f, g, np.roll(REVERSE, turn)[:1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("checkpoints", [None, 1, "all"])
def test_second_order_in_some_of_the_inputs(checkpoints):
    """The other input stays, at a place where its slope is infinite."""

    def f(run):
        def value(x, y):
            step = lambda c, y, _: {"y": 0.5 * c["y"] * x + jnp.sqrt(y)}
            return run(step, {"y": x}, y, jnp.zeros(STEPS))["y"]

        return value

    ours = f(lambda *a: by_scan(*a, checkpoints=checkpoints))
    python = f(python_of)
    for second in (
        lambda f: lambda x, y: jax.grad(jax.grad(f))(x, y),
        lambda f: lambda x, y: jax.jacfwd(lambda x: jax.grad(f, (0, 1))(x, y)[0])(x),
        lambda f: lambda x, y: jax.jacrev(lambda x: jax.grad(f, (0, 1))(x, y)[0])(x),
        lambda f: lambda x, y: jax.jvp(lambda x: jax.vjp(f, x, y)[1](1.0)[0], (x,), (1.0,))[1],
    ):
        got, wanted = second(ours)(1.3, 0.0), second(python)(1.3, 0.0)
        assert np.isfinite(wanted)
        assert_close(got, wanted)


@pytest.mark.exhaustive
def test_fewer_leaves_keep_their_places():
    """Cotangents of a joint derivative are matched to its outputs one by one."""

    def value(run):
        def f(v):
            def step(c, _):
                a, b, d = c
                return (jnp.sin(a * b), b * jnp.cos(v[2]), d + a * v[1]), a * d

            (a, _, d), ys = run(step, (v[0], v[1], v[2]), None, STEPS)
            return a * 2.0 + d * ys[-1]

        return f

    v = jnp.array([0.3, 0.7, 1.1])
    second = jax.jit(
        lambda run: (jax.hessian(value(run))(v), jax.jacrev(jax.grad(value(run)))(v)),
        static_argnums=0,
    )
    wanted = second(lax.scan)
    for checkpoints in (None, 1, "all"):
        assert_close(second(ft.partial(loopkit.scan, checkpoints=checkpoints)), wanted)


@pytest.mark.exhaustive
@pytest.mark.parametrize("checkpoints", ["all", 3])
def test_a_second_derivative_in_what_the_first_is_not_in(checkpoints):
    """The values saved for the first derivative are not enough for the second."""

    def f(a, b, loops=loopkit, **how):
        step = lambda c: (c[0] + 1, jnp.sin(a * c[1]) + b * jnp.cos(b * c[1]))
        return loops.while_loop(lambda c: c[0] < 5, step, (0, 0.3), **how)[1]

    def mixed(f):
        value = lambda b: jax.vjp(lambda a: f(a, b), 0.7)[0]
        slope = lambda b: jnp.cos(jax.grad(f)(0.7, b))
        return jax.grad(value)(0.4), jax.grad(slope)(0.4)

    got = mixed(lambda a, b: f(a, b, max_steps=8, checkpoints=checkpoints))
    value = jax.jacfwd(lambda b: f(0.7, b, lax))(0.4)
    slope = jax.jacfwd(lambda b: jnp.cos(jax.jacfwd(lambda a: f(a, b, lax))(0.7)))(0.4)
    assert_close(got, (value, slope))


@pytest.mark.parametrize("result", [0, 1], ids=["carry", "ys"])
def test_no_second_derivative_of_a_linear_loop(result):
    """Nor is one of zeros computed, whether the carry is asked for or rows."""

    def f(x):
        step = lambda c, row: (0.5 * c, c * row)
        return jnp.sum(loopkit.scan(step, x * jnp.ones(2), jnp.arange(3.0))[result])

    along = lambda x: jax.jvp(jax.grad(f), (x,), (1.0,))
    assert "loopkit_pullback" in str(jax.make_jaxpr(along)(0.3))
    assert "loopkit_hessian" not in str(jax.make_jaxpr(along)(0.3))
    assert jax.hessian(f)(0.3) == 0.0
