"""`measure=True`: the compiler's figure for a gradient is within the budget."""

import contextlib
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import loopkit
from derivatives import assert_close, in_numpy
from loopkit._engine.derivative import ways
from loopkit._foreign.checkpointed import _asked
from test_one_budget import PROGRAMS, W, X, bytes_for_all, compiled_bytes, twice, two, unrolled
from test_straight_line import RUNS_AGAIN


def test_the_compiler_needs_no_more_than_the_budget():
    budget = 3500
    assert compiled_bytes(loopkit.checkpointed(twice, memory=budget), X, W) > budget
    measured = loopkit.checkpointed(twice, memory=budget, measure=True)
    assert compiled_bytes(measured, X, W) <= budget
    wanted = in_numpy(jax.grad(lambda x, w: twice(x, w, unrolled), (0, 1)), X, W)
    assert_close(jax.jit(jax.grad(measured, (0, 1)))(X, W), wanted)


@pytest.mark.slow
def test_what_a_function_closes_over_is_a_constant_for_the_compiler(monkeypatch):
    """It needs no cotangent. Yet a loop that reads a constant may need a copy of it."""
    matrix, x = jnp.cos(jnp.arange(64.0 * 64)).reshape(64, 64), jnp.ones((8, 64))

    def f(x):
        step = lambda c, _: (jnp.tanh(c @ matrix) + jnp.sin(c), None)
        return jnp.sum(lax.scan(step, x, None, 20)[0])

    figures, temporary_bytes = [], ways.temporary_bytes

    def reported(*given):
        figures.append(temporary_bytes(*given))
        return figures[-1]

    monkeypatch.setattr(ways, "temporary_bytes", reported)
    measured = loopkit.checkpointed(f, memory=30_000, measure=True)
    compiled = jax.jit(jax.grad(measured)).lower(x).compile().memory_analysis()
    assert compiled.temp_size_in_bytes in figures
    assert compiled.temp_size_in_bytes <= 30_000
    assert loopkit.explain(measured, x).gradient.compiled == compiled.temp_size_in_bytes


def along(xs, w):
    """Most of the memory is for what the loop makes, whatever its plan."""
    start, step = jnp.zeros(xs.shape[1:]), lambda h, x: (jnp.tanh(h @ w + jnp.sin(x)),) * 2
    return jnp.sum(lax.scan(step, start, xs)[1] ** 2)


def test_a_little_more_than_the_least_is_used():
    """A plan of one carry runs steps again 500,500 times."""
    args = jnp.ones((1000, 4, 16)), jnp.eye(16) / 2
    with pytest.raises(ValueError, match=r"at least \d+ bytes, which the smallest") as refused:
        jax.grad(loopkit.checkpointed(along, memory=400_000, measure=True), (0, 1))(*args)
    budget = 2100 + int(re.search(r"at least (\d+)", str(refused.value))[1])
    measured = loopkit.checkpointed(along, memory=budget, measure=True)
    assert compiled_bytes(measured, *args) <= budget
    assert loopkit.explain(measured, *args).plan.evaluations(1000)[1] < 10_000


@pytest.mark.slow
def test_the_smallest_plan_that_an_error_names_will_do():
    few = loopkit.checkpointed(two, memory=1600, measure=True)
    assert_close(few(X, W), two(X, W, unrolled))
    said = r"must be at least (\d+) bytes, which the smallest plan needs once it is compiled"
    with pytest.raises(ValueError, match=said + r"\. .* Pass .*\. Got: 1600 bytes\.") as refused:
        jax.grad(few)(X, W)
    least = int(re.search(said, str(refused.value))[1])
    assert compiled_bytes(loopkit.checkpointed(two, memory=least, measure=True), X, W) <= least
    with pytest.raises(ValueError, match=said):
        jax.grad(loopkit.checkpointed(two, memory=least - 1, measure=True))(X, W)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"measure": True}], ids=str)
