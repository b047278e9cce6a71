"""Programs that differ in one thing, wherever a thing can be, are not taken for one another.

Each is a fresh function that holds a number in some place; two of them run one after the other,
in every mode, and lax runs them too.
"""

import functools
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from tolerances import assert_near

RATE = 2.0


class Owner:
    rate = 2.0

    def __init__(self, rate):
        self.own = rate

    def scaled(self, x):
        return x * self.own

    def looped(self, x):
        return lax.fori_loop(0, 2, lambda _, y: y * self.own, x)

    @classmethod
    def looped_for_all(cls, x):
        return lax.fori_loop(0, 2, lambda _, y: y * cls.rate, x)


class Heir(Owner):
    pass


class Meta(type):
    @property
    def found(cls):
        return Meta.rate


class Made(metaclass=Meta):
    pass


class Layer(eqx.Module):
    settings: object = eqx.field(static=True)

    def __call__(self, x):
        return x * self.settings.rate


MODULE = types.ModuleType("settings")
exec("SCALE = 2.0\ndef helper(x): return x * SCALE", MODULE.__dict__)
HELD = {"rate": [2.0]}
OWNER, LAYER = Owner(2.0), Layer(types.SimpleNamespace(rate=2.0))
TABLE = np.full(3, 2.0)


def through(change, function):
    """Change a state, then return what a fresh function computes from it."""

    def make(v):
        change(v)
        return lambda x: function(x)

    return make


def set_in(owner, name):
    return lambda v: setattr(owner, name, v)


READ = {
    "a global": through(lambda v: globals().update(RATE=v), lambda x: x * RATE),
    "an item of a list in a dict": through(
        lambda v: HELD.update(rate=[v]), lambda x: x * HELD["rate"][0]
    ),
    "an attribute": through(set_in(OWNER, "own"), lambda x: x * OWNER.own),
    "a bound method": through(set_in(OWNER, "own"), OWNER.scaled),
    "an attribute of a class": through(set_in(Owner, "rate"), lambda x: x * Owner.rate),
    "an inherited attribute": through(set_in(Owner, "rate"), lambda x: x * Heir.rate),
    "a property of a metaclass": through(set_in(Meta, "rate"), lambda x: x * Made.found),
    "getattr": through(set_in(Owner, "rate"), lambda x: x * getattr(Owner, "ra" + "te")),
    "a function of a module": through(set_in(MODULE, "SCALE"), lambda x: MODULE.helper(x)),
    "a function of a module, itself": through(set_in(MODULE, "SCALE"), lambda x: MODULE.helper(x)),
    "behind vmap": through(
        set_in(MODULE, "SCALE"), lambda x: jax.vmap(lambda x: MODULE.helper(x))(x[None])[0]
    ),
    "a static field": through(set_in(LAYER.settings, "rate"), lambda x: LAYER(x)),
    "an array of numpy": through(TABLE.fill, lambda x: x * TABLE[0]),
    "an array of numpy, whole": through(TABLE.fill, lambda x: x * jnp.asarray(TABLE).mean()),
    "a builtin": through(lambda v: HELD.update(get=[v]), lambda x: x * HELD.get("get")[0]),
}


def with_jvp(primal, slope):
    f = jax.custom_jvp(primal)
    f.defjvp(lambda p, t: (f(*p), slope(*p) * t[0]))
    return f


def with_vjp(primal, slope):
    f = jax.custom_vjp(primal)
    f.defvjp(lambda x: (f(x), x), lambda x, ct: (slope(x) * ct,))
    return f


def reading_rule(kind):
    """The very same function with a rule, which reads what has changed."""
    f = kind(lambda x: 2.0 * x, lambda x: HELD["rule"])

    def make(v):
        HELD["rule"] = v
        return lambda x: f(x)

    return make


def in_batches(v):
    @jax.custom_batching.custom_vmap
    def f(x):
        return v * x

    f.def_vmap(lambda size, batched, x: (v * x, batched[0]))
    return f


def whole(v):
    return np.full(3, v)


LARGE = 2000


