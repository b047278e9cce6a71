"""Budgets and plans: what is asked for, what is predicted, what the compiler then needs."""

import functools as ft
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import loopkit
from derivatives import assert_close
from loopkit import Plan
from loopkit._plans.budget import SELDOM_REACHED, Bytes
from loopkit._plans.cheapest import TooLittle, runs_again
from loopkit._plans.costs import Row, StepCosts
from loopkit._plans.planner import best_plan, make_plan
from loopkit.schedules import binomial
from turns import in_turn

X = jnp.linspace(0.1, 1.0, 5000)
MATRIX = jnp.eye(96) * 0.9 + 0.01


def vector(x, _):
    return x + 1e-3 * jnp.sin(X * x), None


def network(x, _):
    return jnp.tanh(x @ MATRIX), jnp.sum(x)


def gradient(loop, step, init, length, **options):
    def loss(init):
        carry, ys = loop(step, init, None, length, **options)
        return jnp.sum(carry**2) + (0 if ys is None else jnp.sum(ys))

    return jax.jit(jax.grad(loss))


def temporary(*args, **options):
    function = gradient(*args, **options)
    return function.lower(args[2]).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("memory", [300_000, "1 MB", "0.5 MiB", 5_000_000])
def test_a_budget_in_bytes_is_kept(memory):
    count = {"1 MB": 10**6, "0.5 MiB": 2**19}.get(memory, memory)
    needed = temporary(loopkit.scan, vector, X, 300, memory=memory)
    least = temporary(loopkit.scan, vector, X, 1)
    assert needed - least <= 1.05 * count + 64_000
    assert needed - least >= 0.5 * count, "a budget is there to be used"


@pytest.mark.slow
def test_the_result_does_not_depend_on_the_budget():
    want = gradient(lax.scan, network, jnp.ones((7, 96)), 13)(jnp.ones((7, 96)))
    plans = [
        Plan(13),
        Plan(13, segment=4),
        Plan(4, segment=4),
        Plan(3, segment=2, store="residuals"),
        Plan(2),
        Plan(1),
        Plan(0, keeps_all=True, store="residuals"),
    ]
    for options in [{"memory": "1 MB"}, *({"checkpoints": p} for p in plans)]:
        got = gradient(loopkit.scan, network, jnp.ones((7, 96)), 13, **options)
        assert_close(got(jnp.ones((7, 96))), want)


@ft.cache
def gradients_of_matrices(loop, plan=None):
    x = jnp.linspace(-1, 1, 4 * 96).reshape(4, 96)
    xs = jnp.linspace(0, 1, 11 * 4 * 96).reshape(11, 4, 96)

    def loss(w, v, x, n):
        def step(carry, x):
            i, h = carry
            return (i + 1, jnp.tanh(h @ w + x @ v + h @ w.T)), jnp.sum(h)

        until = lambda c, _: c[0] >= n
        how = {"until": until, "checkpoints": plan} if loop is loopkit.scan else {}
        (_, h), ys = loop(step, (0, x), xs, 11, **how)
        return jnp.sum(h**2) + jnp.sum(ys)

    return jax.jit(jax.grad(loss, (0, 1, 2)))(MATRIX, MATRIX - 0.3, x, 11)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("segment", "store", "slots"), in_turn([1, 4, 5], ["carries", "residuals"], [3, 20])
)
def test_gradients_of_large_matrices(segment, store, slots):
    """Products of the matrices are deferred to the end of a segment."""
    got = gradients_of_matrices(loopkit.scan, Plan(slots, segment=segment, store=store))
    assert_close(got, gradients_of_matrices(lax.scan))


def test_predicted_peak():
    step = StepCosts(carry_bytes=1000, residual_bytes=3000)
    plan = make_plan(8, 100, True, step)
    assert plan.peak_bytes <= 8 * 1004 + plan.least_bytes
    assert make_plan("all", 100, True, step).slot_bytes == 300_000
    assert make_plan(100, 100, True, step).slot_bytes == 100_000


@pytest.mark.every_case
@pytest.mark.parametrize("slots", [1, 2, 5, 9])
def test_predicted_runs_are_the_optimum(slots):
    plan = make_plan(Plan(slots), 60, True, StepCosts(8, 8))
    assert sum(plan.evaluations()) == binomial.evaluations(60, slots) + 60


MONOTONE = {
    "small matrices": StepCosts(160, 1056, 840.0, 890.0, 880.0, carry_arrays=2, residual_arrays=33),
    "a vector": StepCosts(40_000, 80_000, 16e3, 31e3, 15e3, carry_arrays=1, residual_arrays=2),
    "a network": StepCosts(16_384, 49_152, 24e3, 24e3, 13e3, carry_arrays=1, residual_arrays=3),
    "three numbers": StepCosts(12, 12, 51.0, 51.0, 0.1, carry_arrays=3, residual_arrays=3),
    "residuals are few": StepCosts(4000, 8, 900.0, 910.0, 900.0, carry_arrays=1, residual_arrays=1),
    "a recurrent network": StepCosts(512, 2572, 1294.0, 2064.0, 2064.0, 2560, 262_144, 0, 0, 1, 7),
    "a large state": StepCosts(10**6, 9 * 10**6, 2e6, 3e6, 1e6, carry_arrays=9, residual_arrays=40),
}


