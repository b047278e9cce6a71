"""Explanations: what a function's loops are said to store, in words and in pictures."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import matplotlib
import pytest
from jax import lax
from jax.experimental import io_callback

import loopkit
from loopkit import Plan
from loopkit._plans.costs import StepCosts
from loopkit._plans.planner import make_plan
from loopkit._plans.plot import picture

matplotlib.use("agg")
X = jnp.ones(100, "float32")


def rotate(x, _):
    return x + 0.1 * jnp.sin(x), None


def several(x):
    x, _ = loopkit.scan(rotate, x, length=400)
    x = loopkit.while_loop(lambda x: x[0] < 9, lambda x: x * 1.5, x, max_steps=50)
    x = jax.jit(lambda x: loopkit.fori_loop(0, 7, lambda _, x: jnp.tanh(x), x))(x)
    x, _ = lax.scan(rotate, x, length=30)
    return lax.while_loop(lambda x: x[0] < 9, lambda x: x + 1, x)


def test_every_loop_is_found():
    explained = loopkit.explain(several, X)
    names = [loop.name for loop in explained.loops]
    assert names == [
        "loopkit.scan",
        "loopkit.while_loop",
        "loopkit.fori_loop",
        "lax.scan",
        "lax.while_loop",
    ]
    assert all(loop.source.startswith("test_explain.py:") for loop in explained.loops)
    scan, bounded, *_, of_lax, _ = explained.loops
    assert scan.plan.bound == 400
    assert scan.plan.exact
    assert not bounded.plan.exact
    assert scan.plan.step.carry_bytes == 400
    assert [loop.row[5] for loop in explained.loops[3:]] == ["every step", "no gradient"]
    assert of_lax.scan_bytes == 30 * 400, "cos(x) of every step"


def test_a_function_without_loops():
    assert str(loopkit.explain(jnp.sin, X)) == "no loops"
    assert loopkit.explain(jnp.sin, X).plot() == []


def test_results_that_are_no_arrays():
    def trained(model, x):
        return {**model, "bias": model["bias"] + lax.fori_loop(0, 3, lambda _, x: x + 1, x)}

    model = {"bias": X, "activation": jax.nn.silu, "name": "dense"}
    (loop,) = loopkit.explain(trained, model, X).loops
    assert loop.name == "lax.scan"


def test_arguments_that_are_no_arrays():
    def counted(x, steps, activation, *, how):
        assert how == "twice"
        return loopkit.fori_loop(0, steps, lambda _, x: activation(activation(x)), x)

    of_types = jax.ShapeDtypeStruct(X.shape, X.dtype)
    for x in X, of_types:
        plan = loopkit.explain(counted, x, 12, jax.nn.silu, how="twice").plan
        assert (plan.bound, plan.exact) == (12, True)
    with pytest.raises(TypeError, match=r"loopkit\.explain: `fn` must be a function[.] .*Got: 3"):
        loopkit.explain(3)


def test_what_lax_stores_is_what_the_compiler_stores():
    loss = lambda x: jnp.sum(lax.scan(rotate, x, length=300)[0])
    needed = jax.jit(jax.grad(loss)).lower(X).compile().memory_analysis().temp_size_in_bytes
    predicted = loopkit.explain(loss, X).loops[0].scan_bytes
    assert abs(needed - predicted) <= 0.1 * predicted


def test_lanes_of_a_gradient_are_shown_as_one_of_them():
    """In all columns: a plan is for one lane, and is kept for the others."""
    loss = lambda x: loopkit.scan(rotate, x, length=400)[0].sum()
    one = loopkit.explain(jax.grad(loss), X).loops
    assert one[0].scan_bytes == 400 * 400
    assert loopkit.explain(jax.vmap(jax.grad(loss)), jnp.stack([X, X])).loops == one


def test_loops_within_loops_and_gradients():
    inner = lambda x, _: (loopkit.fori_loop(0, 3, lambda _, x: jnp.sin(x), x), None)
    loss = lambda x: jnp.sum(loopkit.scan(inner, x, length=5)[0])
    assert len(loopkit.explain(loss, X).loops) == 2
    assert {e.name for e in loopkit.explain(jax.grad(loss), X).loops} == {
        "loopkit.scan",
        "loopkit.fori_loop",
    }


def test_the_table():
    text = str(loopkit.explain(several, X))
    assert text.splitlines()[0].split()[:4] == ["loop", "source", "steps", "carry"]
    assert "<= 50" in text
    assert "no bound" in text
    assert len(text.splitlines()) == 6


def test_a_plan_is_accepted_by_the_loop():
    run = lambda x, **options: loopkit.scan(rotate, x, length=60, **options)[0]
    plan = loopkit.explain(lambda x: run(x, checkpoints=5), X).plan
    assert plan.bound == 60
    fewer = dataclasses.replace(plan, slots=2)
    again = loopkit.explain(lambda x: run(x, checkpoints=fewer), X).plan
    assert again == fewer
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.slots = 3


@pytest.mark.parametrize("fn", [several, lambda x: x], ids=["several", "none"])
def test_one_loop_has_a_plan(fn):
    found = loopkit.explain(fn, X)
    with pytest.raises(ValueError, match=r"explain: `fn` must run one loop of loopkit to have a"):
        _ = found.plan
    assert len(found) == len(found.loops)
    assert [found[i] for i in range(len(found))] == list(found)


def test_a_little_more_memory_that_would_halve_the_runs():
    def f(x, **options):
        return loopkit.scan(lambda x, _: (jnp.sin(x), None), x, length=64, **options)[0]

    x = jnp.ones(1000)
    found = loopkit.explain(lambda x: f(x, memory=12_000), x)
    more = found[0].with_more
    assert (found.plan.slots, more.slots) == (1, 2)
    assert loopkit.explain(lambda x: f(x, memory=more.peak_bytes), x).plan == more
    runs = [p.evaluations()[1] for p in (more, found.plan)]
    said = rf"with a peak of 16.9 kB, test_explain.py:\d+: {runs[0]} whole runs backward, not 2,080"
    assert re.search(said, str(found))
    assert runs == [430, 2080]
    for memory in ("1 MB", None, {"device": 20_000, "host": 20_000}):
        assert loopkit.explain(lambda x, m=memory: f(x, memory=m), x)[0].with_more is None


@pytest.mark.every_case
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "asked", [Plan(3), Plan(4, segment=3), Plan(20, segment=3), Plan(50), "all"], ids=str
)
def test_the_picture_shows_what_runs(asked, exact):
    plan = make_plan(asked, 50, exact, StepCosts(10, 30))
    drawn = picture(plan, 50)
    length = lambda kind: sum(abs(s.stop - s.start) for s in drawn.stretches if s.kind == kind)
    assert length("forward") == length("reversed") == 50
    if exact and plan.segment == 1 and plan.strategy != "every carry":
        assert length("recomputed") == sum(plan.evaluations()) - 100
    most = max(size for _, size in drawn.in_use)
    assert most <= plan.slot_bytes + plan.row_bytes


@pytest.mark.parametrize(("slots", "with_memory"), [(4, 3), (20, 20)])
def test_the_picture_shows_the_carries_that_have_memory(slots, with_memory):
    plan = make_plan(Plan(slots), 50, True, StepCosts(10, 30))
    assert max(size for _, size in picture(plan, 50).in_use) == 10 * with_memory


def test_plots():
    plan = make_plan(Plan(4, segment=5), 50, True, StepCosts(10, 30))
    figure = plan.plot()
    labels = [t.get_text() for t in figure.axes[0].get_legend().get_texts()]
    assert labels == ["forward", "recomputed", "replayed", "reversed", "carry saved"]
    assert len(loopkit.explain(several, X).plot(steps=20)) == 3
    matplotlib.pyplot.close("all")


def test_a_picture_needs_a_length():
    with pytest.raises(ValueError, match=r"loopkit\.Plan\.plot: `steps` must be given"):
        Plan(4).plot()


def test_parts_of_steps_that_run_again_are_counted():
    """Both what `jax.checkpoint` runs again and what a budget does not keep are counted."""
    hidden = jax.checkpoint(lambda c, _: (jnp.sin(jnp.exp(c)), None))
    every = lambda c: loopkit.scan(hidden, c, None, 10, checkpoints="all")[0]
    assert loopkit.explain(every, X)[0].row[8] == "about 10"
    plain = lambda c: loopkit.scan(lambda c, _: (jnp.sin(c), None), c, None, 10, checkpoints="all")
    assert loopkit.explain(plain, X)[0].row[8] == "0"

    wide = jnp.ones((64, 64))
    layer = lambda h, w: (jnp.sin(h + jnp.tanh(jnp.exp(h) @ w) @ w.T), None)
    budget = lambda h, w: loopkit.scan(layer, h, w, memory="1 MB")[0]
    (found,) = loopkit.explain(budget, wide, jnp.ones((12, 64, 64)))
    assert found.plan.price > 0
    assert found.row[8].startswith("about ")


@pytest.mark.slow
def test_the_memory_of_the_whole_gradient_stands_below_a_budget_of_a_loop():
    """The budget leaves out the cotangent of the weights; the compiler does not."""
    w, x = jnp.ones((64, 64)) / 64, jnp.ones((8, 64))

    def loss(w, x, memory=None):
        return jnp.sum(
            loopkit.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, 200, memory=memory)[0]
        )

    explained = loopkit.explain(lambda w, x: loss(w, x, "100 kB"), w, x)
    limited, whole = explained[0].plan.peak_bytes, explained.gradient
    assert limited <= 100_000 < limited + w.nbytes < whole.peak
    assert whole.compiled == pytest.approx(whole.peak, rel=0.2)
    assert "peak of the gradient, predicted" in str(explained)
    assert "peak of the gradient, predicted" not in str(loopkit.explain(loss, w, x))


def test_a_loop_of_lax_without_a_gradient_is_listed():
    def told(x):
        step = lambda c, _: (io_callback(jnp.sin, jax.ShapeDtypeStruct((), "float64"), c), None)
        return lax.scan(step, x, length=3)[0]

    (loop,) = loopkit.explain(told, 1.0)
    assert (loop.row[2], loop.row[3], loop.row[5]) == ("3", "8 B", "no gradient")


def test_one_carry_is_a_carry():
    assert Plan(1).stored == "1 carry"
    assert Plan(2).stored == "2 carries"
