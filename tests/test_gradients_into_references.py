"""Gradients that are added to references (`jax.vjp(f, x)[1].with_refs`), inside the loop."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from turns import in_turn

N, WIDTH = 6, 3
WEIGHTS = jnp.asarray(np.sin(np.arange(1.0, 1 + N * WIDTH**2)).reshape(N, WIDTH, WIDTH))
SHARED = jnp.asarray(np.cos(np.arange(1.0 * WIDTH**2)).reshape(WIDTH, WIDTH))
START = jnp.asarray(np.linspace(0.2, 1.1, 2 * WIDTH).reshape(2, WIDTH))
EVERY = WEIGHTS, SHARED, START
BATCHES = jnp.stack([START, 0.5 - START, START**2])


def step(shared, c, w):
    c = jnp.tanh(c @ w + c @ shared)
    return c, jnp.sin(c @ w).sum()


def by_hand(weights, shared, c, order=range(N)):
    total = 0.0
    for at in order:
        c, y = step(shared, c, weights[at])
        total += y * (1 + at)
    return total + c.sum()


def scanned(weights, shared, c, scan=loopkit.scan, **options):
    c, ys = scan(ft.partial(step, shared), c, weights, **options)
    return ys @ jnp.arange(1.0, 1 + N) + c.sum()


def stopped(weights, shared, c, **options):
    stop = {"until": lambda c, y: c[0] == 4}
    one = lambda c, w: ((c[0] + 1, step(shared, c[1], w)[0]), step(shared, c[1], w)[1])
    (_, c), ys = loopkit.scan(one, (jnp.int32(0), c), weights, **stop, **options)
    return ys @ jnp.arange(1.0, 1 + N) + c.sum()


def while_loop(weights, shared, c, **options):
    """Weights are a constant of this loop, as `shared` is, and a carry has the sum."""

    def body(s):
        c, y = step(shared, s[1], weights[s[0]])
        return s[0] + 1, c, s[2] + y * s[3], s[3] + 1

    before = jnp.int32(0), c, jnp.float64(0), jnp.float64(1)
    _, c, total, _ = loopkit.while_loop(lambda s: s[0] < N, body, before, **options)
    return total + c.sum()


def nested(pairs, shared, c, **options):
    inner = lambda c, w: loopkit.scan(ft.partial(step, shared), c, w, **options)
    c, ys = loopkit.scan(inner, c, pairs, **options)
    return ys.reshape(N) @ jnp.arange(1.0, 1 + N) + c.sum()


def in_lax(pairs, shared, c, **options):
    inner = lambda c, w: loopkit.scan(ft.partial(step, shared), c, w, **options)
    c, ys = lax.scan(inner, c, pairs)
    return ys.reshape(N) @ jnp.arange(1.0, 1 + N) + c.sum()


LOOPS = {
    "scan": (scanned, range(N)),
    "reverse": (ft.partial(scanned, reverse=True), range(N)[::-1]),
    "unroll": (ft.partial(scanned, unroll=4), range(N)),
    "other axis": (ft.partial(scanned, in_axes=1), range(N)),
    "until": (stopped, range(4)),
    "while_loop": (while_loop, range(N)),
    "while_loop, bounded": (ft.partial(while_loop, max_steps=2 * N), range(N)),
    "nested": (nested, range(N)),
    "in lax": (in_lax, range(N)),
}
SHAPED = {
    "other axis": lambda weights: jnp.moveaxis(weights, 0, 1),
    "nested": lambda weights: weights.reshape(N // 2, 2, WIDTH, WIDTH),
}
SHAPED["in lax"] = SHAPED["nested"]
PLANS = [{}, {"checkpoints": "all"}, {"checkpoints": 2}, {"memory": 400}]


def fill(like):
    return jax.tree.map(lambda v: jnp.full(v.shape, 0.25, v.dtype), like)


def into_references(f):
    """Return a function that returns what references hold after a gradient was added to each."""

    def of(*args):
        refs = tuple(jax.tree.map(jax.new_ref, fill(args)))
        jax.vjp(f, *args)[1].with_refs(*refs)(1.0)
        return tuple(ref[...] for ref in refs)

    return of


def assert_near(got, expected):
    """Up to the rounding of sums, whose terms may be as large as the largest element."""
    largest = lambda b: np.max(np.abs(b), initial=1, where=np.isfinite(b))
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14 * largest(b))
    jax.tree.map(near, got, expected)


def by_sums(f):
    """Return a function that returns the same as `into_references(f)`, by sums."""
    gradient = jax.grad(f, argnums=(0, 1, 2))
    return lambda *args: jax.tree.map(jnp.add, fill(args), gradient(*args))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan"), in_turn(LOOPS, PLANS, of=4))
def test_what_references_hold(name, plan):
    (loop, order), shaped = LOOPS[name], SHAPED.get(name, lambda weights: weights)
    if name == "while_loop" and plan == {"checkpoints": "all"}:
        plan = {}
    add = into_references(ft.partial(loop, **plan))
    got = jax.jit(add)(shaped(WEIGHTS), SHARED, START)
    wanted, *others = jax.jit(by_sums(ft.partial(by_hand, order=order)))(*EVERY)
    assert_near(got, (shaped(wanted), *others))


def temporary(loop, weights):
    """Return the bytes of temporary memory that adding a gradient to a reference takes."""

    def add(weights, ref):
        jax.vjp(loop, weights)[1].with_refs(ref)(1.0)

    lowered = jax.jit(add).lower(weights, jax.new_ref(jnp.zeros_like(weights)))
    return lowered.compile().memory_analysis().temp_size_in_bytes


X, WIDE = jnp.ones((2, 32)), jnp.ones((24, 32, 32))


def last(weights, scan=loopkit.scan, **options):
    return scan(lambda c, w: (jnp.tanh(c @ w), None), X, weights, **options)[0].sum()


def last_before(weights, **options):
    one = lambda c, w: ((c[0] + 1, jnp.tanh(c[1] @ w)), None)
    until = lambda c, _: c[0] == 20
    return loopkit.scan(one, (jnp.int32(0), X), weights, until=until, **options)[0][1].sum()


def last_by_index(weights, **options):
    body = lambda s: (s[0] + 1, jnp.tanh(s[1] @ weights[s[0]]))
    init = jnp.int32(0), X
    return loopkit.while_loop(lambda s: s[0] < 24, body, init, **options)[1].sum()


@pytest.mark.slow
def test_temporary_memory():
    """No array of weights is made, and no more is needed than by lax."""
    lax_needs = temporary(ft.partial(last, scan=lax.scan), WIDE)
    assert temporary(last, WIDE) <= lax_needs < WIDE.nbytes / 2
    assert temporary(ft.partial(last, checkpoints=1), WIDE) < 24 * X.nbytes + 3 * WIDE[0].nbytes


@pytest.mark.slow
@pytest.mark.parametrize("loop", [last, last_before, last_by_index])
@pytest.mark.parametrize("options", [{"checkpoints": 4}, {"unroll": 4}])
def test_no_array_of_weights_is_made(loop, options):
    assert temporary(ft.partial(loop, **options), WIDE) < WIDE.nbytes / 2


@pytest.mark.parametrize("over", [lax.scan, loopkit.scan])
def test_microbatches(over):
    @jax.jit
    def accumulated():
        refs = tuple(map(jax.new_ref, fill((WEIGHTS, SHARED))))

        def one(_, c):
            f = lambda weights, shared: scanned(weights, shared, c, checkpoints=2)
            jax.vjp(f, WEIGHTS, SHARED)[1].with_refs(*refs)(1.0)
            return None, None

        over(one, None, BATCHES)
        return tuple(ref[...] for ref in refs)

    total = lambda *weights: sum(by_hand(*weights, c) for c in BATCHES)
    grads = jax.jit(jax.grad(total, argnums=(0, 1)))(WEIGHTS, SHARED)
    assert_near(accumulated(), tuple(0.25 + grad for grad in grads))


def squares(f):
    return lambda *args: sum(jnp.sum(v**2) for v in f(*args))


def along(f):
    slope = jax.grad(squares(f), argnums=(0, 1, 2))
    return jax.jit(lambda *args: jax.jvp(slope, args, tuple(map(jnp.cos, args)))[1])


def lanes(f, *axes):
    """Return the results of `f` for two lanes, of which the second has other values."""
    pair = lambda v, axis: v if axis is None else jnp.stack([v, jnp.sin(v)], axis)
    return lambda *args: jax.vmap(f, axes)(*map(pair, args, axes))


MODES = {
    "outside jit": lambda f: f,
    "vmap": lambda f: lanes(f, None, None, 0),
    "vmap over weights": lambda f: lanes(f, 0, None, None),
    "vmap, batch last": lambda f: jax.jit(lanes(f, None, -1, -1)),
    "grad": lambda f: jax.jit(jax.grad(squares(f), argnums=(0, 1, 2))),
    "jvp of grad": along,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "loop"),
    in_turn(MODES, [scanned, stopped, ft.partial(while_loop, max_steps=2 * N)], of=3),
)
def test_under_transformations(mode, loop):
    by = by_sums(ft.partial(by_hand, order=range(4 if loop is stopped else N)))
    assert_near(MODES[mode](into_references(loop))(*EVERY), MODES[mode](by)(*EVERY))


def test_linear_transpose():
    """A gradient into a reference is linear in its cotangent, and in what the reference held."""

    def f(before, ct):
        ref = jax.new_ref(before)
        jax.vjp(lambda w: scanned(w, SHARED, START), WEIGHTS)[1].with_refs(ref)(ct)
        return ref[...]

    got = jax.jit(lambda ct: jax.linear_transpose(f, WEIGHTS, 1.0)(ct))(WEIGHTS)
    slope = jax.grad(by_hand)(*EVERY)
    assert_near(got, (WEIGHTS, jnp.sum(slope * WEIGHTS)))


def test_one_reference_for_two_arguments():
    @jax.jit
    def both():
        ref = jax.new_ref(jnp.full_like(WEIGHTS, 0.25))
        f = lambda u, v: loopkit.scan(lambda c, uv: step(uv[1], c, uv[0]), START, (u, v))[0].sum()
        jax.vjp(f, WEIGHTS, 0.3 - WEIGHTS)[1].with_refs(ref, ref)(1.0)
        return ref[...]

    def f(u, v):
        c = START
        for at in range(N):
            c, _ = step(v[at], c, u[at])
        return c.sum()

    grads = jax.grad(f, argnums=(0, 1))(WEIGHTS, 0.3 - WEIGHTS)
    assert_near(both(), 0.25 + grads[0] + grads[1])


def test_values_beside_references():
    @jax.jit
    def some():
        ref = jax.new_ref(jnp.full_like(WEIGHTS, 0.25))
        pull = jax.vjp(scanned, *EVERY)[1]
        _, shared, _ = pull.with_refs(ref, jax.ad.GradValue(), jax.ad.DontWant())(1.0)
        return ref[...], shared

    wanted = by_sums(by_hand)(*EVERY)
    assert_near(some(), (wanted[0], wanted[1] - 0.25))


def test_cotangents_of_a_batch():
    """The steps run once for all cotangents, each with a reference of its own."""

    @jax.jit
    def every(cts):
        pull = jax.vjp(
            lambda *args: loopkit.scan(ft.partial(step, args[1]), args[2], args[0]), *EVERY
        )[1]

        def one(ct):
            refs = jax.tree.map(jax.new_ref, fill(EVERY))
            pull.with_refs(*refs)((START, ct))
            return tuple(ref[...] for ref in refs)

        return jax.vmap(one)(cts)

    def by(ct, *args):
        w, shared, c = args
        total = 0.0
        for at in range(N):
            c, y = step(shared, c, w[at])
            total += ct[at] * y
        return total + (START * c).sum()

    cts = jnp.stack([jnp.arange(1.0, 1 + N), jnp.cos(jnp.arange(1.0 * N))])
    each = [by_sums(ft.partial(by, ct))(*EVERY) for ct in cts]
    assert_near(every(cts), tuple(map(jnp.stack, zip(*each, strict=True))))


def test_no_cotangent_leaves_a_reference_as_it_is():
    weights = WEIGHTS.at[0].set(jnp.inf)

    @jax.jit
    def kept():
        ref = jax.new_ref(weights)
        f = lambda w: loopkit.scan(lambda c, w: (c * 2, w.sum()), jnp.float64(1), w)[0]
        jax.vjp(f, weights)[1].with_refs(ref)(1.0)
        return ref[...]

    assert_near(kept(), weights)


@pytest.mark.parametrize("lanes", ["compact", None])
def test_lanes_that_stop_apart(lanes):
    """The cotangents of weights are sums over the lanes that still go on."""
    ends = jnp.array([2, 5, 3])

    def f(weights, shared, cs):
        def one(c, end):
            body = lambda c, w: ((c[0] + 1, step(shared, c[1], w)[0]), None)
            stop = {"until": lambda c, _: c[0] == end, "lanes": lanes}
            return loopkit.scan(body, (0, c), weights, **stop)[0][1].sum()

        return jax.vmap(one)(cs, ends).sum()

    def by(weights, shared, cs):
        total = 0.0
        for c, end in zip(cs, ends, strict=True):
            for at in range(end):
                c, _ = step(shared, c, weights[at])
            total += c.sum()
        return total

    args = WEIGHTS, SHARED, BATCHES
    assert_near(jax.jit(into_references(f))(*args), by_sums(by)(*args))