@pytest.mark.parametrize(
    ("name", "bound", "exact"), in_turn(MONOTONE, [2, 7, 97, 1000, 4096], [True, False], of=3)
)
def test_more_memory_is_never_slower(name, bound, exact):
    """Nor than the default, where that fits, unless it runs fewer steps again."""
    step, last = MONOTONE[name], None
    default = make_plan(None, bound, exact, step)
    runs = lambda plan: runs_again(plan, bound)
    for count in (int(300 * 1.5**k) for k in range(50)):
        try:
            plan = make_plan(Bytes(count), bound, exact, step)
        except ValueError:
            assert last is None
            continue
        time = plan.nanoseconds(bound)
        assert plan.peak_bytes <= count
        assert last is None or time <= last
        if time > default.nanoseconds(bound) and count >= default.peak_bytes:
            assert runs(plan) < runs(default)
        last = time
    assert last is not None


def test_what_passes_through_a_loop_may_leave_no_memory_to_reuse():
    """Beyond 32 MB, memory is new at every call."""
    alone = StepCosts(100, 250_000, run=1e5, record=1e5, remake=1e5, residual_arrays=1)
    with_ys = alone._replace(slice_bytes=100_000)
    plans = [make_plan(Bytes(10**8), 100, True, step) for step in (alone, with_ys)]
    assert plans[0].keeps_all
    assert plans[1].peak_bytes < 24 * 10**6
    small = [make_plan(None, 10, True, step).stored for step in (alone, with_ys)]
    assert small[0] == small[1]


def test_large_products_are_added_up_seldom():
    """However many carries there is room for: each sum of two matrices takes as long as steps."""
    step = MONOTONE["a recurrent network"]
    for count in (10**6, 2 * 10**6, 4 * 10**6):
        plan = make_plan(Bytes(count), 20_000, True, step)
        assert plan.segment >= 100 or plan.strategy == "every carry"
    short = replace(plan, slots=5_000, segment=4)
    alone = [replace(p, step=step._replace(product_bytes=0)) for p in (short, plan)]
    dearer, without = (
        a.nanoseconds(20_000) / b.nanoseconds(20_000) for a, b in [(short, plan), alone]
    )
    assert dearer > 1.5 * without


@pytest.mark.slow
def test_a_table_that_the_body_reads_is_not_counted():
    """Nor is its cotangent: a single step has both."""
    table = jnp.ones((10_000, 5))

    def loss(table):
        step = lambda c: (c[0] + 1, jnp.sin(c[1] + table[c[0]]))
        start = (0, jnp.ones(5))
        limits = {"max_steps": 10_000, "memory": 9000}
        return jnp.sum(loopkit.while_loop(lambda c: c[0] < 9000, step, start, **limits)[1])

    compiled = jax.jit(jax.grad(loss)).lower(table).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * table.nbytes


@pytest.mark.parametrize("exact", [True, False])
def test_small_loops_keep_everything_or_nothing(exact):
    """To checkpoint some of a few bytes gains nothing, and takes longer to compile."""
    assert make_plan(None, 7, exact, StepCosts(100, 25)).keeps_all
    whole = make_plan(None, 7, exact, StepCosts(400, 600))
    assert (whole.slots, whole.segment, whole.slot_bytes) == (1, 7, 0)
    assert make_plan(None, 1000, exact, StepCosts(400, 600)).slots > 1


def test_steps_that_hold_loops_are_not_run_again():
    """Each loop in them would be compiled again; of more bytes, they are.

    Where a step may not be taken, fewer bytes are kept.
    """
    few, small, large = (StepCosts(400, n, holds_loops=True) for n in (800, 10_000, 20_000))
    assert make_plan(None, 10, True, small).keeps_all
    assert not make_plan(None, 10, True, small._replace(holds_loops=False)).keeps_all
    assert not make_plan(None, 10, True, large).keeps_all
    assert not make_plan(None, 10, False, small).keeps_all
    assert make_plan(None, 10, False, few).keeps_all
    assert not make_plan(None, 10, False, few._replace(holds_loops=False)).keeps_all
    assert not make_plan(3, 10, True, small).keeps_all


def test_steps_that_hold_loops_keep_more_by_default():
    """A replay would run the inner loops again; a smaller row does where all is too much."""
    small, run = Row(0.1, 30_000, 4, 2e3), {"run": 2e5, "record": 2e5}
    step = StepCosts(70_000, 200_000, remake=2e5, holds_loops=True, smaller_rows=(small,), **run)
    plan = make_plan(None, 100, True, step)
    assert plan.keeps_all
    assert plan.row == small
    assert not make_plan(None, 100, True, step._replace(holds_loops=False)).keeps_all
    assert not make_plan(None, 200, True, step).keeps_all  # 6 MB
    cheap = step._replace(run=100.0, record=100.0, remake=100.0)
    assert not make_plan(None, 100, True, cheap).keeps_all


