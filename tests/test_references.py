"""References to memory (`jax.new_ref`): a step's own, and those that it closes over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.test_util import check_grads

import loopkit
from turns import in_turn

X = jnp.linspace(0.2, 1.1, 5)
MODES = {
    "value": lambda f: f,
    "jit": jax.jit,
    # JAX 0.12 cannot make a reference to integers in a jvp that is not jitted.
    "jvp": lambda f: jax.jit(lambda x: jax.jvp(f, (x,), (jnp.cos(x),))),
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "hessian": lambda f: jax.hessian(lambda x: f(x).sum()),
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda x: f(x).sum()), in_axes=-1),
}


def own(c, t):
    """A step that swaps, adds and reads in memory of its own."""
    rows = jax.new_ref(jnp.stack([c, c]))
    rows[0] = rows[1] * t
    rows[1] += jnp.sin(rows[0])
    return rows[0] + rows[1] * 0.3, rows[1]


def own_by_hand(c, t):
    return c * t + (c + jnp.sin(c * t)) * 0.3, c + jnp.sin(c * t)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "options"), in_turn(MODES, [{}, {"checkpoints": "all"}, {"checkpoints": 2}], of=3)
)
def test_memory_of_a_step(mode, options):
    def of(step, **options):
        scan = lax.scan if not options else loopkit.scan
        return lambda x: jnp.sum(scan(step, x, X, **options)[1] ** 2, axis=0)

    x = jnp.array([[0.3, 0.9], [0.5, 0.1]]) if mode.startswith("vmap") else jnp.array([0.3, 0.9])
    got = MODES[mode](of(own, **{"unroll": 1, **options}))(x)
    expected = MODES[mode](of(own_by_hand))(x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), got, expected)


def kept(loop, x, steps=5):
    """Rows that steps write to memory outside, which counts them, too."""
    rows = jax.new_ref(jnp.stack([0 * x] * steps))
    count = jax.new_ref(jnp.sum(jnp.isnan(x), dtype=jnp.int32))

    def step(c):
        rows[count[...]] = c
        count[...] += 1
        return jnp.sin(c) * rows[0]

    last = loop(count, step, x)
    return rows[...], count[...], last


LOOPS = {
    "scan": lambda _, step, x: loopkit.scan(lambda c, _: (step(c), None), x, length=5)[0],
    "until": lambda _, step, x: loopkit.scan(
        lambda c, i: (step(c), i), x, jnp.arange(9), until=lambda c, i: i == 4
    )[0],
    "while_loop": lambda n, step, x: loopkit.while_loop(lambda _: n[...] < 5, step, x),
    "masked": lambda n, step, x: loopkit.while_loop(
        lambda c: n[...] < 5,
        lambda c: (step(c[0]), c[1].at[n[...]].set(n[...])),
        (x, jnp.zeros(9, jnp.int32)),
        max_steps=9,
        buffers=lambda c: c[1],
    )[0],
    "fori_loop": lambda _, step, x: loopkit.fori_loop(0, 5, lambda _, c: step(c), x, unroll=2),
    "nested": lambda _, step, x: loopkit.fori_loop(
        0, 5, lambda _, c: loopkit.scan(lambda c, _: (step(c), None), c, length=1)[0], x
    ),
    "in lax": lambda _, step, x: lax.fori_loop(
        0, 5, lambda _, c: loopkit.fori_loop(0, 1, lambda _, c: step(c), c), x
    ),
    "by hand": lambda _, step, x: [x := step(x) for _ in range(5)][-1],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "mode"),
    in_turn(
        [name for name in LOOPS if name != "by hand"],
        ["grad", "value", "jvp", "jit", "vmap of grad", "disable_jit"],
        of=3,
    ),
)
def test_memory_outside(name, mode):
    if name == "in lax" and "grad" in mode and jax.__version_info__ < (0, 11):
        pytest.skip("lax's own loops have no gradient there")

    def of(name):
        return lambda x: sum(jnp.sum(v, dtype=float) for v in kept(LOOPS[name], x))

    x = jnp.array([[0.3, 0.9], [0.5, 0.1]]) if mode.startswith("vmap") else jnp.array([0.3, 0.9])
    expected = MODES.get(mode, MODES["value"])(of("by hand"))(x)
    with jax.disable_jit(mode == "disable_jit"):
        got = MODES.get(mode, MODES["value"])(of(name))(x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), got, expected)


@pytest.mark.slow
def test_memory_of_the_caller_is_written_at_every_call():
    seen = jax.new_ref(jnp.zeros(3))

    def step(c, t):
        seen[...] += lax.stop_gradient(c)
        return jnp.sin(c) * t, None

    run = lambda x: loopkit.scan(step, x, X)[0].sum()
    x, calls = jnp.ones(3), (run, jax.jit(run), jax.grad(run), jax.jit(jax.grad(run)), run)
    for count, call in enumerate(calls, 1):
        call(x)
        state, total = x, jnp.zeros(3)
        for t in X:
            total, state = total + state, jnp.sin(state) * t
        np.testing.assert_allclose(seen[...], count * total, rtol=1e-12)


def test_other_memory_of_the_same_steps():
    def filled(start):
        rows = jax.new_ref(jnp.full(4, start))
        loopkit.fori_loop(0, 4, lambda i, c: (rows.__setitem__(i, rows[i] * c), c + 1)[1], 1.0)
        return rows[...]

    for start in (1.0, 2.0, 3.0):
        np.testing.assert_allclose(filled(start), start * jnp.arange(1.0, 5.0))


def test_memory_of_loops_that_grow():
    total = jax.new_ref(jnp.float64(0))

    def step(c, _):
        total[...] += c
        return c + 1, c

    _, ys = loopkit.unbounded_scan(step, 1.0, until=lambda c, _: c > 100)
    assert total[...] == ys.sum() == 5050


@pytest.mark.slow
def test_derivatives_of_what_memory_held_before():
    def f(x, y):
        held = jax.new_ref(y)

        def step(c, t):
            held[...] = jnp.cos(held[...]) * c
            return jnp.sin(c) * t + held[...], None

        return loopkit.scan(step, x, X)[0] * held[...]

    check_grads(f, (0.4, 0.7), order=1, modes=("fwd", "rev"), rtol=1e-6)


def test_steps_that_have_to_stay_finite_have_no_memory_outside():
    rows = jax.new_ref(jnp.zeros(3))
    step = lambda c, t: (c + rows[0] * t, None)
    message = (
        r"loopkit.scan: `debug` cannot be given if `f` reads or writes references made outside[.] "
        r"Put the values of the references into `init`[.] Got: a reference to float64\[3\]"
    )
    with pytest.raises(NotImplementedError, match=message):
        loopkit.scan(step, 1.0, X, debug="finite")
