"""`unroll`: steps to an iteration, given or found by measuring."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from derivatives import assert_close, derivative, in_numpy
from loopkit import Plan
from loopkit._extras import best_unroll as trials
from problems import named

KEEPS_ALL = Plan(0, keeps_all=True, store="residuals")


@pytest.mark.exhaustive
def test_more_steps_to_an_iteration_than_there_are():
    """All steps of a segment are one iteration."""
    x = jnp.ones((32, 64))

    def products(unroll):
        step = lambda x, _: (jnp.tanh(x @ jnp.eye(64)), None)
        f = lambda x: loopkit.scan(step, x, length=8, unroll=unroll, checkpoints=Plan(2, 4))[0]
        slope = jax.grad(lambda x: f(x).sum())
        return jax.jit(slope).lower(x).as_text().count("dot_general"), slope(x)

    (few, wanted), (many, _), *larger = map(products, (1, 4, 5, 8, True))
    assert many > 2 * few
    for count, got in larger:
        assert count >= many
        assert_close(got, wanted)


@pytest.mark.slow
def test_blocks_of_a_truncated_scan_are_unrolled_and_they_alone():
    """However many there are, the program is no longer."""

    def lengths(length, truncate):
        stop = lambda c, _: c > 9.0
        f = lambda x: loopkit.scan(
            lambda c, x: (jnp.sin(c) * x, None),
            x,
            x * jnp.ones(length),
            truncate=truncate,
            until=stop,
            unroll=True,
        )[0]
        return len(jax.jit(jax.grad(f)).lower(1.0).as_text())

    assert lengths(24, 2) < 1.1 * lengths(6, 2)
    assert lengths(24, 4) > 1.1 * lengths(24, 2)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [Plan(100), Plan(4, segment=4), KEEPS_ALL])
@pytest.mark.parametrize("name", ["while_scalar", "scan_until", "scan_xs_ys"])
def test_derivatives_with_every_way_of_storing(name, checkpoints):
    (problem,) = named(name)
    x = problem.vector()
    got = derivative(problem.flat_loop(checkpoints, max_steps=100, unroll=3), "r")
    lanes = jnp.stack([x, 1.15 * x])
    each = [in_numpy(derivative(problem.flat_reference(row), "r"), row) for row in lanes]
    assert_close(jax.jit(got)(x), each[0])
    assert_close(jax.jit(jax.vmap(got))(lanes), jnp.stack(each))


def test_what_is_no_unroll():
    for unroll in ("auto", "fast", 1.5):
        with pytest.raises(
            TypeError, match=r"scan: `unroll` must be an int >= 0 .* bool[.] .*Got:"
        ):
            loopkit.scan(lambda x, _: (x, None), 1.0, length=3, unroll=unroll)


def timed(monkeypatch, to_compile, seconds):
    """Trials that take just so long, of `count` steps to an iteration."""
    made = []

    def measured(run, init, xs):
        run(init, xs)
        made.append(trials.COUNTS[len(made)])
        return to_compile(made[-1]), seconds(made[-1])

    monkeypatch.setattr(trials, "_measured", measured)
    return made


@pytest.mark.parametrize(
    ("to_compile", "seconds", "wanted", "tried"),
    [
        (lambda n: 0.1 * n, lambda n: 1e-6 / n, 1, 2),  # a run saves less than compiling costs
        (lambda n: 0.1 * n, lambda n: 1e-2 / n, 8, 5),
        (lambda n: 0.001, lambda n: 1e-3 * (1 - 0.002 * n), 1, 5),  # within the noise
        (lambda n: 3.0**n, lambda n: 1e-2 / n, 1, 3),  # to compile four takes longer than all runs
    ],
)
def test_time_to_compile_counts(to_compile, seconds, wanted, tried, monkeypatch):
    made = timed(monkeypatch, to_compile, seconds)
    step = lambda x, _: (x * 0.5, None)
    assert loopkit.best_unroll(step, 1.0, length=100) == wanted
    assert made == list(trials.COUNTS[:tried])


@pytest.mark.slow
@pytest.mark.parametrize("gradient", [False, True])
def test_a_real_trial(gradient):
    """Trees may hold integers, which have no gradient."""

    def step(c, x):
        x_row, k = x
        new = {"a": c["a"] + 0.1 * c["a"] ** 2 * x_row, "n": c["n"] + k}
        return new, (c["a"], c["n"], new["a"].astype(complex))

    init, xs = {"a": 0.5, "n": 3}, (np.linspace(0, 1, 20), jnp.arange(20))
    found = loopkit.best_unroll(step, init, xs, gradient=gradient, checkpoints="all", uses=10)
    assert found in trials.COUNTS
    assert type(found) is int


@pytest.mark.slow
@pytest.mark.parametrize("gradient", [False, True])
def test_leaves_that_are_no_arrays(gradient):
    """Steps get them, and Python numbers in xs, as `loopkit.scan` passes them."""

    def step(c, x):
        assert x["flag"] is True
        return {**c, "rows": c["rows"].append(c["act"](x["v"]))}, None

    init = {"rows": loopkit.TensorArray.empty(4, 0.5), "act": jnp.tanh, "name": "cell"}
    xs = {"v": jnp.ones(4), "flag": True}
    assert loopkit.best_unroll(step, init, xs, gradient=gradient, uses=10) in trials.COUNTS


def test_steps_are_run_on_the_values_given():
    """They may hold loops that end by themselves, write to the host, and read what is random."""
    seen = []
    inside = lambda x: loopkit.while_loop(lambda y: y < 1, lambda y: y + x, x)

    def step(x, _):
        jax.debug.callback(lambda x: seen.append(float(x)), x)
        return x + 0.1 * inside(x), None

    loopkit.best_unroll(step, 0.5, length=2, uses=1)
    jax.effects_barrier()
    want = [0.5, float(step(0.5, None)[0])]
    assert set(seen) == set(want)
    assert len(seen) >= len(want) * (trials.ROUNDS + 1)


def test_inside_jit_is_an_error():
    step = lambda x, _: (x, None)
    for f, name in (
        (lambda x: loopkit.best_unroll(step, x, length=3), "init"),
        (lambda x: loopkit.best_unroll(step, 1.0, x), "xs"),
    ):
        message = f"best_unroll: `{name}` must hold values to measure with[.] .*Got: traced"
        with pytest.raises(TypeError, match=message):
            jax.jit(f)(jnp.ones(3))


def test_arguments():
    step = lambda x, _: (x, None)
    with pytest.raises(TypeError, match="best_unroll: `gradient` must be a bool"):
        loopkit.best_unroll(step, 1.0, length=3, gradient="yes")
    with pytest.raises(
        ValueError, match=r"best_unroll: `uses` must be an int >= 1 .runs.[.] .*Got: 0"
    ):
        loopkit.best_unroll(step, 1.0, length=3, uses=0)
    with pytest.raises(TypeError, match="best_unroll: `f` must be a function"):
        loopkit.best_unroll(None, 1.0, length=3)
