"""Errors at run time are heard where only a derivative is used, or a part of the result."""

import functools as ft
import itertools

import jax
import jax.numpy as jnp
import pytest

import loopkit
from derivatives import assert_close

SCALE = 1.6


def long(x, w=SCALE, max_steps=3, return_info=False):
    """More steps than there may be."""
    how = {"max_steps": max_steps, "throw": True, "return_info": return_info}
    body = lambda c: (c[0] + 1, jnp.sin(c[1]) + w * c[1])
    return loopkit.while_loop(lambda c: c[1] < 50.0, body, (0, x), **how)


def value(x, **how):
    return long(x, **how)[1]


def with_w(x, **how):
    """Differentiate with respect to a constant that the loop closes over."""
    return long(1.0, SCALE * x, **how)[1]


DERIVATIVES = {
    "value": lambda f: f,
    "tangent": lambda f: lambda x: jax.jvp(f, (x,), (1.0,))[1],
    "grad": jax.grad,
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](2.0),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](2.0),
    "jacfwd": jax.jacfwd,
    "jacrev": jax.jacrev,
    "hessian": jax.hessian,
    "reverse over reverse": lambda f: jax.grad(jax.grad(f)),
    "second tangent": lambda f: jax.jacfwd(jax.jacfwd(f)),
}
LANES = jnp.asarray([60.0, 1.0])
TRANSFORMS = {
    **DERIVATIVES,
    **{
        f"vmap of {name}": lambda f, take=take: lambda x: jax.vmap(take(f))(LANES * x)
        for name, take in DERIVATIVES.items()
    },
    "gradient of vmap": lambda f: jax.grad(lambda x: jnp.sum(jax.vmap(f)(LANES * x))),
    "checkpointed": lambda f: jax.grad(jax.checkpoint(f)),
}


def in_python(x, w):
    for _ in range(3):
        x = jnp.where(x < 50.0, jnp.sin(x) + w * x, x)
    return x


def thrown():
    """Each transformation of one of the two is quick."""
    both = enumerate([value, with_w])
    for (k, transform), (j, f) in itertools.product(enumerate(TRANSFORMS), both):
        marks = pytest.mark.exhaustive if (k + k // len(DERIVATIVES) + j) % 2 else ()
        yield pytest.param(transform, f, marks=marks, id=f"{transform}-{f.__name__}")


@pytest.mark.parametrize(("transform", "f"), list(thrown()))
def test_throw(transform, f):
    take = TRANSFORMS[transform]
    run = jax.jit(take(f))
    with pytest.raises(Exception, match="`max_steps` must be enough for `cond_fun`"):
        jax.block_until_ready(run(1.0))
    # From here, or with a w as large, three steps are enough.
    reference = lambda x: in_python(x, SCALE) if f is value else in_python(1.0, SCALE * x)
    assert_close(run(15.0), take(reference)(15.0))


PARTS = {
    "an integer": lambda out: out[0][0],
    "steps": lambda out: out[1].steps,
    "stopped": lambda out: out[1].stopped,
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("lanes", [False, True])
def test_throw_where_one_part_is_used(part, lanes):
    f = lambda x, n: PARTS[part](long(x, max_steps=n, return_info=True))
    run = jax.vmap(f, (0, None)) if lanes else f
    run, x = jax.jit(run, static_argnums=1), LANES if lanes else 1.0
    jax.block_until_ready(run(x, 90))
    with pytest.raises(Exception, match="`max_steps` must be enough"):
        jax.block_until_ready(run(x, 3))


@pytest.mark.slow
def test_zeros_stay_symbolic():
    """A check gives no derivative to a value without one: zeros would be NaN before a root at 0."""

    def f(x):
        step = lambda c: (1.5 * c[0], 0.9 * c[1])
        y, z = loopkit.while_loop(lambda c: c[0] < 50.0, step, (x, 0.0), max_steps=10, throw=True)
        return y + jnp.sqrt(z)

    assert_close(jax.grad(f)(1.0), jnp.asarray(1.5**10))
    assert_close(jax.jvp(f, (1.0,), (1.0,))[1], jnp.asarray(1.5**10))


def test_what_is_no_part_of_a_derivative_is_not_heard():
    f = lambda x: value(1.0) + x
    assert jax.jit(jax.grad(f))(1.0) == 1.0


@pytest.mark.slow
def test_one_lane_is_enough():
    f = jax.jit(jax.vmap(jax.grad(value)))
    jax.block_until_ready(f(jnp.asarray([60.0, 70.0])))
    with pytest.raises(Exception, match="`max_steps` must be enough"):
        jax.block_until_ready(f(jnp.asarray([60.0, 1.0])))


# ---------------------------------------------------------------- buffers


XS = jnp.linspace(0.5, 1.5, 6)


def rows(xs, back=1, linear=False, last=5, **how):
    """Row after row, from the row `back` before; the first from itself if `back` is 0."""

    def body(i, ys):
        before = ys[i - back]
        return ys.at[i].set(xs[i] + before if linear else xs[i] * before)

    ys = jnp.zeros(6).at[0].set(xs[0])
    return jnp.sum(loopkit.fori_loop(1, last, body, ys, buffers=True, **how))


OF_ROWS = {
    "value": lambda f: f,
    "tangent": lambda f: lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))[1],
    "grad": jax.grad,
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](2.0),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](jnp.ones_like(x)),
    "hessian": jax.hessian,
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, 2 * x])),
    "checkpointed": lambda f: jax.grad(jax.checkpoint(f)),
}


