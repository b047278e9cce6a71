"""Errors at run time are heard where only a derivative is used, or a part of the result."""

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
    """With respect to a constant that the loop closes over."""
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


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("f", [value, with_w], ids=lambda f: f.__name__)
def test_throw(f, transform):
    take = TRANSFORMS[transform]
    with pytest.raises(Exception, match="`max_steps` must be enough for `cond_fun`"):
        jax.block_until_ready(jax.jit(take(f))(1.0))
    enough = lambda x: f(x, max_steps=90)
    bounded = lambda x: loopkit.while_loop(
        lambda c: c < 50.0,
        lambda c: jnp.sin(c) + (SCALE if f is value else SCALE * x) * c,
        x if f is value else 1.0,
        max_steps=90,
    )
    assert_close(jax.jit(take(enough))(1.0), jax.jit(take(bounded))(1.0))


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


def test_zeros_stay_symbolic():
    """What has no derivative gets none from a check."""

    def f(x, n):
        out = long(1.0, max_steps=n)[1]
        return out + x

    text = str(jax.make_jaxpr(jax.grad(f), static_argnums=1)(1.0, 90))
    assert "loopkit_heard" not in text.replace(" ", "").split("add")[-1]
    assert jax.jit(jax.grad(f), static_argnums=1)(1.0, 3) == 1.0


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


SLOW = ("hessian", "vmap of grad", "vjp")


@pytest.mark.parametrize(
    "transform",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in OF_ROWS],
)
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("checkpoints", ["all", None, 1])
def test_buffers(transform, linear, checkpoints):
    """Also where the derivative does not read the value that was read."""
    if linear and transform == "hessian":
        return  # zero: nothing is read
    take = OF_ROWS[transform]
    f = lambda xs, **how: rows(xs, linear=linear, checkpoints=checkpoints, **how)
    checked = lambda **how: jax.jit(take(lambda xs: f(xs, checks=True, **how)))
    with pytest.raises(Exception, match=r"is read at index \d in step \d, where nothing has been"):
        jax.block_until_ready(checked(back=0)(XS))
    with pytest.raises(Exception, match=r"at index [67] in step [56], outside of its shape"):
        jax.block_until_ready(checked(last=8)(jnp.pad(XS, (0, 2))))
    assert_close(checked()(XS), take(f)(XS))


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
