"""Loops under `jax.vmap` with an axis name that their steps ask for."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import loopkit
from derivatives import assert_close

LANES = 4
XS = jnp.asarray([0.3, 0.7, -0.4, 0.9])
NEXT = [(i, (i + 1) % LANES) for i in range(LANES)]


class Masked:
    """The loops, each a scan of lax over more steps than are taken, of which some do not count."""

    @staticmethod
    def while_loop(cond, body, init, **_):
        def step(c, _):
            go = cond(c)
            return jax.tree.map(lambda new, old: jnp.where(go, new, old), body(c), c), None

        return lax.scan(step, init, length=9)[0]

    @staticmethod
    def scan(f, init, xs, until=None, **_):
        if until is None:
            return lax.scan(f, init, xs)

        def step(s, x):
            c, go = s
            new, y = f(c, x)
            held = jax.tree.map(lambda a, b: jnp.where(go, a, b), new, c)
            return (held, go & ~until(new, y)), jnp.where(go, y, 0)

        (c, _), ys = lax.scan(step, (init, True), xs)
        return c, ys

    @staticmethod
    def fori_loop(first, last, body, init, **_):
        step = lambda c, i: (jnp.where((i >= first) & (i < last), body(i, c), c), None)
        return lax.scan(step, init, jnp.arange(8, dtype=jnp.int32))[0]


def number():
    return lax.axis_index("lane")


def real():
    """Return a batch with values, to compute with."""
    return number().astype(float)


def counted(loops, until, body, x, **how):
    """While the first of two is below `until()`."""
    step = lambda c: (c[0] + 1, body(c[1]))
    return loops.while_loop(lambda c: c[0] < until(), step, (0, x), **how)[1]


def in_predicate(loops, x, w, **how):
    return counted(loops, lambda: 1 + number(), lambda c: jnp.sin(w * c) + c / 2, x, **how)


def in_body(loops, x, w, **how):
    return counted(loops, lambda: 3, lambda c: jnp.sin(w * c) + c * real(), x, **how)


def from_a_constant(loops, x, w, **how):
    """Nothing that goes in differs, nor has it a tangent."""
    return x * w * counted(loops, lambda: 3, lambda c: jnp.sin(c) + c * real(), 0.4, **how)


def summed(loops, x, w, **how):
    return counted(loops, lambda: 3, lambda c: c * lax.psum(jnp.sin(w * c), "lane"), x, **how)


def summed_predicate(loops, x, w, **how):
    more = lambda c: lax.psum(c, "lane") < 9
    return loops.while_loop(more, lambda c: c * w * 1.9 + 0.1, x, **how)


def mean_of_stopped_lanes(loops, x, w, **how):
    """Lanes that go on read what those that have stopped hold."""
    body = lambda c: jnp.sin(w * c) + c * lax.pmean(c * w, "lane")
    return counted(loops, lambda: 1 + number(), body, x, **how)


def permuted(loops, x, w, **how):
    body = lambda c: jnp.sin(w * c) + c * lax.ppermute(c * w, "lane", NEXT)
    return counted(loops, lambda: 3, body, x, **how)


def gathered(loops, x, w, **how):
    body = lambda c: jnp.sin(w * c) + c * lax.all_gather(c * w, "lane")[1]
    return counted(loops, lambda: 3, body, x, **how)


def scanned(loops, x, w, **how):
    def step(c, t):
        return jnp.sin(w * c) + t * lax.pmean(w * c, "lane"), c * real()

    c, ys = loops.scan(step, x, jnp.arange(3.0), **how)
    return c + ys.sum()


def ys_alone(loops, x, w, **how):
    c, ys = loops.scan(lambda c, t: (jnp.sin(c) + t, real()), 0.3, jnp.arange(3.0), **how)
    return c * x + ys.sum() * w


def stopping(loops, x, w, **how):
    """Stop lanes at different steps, with a collective in `until` alone."""

    def until(c, _):
        return (c[0] > number()) | (lax.psum(c[1], "lane") > 3)

    step = lambda c, t: ((c[0] + 1, jnp.sin(w * c[1]) + t), c[1] * w)
    c, ys = loops.scan(step, (0, x), jnp.arange(6.0) / 4, until=until, **how)
    return c[1] + ys.sum()


def stopping_apart(loops, x, w, **how):
    def step(c, t):
        return (c[0] + 1, jnp.sin(w * c[1]) + lax.pmean(c[1] * w, "lane") + t), c[1] * w

    until = lambda c, _: c[0] > number()
    c, ys = loops.scan(step, (0, x), jnp.arange(6.0) / 4, until=until, **how)
    return c[1] + ys.sum()


def to_the_number(loops, x, w, **how):
    return loops.fori_loop(
        0, 1 + number(), lambda i, c: jnp.sin(w * c) + i.astype(float) * c, x, **how
    )


def counting_lanes(loops, x, w, **how):
    return loops.fori_loop(
        0, 3, lambda i, c: jnp.sin(w * c) + (i * number()).astype(float) * c, x, **how
    )


PROGRAMS = [
    in_predicate,
    in_body,
    from_a_constant,
    summed,
    summed_predicate,
    mean_of_stopped_lanes,
    permuted,
    gathered,
    scanned,
    ys_alone,
    stopping,
    stopping_apart,
    to_the_number,
    counting_lanes,
]


def over_lanes(f, in_axes=(0, None), **how):
    return jax.vmap(f, in_axes, axis_name="lane", axis_size=LANES, **how)


SAME = (None, None)


def total(f, in_axes):
    return lambda x, w: jnp.sum(jnp.sin(over_lanes(f, in_axes)(x, w)))


def nested(f):
    """The axis is around another vmap, and inside another."""
    inner = lambda x, w: jax.vmap(lambda w: f(x, w), axis_name="inner")(w + jnp.arange(2.0) / 5)
    outer = lambda x: over_lanes(inner, SAME)(x, 0.8)
    return jax.vmap(outer, axis_name="outer")(XS[:2])


def two_names(f):
    """Steps ask for both."""
    both = lambda x, w: f(x * (1 + lax.axis_index("outer").astype(float)), w)
    return jax.vmap(lambda w: over_lanes(both)(XS, w), axis_name="outer")(jnp.asarray([0.8, 0.9]))


TRANSFORMS = {
    "value": lambda f: over_lanes(f)(XS, 0.8),
    "value of the same": lambda f: over_lanes(f, SAME)(0.4, 0.8),
    "jvp": lambda f: jax.jvp(over_lanes(f, SAME), (0.4, 0.8), (0.3, 1.0)),
    "tangents that differ": lambda f: over_lanes(lambda t, w: jax.jvp(f, (0.4, w), (t, 0.5)))(
        XS, 0.8
    ),
    "gradient of a sum": lambda f: jax.grad(total(f, (0, None)), (0, 1))(XS, 0.8),
    "gradient of a sum of the same": lambda f: jax.grad(total(f, SAME), (0, 1))(0.4, 0.8),
    "gradient in each": lambda f: over_lanes(jax.jit(jax.grad(f, (0, 1))), SAME)(0.4, 0.8),
    "cotangents that differ": lambda f: over_lanes(lambda t, w: jax.vjp(f, 0.4, w)[1](t))(XS, 0.8),
    "hessian": lambda f: jax.hessian(total(f, SAME), (0, 1))(0.4, 0.8),
    "hessian in each": lambda f: over_lanes(jax.hessian(f, (0, 1)), SAME)(0.4, 0.8),
    "nested": lambda f: nested(f),
    "gradient in nested": lambda f: nested(jax.grad(f, (0, 1))),
    "two names": lambda f: two_names(f),
}


FIRST = ["value of the same", "jvp", "gradient of a sum", "gradient in each"]
FIRST += ["cotangents that differ"]
LATER = [name for name in TRANSFORMS if name not in FIRST]


def taking_turns():
    """Each program with some of the first transformations; slowly with all, and half of others."""
    for k, program in enumerate(PROGRAMS):
        names = [*np.roll(FIRST, 2 * k), *np.roll(LATER, 3 * k)[: len(LATER) // 2]]
        for j, name in enumerate(names):
            marks = () if j < 2 else pytest.mark.exhaustive
            yield pytest.param(program, str(name), marks=marks, id=f"{program.__name__}-{name}")


@pytest.mark.parametrize(("program", "transform"), list(taking_turns()))
def test_as_with_lax(program, transform):
    take = TRANSFORMS[transform]
    mine = lambda x, w: program(loopkit, x, w, checkpoints=2)
    assert_close(take(mine), take(lambda x, w: program(Masked, x, w)))


@ft.cache
def summed_gradient(program):
    return TRANSFORMS["gradient of a sum"](lambda x, w: program(Masked, x, w))


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"checkpoints": "all", "max_steps": 9}, {"unroll": 3}, {}])
@pytest.mark.parametrize("program", [in_predicate, mean_of_stopped_lanes, permuted])
def test_however_it_is_run(program, how):
    got = TRANSFORMS["gradient of a sum"](lambda x, w: program(loopkit, x, w, **how))
    assert_close(got, summed_gradient(program))


@pytest.mark.slow
def test_in_loops_of_lax():
    mine = lambda x, w: mean_of_stopped_lanes(lax, x, w)
    got = TRANSFORMS["gradient of a sum"](loopkit.checkpointed(mine))
    assert_close(got, summed_gradient(mean_of_stopped_lanes))


@pytest.mark.slow
def test_the_name_of_a_mesh_axis_too():
    """`spmd_axis_name`, for lanes on different devices."""
    mesh = Mesh(np.asarray(jax.devices()[:LANES]), ("d",))
    xs = jax.device_put(XS, jax.NamedSharding(mesh, P("d")))
    for program in (in_predicate, mean_of_stopped_lanes, permuted):
        take = lambda loops, program=program: jax.jit(
            lambda xs: jax.grad(
                lambda xs, w: jnp.sum(
                    over_lanes(lambda x, w: program(loops, x, w), spmd_axis_name="d")(xs, w)
                ),
                (0, 1),
            )(xs, 0.8)
        )
        assert_close(take(loopkit)(xs), take(Masked)(XS))


@pytest.mark.exhaustive
def test_buffers_of_lanes_in_step():
    """A lane that has stopped writes nothing, and is still read."""

    def f(loops, x):
        def body(c):
            i, rows = c
            row = rows[i] * lax.pmean(rows[i], "lane") + 0.5
            return i + 1, rows.at[i + 1].set(row)

        how = {"buffers": lambda c: c[1]} if loops is loopkit else {}
        first = jnp.zeros(6).at[0].set(x)
        return loops.while_loop(lambda c: c[0] < 1 + number(), body, (0, first), **how)[1].sum()

    def take(loops):
        values = lambda xs: over_lanes(lambda x, _: f(loops, x))(xs, 0.0)
        return values(XS), jax.grad(lambda xs: jnp.sum(values(xs) ** 2))(XS)

    assert_close(take(loopkit), take(Masked))


def test_a_mesh_that_steps_open_is_not_of_lanes():
    """A loop around a shard_map, whose collectives are not between lanes."""
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("d",))
    each = jax.shard_map(
        lambda x: x / 2 + lax.psum(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P("d")
    )
    f = lambda loops, x: counted(loops, lambda: 3, each, jnp.stack([x, x + 1]))
    x = jax.device_put(0.3, jax.NamedSharding(mesh, P()))
    take = lambda loops: jax.jit(lambda x: jax.jacrev(lambda x: f(loops, x))(x))(x)
    assert_close(take(loopkit), take(Masked))