def test_a_few_steps_keep_every_carry():
    step = StepCosts(1 << 22, 1 << 22, run=1e7, record=1e7, remake=1e5)
    plans = {n: make_plan(None, n, True, step) for n in (2, 5, 9, 10)}
    stores = {n: plan.strategy for n, plan in plans.items()}
    assert stores == {**dict.fromkeys((2, 5, 9), "every carry"), 10: "every segment"}


def test_every_carry_is_kept_where_that_takes_little_more():
    """An eighth of what lives while a step is reversed; segments of steps are one more loop."""
    step = StepCosts(1 << 18, 5 << 18, run=4e6, record=4e6, remake=3e6)
    every, few = make_plan(None, 20, True, step), make_plan(None, 24, True, step)
    assert (every.strategy, few.strategy) == ("every carry", "every segment")
    some = replace(every, slots=10, segment=2, store="residuals")
    assert 0 < every.peak_bytes - some.peak_bytes <= step.working_bytes // 8
    slower = step._replace(remake=4e8)
    assert make_plan(None, 20, True, slower).strategy == "every segment"


def test_a_bound_that_is_seldom_reached_brings_no_slots_without_segments():
    """Every carry of the likely steps would be few bytes; those of all steps are not."""
    step = StepCosts(72, 166, 200, 500, 500)
    plan = make_plan(SELDOM_REACHED, 512, False, step)
    assert plan == make_plan(None, 512, False, step)
    assert plan.slots == plan.segments


def test_rows_without_a_bound():
    """Residuals, if they are small, however many arrays they are; at least 64 of them."""
    small, large = StepCosts(8, 256, residual_arrays=30), StepCosts(8, 264, residual_arrays=30)
    plan = make_plan(None, None, False, small)
    assert (plan.store, plan.segment, plan.thinned) == ("residuals", 64, True)
    assert make_plan(None, None, False, large).store == "carries"
    assert make_plan(None, 1000, False, small).store == "carries"


@pytest.mark.slow
@given(
    carry=st.integers(0, 10**5),
    residuals=st.integers(0, 10**6),
    factors=st.sampled_from([0, 0, 300]),
    buffers=st.sampled_from([(0, 0), (0, 0), (40, 10**4), (3000, 3000)]),
    bound=st.none() | st.integers(1, 10**4),
    exact=st.booleans(),
    loops=st.sampled_from([1, 2]),
    share=st.floats(0, 1.5),
)
@settings(max_examples=200, deadline=None)
def test_the_least_budget(carry, residuals, factors, buffers, bound, exact, loops, share):
    """None is refused that one slot would do for; the least that is named does, and no less."""
    step = StepCosts(carry, residuals, 50.0, 80.0, 60.0, factors, 9 * factors, *buffers, 2, 5)
    exact = exact and bound is not None
    planned = lambda count: make_plan(Bytes(count, loops=loops), bound, exact, step)
    alone = replace(Plan(1), bound=bound, exact=exact, step=step._replace(carry_bytes=carry or 1))
    count = max(1, int(share * loops * alone.peak_bytes))
    try:
        assert planned(count).peak_bytes <= count // loops
    except TooLittle as refused:
        least = least_named(refused)
        assert count < least <= loops * alone.peak_bytes
        assert planned(least).peak_bytes <= least // loops
        with pytest.raises(TooLittle):
            planned(least - loops)


def test_the_least_of_several_ways():
    """If a step can be undone or saved, the error names the need of the cheaper way."""
    saved = StepCosts(10_000, 20_000, 50.0, 80.0, 60.0)
    undone = saved._replace(carry_bytes=100, buffer_bytes=9_900, log_bytes=500)
    for steps in ((undone, saved), (saved, undone)):
        with pytest.raises(ValueError, match="must be at least") as refused:
            best_plan(Bytes(100), 1000, True, steps)
        least = least_named(refused.value)
        assert least < 12_000
        best_plan(Bytes(least), 1000, True, steps)


def least_named(error):
    return int(re.search(r"must be at least (\d+) bytes", str(error))[1])


def test_the_least_budget_of_a_loop():
    with pytest.raises(ValueError, match=r"loopkit\.scan: `memory` must be at least \d+ bytes"):
        gradient(loopkit.scan, vector, X, 30, memory=100)(X)


@pytest.mark.slow
def test_a_plan_of_every_step_written_by_hand():
    every = Plan(1, keeps_all=True)
    gradient = lambda plan: jax.grad(
        lambda x: jnp.sum(loopkit.scan(vector, x, length=3, checkpoints=plan)[0] ** 2)
    )(X)
    assert_close(gradient(every), gradient("all"))


def test_printed():
    assert "8 carries, then the carries of 4 steps at a time" in str(Plan(8, segment=4))
    assert "runs       60 forward" in str(make_plan(Plan(5), 60, True, StepCosts(8, 8)))