def test_a_budget_below_the_prediction_is_enough_if_the_compiler_says_so(how):
    """An error of the prediction may lie on either side. Nothing is refused by it alone."""

    def f(x):  # the compiler needs no cotangents for what is only added
        y, _ = lax.scan(lambda c, _: (jnp.sin(c), None), x, length=3)
        return jnp.sum(y) + sum(jnp.sum(jnp.cos(x * k)) for k in range(9))

    x = jnp.ones(1000)
    with pytest.raises(ValueError, match="must be at least") as refused:
        jax.grad(loopkit.checkpointed(f, memory=1))(x)
    predicted = int(re.search(r"at least (\d+)", str(refused.value))[1])
    slope = jax.jit(jax.grad(loopkit.checkpointed(f, memory=predicted)))
    needed = slope.lower(x).compile().memory_analysis().temp_size_in_bytes
    assert needed < predicted
    measured = jax.jit(jax.grad(loopkit.checkpointed(f, memory=needed, **how)))
    assert_close(measured(x), jax.jit(jax.grad(f))(x))


@pytest.mark.slow
def test_a_budget_that_is_hard_to_meet_is_used(monkeypatch):
    """If the compiler keeps asking for a little more, the plan is not the smallest at once."""
    figures, limit = [], 40_000

    def step(c, _):
        return jnp.sin(c) * c, None

    def f(x):
        return jnp.sum(lax.scan(step, x, length=1000)[0])

    def reported(jaxpr, *given):
        figures.append(int(0.8 * limit + 0.3 * temporary_bytes(jaxpr)))
        return figures[-1]

    temporary_bytes = ways.temporary_bytes
    monkeypatch.setattr(ways, "temporary_bytes", reported)
    measured = loopkit.checkpointed(f, memory=limit, measure=True)
    jax.eval_shape(jax.grad(measured), jnp.ones(100))
    assert len(figures) == 3
    assert figures[1] > limit >= figures[2] > 0.95 * limit


@pytest.mark.slow
@pytest.mark.parametrize("f", PROGRAMS)
def test_programs_of_several_loops(f):
    least, whole = bytes_for_all(f, X, W)
    for budget in (2 * least, whole):
        measured = loopkit.checkpointed(f, memory=budget, measure=True)
        assert compiled_bytes(measured, X, W) <= budget


@pytest.mark.slow
def test_inside_other_transformations():
    budget = 3500
    measured = loopkit.checkpointed(twice, memory=budget, measure=True)
    lanes = jnp.stack([X, jnp.cos(X)])
    wanted = jnp.stack([jax.grad(lambda x: twice(x, W, unrolled))(x) for x in lanes])
    each = jax.grad(measured, (0, 1))(X, W)
    assert_close(each, jax.grad(lambda x, w: twice(x, w, unrolled), (0, 1))(X, W))
    assert_close(jax.jit(jax.vmap(jax.grad(measured), (0, None)))(lanes, W), wanted)
    with jax.disable_jit():
        assert_close(measured(X, W), twice(X, W, unrolled))


@pytest.mark.parametrize("memory", [20_000, 60_000])
def test_a_function_that_fits_as_it_is(memory):
    """Blocks may keep the compiler from fusing what needs no memory in the function itself."""
    row = lambda r, w: lax.cond(r[0] > 0, lambda r: jnp.sin(r) * w, jnp.cos, r)

    def f(x, ws):
        for k in range(4):
            x = jax.vmap(row)(x, ws[k])
        return jnp.sum(x**2)

    x = jnp.cos(jnp.arange(32 * 32.0)).reshape(32, 32)
    ws = jnp.stack([jnp.sin(x * k) for k in range(4)])
    measured = loopkit.checkpointed(f, memory=memory, measure=True)
    assert compiled_bytes(f, x, ws) <= memory
    assert compiled_bytes(measured, x, ws) <= memory
    assert_close(jax.jit(jax.grad(measured))(x, ws), jax.grad(f)(x, ws))


