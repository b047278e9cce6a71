"""A budget for code without loops, and between loops: which of it runs again in the gradient."""

import re
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import loopkit
from derivatives import assert_close
from loopkit._engine.derivative.straight_line import _moving
from loopkit._jaxprs import equations
from test_one_budget import compiled_bytes

RUNS_AGAIN = jax.__version_info__ >= (0, 11)
"""Whether the compiler for CPUs does not merge what `jax.checkpoint` runs again with what ran."""


def layer(x, w):
    return x + jax.nn.gelu(jnp.tanh(x @ w[0]) @ w[1])


def layers(ws, x):
    """Layers in a Python loop."""
    for w in ws:
        x = layer(x, w)
    return jnp.sum(x**2)


def with_skips(ws, x):
    """Values of the first layers are read by the last ones."""
    met = []
    for w in ws[: len(ws) // 2]:
        met.append(x)
        x = jnp.sin(layer(x, w))
    for w in ws[len(ws) // 2 :]:
        x = layer(x, w) * jnp.cos(met.pop())
    return jnp.sum(x)


def between(ws, x, scan=lax.scan):
    """Layers before, between and after two loops."""
    x = layer(layer(x, ws[0]), ws[1])
    x, ys = scan(lambda c, _: (jnp.sin(c) + 0.1, jnp.sum(c)), x, length=6)
    x = layer(layer(x, ws[2]), ws[3])
    x, _ = scan(lambda c, _: (jnp.cos(c) * c, None), x, length=5)
    return jnp.sum(layer(x, ws[4]) ** 2) + jnp.sum(ys**2)


def arguments(n=8, batch=32, width=8):
    grid = lambda a, b, k: jnp.asarray(np.sin(np.arange(a * b) * (k + 1.0)).reshape(a, b))
    ws = [(grid(width, 2 * width, k) / 3, grid(2 * width, width, k) / 3) for k in range(n)]
    return ws, grid(batch, width, 0.3)


def least(f, *args):
    """The fewest bytes that will do, as the error says."""
    with pytest.raises(ValueError, match=r"must be at least \d+ bytes") as refused:
        jax.eval_shape(jax.grad(loopkit.checkpointed(f, memory=1)), *args)
    return int(re.search(r"at least (\d+)", str(refused.value))[1])


def within(f, *args, part=0.0):
    """`f` with a budget: from the least that will do (0) to what `f` needs without one (1)."""
    low, high = least(f, *args), compiled_bytes(f, *args)
    return loopkit.checkpointed(f, memory=max(low, int(low + part * (high - low))))


@pytest.mark.parametrize(
    "f", [layers, *(pytest.param(f, marks=pytest.mark.slow) for f in (with_skips, between))]
)
def test_every_derivative_is_that_without_a_budget(f):
    ws, x = arguments(4 if f is layers else 6, 24, 3)
    budgeted = within(f, ws, x)
    tangent = jnp.cos(x)

    def all_of(f):
        g = lambda x: f(ws, x)
        slope = jax.grad(g)
        lanes = jax.vmap(jax.grad(f), (None, 0))(ws, jnp.stack([x, tangent]))
        moved = jax.jvp(g, (x,), (tangent,))
        second = jax.jvp(slope, (x,), (tangent,)), jax.grad(lambda x: jnp.sum(slope(x) ** 2))(x)
        return f(ws, x), jax.grad(f)(ws, x), moved, second, lanes

    assert "prevent_cse" in str(jax.make_jaxpr(budgeted)(ws, x))
    assert_close(jax.jit(lambda: all_of(budgeted))(), jax.jit(lambda: all_of(f))())


@pytest.mark.slow
def test_the_compiler_needs_no_more_than_the_budget():
    args = arguments(12, 256, 8)
    whole, low = compiled_bytes(layers, *args), least(layers, *args)
    assert low < 0.4 * whole
    used = []
    for budget in np.linspace(low, whole, 4):
        used.append(compiled_bytes(loopkit.checkpointed(layers, memory=int(budget)), *args))
        assert used[-1] <= budget or not RUNS_AGAIN
    assert (used[0] < 0.6 * used[-1]) == RUNS_AGAIN


@pytest.mark.slow
def test_a_measured_budget_where_values_are_read_much_later():
    args = arguments(12, 256, 8)
    budget = compiled_bytes(with_skips, *args) // 2
    measured = loopkit.checkpointed(with_skips, memory=budget, measure=True)
    if RUNS_AGAIN:
        assert compiled_bytes(measured, *args) <= budget
    else:
        with pytest.raises(ValueError, match="which the smallest plan needs once it is compiled"):
            compiled_bytes(measured, *args)


@pytest.mark.slow
def test_it_needs_less_than_a_checkpoint_for_each_layer():
    ws, x = arguments(12, 256, 8)
    by_hand = compiled_bytes(lambda ws, x: _by_hand(ws, x), ws, x)
    budgeted = loopkit.checkpointed(layers, memory=by_hand, measure=True)
    if RUNS_AGAIN:
        assert compiled_bytes(budgeted, ws, x) <= by_hand
    else:
        with pytest.raises(ValueError, match="which the smallest plan needs once it is compiled"):
            compiled_bytes(budgeted, ws, x)


def _by_hand(ws, x):
    for w in ws:
        x = jax.checkpoint(layer)(x, w)
    return jnp.sum(x**2)


@pytest.mark.slow
def test_more_bytes_take_no_more_time():
    args = arguments(12, 256, 8)
    times = []
    for budget in np.linspace(least(layers, *args), 4 * compiled_bytes(layers, *args), 8):
        said = loopkit.explain(loopkit.checkpointed(layers, memory=int(budget)), *args)
        times.append(said.gradient.again)
    assert all(more <= 1.02 * less for less, more in pairwise(times))
    assert times[0] > times[-1]


@pytest.mark.slow
def test_explain_says_what_runs_again():
    args = arguments(12, 256, 8)
    budget = int(0.5 * compiled_bytes(layers, *args))
    said = loopkit.explain(loopkit.checkpointed(layers, memory=budget), *args)
    assert said.gradient.peak <= 1.1 * budget  # the plan is that of blocks, this of the whole
    assert said.gradient.compiled <= budget or not RUNS_AGAIN
    assert re.search(r"no loops\npeak .*; code between .* again: .* ms$", str(said))
    if RUNS_AGAIN:
        assert "code that runs again at test_straight_line.py:" in str(said.gradient.timeline)
    assert str(loopkit.explain(layers, *args)) == "no loops"


def test_a_large_budget_changes_nothing():
    args = arguments(3, 4, 3)
    changed = jax.make_jaxpr(loopkit.checkpointed(layers, memory="1 GB"))(*args)
    assert str(changed) == str(jax.make_jaxpr(layers)(*args))
    peaks = [
        loopkit.explain(f, *args).gradient.peak
        for f in (layers, loopkit.checkpointed(layers, memory="1 GB"))
    ]
    assert peaks[0] == peaks[1] > 0


@pytest.mark.slow
def test_a_budget_too_small_is_an_error_of_gradients_alone():
    ws, x = arguments(4, 4, 3)
    few = loopkit.checkpointed(layers, memory=1)
    pushed = lambda f: jax.jvp(f, (ws, x), (ws, x))
    all_of = lambda f: (f(ws, x), pushed(f), jax.vmap(f, (None, 0))(ws, x[:, None]))
    assert_close(jax.jit(lambda: all_of(few))(), jax.jit(lambda: all_of(layers))())
    for transform in (jax.grad, lambda f: jax.vmap(jax.grad(f), (None, 0)), jax.jacrev):
        with pytest.raises(ValueError, match=r"`memory` must be at least \d+ bytes\. Most of it"):
            transform(few)(ws, x[None])


@pytest.mark.slow
def test_a_refusal_names_the_least_as_compiled_and_a_line():
    args = arguments(12, 256, 8)
    predicted = least(with_skips, *args)
    few, said = loopkit.checkpointed(with_skips, memory=predicted // 2), r"at least (\d+) bytes"
    with pytest.raises(ValueError, match=rf"{said}.* at test_straight_line\.py:\d+\. ") as refused:
        jax.grad(few)(*args)
    said = int(re.search(said, str(refused.value))[1])
    budgeted = loopkit.checkpointed(with_skips, memory=said)
    assert compiled_bytes(budgeted, *args) <= said < predicted or not RUNS_AGAIN


@pytest.mark.slow
def test_what_must_not_run_again_does_not():
    """A callback that returns a value, and one that reports, run once each."""
    seen = []

    def f(ws, x):
        x = layer(x, ws[0])
        x = x + jax.pure_callback(lambda v: seen.append("pure") or v * 0, x, lax.stop_gradient(x))
        jax.debug.callback(lambda v: seen.append("debug"), x[0, 0])
        for w in ws[1:]:
            x = layer(x, w)
        return jnp.sum(x**2)

    ws, x = arguments(6, 16, 3)
    wanted = jax.jit(jax.grad(f))(ws, x)
    jax.effects_barrier()
    seen.clear()
    assert_close(jax.jit(jax.grad(within(f, ws, x)))(ws, x), wanted)
    jax.effects_barrier()
    assert sorted(seen) == ["debug", "pure"]


@pytest.mark.slow
def test_random_numbers_are_the_same_when_they_are_made_again():
    def f(ws, x, key=None):
        for k, w in enumerate(ws):
            kept = jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), k), 0.5, x.shape)
            x = layer(jnp.where(kept, x, 0.0), w)
        return jnp.sum(x**2)

    args = arguments(6, 16, 3)
    assert_close(jax.grad(within(f, *args))(*args), jax.grad(f)(*args))


