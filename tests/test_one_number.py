"""Gradients of loops in which a single number moves: they are made as the loop runs."""

import functools as ft
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.ad_checkpoint import saved_residuals
from jax.sharding import PartitionSpec as P

import loopkit
from derivatives import assert_close

VALUES = jnp.linspace(0.2, 1.0, 5)
ROWS = jnp.cos(jnp.arange(12.0))


def rows_of_a_scan(loops, a):
    step = lambda c, x: (jnp.sin(c * a + x) + a * jnp.roll(c, 1) / 4, c[:2] * a)
    c, ys = loops.scan(step, VALUES, ROWS)
    return jnp.stack([(c**2).sum(), jnp.cos(ys)[2:5].sum() * a])


def root(loops, a):
    inaccurate = lambda x: jnp.abs(x * x - a) > 1e-9 * a
    return loops.while_loop(inaccurate, lambda x: (x + a / x) / 2, 2.0)[None]


def written_in_place(loops, a):
    def step(i, s):
        table, c = s
        c = jnp.sin(c + a * table[(3 * i) % 4])
        return table.at[i % 4].set(c), c

    table, c = loops.fori_loop(0, 9, step, (jnp.ones(4), 0.5))
    return jnp.append(table, c)


def nested(loops, a):
    def outer(c, x):
        c = loops.while_loop(lambda s: s.sum() < 4, lambda s: s * (1.5 + a) + x**2, c / 9)
        return c, root(loops, a + c[0])[0]

    c, ys = loops.scan(outer, VALUES, ROWS[:5])
    return jnp.append(c, ys)


def complex_numbers(loops, a):
    turned = lambda x: jnp.exp(lax.complex(0 * x, a * x))
    step = lambda c, x: (c * turned(x) + lax.complex(a, a), c.imag)
    c, ys = loops.scan(step, lax.complex(VALUES, VALUES), ROWS)
    return jnp.append(jnp.abs(c), ys.sum(0))


def of_other_types(loops, a):
    b = a.astype("float32")
    step = lambda c, _: ((c[0] * b + 1, jnp.sin(c[1]) + b.astype(float)), c[0].astype(float))
    (c, d), ys = loops.scan(step, (jnp.ones(3, "float32"), 0.3), None, length=4)
    return jnp.append(c.astype(float), d + ys.sum())


LOOPS = [rows_of_a_scan, root, written_in_place, nested, complex_numbers, of_other_types]
"""Functions of a number, whose values are vectors."""


def weights(f, a):
    return jnp.cos(jnp.arange(1.0, 1 + f(a).size))


def pull(f, a):
    return jax.vjp(f, a)[1](weights(f, a))[0]


MODES = {
    "vjp": lambda f, a: pull(f, a),
    "jvp": lambda f, a: jax.jvp(f, (a,), (1.7,))[1],
    "jacrev": lambda f, a: jax.jacrev(f)(a),
    "linearize": lambda f, a: jax.linear_transpose(jax.linearize(f, a)[1], a)(f(a))[0],
    "vjp of vjp": lambda f, a: jax.grad(lambda a: pull(f, a))(a),
    "jvp of vjp": lambda f, a: jax.jacfwd(lambda a: pull(f, a))(a),
    "vjp of jvp": lambda f, a: pull(lambda a: jax.jvp(f, (a,), (0.3,))[1], a),
    "third": lambda f, a: jax.grad(jax.grad(lambda a: pull(f, a)))(a),
    "jit": lambda f, a: jax.jit(lambda a: pull(jax.jit(f), a))(a),
    "remat": lambda f, a: pull(jax.checkpoint(f), a),
    "vmap of vjp": lambda f, a: jax.vmap(lambda a: pull(f, a))(a * jnp.array([1.0, 0.8, 1.1])),
    "vjp of vmap": lambda f, a: pull(lambda a: jax.vmap(f)(a * VALUES).ravel(), a),
    "shared by lanes": lambda f, a: pull(lambda a: jax.vmap(lambda b: f(a) * b)(VALUES).ravel(), a),
}


