"""One budget for the gradient of a whole function: its loops share it by one price of a byte."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from derivatives import assert_close, in_numpy
from loopkit._engine.derivative import choices

X, W = jnp.asarray(np.sin(np.arange(12.0)).reshape(4, 3)), jnp.asarray(np.eye(3) * 0.9 + 0.05)


def unrolled(step, carry, xs=None, length=None):
    """A scan as a Python loop."""
    ys = []
    for k in range(len(xs) if length is None else length):
        carry, y = step(carry, None if xs is None else xs[k])
        ys.append(y)
    return carry, None if ys[0] is None else jnp.stack(ys)


def layer(w):
    return lambda c, _: (jnp.sin(c @ w), None)


def two(x, w, scan=lax.scan):
    """A loop of large steps, and one of small steps."""
    x, _ = scan(layer(w), x, length=9)
    y, _ = scan(lambda c, _: (jnp.cos(c) * c, None), x[:1], length=5)
    return jnp.sum(y) + jnp.sum(x)


def three(x, w, scan=lax.scan):
    """Three loops, whose ys are read later."""
    x, ys = scan(lambda c, _: (jnp.sin(c @ w), c[0]), x, length=6)
    x, zs = scan(lambda c, y: (jnp.sin(c @ w) + y, c.sum()), jnp.tile(x, (2, 1)), ys)
    x, _ = scan(lambda c, _: (jnp.cos(c) * c, None), x, length=7)
    return jnp.sum(x) + jnp.sum(zs**2) + jnp.sum(ys)


def nested(x, w, scan=lax.scan):
    """A loop in a loop, and one after it."""

    def outer(c, _):
        c, _ = scan(layer(w), c, length=4)
        return jnp.tanh(c), c.sum()

    x, ys = scan(outer, x, length=5)
    x, _ = scan(layer(w), x, length=6)
    return jnp.sum(x) + jnp.sum(ys**2)


def branches(x, w, scan=lax.scan):
    """Loops in the branches of a cond, after another loop."""
    x, _ = scan(layer(w), x, length=5)
    left = lambda x: scan(layer(w), x, length=7)[0]
    right = lambda x: scan(lambda c, _: (jnp.cos(c) * c, None), x, length=4)[0]
    return jnp.sum(lax.cond(x[0, 0] > 0, left, right, x))


def twice(x, w, scan=lax.scan):
    """A compiled loop that is called twice, and one under `jax.checkpoint`."""
    inner = jax.jit(lambda x: scan(layer(w), x, length=6)[0])
    last = jax.checkpoint(lambda x: scan(layer(w), x, length=5)[0])
    return jnp.sum(last(inner(jnp.tanh(inner(x)))))


PROGRAMS = [two, three, nested, branches, twice]
PARTS = [0.15, 0.4, 1.0]


def bytes_for_all(f, *args):
    """The least bytes that an error names, and those that suffice for every residual."""
    with pytest.raises(ValueError, match="must be at least") as refused:
        jax.grad(loopkit.checkpointed(f, memory=1))(*args)
    least = int(re.search(r"must be at least (\d+) bytes", str(refused.value))[1])
    whole = sum(loop.scan_bytes for loop in loopkit.explain(f, *args).loops)
    return least, max(whole, 2 * least)


@pytest.mark.parametrize("f", PROGRAMS)
def test_gradients_within_a_budget(f):
    value, slopes = in_numpy(jax.value_and_grad(lambda *of: f(*of, unrolled), (0, 1)), X, W)
    least, whole = bytes_for_all(f, X, W)
    for part in PARTS:
        budgeted = loopkit.checkpointed(f, memory=int(least + part * (whole - least)))
        assert_close(budgeted(X, W), value)
        assert_close(jax.jit(jax.grad(budgeted, (0, 1)))(X, W), slopes)


def modes(f):
    """Derivatives of `f` in every mode."""
    v = jnp.cos(X)
    alone = lambda x: f(x, W)
    return {
        "jvp": lambda: jax.jvp(alone, (X,), (v,))[1],
        "vjp": lambda: jax.vjp(f, X, W)[1](jnp.float64(2.0)),
        "forward over reverse": lambda: jax.jvp(jax.grad(alone), (X,), (v,))[1],
        "reverse over reverse": lambda: jax.grad(lambda x: jnp.vdot(jax.grad(alone)(x), v))(X),
        "vmap": lambda: jax.vmap(alone)(jnp.stack([X, v])),
        "vmap of grad": lambda: jax.vmap(jax.grad(alone))(jnp.stack([X, v])),
        "grad of vmap": lambda: jax.grad(lambda x: jax.vmap(alone)(x).sum())(jnp.stack([X, v])),
    }


@pytest.mark.slow
@pytest.mark.parametrize("mode", modes(two))
@pytest.mark.parametrize("f", PROGRAMS)
def test_all_modes_within_a_budget(f, mode):
    least, whole = bytes_for_all(f, X, W)
    for memory in (least, (least + whole) // 2):
        budgeted = loopkit.checkpointed(f, memory=memory)
        wanted = modes(lambda x, w: f(x, w, unrolled))[mode]()
        assert_close(modes(budgeted)[mode](), wanted)
        assert_close(jax.jit(modes(budgeted)[mode])(), wanted)


def compiled_bytes(f, *args):
    compiled = jax.jit(jax.grad(f, tuple(range(len(args))))).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes


WIDE = jnp.asarray(np.sin(np.arange(64 * 32.0)).reshape(64, 32)), jnp.asarray(np.eye(32) * 0.9)


def two_wide(x, w):
    x, _ = lax.scan(layer(w), x, length=200)
    y, _ = lax.scan(lambda c, _: (jnp.cos(c) * c, None), x[:2], length=50)
    return jnp.sum(y) + jnp.sum(x)


def nested_wide(x, w):
    def outer(c, _):
        d, _ = lax.scan(layer(w), c, length=20)
        return jnp.tanh(d), d.sum()

    x, ys = lax.scan(outer, x, length=20)
    return jnp.sum(x) + jnp.sum(ys**2)


def predicted_bytes(f, memory):
    return loopkit.explain(loopkit.checkpointed(f, memory=memory), *WIDE).gradient.peak


@pytest.mark.slow
@pytest.mark.parametrize("f", [two_wide, nested_wide])
def test_a_tenth_is_left_to_the_compiler_if_a_plan_is_that_small(f):
    least, whole = bytes_for_all(f, *WIDE)
    for part in (0.1, 0.4):
        memory = int(least + part * (whole - least))
        assert 0.7 * memory < predicted_bytes(f, memory) <= memory / 1.1
    for memory in (least, int(1.05 * least)):
        assert predicted_bytes(f, memory) == least


def test_a_mistake_in_a_prediction_is_not_taken_for_code_without_a_derivative(monkeypatch):
    def mistaken(*args):
        raise TypeError("a mistake")

    monkeypatch.setattr(choices, "timeline", mistaken)
    with pytest.raises(TypeError, match="a mistake"):
        loopkit.checkpointed(lambda x: two(x, W), memory="1 MB")(X)


@pytest.mark.slow
@pytest.mark.parametrize("f", [two_wide, nested_wide])
def test_the_compiler_needs_no_more_than_the_budget(f):
    stored = compiled_bytes(loopkit.checkpointed(f, checkpoints="all"), *WIDE)
    used = []
    for part in (0.1, 0.2, 0.4, 0.7):
        budget = int(part * stored)
        used.append(compiled_bytes(loopkit.checkpointed(f, memory=budget), *WIDE))
        assert used[-1] <= budget
    assert used == sorted(used)
    assert used[1] > 0.1 * stored


def wave_then_filter(speed, w, u):
    """Loops whose ys are read by the next, each with memory of its own while it is reversed."""

    def move(state, _):
        u, v = state
        v = v + 0.1 * speed * (jnp.roll(u, 1, -1) - u)
        return (u + 0.1 * v, v), u[:, ::8]

    _, seen = lax.scan(move, (u, jnp.zeros_like(u)), length=200)
    see = lambda h, x: (jnp.tanh(h @ w + x), h)
    _, states = lax.scan(see, jnp.zeros((8, 16)), seen)
    decay = lambda c, h: (0.9 * c + h**2, jnp.sum(c))
    return jnp.mean(lax.scan(decay, jnp.zeros((8, 16)), states, reverse=True)[1])


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.3, 0.4, 0.7])
def test_memory_is_taken_when_a_loop_begins(part):
    """Not when the program does: loops that run one after another need it one after another."""
    args = jnp.ones(128), jnp.eye(16), jnp.ones((8, 128))

    def compiled(f):
        return jax.jit(jax.grad(f, (0, 1, 2))).lower(*args).compile().memory_analysis()

    budget = int(part * compiled(wave_then_filter).temp_size_in_bytes)
    within = loopkit.checkpointed(wave_then_filter, memory=budget)
    assert 0.7 * budget < compiled(within).temp_size_in_bytes < 1.05 * budget


def predicted_time(f, memory, *args):
    """The nanoseconds of all loops that are predicted."""
    loops = loopkit.explain(loopkit.checkpointed(f, memory=memory), *args).loops
    return sum(loop.plan.nanoseconds(loop.plan.bound) for loop in loops)


def test_a_small_loop_leaves_its_part_to_a_large_one():
    """A loop of small steps needs few bytes: the other one gets the rest."""

    def f(x):
        small, _ = lax.scan(lambda c, _: (jnp.sin(c), None), x[:2], length=64)
        large, _ = lax.scan(lambda c, _: (jnp.sin(c), None), x, length=64)
        return jnp.sum(small) + jnp.sum(large)

    x, budget = jnp.ones(1000), 400_000
    budgeted = loopkit.checkpointed(f, memory=budget)
    small, large = (loop.plan.peak_bytes for loop in loopkit.explain(budgeted, x).loops)
    assert small < budget / 20
    assert large > budget / 2


def test_more_bytes_take_no_more_time():
    least, whole = bytes_for_all(two, X, W)
    found = [predicted_time(two, int(m), X, W) for m in np.linspace(least, whole, 6)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


def test_the_least_that_an_error_names_will_do():
    least, _ = bytes_for_all(two, X, W)
    jax.eval_shape(jax.grad(loopkit.checkpointed(two, memory=least)), X, W)
    said = r"Most of it, \d+ bytes, is for what scan at test_one_budget.py:\d+ saves"
    with pytest.raises(ValueError, match=said):
        jax.eval_shape(jax.grad(loopkit.checkpointed(two, memory=least - 1)), X, W)


def test_a_budget_too_small_is_an_error_of_gradients_alone():
    assert_close(loopkit.checkpointed(two, memory=1)(X, W), two(X, W))


def test_on_the_host_too():
    f = loopkit.checkpointed(two, memory={"device": 10**6, "host": 10**6})
    loops = loopkit.explain(f, X, W).loops
    assert 0 < sum(loop.plan.host_bytes for loop in loops) <= 10**6
    few = loopkit.checkpointed(two, memory={"device": 10**6, "host": 1})
    with pytest.raises(ValueError, match=r"at least \d+ bytes on the host. .* Got: 1 bytes"):
        jax.eval_shape(jax.grad(few), X, W)
    few = loopkit.checkpointed(two, memory={"device": 1, "host": 10**6})
    with pytest.raises(ValueError, match=r"at least \d+ bytes on the device. .* Got: 1 bytes"):
        jax.eval_shape(jax.grad(few), X, W)


def test_functions_with_a_derivative_in_some_inputs_only():
    def f(x, data, scan=lax.scan):
        scale = jax.pure_callback(np.cos, jax.ShapeDtypeStruct((), data.dtype), data)
        return scan(lambda c, _: (jnp.sin(c) * scale, None), x, length=9)[0].sum()

    budgeted = loopkit.checkpointed(f, memory=5000)
    wanted = jax.grad(lambda x: f(x, 1.0 * jnp.ones(()), unrolled))(X)
    assert_close(jax.grad(budgeted)(X, jnp.ones(())), wanted)


def test_functions_without_a_derivative_run():
    def f(x):
        halved = lambda c: jax.pure_callback(lambda v: v / 2, jax.ShapeDtypeStruct((), c.dtype), c)
        return lax.scan(lambda c, _: (halved(c), None), x, length=3)[0]

    assert_close(loopkit.checkpointed(f, memory=100)(8.0), jnp.float64(1.0))


@pytest.mark.slow
def test_a_loop_left_to_lax_with_a_loop_in_it():
    f = loopkit.checkpointed(nested, memory=10**4, only=lambda site: site.depth > 0)
    assert_close(jax.grad(f)(X, W), jax.grad(lambda x: nested(x, W, unrolled))(X))


def test_explain_says_what_holds_the_peak():
    said = loopkit.explain(loopkit.checkpointed(two_wide, memory="1 MB"), *WIDE)
    gradient = said.gradient
    assert gradient.peak == sum(count for _, count in gradient.holders) <= 10**6
    assert gradient.peak == max(count for _, count in gradient.timeline) > 5 * 10**5
    saved = max(gradient.holders, key=lambda held: held[1])
    assert "scan at test_one_budget.py" in saved[0]
    assert saved[1] > gradient.peak / 2
    assert f"predicted: {gradient.peak / 1e3:.0f} kB: " in str(said).splitlines()[-1]
    alone = loopkit.explain(two_wide, *WIDE)
    assert "peak of the gradient" not in str(alone)
    assert alone.gradient.peak > gradient.peak


@pytest.mark.slow
@pytest.mark.parametrize("f", [two_wide, nested_wide])
def test_the_prediction_is_near_the_figure_of_the_compiler(f):
    gradient = loopkit.explain(loopkit.checkpointed(f, memory="2 MB"), *WIDE).gradient
    assert gradient.compiled == compiled_bytes(loopkit.checkpointed(f, memory="2 MB"), *WIDE)
    assert 0.9 * gradient.peak < gradient.compiled < 1.1 * gradient.peak


def test_loops_that_are_differentiated_inside_stay_as_they_are_laid_out():
    """The function itself takes a gradient; what its loops have saved is read in it."""

    def program(x):
        step = lambda c, _: ((jnp.sin(c[0]) + c[0], jnp.sin(c[1]) + jnp.sin(c[1]) / 2), None)
        outs = lax.scan(step, (jnp.full((2, 3), x), x), None, 1)[0]
        return jnp.concatenate([v.ravel() for v in (x, *outs, jnp.sum(jnp.sin(x)) ** 2)])

    def slope(x):
        y, pullback = jax.vjp(program, x)
        return pullback(jnp.cos(jnp.arange(1.0 * y.size)))[0]

    within = loopkit.checkpointed(slope, memory="50 kB")
    assert_close(jax.jit(jax.grad(within))(0.5), jax.grad(slope)(0.5))


@pytest.mark.parametrize("kind", ["scan", "while_loop", "in a loop"])
def test_loops_of_loopkit_share_the_budget_too(kind):
    """If they have no budget of their own."""

    def f(x):
        if kind == "while_loop":
            go, step = lambda c: c[0] < 200, lambda c: (c[0] + 1, jnp.sin(c[1]) * c[1])
            x = loopkit.while_loop(go, step, (0, x), max_steps=200)[1]
        elif kind == "scan":
            x, _ = loopkit.scan(lambda c, _: (jnp.sin(c) * c, None), x, None, 200)
        else:
            inner = lambda c: loopkit.scan(lambda c, _: (jnp.sin(c) * c, None), c, None, 12)[0]
            x, _ = loopkit.scan(lambda c, _: (inner(c) + 0.1, None), x, None, 40)
        return jnp.sum(x)

    x, budget = jnp.linspace(-1.0, 1.0, 1000), 90_000
    assert compiled_bytes(f, x) > 4 * budget
    within = loopkit.checkpointed(f, memory=budget)
    assert compiled_bytes(within, x) <= budget
    assert_close(jax.jit(jax.grad(within))(x), jax.jit(jax.grad(f))(x))