@pytest.mark.slow
def test_custom_rules_and_checkpoints_of_the_user_inside():
    @jax.custom_vjp
    def doubled(x):
        return jnp.sin(x)

    doubled.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (2 * ct * jnp.cos(x),))

    def f(ws, x):
        for w in ws:
            x = jax.checkpoint(layer)(doubled(x), w) + jax.nn.relu(x)
        return jnp.sum(x**2)

    args = arguments(6, 16, 3)
    assert_close(jax.grad(within(f, *args))(*args), jax.grad(f)(*args))


def test_code_with_callbacks_of_values_without_tangents_is_divided():
    def f(ws, x):
        for w in ws:
            x = layer(x, w)
            io_callback(lambda v: None, None, lax.stop_gradient(x[0, 0]))
        return jnp.sum(x**2)

    args = arguments(6, 32, 4)
    assert least(f, *args) < 0.6 * compiled_bytes(f, *args)


def test_what_moves_is_what_the_derivative_moves():
    """Operands that are only compared or rounded do not, nor what is made of these alone."""

    def block(a, b, c, n):
        still = jnp.round(b) + jnp.sign(b) * jnp.floor(b) + lax.stop_gradient(jnp.ceil(b))
        return jnp.where(c > 0, a, still), still, jnp.sin(a) * still, n + 1

    types = [jax.ShapeDtypeStruct((3,), float)] * 3 + [jax.ShapeDtypeStruct((), int)]
    j = equations.inlined(jax.make_jaxpr(block)(*types)).jaxpr
    flags = _moving(j.eqns, j.invars, j.outvars, [True, True, True, False])
    assert flags == ((True, False, False, False), (True, False, True, False))