def forward_only(f, a, mode):
    """Return the same derivative by forward mode through the loops of lax."""
    w, slope = weights(f, a), jax.jacfwd(f)
    pulled = lambda a: (slope(a) * w).sum()
    lanes = a * jnp.array([1.0, 0.8, 1.1])
    return {
        "vjp": lambda: pulled(a),
        "jvp": lambda: slope(a) * 1.7,
        "jacrev": lambda: slope(a),
        "linearize": lambda: (slope(a) * f(a)).sum(),
        "vjp of vjp": lambda: jax.jacfwd(pulled)(a),
        "jvp of vjp": lambda: jax.jacfwd(pulled)(a),
        "vjp of jvp": lambda: jax.jacfwd(pulled)(a) * 0.3,
        "third": lambda: jax.jacfwd(jax.jacfwd(pulled))(a),
        "jit": lambda: pulled(a),
        "remat": lambda: pulled(a),
        "vmap of vjp": lambda: jnp.stack(list(map(pulled, lanes))),
        "vjp of vmap": lambda: pulled_lanes(f, a, lambda f, a, v: f(a * v)),
        "shared by lanes": lambda: pulled_lanes(f, a, lambda f, a, v: f(a) * v),
    }[mode]()


def pulled_lanes(f, a, of_lane):
    every = lambda a: jnp.concatenate([of_lane(f, a, v) for v in VALUES])
    return (jax.jacfwd(every)(a) * weights(every, a)).sum()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("f", LOOPS)
def test_derivatives_are_those_of_forward_mode(f, mode):
    a = jnp.float64(0.7)
    found = MODES[mode](ft.partial(f, loopkit), a)
    tolerance = 1e-6 if f is of_other_types else 1e-8
    assert_close(found, forward_only(ft.partial(f, lax), a, mode), tolerance)


def primitives(f, *args):
    return str(jax.make_jaxpr(jax.grad(lambda *a: f(*a).sum()))(*args))


@pytest.mark.parametrize("f", LOOPS)
def test_no_loop_is_reversed(f):
    assert "loopkit_forward" not in primitives(ft.partial(f, loopkit), jnp.float64(0.7))


@jax.custom_vjp
def with_vjp(x):
    return jnp.sin(x)


with_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.cos(x),))


def scanned(a, step=lambda c, x: (jnp.sin(c * x), c), **options):
    return loopkit.scan(step, a, ROWS, **options)[0]


REVERSED = {
    "a vector": lambda a: scanned(a * VALUES),
    "two numbers": lambda a: scanned(a, lambda c, x: (c * a + x, None)),
    "a complex number": lambda a: jnp.abs(scanned(lax.complex(a, a), lambda c, x: (jnp.sin(c), c))),
    "a rule without a JVP": lambda a: scanned(a, lambda c, x: (with_vjp(c) * x, None)),
    "less precision": lambda a: scanned(a, lambda c, x: (c * x, c.astype("float32"))),
    "many rows": lambda a: loopkit.scan(lambda c, _: (c * a, c), 1.0, length=10_000)[1],
    "a number of carries": lambda a: scanned(a, checkpoints=3),
    "all": lambda a: scanned(a, checkpoints="all"),
    "bytes": lambda a: scanned(a, memory=200),
    "a plan": lambda a: scanned(a, checkpoints=loopkit.Plan(3)),
    "cotangents are checked": lambda a: scanned(a, debug="finite"),
}


@pytest.mark.parametrize("name", REVERSED)
def test_others_are_reversed(name):
    """A budget or a check is obeyed, and a rule without a JVP is enough."""
    f = REVERSED[name]
    assert re.search("loopkit_forward|_lax_scan", primitives(f, 0.7))
    difference = (f(0.7 + 1e-6) - f(0.7 - 1e-6)).sum() / 2e-6
    np.testing.assert_allclose(jax.grad(lambda a: f(a).sum())(0.7), difference, rtol=1e-6)