UNWRITTEN = {"back": 0}, 0, r"before it is read[.] .*Got: a read at index \d in step \d"
OUTSIDE = {"last": 8}, 2, r"within its shape .*Got: index [67] in step [56]"


def of_rows():
    """Each way to differentiate, of linear rows or of others; slowly of the other of the two."""
    for t, transform in enumerate(OF_ROWS):
        for k, marks in enumerate([(), pytest.mark.exhaustive]):
            linear = (t + k) % 2 == 0
            if linear and transform == "hessian":
                continue  # zero: nothing is read
            checkpoints = ["all", None, 1][(t + k) % 3]
            wrong = (UNWRITTEN, OUTSIDE)[(t // 2 + k) % 2]
            name = f"{transform}-{linear}-{checkpoints}-{next(iter(wrong[0]))}"
            yield pytest.param(transform, linear, checkpoints, *wrong, marks=marks, id=name)


@ft.cache
def unchecked(transform, linear):
    return OF_ROWS[transform](lambda xs: rows(xs, linear=linear))(XS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transform", "linear", "checkpoints", "wrong", "more", "text"), list(of_rows())
)
def test_buffers(transform, linear, checkpoints, wrong, more, text):
    """Also where the derivative does not read the value that was read."""

    def checked(**how):
        f = lambda xs: rows(xs, linear=linear, checkpoints=checkpoints, debug="bounds", **how)
        return jax.jit(OF_ROWS[transform](f))

    with pytest.raises(Exception, match=text):
        jax.block_until_ready(checked(**wrong)(jnp.pad(XS, (0, more))))
    assert_close(checked()(XS), unchecked(transform, linear))


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["value", "tangent", "grad", "linearize"])
def test_tensor_array(transform):
    def f(n):
        def run(xs):
            array = loopkit.TensorArray.empty(4, jnp.zeros(()))
            out = loopkit.scan(lambda a, x: (a.append(x * x), None), array, xs[:n])[0]
            return jnp.sum(out.append(xs[0]).stack() if n < 4 else out.append(xs[0])._data[0])

        return jax.jit(OF_ROWS[transform](run))

    jax.block_until_ready(f(3)(XS))
    with pytest.raises(Exception, match="must stay within the capacity of 4"):
        jax.block_until_ready(f(4)(XS))


def test_a_write_before_the_first_element():
    """As an index past the capacity: at the loop's end, where nobody knows the index before."""

    def loop(back):
        body = lambda c: (c[0] + 1, c[1].write(c[0] - back, c[0] * jnp.ones(3)))
        end = loopkit.while_loop(
            lambda c: c[0] < 3, body, (0, loopkit.TensorArray.empty(4, jnp.ones(3)))
        )
        return end[1].stack()

    assert_close(jax.jit(loop)(0)[:3], jnp.outer(jnp.arange(3.0), jnp.ones(3)))
    for f in (loop, jax.jit(loop)):
        with pytest.raises(
            Exception, match=r"must stay within the capacity of 4, .*an index before the first"
        ):
            jax.block_until_ready(f(2))
    two = loopkit.TensorArray.empty(4, jnp.ones(3)).append(jnp.ones(3)).append(jnp.ones(3))
    write = jax.jit(lambda array, i: array.write(i, jnp.ones(3)))
    assert len(write(two, -2)) == 2
    with pytest.raises(Exception, match="an index before the first"):
        jax.block_until_ready(write(two, -3))
