"""Under jax's own modes and tools: disable_jit, checking_leaks, export, ahead of time."""

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax import lax

import loopkit
from derivatives import assert_close
from problems import CHECKPOINTS
from turns import in_turn


def power(x, n, **kwargs):
    """x^(2^n)"""
    return loopkit.while_loop(
        lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * c[1]), (0, x), **kwargs
    )[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_disable_jit(checkpoints):
    def run():
        f = lambda x: power(x, 3, max_steps=5, checkpoints=checkpoints)
        scanned = lambda x: loopkit.scan(
            lambda h, x: (h * x, h), x, jnp.ones(4) * 2, until=lambda h, _: h > 5.0
        )
        counted = lambda x: loopkit.fori_loop(0, 3, lambda i, x: x * (i + 1), x)
        return (
            jax.value_and_grad(f)(1.1),
            jax.jvp(f, (1.1,), (1.0,)),
            jax.jvp(jax.grad(f), (1.1,), (1.0,)),
            jax.jvp(scanned, (1.1,), (1.0,)),
            jax.vmap(jax.grad(f))(jnp.asarray([1.1, 0.9])),
            jax.grad(counted)(1.1),
        )

    wanted = run()
    with jax.disable_jit():
        got = run()
    assert_close(got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [None, 2, "all"])
def test_disable_jit_of_no_step(checkpoints):
    """A loop of no steps runs under `disable_jit`, where `lax.scan` refuses one."""

    def f(x):
        carry, ys = loopkit.scan(lambda c, x: (c * x, c), x, jnp.zeros(0), checkpoints=checkpoints)
        return carry**2 + jnp.sum(ys)

    with jax.disable_jit():
        assert (f(3.0), jax.grad(f)(3.0), jax.grad(jax.grad(f))(3.0)) == (9.0, 6.0, 2.0)


def test_disable_jit_runs_the_body_as_python():
    """For a debugger: concrete values, once for each step."""
    seen = []

    def body(x):
        seen.append(float(x))
        return x * 2

    with jax.disable_jit():
        loopkit.while_loop(lambda x: x < 5, body, 1.0)
        loopkit.scan(lambda x, _: (body(x), None), 1.0, length=2)
        with pytest.raises(TypeError, match=r"loopkit\.scan: `f` must return a pair"):
            loopkit.scan(lambda x, _: x, 1.0, length=2)
    assert seen == [1.0, 2.0, 4.0, 1.0, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", in_turn(CHECKPOINTS))
def test_no_tracer_leaks(checkpoints):
    with jax.checking_leaks():

        def f(x, w):
            inner = lambda x: loopkit.scan(lambda x, _: (jnp.sin(w * x), None), x, length=2)[0]
            return loopkit.while_loop(
                lambda c: c[0] < 3,
                lambda c: (c[0] + 1, inner(c[1])),
                (0, x),
                max_steps=5,
                checkpoints=checkpoints,
            )[1]

        jax.jit(jax.grad(f))(0.3, 0.7)
        jax.jit(jax.vmap(jax.hessian(f), (0, None)))(jnp.ones(2), 0.7)
        jax.jvp(f, (0.3, 0.7), (1.0, 1.0))


@pytest.mark.parametrize("what", ["value", "grad", "hessian", "vmap of grad"])
def test_export(what):
    """To StableHLO, to bytes, and back."""

    def f(x):
        body = lambda c: (c[0] + 1, jnp.sin(c[1]) * c[1] + 0.3)
        return loopkit.while_loop(lambda c: jnp.sum(c[1]) < 2.5, body, (0, x), checkpoints=3)[1][0]

    take = {
        "value": lambda f: f,
        "grad": jax.grad,
        "hessian": jax.hessian,
        "vmap of grad": lambda f: jax.vmap(jax.grad(f)),
    }[what]
    x = jnp.asarray([0.7, 0.9])
    x = jnp.stack([x, x + 0.3]) if what == "vmap of grad" else x
    compiled = jax.jit(take(f))
    exported = jax.export.export(compiled)(jax.ShapeDtypeStruct(x.shape, x.dtype))
    again = jax.export.deserialize(exported.serialize())
    assert_close(again.call(x), compiled(x))


def test_export_with_a_symbolic_batch():
    (size,) = jax.export.symbolic_shape("b")
    f = jax.jit(jax.vmap(jax.grad(lambda x: power(x, 3, checkpoints=1))))
    exported = jax.export.export(f)(jax.ShapeDtypeStruct((size,), "float64"))
    again = jax.export.deserialize(exported.serialize())
    assert_close(again.call(jnp.asarray([1.1, 0.5, 0.2])), f(jnp.asarray([1.1, 0.5, 0.2])))


@pytest.mark.slow
def test_export_with_symbolic_features():
    """A symbolic size decides whether an array is transposed before it is sliced."""
    (size,) = jax.export.symbolic_shape("n")

    def f(xs):
        start = jnp.ones(xs.shape[1])
        return loopkit.scan(lambda h, x: (jnp.sin(h) * x + h, h), start, xs)[1].sum()

    exported = jax.export.export(jax.jit(jax.grad(f)))(jax.ShapeDtypeStruct((4, size), "float64"))
    xs = jnp.linspace(0.0, 1.0, 12).reshape(4, 3)
    assert_close(exported.call(xs), jax.grad(f)(xs))


@pytest.mark.slow
def test_export_with_a_symbolic_length():
    def f(loops, xs):
        h, ys = loops.scan(lambda h, x: (jnp.sin(h) * x + h, h), 1.0, xs)
        return h + ys.sum() + loops.fori_loop(0, xs.shape[0], lambda i, h: h + xs[i], h)

    (size,) = jax.export.symbolic_shape("n")
    mine = lambda xs: f(loopkit, xs)
    replaced = loopkit.checkpointed(lambda xs: f(jax.lax, xs))
    for program in mine, replaced:
        exported = jax.export.export(jax.jit(program))(jax.ShapeDtypeStruct((size,), "float64"))
        again = jax.export.deserialize(exported.serialize())
        for n in 1, 5:
            xs = jnp.linspace(0.1, 1.0, n)
            assert_close(again.call(xs), f(jax.lax, xs))

    def scanned(xs, **settings):
        *_, info = loopkit.scan(lambda h, x: (h * x, h), 1.0, xs, return_info=True, **settings)
        return info.steps

    exported = jax.export.export(jax.jit(scanned))(jax.ShapeDtypeStruct((size,), "float64"))
    assert exported.call(jnp.ones(7)) == 7
    with pytest.raises(ValueError, match=r"`length` must be known .*symbolic n and `checkpoints`"):
        jax.export.export(jax.jit(lambda xs: scanned(xs, checkpoints=3)))(
            jax.ShapeDtypeStruct((size,), "float64")
        )


def test_ahead_of_time():
    compiled = jax.jit(jax.grad(lambda x: power(x, 2, checkpoints=1))).lower(1.5).compile()
    assert_close(compiled(1.5), jnp.asarray(4 * 1.5**3))


def test_jaxpr_can_be_printed_and_evaluated():
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: power(x, 2, checkpoints=1)))(1.5)
    assert str(jaxpr)
    assert_close(jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, 1.5), [jnp.asarray(4 * 1.5**3)])


