"""Loops of other libraries that have a derivative, whatever their steps are made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from derivatives import assert_close
from test_foreign_errors import LOOPS, scanned, schur, until, with_vjp


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_only_is_a_way_out(loop):
    """The loop whose derivative nobody needs."""
    step = lambda x: schur(x)
    f = lambda x: scanned(jnp.sin, x) + lax.stop_gradient(LOOPS[loop](step, lax.stop_gradient(x)))
    x = jnp.asarray(0.7)
    wanted = jax.grad(lambda x: scanned(jnp.sin, x))(x)
    for only in (None, lambda site: site.source.endswith("(scanned)") and loop != "scan"):
        assert_close(jax.grad(loopkit.checkpointed(f, only=only, strict=False))(x), wanted)


def test_all_needs_no_bound_where_nobody_differentiates():
    """A loop in a function that has a rule, the value alone, forward mode, a table of the loops."""

    @jax.custom_vjp
    def solved(x):
        return until(jnp.sin, x)

    solved.defvjp(lambda x: (solved(x), x), lambda x, ct: (ct * jnp.cos(x),))
    kept = loopkit.checkpointed(lambda x: scanned(solved, x), checkpoints="all")
    assert_close(jax.grad(kept)(0.7), jax.grad(lambda x: scanned(solved, x))(0.7))
    plain = loopkit.checkpointed(lambda x: until(jnp.sin, x), checkpoints="all")
    assert_close(plain(0.7), until(jnp.sin, 0.7))
    assert_close(jax.jacfwd(plain)(0.7), jax.jacfwd(lambda x: until(jnp.sin, x))(0.7))
    assert loopkit.explain(plain, 0.7)[0].row[5] == "no gradient"


def with_reference(x):
    ref = jax.new_ref(x)
    ref[...] = ref[...] * 2
    return ref[...]


def with_integers(x):
    body = lambda c: (c[0] * 1.5, c[1] + 1, ~c[2], jax.random.split(c[3])[0], c[4] ^ 3)
    start = x, 0, jnp.asarray(True), jax.random.key(0), jnp.uint8(7)
    out = lax.while_loop(lambda c: (c[1] < 4) & (c[0] < 9), body, start)
    return out[0] * out[1] + jax.random.normal(out[3]) * out[0] + out[4].astype(float)


def with_root(x):
    newton = lambda f, z: lax.fori_loop(0, 20, lambda _, z: z - f(z) / (3 * z * z), z)
    step = lambda x: lax.custom_root(lambda z: z**3 - x, x, newton, lambda g, y: y / g(1.0))
    return scanned(step, x)


WORK = {
    "references of a step's own": lambda x: scanned(with_reference, x),
    "integers, bools, keys": with_integers,
    "a while loop over integers alone": lambda x: x * lax.while_loop(lambda i: i < 9, abs, 9),
    "custom_root": with_root,
    "custom_linear_solve": lambda x: scanned(
        lambda x: lax.custom_linear_solve(
            lambda v: v * x, x * x, lambda _, b: b / x, lambda _, b: b / x
        ),
        x,
    ),
    "custom_vjp": lambda x: scanned(with_vjp, x),
    "reduce by a product": lambda x: scanned(
        lambda x: lax.reduce(jnp.stack([x, x]), 1.0, lax.mul, (0,)), x
    ),
    "bits": lambda x: scanned(
        lambda x: lax.bitcast_convert_type(lax.bitcast_convert_type(x, "int64"), "float64") + x, x
    ),
    "no steps": lambda x: lax.scan(lambda c, _: (c * 2, c), x, length=0)[0],
    "no elements": lambda x: scanned(lambda c: c * x, jnp.zeros((0, 2))).sum() + x,
    "complex": lambda x: jnp.abs(scanned(lambda c: c * (1 + 2j), x + 0j)),
    "half precision": lambda x: scanned(jnp.sin, x.astype("bfloat16")).astype(float),
    "an ordered report": lambda x: scanned(
        lambda x: (jax.debug.callback(lambda v: None, x, ordered=True), x * 2)[1], x
    ),
    "stop_gradient": lambda x: x * scanned(lambda x: schur(x), lax.stop_gradient(x)),
}


@pytest.mark.parametrize("name", WORK)
def test_what_works(name):
    f, x = WORK[name], jnp.asarray(0.7)
    unrolled = jax.grad(f)(x) if name != "integers, bools, keys" else jax.jacfwd(f)(x)
    for how in (lambda g: g, jax.jit):
        assert_close(how(jax.grad(loopkit.checkpointed(f)))(x), unrolled)
    with loopkit.replace_lax_loops():
        assert_close(jax.grad(f)(x), unrolled)


def test_integers_have_no_derivative_here_either():
    f = loopkit.checkpointed(lambda n: lax.fori_loop(0, 3, lambda _, n: n * 2, n))
    with pytest.raises(TypeError, match="grad requires real- or complex-valued inputs"):
        jax.grad(f)(3)
    value, pullback = jax.vjp(f, 3)
    (slope,) = pullback(np.zeros((), jax.dtypes.float0))
    assert (value, slope.dtype) == (24, jax.dtypes.float0)