@pytest.mark.slow
def test_code_with_references_is_left_as_it_is():
    def f(ws, x):
        total = jax.new_ref(x)
        for w in ws:
            x = layer(x, w)
            total[...] += jnp.sin(x)
        return jnp.sum(total[...] ** 2)

    args = arguments(3, 8, 3)
    budgeted = loopkit.checkpointed(f, memory=least(f, *args))
    assert_close(jax.grad(budgeted)(*args), jax.grad(f)(*args))


def test_a_refusal_for_two_memories_names_the_least_for_one():
    args = arguments(6, 32, 4)
    few = loopkit.checkpointed(layers, memory={"device": 1, "host": "1 MB"})
    with pytest.raises(ValueError, match=rf"must be at least {least(layers, *args)} bytes on the"):
        jax.grad(few)(*args)


@pytest.mark.slow
def test_a_measured_budget_of_sharded_arrays():
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        ws, x = arguments(4, 32, 4)
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
        args = ws, jax.device_put(x, rows)
        measured = loopkit.checkpointed(layers, memory="20 kB", measure=True)
        assert_close(jax.jit(jax.grad(measured))(*args), jax.jit(jax.grad(layers))(*args))


@pytest.mark.slow
def test_what_all_devices_save_is_taken_off_the_arrays_of_all():
    """Outside `jax.shard_map`, what a loop in it saves is one array of all devices."""
    mesh = jax.sharding.Mesh(jax.devices(), ("i",))

    def part(x):
        return lax.scan(lambda c, _: (jnp.sin(c), None), jnp.sin(x), length=50)[0]

    spec = jax.sharding.PartitionSpec("i")
    f = lambda x: jnp.sum(jax.shard_map(part, mesh=mesh, in_specs=spec, out_specs=spec)(x))
    x = jnp.asarray(np.linspace(0.0, 1.0, 400))
    budget = least(f, x)
    assert budget < 20 * x.nbytes
    assert_close(jax.jit(jax.grad(loopkit.checkpointed(f, memory=budget)))(x), jax.grad(f)(x))


@pytest.mark.slow
def test_a_loop_of_a_checkpoint_inside_shard_map_is_planned_outside():
    """Its step is traced where nothing names the axis over which values vary."""
    wide = np.cos(np.arange(216.0)).reshape(3, 72)

    def network(x):
        step = lambda h, w: (h + jnp.tanh(h @ w @ wide) @ wide.T, None)
        return loopkit.scan(step, jnp.full(3, x), jnp.full((2, 3, 3), x))[0]

    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    part = lambda x: jax.checkpoint(network)(x[0])[None]
    f = jax.shard_map(part, mesh=mesh, in_specs=spec, out_specs=spec)
    x = jnp.array([0.5, 0.1])
    gradient = lambda f: jax.vjp(f, x)[1](jnp.ones((2, 3)))[0]
    with pytest.raises(ValueError, match=r"`memory` must be at least \d+ bytes") as refused:
        gradient(loopkit.checkpointed(f, memory=1))
    (least,) = re.findall(r"at least (\d+) bytes", str(refused.value))
    assert_close(gradient(loopkit.checkpointed(f, memory=int(least))), gradient(f))