def test_donated_arguments():
    f = jax.jit(lambda x: x + power(x, 2), donate_argnums=0)
    assert_close(f(jnp.asarray(1.5)), jnp.asarray(1.5 + 1.5**4))


def to_size(x):
    return loopkit.fori_loop(0, x.shape[0], lambda i, c: jnp.sin(c) + x[i], 0.0)


def to_size_bounded(x):
    return loopkit.fori_loop(
        0, x.shape[0], lambda i, c: jnp.sin(c) * x + x[i], x, max_steps=9, checkpoints=2
    ).sum()


def while_in_size(x):
    body = lambda c: (c[0] + 1, jnp.sin(c[1]) + x[c[0]])
    return loopkit.while_loop(lambda c: c[0] < x.shape[0], body, (0, 0.0))[1]


def written_rows(x):
    body = lambda i, c: c.at[i].set(jnp.sin(c[i - 1]) * x[i] + c[0])
    return loopkit.fori_loop(1, x.shape[0], body, x, buffers=True).sum()


def written_slices(x):
    """Write to a table: part of a row in some steps, several rows in others."""

    def body(c, _):
        i, rows = c
        rows = rows.at[i, 1].set(jnp.sin(rows[i - 1, 0]) * x[i - 1])
        return (i + 1, rows.at[jnp.stack([i, i - 1]), 0].add(rows[i, 1])), None

    init = 1, jnp.stack([x, x + 1], 1)
    return loopkit.scan(body, init, None, 3, buffers=lambda c: c[1])[0][1].sum()


def written_once(x):
    """Three rows, of as many as there are: they may come around to the first again."""

    def body(c, _):
        i, rows, s = c
        s = jnp.sin(s * rows[i - 1])
        return (i + 1, rows.at[i].set(s * x[0]), s), None

    (_, rows, s), _ = loopkit.scan(body, (-1, x, 0.7), None, 3, buffers=lambda c: c[1])
    return rows.sum() + s


def of_symbolic_length(x):
    c, ys = loopkit.scan(lambda c, x: (jnp.sin(c) + x, c * x), 0.3, x)
    return c + ys.sum()


def in_each_other(x):
    inner = lambda i, c: to_size(jnp.cos(x) * c) + x[i]
    return loopkit.fori_loop(0, x.shape[0], inner, 0.5)


def looking_now_and_then(x):
    """A loop of lax in it counts as well, and takes nobody knows how many steps."""

    def body(c):
        return lax.scan(lambda c, x: ((c[0] + 1, jnp.sin(c[1]) + x), None), c, x)[0]

    return loopkit.while_loop(lambda c: (c[0] < 7) & (c[1] < 1e3), body, (0, 0.3))[1]


SYMBOLIC = {
    "value": lambda f: f,
    "grad": jax.grad,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),))[1],
    "hessian": jax.hessian,
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, x / 2])),
}


OF_A_SIZE = [
    to_size,
    to_size_bounded,
    while_in_size,
    written_slices,
    written_rows,
    of_symbolic_length,
    in_each_other,
    written_once,
    looking_now_and_then,
]


def of_a_size():
    """Each program by a gradient or a tangent; slowly by two of the other transformations."""
    for k, f in enumerate(OF_A_SIZE):
        first, later = ["grad", "jvp"], ["value", "hessian", "vmap of grad"]
        names = [first[k % 2], later[k % 3], first[k % 2 - 1] if k % 3 else later[k % 3 - 1]]
        for j, name in enumerate(names):
            marks = pytest.mark.exhaustive if j else ()
            yield pytest.param(f, name, marks=marks, id=f"{f.__name__}-{name}")


@pytest.mark.slow
@pytest.mark.parametrize(("f", "transform"), list(of_a_size()))
def test_export_of_a_symbolic_size(f, transform):
    (size,) = jax.export.symbolic_shape("n")
    take = SYMBOLIC[transform](f)
    exported = jax.export.export(jax.jit(take))(jax.ShapeDtypeStruct((size,), "float64"))
    again = jax.export.deserialize(exported.serialize())
    for n in (4, 7) if f is written_slices else (1, 5):
        x = jnp.linspace(0.2, 1.1, n)
        assert_close(again.call(x), take(x))