def test_many_steps_without_a_bound_keep_nothing():
    wide = jnp.linspace(0.0, 1.0, 10_000)

    def f(a, count):
        more = lambda s: s[0] < count
        step = lambda s: (s[0] + 1, s[1] + 0.1 * s[2], s[2] - a * jnp.sin(s[1]))
        return loopkit.while_loop(more, step, (0, wide, wide))[1].sum()

    compiled = jax.jit(jax.grad(f)).lower(0.3, 5).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 10 * wide.nbytes


def test_rows_that_do_not_count_may_overflow():
    """The slopes of later steps become infinite, and have no part in the gradient."""

    def chaotic(a, **options):
        step = lambda c, _: (3.7 * c * (1 - c), c)
        last, ys = loopkit.scan(step, a, length=3000, **options)
        return last, ys[:5].sum()

    slope = lambda **how: jax.grad(lambda a: chaotic(a, **how)[1])(0.3)
    assert not jnp.isfinite(jax.jvp(chaotic, (0.3,), (1.0,))[1][0])
    np.testing.assert_allclose(slope(), slope(checkpoints=9), rtol=1e-12)


def test_jax_checkpoint_keeps_no_slopes():
    """Unless its policy says so."""
    f = lambda policy: jax.checkpoint(ft.partial(rows_of_a_scan, loopkit), policy=policy)
    kept = lambda policy: [t.str_short() for t, _ in saved_residuals(f(policy), jnp.float64(0.7))]
    policies = jax.checkpoint_policies
    assert "float64[12,2]" not in kept(policies.nothing_saveable)
    assert "float64[12,2]" in kept(policies.everything_saveable)


def test_lanes_share_a_number_or_have_their_own():
    counts = jnp.arange(100) % 23

    def f(a, count, **options):
        step = lambda s: (s[0] + 1, jnp.sin(s[1]) * a + a)
        return loopkit.while_loop(lambda s: s[0] < count, step, (0, 0.1), **options)[1]

    def both(**options):
        of = ft.partial(f, **options)
        shared = jax.grad(lambda a: jax.vmap(of, (None, 0))(a, counts).sum())(0.7)
        return shared, jax.vmap(jax.grad(of))(counts / 30, counts)

    assert_close(both(), both(checkpoints=4, lanes="wait"), 1e-11)


@pytest.mark.slow
def test_devices_share_a_number_or_have_their_own():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(a, v, c, _):
        c = jnp.sin(c * a) + v
        return c + lax.psum(c * a, "i") / 9, c

    def f(a, **options):
        own = lambda a, v: loopkit.scan(ft.partial(step, a[0], v), v, length=5, **options)[0]
        spread = jax.shard_map(own, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
        return spread(a, VALUES[:4]).sum()

    numbers = jnp.linspace(0.2, 0.9, 4)
    assert_close(jax.grad(f)(numbers), jax.grad(ft.partial(f, checkpoints=2))(numbers), 1e-12)


def test_jet_goes_through_the_gradient():
    from jax.experimental import jet

    f = lambda a: scanned(jnp.sin(a)) ** 2
    value, terms = jet.jet(jax.grad(f), (0.7,), ((1.0, 0.0),))
    slope = jax.grad(lambda a: scanned(jnp.sin(a), checkpoints=3) ** 2)
    wanted = slope(0.7), [jax.jacfwd(slope)(0.7), jax.jacfwd(jax.jacfwd(slope))(0.7)]
    assert_close((value, terms), wanted, 1e-9)


def test_lanes_of_a_rule_that_mixes_them_have_numbers_of_their_own():
    @jax.custom_batching.custom_vmap
    def mixed(x):
        return jnp.sin(x)

    @mixed.def_vmap
    def rule(size, batched, x):
        return jnp.sin(x) + x.mean(), True

    step = lambda c, x: (mixed(c * x), c)
    along = lambda loops: lambda a, t: jax.jvp(lambda a: loops.scan(step, a, ROWS), (a,), (t,))
    numbers, tangents = jnp.array([0.3, 0.5]), jnp.array([1.0, -2.0])
    found, wanted = (jax.vmap(along(loops))(numbers, tangents) for loops in (loopkit, lax))
    assert_close(found, wanted, 1e-12)