HELD_IN = {
    "a cell": lambda v: lambda x: x * v,
    "a default": lambda v: lambda x, v=v: x * v,
    "a keyword": lambda v: functools.partial(lambda x, *, v: x * v, v=v),
    "a partial": lambda v: functools.partial(lambda v, x: x * v, v),
    "a constant of numpy in jit": lambda v: jax.jit(lambda x: x * jnp.asarray(whole(v)).mean()),
    "a large constant of numpy in jit": lambda v: jax.jit(
        lambda x: x * jnp.asarray(np.full(LARGE, v)).mean()
    ),
    "a constant of jax in jit": lambda v: (lambda w: jax.jit(lambda x: x * w.mean()))(
        jnp.full(3, v)
    ),
    "jit in jit": lambda v: jax.jit(jax.jit(lambda x: x * jnp.asarray(whole(v)).mean())),
    "a branch": lambda v: lambda x: lax.cond(x > 0, jax.jit(lambda x: x * whole(v)[0]), jnp.sin, x),
    "an array of a branch": lambda v: (
        lambda x: lax.cond(x > 0, lambda x: x * jnp.asarray(whole(v)).mean(), jnp.sin, x)
    ),
    "a switch": lambda v: lambda x: lax.switch(1, [jnp.sin, lambda x: x * v, jnp.cos], x),
    "an inner scan": lambda v: lambda x: lax.scan(lambda c, w: (c * w, None), x, whole(v)[:1])[0],
    "an inner loop": lambda v: (
        lambda x: loopkit.fori_loop(0, 1, jax.jit(lambda i, c: c * jnp.asarray(whole(v)).mean()), x)
    ),
    "an inner fori_loop": lambda v: (
        lambda x: lax.fori_loop(0, 1, lambda i, c: c * jnp.asarray(whole(v))[i], x)
    ),
    "checkpoint": lambda v: jax.checkpoint(lambda x: x * jnp.asarray(whole(v)).mean()),
    "a custom JVP": lambda v: with_jvp(lambda x: v * x, lambda x: v),
    "the rule of a custom JVP": lambda v: with_jvp(lambda x: 2.0 * x, lambda x: v),
    "an array of the rule of a custom JVP": lambda v: with_jvp(
        lambda x: 2.0 * x, lambda x: jnp.asarray(whole(v)).mean()
    ),
    "a custom VJP": lambda v: with_vjp(lambda x: v * x, lambda x: v),
    "the rule of a custom VJP": lambda v: with_vjp(lambda x: 2.0 * x, lambda x: v),
    "what the rule of a custom JVP reads": reading_rule(with_jvp),
    "what the rule of a custom VJP reads": reading_rule(with_vjp),
    "the rule of a custom vmap": in_batches,
    "a linear solve": lambda v: (
        lambda x: lax.custom_linear_solve(
            lambda y: jnp.asarray(whole(1 / v)).mean() * y,
            x,
            lambda _, b: b * v,
            transpose_solve=lambda _, b: b * v,
        )
    ),
    "a dtype": lambda v: lambda x: x.astype(np.float32 if v == 2.0 else float) * v,
    "the sign of zero": lambda v: lambda x: x * jnp.copysign(v, -0.0 if v == 2.0 else 0.0),
    "a type": lambda v: lambda x: x * (2 if v == 2.0 else 3.0),
    "an axis": lambda v: lambda x: x * jnp.sum(jnp.ones((2, 3)), axis=int(v == 2.0))[0],
}
PLACES = READ | HELD_IN
WITHOUT = {
    "a custom VJP": {"jvp"},
    "the rule of a custom VJP": {"jvp"},
    "what the rule of a custom VJP reads": {"jvp"},
    "the rule of a custom vmap": {"grad", "jitted grad", "hessian"},
}
"""Modes that JAX does not have of them."""


def scan(loops, step, x):
    return loops.scan(lambda c, _: (step(c), None), x, None, 2)[0]


def fori_loop(loops, step, x):
    return loops.fori_loop(0, 2, lambda _, c: step(c), x)


def bare(loops, step, x):
    """The function itself is the body."""
    how = {} if loops is lax else {"max_steps": 2}
    return loops.while_loop(lambda x: jnp.abs(x) < 100.0, step, x, **how)


def stored(loops, step, x):
    how = {} if loops is lax else {"checkpoints": "all"}
    return loops.scan(lambda c, _: (step(c), None), x, None, 2, **how)[0]


def inside(loops, step, x):
    inner = lambda c: loops.scan(lambda c, _: (step(c), None), c, None, 2)[0]
    return loops.scan(lambda c, _: (inner(c), None), x, None, 1)[0]


