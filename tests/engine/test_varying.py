"""Jaxprs of which everything varies between devices: what they compute stays, in every equation."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import loopkit
from loopkit import _jax
from loopkit._engine.passes.varying import all_varying, varying

from .small_loops import assert_same, make_loop

MESH = Mesh(np.asarray(jax.devices()[:4]), ("d",))
XS = np.array([0.3, 0.7, 0.4, 0.9])
W = np.array([0.8, 1.1])


@jax.custom_jvp
def ruled(x, w):
    return jnp.sin(x * w)


@ruled.defjvp
def _(primals, tangents):
    (x, w), (t, s) = primals, tangents
    return ruled(x, w), 2 * jnp.cos(x * w) * (t * w + x * s)


@jax.custom_vjp
def ruled_backward(x, k):
    return jnp.sin(x) * k.astype(float)


ruled_backward.defvjp(
    lambda x, k: (ruled_backward(x, k), (x, k)),
    lambda r, ct: (3 * ct * jnp.cos(r[0]) * r[1].astype(float), None),
)

PROGRAMS = {
    "call": lambda x, w: jax.jit(lambda v: jnp.sin(v) * 2.0)(w) + x,
    "cond": lambda x, w: lax.cond(w[0] > 0.5, jnp.sin, jnp.cos, w) + x,
    "scan": lambda x, w: lax.scan(lambda c, k: (jnp.sin(c) * k, c), w[0], w)[1] + x,
    "loop": lambda x, w: loopkit.while_loop(lambda c: c[0] < 3.0, lambda c: c * 1.5, w) * x,
    "custom_jvp": lambda x, w: ruled(w, w) + x,
    "custom_vjp": lambda x, w: ruled_backward(w * x, jnp.int32(7 * w)),
    "checkpoint": lambda x, w: jax.checkpoint(jnp.sin)(w) + x,
    "scatter": lambda x, w: jnp.zeros(2).at[jnp.int32(w[:1])].add(w[1]) + x,
    "solve": lambda x, w: jnp.linalg.solve(jnp.eye(2) + w[0], w) + x,
}


def on_devices(fun):
    """fun(x, w), with one x to a device; w is the same on all."""
    local = lambda xs, w: jax.tree.map(lambda v: v[None], fun(xs[0], w))
    return jax.shard_map(local, mesh=MESH, in_specs=(P("d"), P()), out_specs=P("d"))


def rewritten(program, x, w):
    """A jaxpr all of which varies, of a program of one that varies, and one that does not."""
    like = jax.typeof(x)
    jaxpr = _jax.trace_closed(lambda x, w: [program(x, w)], [like, jax.typeof(w)], "step")
    new = all_varying(jaxpr, [jax.typeof(w), like])
    assert all(map(_jax.varying, [*new.in_avals, *new.out_avals]))
    return lambda *values: _jax.call_jaxpr(new)(*values)[0]


def test_values_and_slopes_stay():
    def every(how):
        def local(x, w):
            programs = [how(program, x, w) for program in PROGRAMS.values()]
            w = lax.pcast(w, "d", to="varying")
            slope = lambda f: jax.grad(lambda x: jnp.sum(f(x, w * x)))(x)
            return [(f(x, w), slope(f)) for f in programs]

        return jax.jit(on_devices(local))(XS, W)

    found, wanted = every(rewritten), every(lambda program, x, w: program)
    for both in zip(found, wanted, strict=True):
        assert_same(*both)


@pytest.mark.exhaustive
def test_what_is_made_varying_before():
    """It is so already."""

    def program(x, w):
        varies = lax.pcast(w * 2.0, "d", to="varying")
        return varies + lax.axis_index("d").astype(x.dtype) * x + jnp.sum(varies)

    def plain(x, w):
        return jnp.sum(w * 2.0) + w * 2.0 + lax.axis_index("d").astype(x.dtype) * x

    def again(x, w):
        return rewritten(program, x, w)(x, lax.pcast(w, "d", to="varying"))

    assert_same([on_devices(again)(XS, W)], [on_devices(plain)(XS, W)])


def test_constants_of_a_jaxpr_inside():
    def local(x, w):
        like = jax.typeof(x)
        inner = _jax.trace_closed(lambda a, b: [a - b], [jax.typeof(w)] * 2, "inner")
        j = _jax.open_jaxpr(inner)
        j = j.replace(constvars=j.invars[:1], invars=j.invars[1:])
        held = jax.extend.core.ClosedJaxpr(j, [np.array([5.0, 7.0])])
        return _jax.call_jaxpr(all_varying(held, [like]))(lax.pcast(w, "d", to="varying"))[0]

    assert_same([on_devices(local)(XS, W)], [np.stack([np.array([5.0, 7.0]) - W] * 4)])


@pytest.mark.slow
def test_a_loop_varies_as_its_predicate_does():
    asks = lambda limit, carry: carry[0] < limit[0]
    step = lambda consts, carry, x: ([carry[0] + 1, carry[1] * consts[0]], [carry[1]])
    same, _ = make_loop(step, [0.5], [0, 0.3], length=5, cond=asks, cond_consts=[3])
    fixed, _ = make_loop(step, [0.5], [0, 0.3], length=5)

    def local(x, w):
        limit = _jax.type_like(same.cond_types[0], [jax.typeof(x)])
        types = [limit, *same.carry_types]
        cond = _jax.trace_closed(lambda *v: [asks(v[:1], v[1:])], types, "asks")
        apart = same.replace(cond=cond)
        assert varying(same) is same
        assert varying(fixed) is fixed
        new = varying(apart).loop
        assert all(map(_jax.varying, [*new.operand_types, *new.result_types]))
        given = varying(apart).map_operands([3, 0.5, 0, 0.3])
        assert all(map(_jax.varying, map(jax.typeof, given)))
        assert varying(apart).map_results([1, 2]) == [1, 2]
        return x

    on_devices(local)(XS, W)