def test_a_refusal_says_what_the_compiler_needs_if_that_is_more_than_predicted():
    def f(x, ws):
        for k in range(4):
            x = jnp.sort(x @ ws[k], 0)
        return jnp.sum(x**2)

    x = jnp.cos(jnp.arange(32 * 32.0)).reshape(32, 32)
    ws = jnp.stack([jnp.sin(x * k) for k in range(1, 5)])
    said = (
        r"at least (\d+) bytes\. Most of it, .*; the compiler needs (\d+) bytes for it\. Got: 9000"
    )
    with pytest.raises(ValueError, match=said) as refused:
        jax.grad(loopkit.checkpointed(f, memory=9000))(x, ws)
    least, needed = map(int, re.search(said, str(refused.value)).groups())
    assert 9000 < least < needed


def test_one_memory_in_bytes():
    expected = r"`measure` can be True only if `memory` is a number of bytes\. .*Got: memory="
    for memory in (None, {"device": 10**6, "host": 10**6}):
        with pytest.raises(ValueError, match=expected):
            loopkit.checkpointed(two, memory=memory, measure=True)
    with pytest.raises(ValueError, match=expected):
        loopkit.checkpointed(measure=True)(two)


@pytest.mark.slow
def test_a_part_of_a_program_is_not_compiled_alone():
    f = lambda x: jnp.sum(jnp.sin(x) ** 2) + jnp.sum(lax.pmean(x, "i"))
    expected = (
        r"`measure` cannot be True under `jax\.shard_map`, or where `fn` exchanges values along an "
        r"axis around it\. Leave it out, or put `checkpointed` around what has that axis\. "
        r"Got: a function of the axis 'i'"
    )
    measured = loopkit.checkpointed(f, memory="1 MB", measure=True)
    with pytest.raises(ValueError, match=expected):
        jax.vmap(jax.grad(measured), axis_name="i")(X)
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    divided = lambda f: jax.shard_map(jax.grad(f), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    with pytest.raises(ValueError, match=expected):
        divided(loopkit.checkpointed(one, memory="1 MB", measure=True))(X)
    with pytest.raises(ValueError, match=r"at least (\d+) bytes\. Most of it") as refused:
        divided(loopkit.checkpointed(one, memory=100))(X)
    least = int(re.search(r"at least (\d+)", str(refused.value))[1])
    assert 100 < least < 2400  # no compiler was asked
    assert_close(divided(loopkit.checkpointed(one, memory=least))(X), jax.grad(one)(X))


def one(x):
    return jnp.sum(lax.scan(lambda c, _: (jnp.sin(c), None), x, length=50)[0])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_arrays_on_several_devices(axis_type):
    """Their types name a mesh without devices, for which nothing can be compiled."""
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(axis_type,))
    x = jax.device_put(X, NamedSharding(mesh, P("rows")))
    measured = loopkit.checkpointed(one, memory="1 MB", measure=True)
    assert_close(jax.jit(jax.grad(measured))(x), jax.grad(one)(X))
    few = loopkit.checkpointed(one, memory=200)  # predicted to be too small
    assert_close(jax.jit(few)(x), one(X))


@pytest.mark.slow
def test_a_function_without_a_gradient_in_all_arguments():
    """It still runs, and the gradient in the others is compiled."""
    f = lambda x, y: one(x) + jnp.sum(jax.pure_callback(lambda v: v, y, y))
    few = loopkit.checkpointed(f, memory=300)
    assert_close(jax.jit(few)(X, X), f(X, X))
    with pytest.raises(ValueError, match=r"at least (\d+) bytes, which the smallest") as refused:
        jax.grad(few)(X, X)
    least = int(re.search(r"at least (\d+)", str(refused.value))[1])
    assert 300 < least < 2400
    assert_close(jax.grad(loopkit.checkpointed(f, memory=least))(X, X), jax.grad(f)(X, X))