def foreign(loops, step, x):
    loop = lambda x: lax.scan(lambda c, _: (step(c), None), x, None, 2)[0]
    return loop(x) if loops is lax else loopkit.checkpointed(loop)(x)


RUNS = [bare, stored, inside, foreign]

MODES = {
    "value": lambda f: f,
    "grad": jax.grad,
    "jitted grad": lambda f: jax.jit(jax.grad(f)),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (1.0,)),
    "hessian": lambda f: jax.jacrev(jax.grad(f)),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None]),
}


def cases():
    """Each place in half of the modes by a scan, and in each of the others by another loop; these
    take turns. When asked for, all of them."""
    for k, place in enumerate(PLACES):
        modes = [m for m in MODES if m not in WITHOUT.get(place, ())]
        modes = modes[k % len(modes) :] + modes[: k % len(modes)]
        half = (len(modes) + 1) // 2
        yield pytest.param(place, scan, modes[:half], id=f"{place}-scan")
        for j, mode in enumerate(modes[half:]):
            run = RUNS[(k + j) % len(RUNS)]
            name = f"{place}-{run.__name__}-{mode}"
            yield pytest.param(place, run, [mode], marks=pytest.mark.exhaustive, id=name)
        for run in (scan, *RUNS):
            marks, name = pytest.mark.exhaustive, f"{place}-{run.__name__}-every mode"
            yield pytest.param(place, run, modes, marks=marks, id=name)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "run", "modes"), list(cases()))
def test_one_after_the_other(place, run, modes):
    x = jnp.asarray(0.5)
    # lax.while_loop has no gradient; a loop of two steps has.
    right = fori_loop if run is bare else run

    def result(loops, run, v, mode):
        step = PLACES[place](v)
        return MODES[mode](lambda x: run(loops, step, x))(x)

    for mode in modes:
        for v in (2.0, 3.0):
            got, wanted = result(loopkit, run, v, mode), result(lax, right, v, mode)
            assert_near(got, wanted, what=f"{mode} {v}")


def test_random_numbers_are_drawn_anew():
    draw = lambda: scan(loopkit, lambda c: c + np.random.normal(), 0.0)
    assert len({float(draw()) for _ in range(3)}) == 3


@pytest.mark.slow
def test_a_callback_is_the_one_that_was_passed():
    def run(loops, v):
        told = []
        step = lambda x: jax.debug.callback(told.append, x * v) or x
        jax.block_until_ready(scan(loops, step, 1.0))
        jax.effects_barrier()
        return list(map(float, told))

    def asked(loops, v):
        host = lambda x: np.asarray(x * v, x.dtype)
        step = lambda x: jax.pure_callback(host, jax.typeof(x), x, vmap_method="sequential")
        return float(scan(loops, step, jnp.asarray(1.0)))

    for v in (2.0, 3.0, 2.0):
        assert run(loopkit, v) == run(lax, v)
        assert asked(loopkit, v) == asked(lax, v)


def test_checkpointed_sees_what_its_arguments_hold():
    grow = loopkit.checkpointed(lambda by, x: lax.fori_loop(0, 2, lambda _, y: by(y), x))
    for v in (2.0, 3.0):
        LAYER.settings.rate = v
        OWNER.own = v
        assert grow(LAYER, 1.0) == v * v
        assert grow(OWNER.scaled, 1.0) == v * v
        assert grow(lambda y, v=v: y * v, 1.0) == v * v
        assert grow(functools.partial(lambda o, y: y * o.own, OWNER), 1.0) == v * v
    scaled = loopkit.checkpointed(OWNER.looped)
    for OWNER.own in (2.0, 3.0):
        assert scaled(1.0) == OWNER.own**2
    of_class = loopkit.checkpointed(Owner.looped_for_all)
    given_class = loopkit.checkpointed(Owner.looped_for_all.__func__)
    for Owner.rate in (3.0, 2.0):
        assert of_class(1.0) == given_class(Owner, 1.0) == Owner.rate**2
    power = loopkit.checkpointed(lambda x, n: lax.fori_loop(0, 3, lambda _, y: y * n, x))
    plus = loopkit.checkpointed(lambda x, n: lax.fori_loop(0, 1, lambda _, y: y, x) + n)
    with jax.numpy_dtype_promotion("standard"):  # of a bool and an int
        assert [power(1, n).dtype for n in (True, 1, 1)] == [jnp.asarray(1).dtype] * 3
        assert plus(1, True) == 2