def test_a_gradient_that_does_not_compile_here_is_not_measured():
    """A prediction alone decides then, unless `measure` asks for more."""
    mesh = jax.sharding.AbstractMesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))
    f = lambda x: jnp.sum(jnp.sin(jnp.cos(jnp.sin(x))))
    with jax.sharding.use_abstract_mesh(mesh):
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
        x = jax.ShapeDtypeStruct((4096,), X.dtype, sharding=rows)
        slope = lambda **how: jax.eval_shape(jax.grad(loopkit.checkpointed(f, **how)), x)
        with pytest.raises(ValueError, match=r"must be at least \d+ bytes\. Most") as refused:
            slope(memory=1)
        predicted = int(re.search(r"at least (\d+)", str(refused.value))[1])
        assert slope(memory=predicted).shape == x.shape
        with pytest.raises(ValueError, match=rf"must be at least {predicted} bytes\. Most"):
            slope(memory=predicted // 2)
        expected = r"`measure` can be True only if the gradient of `fn` in all its arguments comp"
        with pytest.raises(ValueError, match=expected + r".* Leave it out\. Got: ValueError: "):
            slope(memory=predicted, measure=True)
        both = loopkit.checkpointed(lambda x, y: f(x) + f(y), memory="1 MB", measure=True)
        with pytest.raises(
            ValueError, match="in the arguments for which it is asked compiles here"
        ):
            jax.eval_shape(jax.grad(both), x, x)


@pytest.mark.every_case
@pytest.mark.parametrize("measure", [False, True])
def test_a_gradient_in_some_arguments_fits(measure):
    """Values may lie where the gradient of the others would be, so it may need more than all."""
    keys = jax.random.split(jax.random.key(0))
    at = jax.random.normal(keys[0], (20, 20)) / 5, jax.random.normal(keys[1], (200, 8, 20))
    stacked, fits = at[1].nbytes, 0
    need = lambda f, of: jax.jit(jax.grad(f, of)).lower(*at).compile().memory_analysis()
    for budget in (int(1.4 * stacked), int(2.6 * stacked)):
        f = loopkit.checkpointed(lambda w, xs: along(xs, w), memory=budget, measure=measure)
        for of in (0, (0, 1)):
            with contextlib.suppress(ValueError):  # the budget may be too small
                assert need(f, of).temp_size_in_bytes <= budget, of
                fits += 1
    assert fits >= 3


def test_where_a_derivative_is_asked_for():
    asked = []

    def of(x):
        asked.append(_asked([x, jnp.ones(3)]))
        return jnp.sum(x)

    jax.grad(of)(1.0)
    jax.jit(jax.grad(of))(1.0)
    jax.grad(lambda x: jax.vmap(of)(x * jnp.ones(2)).sum())(1.0)
    jax.grad(jax.jit(of))(1.0)  # inside jit, that is not known
    of(1.0)
    assert asked == [*[[True, False]] * 3, *[[True, True]] * 2]


@pytest.mark.slow
def test_a_budget_that_only_another_way_fits_in():
    """The way with the fewest predicted bytes may need more than others once it is compiled."""

    def mlp(ws, x):
        for k in range(12):
            x = x + jnp.tanh(x @ ws[k % 4]) @ ws[(k + 1) % 4]
        return jnp.mean(x**2)

    of_ws, of_x = jax.random.split(jax.random.key(0))
    ws, x = 0.2 * jax.random.normal(of_ws, (4, 32, 32)), jax.random.normal(of_x, (1024, 32))

    def needed(**how):
        slope = jax.grad(loopkit.checkpointed(mlp, **how), 1)
        return jax.jit(slope).lower(ws, x).compile().memory_analysis().temp_size_in_bytes

    if not RUNS_AGAIN:
        with pytest.raises(ValueError, match="`memory` must be at least"):
            needed(memory=1_700_000)
        return
    enough = needed(memory=1_700_000, measure=True)
    assert enough <= needed(memory=1_700_000) <= 1_700_000
    with pytest.raises(ValueError, match=f"must be at least {enough} bytes"):
        needed(memory=enough - 1)
