"""Checkpoints in the host's memory."""

import functools as ft
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import loopkit
from derivatives import assert_close, derivative, in_numpy
from loopkit import Plan, _jax
from loopkit._engine import steps
from loopkit._engine.lowering import memory
from loopkit._plans.budget import Bytes
from loopkit._plans.costs import StepCosts
from loopkit._plans.planner import make_plan
from problems import named

PLANS = {
    "segments": Plan(100, segment=2, host=True),
    "few": Plan(2, segment=2, host=True),
    "carries": Plan(100, host=True),
    "carries in segments": Plan(100, segment=4, host=True),
    "residuals": Plan(0, keeps_all=True, store="residuals", host=True),
    "residual rows": Plan(3, segment=2, store="residuals", host=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["while_scalar", "scan_until", "scan_xs_ys"])
def test_gradients(name, plan):
    (problem,) = named(name)
    x = problem.vector()
    f = derivative(problem.flat_loop(PLANS[plan], max_steps=50), "r")
    lanes = jnp.stack([x, 1.15 * x])
    each = [in_numpy(derivative(problem.flat_reference(row), "r"), row) for row in lanes]
    assert_close(jax.jit(f)(x), each[0])
    assert_close(jax.jit(jax.vmap(f))(lanes), jnp.stack(each))


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_steps_left_over(plan):
    """The last steps of an iteration of three do not count, and nothing is saved for them."""
    (problem,) = named("while_scalar")
    x = problem.vector()
    f = derivative(problem.flat_loop(PLANS[plan], max_steps=50, unroll=3), "r")
    assert_close(jax.jit(f)(x), in_numpy(derivative(problem.flat_reference(), "r"), x))


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["carries", "residuals"])
@pytest.mark.parametrize("outer", ["residuals", "every carry"])
def test_what_a_loop_in_a_step_saves_is_saved_there(outer, inner):
    """Also in steps that do not count, and in lanes that have stopped."""
    plans = PLANS | {"every carry": Plan(0, keeps_all=True, host=True)}

    def f(n, x):
        def step(c):
            inside = lambda y, _: (jnp.sin(y) * x, None)
            return c[0] + 1, loopkit.scan(inside, c[1], None, 3, checkpoints=PLANS[inner])[0]

        how = {"max_steps": 4, "checkpoints": plans[outer], "unroll": 3}
        return loopkit.while_loop(lambda c: c[0] < n, step, (0, x), **how)[1].sum()

    def unrolled(n, x):
        y = x
        for _ in range(3 * int(n)):
            y = jnp.sin(y) * x
        return y.sum()

    ns, xs = jnp.array([2, 4, 0]), jnp.array([[0.7, 1.2], [1.1, 0.4], [0.5, 0.9]])
    each = jnp.stack([jax.grad(unrolled, 1)(n, x) for n, x in zip(ns, xs, strict=True)])
    assert_close(jax.jit(jax.grad(f, 1))(ns[1], xs[1]), each[1])
    assert_close(jax.jit(jax.vmap(jax.grad(f, 1)))(ns, xs), each)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["f", "fr", "rr"])
def test_other_derivatives(pattern):
    (problem,) = named("scan_xs_ys")
    x = problem.vector()
    f = derivative(problem.flat_loop(PLANS["few"]), pattern)
    assert_close(jax.jit(f)(x), in_numpy(derivative(problem.flat_reference(), pattern), x))


def cubic(x, **options):
    return loopkit.scan(lambda x, _: (x - 0.01 * x**3, None), x, length=60, **options)[0].sum()


def test_where_the_checkpoints_are():
    _, pull = jax.vjp(lambda x: cubic(x, checkpoints=Plan(7, host=True)), jnp.ones(50))
    # The first of the seven is the initial carry.
    kinds = [a.sharding.memory_kind for a in jax.tree.leaves(pull) if a.shape == (6, 50)]
    assert kinds == ["pinned_host"]


def test_a_program_returns_them_where_they_are():
    """A program returns checkpoints on the host, for a later gradient: JAX looks at equations, not
    types."""
    f = lambda x: cubic(x, checkpoints=Plan(7, host=True))
    pull = jax.jit(lambda x: jax.vjp(f, x)[1])(jnp.ones(50))
    kinds = [a.sharding.memory_kind for a in jax.tree.leaves(pull) if a.shape == (6, 50)]
    assert kinds == ["pinned_host"]
    assert_close(pull(1.0)[0], jax.grad(cubic)(jnp.ones(50)))


@pytest.mark.slow
@pytest.mark.parametrize("jits", [True, False])
def test_outside_jit(jits):
    """`disable_jit` is for the user's functions: where results lie, a compiled program says."""
    x = jnp.linspace(0.1, 1, 50)
    f = lambda x: cubic(x, checkpoints=Plan(7, host=True))
    with jax.disable_jit(not jits):
        found = jax.grad(f)(x)
    assert_close(found, jax.grad(cubic)(x))


def test_two_budgets():
    x = jnp.linspace(0.1, 1, 5000)
    memory = {"device": "200 kB", "host": "1.5 MB"}
    plan = loopkit.explain(lambda x: cubic(x, memory=memory), x).plan
    assert plan.host
    assert plan.peak_bytes <= 200_000
    assert 200_000 < plan.host_bytes <= 1_500_000
    assert "carries on the host" in str(plan)
    assert f"host       {plan.host_bytes:,} bytes" in str(plan)
    assert_close(jax.grad(lambda x: cubic(x, memory=memory))(x), jax.grad(cubic)(x))


def test_more_on_the_host_takes_no_more_runs():
    step = StepCosts(1000, 2000, 100.0, 120.0, 60.0)
    runs = [
        make_plan(Bytes(8000, host=room), 500, True, step).nanoseconds(500)
        for room in (2000, 20_000, 100_000)
    ]
    assert runs == sorted(runs, reverse=True)


def test_the_least_on_the_host():
    with pytest.raises(ValueError, match=r"`memory` must be at least 1608 bytes on the host"):
        jax.grad(lambda x: cubic(x, memory={"device": "10 kB", "host": 3}))(jnp.ones(100))


def test_the_least_on_the_device():
    """An error names the least budget that is enough, and that budget is enough."""
    kept = lambda least: jax.grad(lambda x: cubic(x, memory={"device": least, "host": "1 MB"}))
    with pytest.raises(
        ValueError, match=r"`memory` must be at least \d+ bytes on the dev"
    ) as error:
        kept(500)(jnp.ones(100))
    (least,) = re.findall(r"Pass (\d+) or more for 'device'", str(error.value))
    assert 500 < int(least) < 5000
    assert_close(kept(int(least))(jnp.ones(100)), jax.grad(cubic)(jnp.ones(100)))


def test_what_is_no_pair_of_budgets():
    with pytest.raises(ValueError, match=r'scan: `memory` must have the keys "device" and "host"'):
        cubic(jnp.ones(3), memory={"device": 3})


def test_a_device_without_host_memory(monkeypatch):
    monkeypatch.setattr(memory, "memory_kinds", lambda device: {"device"})
    monkeypatch.setattr(memory, "_sound", set())
    for options in (
        {"checkpoints": Plan(6, host=True)},
        {"memory": {"device": 10**5, "host": 10**6}},
    ):
        with pytest.raises(
            NotImplementedError, match=r"scan: `memory`, or a plan .* Got: cpu with dev"
        ):
            jax.grad(lambda x, options=options: cubic(x, **options))(jnp.ones(51))


@pytest.mark.slow
def test_wrong_gradients_are_noticed(monkeypatch):
    """Before the loop's own gradient is computed."""
    probe = memory._probe
    monkeypatch.setattr(memory, "_sound", set())
    monkeypatch.setattr(memory, "_probe", lambda x, on_host: probe(x, on_host) * (1 + on_host))
    with pytest.raises(
        RuntimeError, match=r"scan: checkpoints must come back unchanged from the host"
    ):
        jax.jit(jax.grad(lambda x: cubic(x, checkpoints=Plan(6, host=True))))(jnp.ones(52))
    assert not memory._sound


def test_checkpoints_that_come_back_as_others_are_noticed(monkeypatch):
    """A gradient of the small loop depends on which is which."""
    exchanged = []

    def read(array, row, axis, **how):
        if _jax.is_on_host(jax.typeof(array)):
            exchanged.append(array.shape[0])
            row = array.shape[0] - 1 - row
        return jax.lax.dynamic_index_in_dim(array, row, axis, **how)

    reads = SimpleNamespace(**vars(jax.lax) | {"dynamic_index_in_dim": read})
    monkeypatch.setattr(steps, "lax", reads)
    monkeypatch.setattr(memory, "SIZE", 61)
    monkeypatch.setattr(memory, "_sound", set())
    with pytest.raises(RuntimeError, match=r"scan: checkpoints .* Got: gradients that differ by"):
        memory.check_host_memory("scan")
    assert exchanged == [2, 2]


def test_how_much_gradients_may_differ():
    device, same = jax.devices()[0], lambda x: x
    memory.check_same("scan", device, [same, same])
    memory.check_same("scan", device, [same, lambda x: x * 1.00005])
    with pytest.raises(RuntimeError, match=r"that differ by 9\.0e-04 on"):
        memory.check_same("scan", device, [same, lambda x: x * 1.001])


@pytest.mark.parametrize("account", [0, None])
def test_it_is_noticed_where_nothing_is_on_the_host(account):
    """The compiler's account shows that nothing is on the host; so does a missing account."""
    device = SimpleNamespace(platform="gpu", device_kind="some card")
    found = SimpleNamespace(host_temp_size_in_bytes=account)
    program = SimpleNamespace(memory_analysis=lambda: found)
    with pytest.raises(
        RuntimeError, match=rf"scan: the compiler must put .* Got: {account} bytes there"
    ):
        memory.check_placed("scan", device, program)
    found.host_temp_size_in_bytes = 2048
    memory.check_placed("scan", device, program)


def test_a_release_that_makes_room_on_the_devices(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    with pytest.raises(
        NotImplementedError, match=r"need jax 0\.12 or newer .* divides .*`memory` as one"
    ):
        _jax.check_spread_on_host()
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    _jax.check_spread_on_host()


def test_a_program_for_another_machine_is_not_looked_at(monkeypatch):
    """None of its devices is here to run anything."""
    monkeypatch.setattr(memory, "_sound", set())
    gradient = jax.jit(jax.grad(lambda x: cubic(x, checkpoints=Plan(6, host=True))))
    text = gradient.trace(jnp.ones(56)).lower(lowering_platforms=("tpu",)).as_text()
    assert "annotate_device_placement" in text
    assert not memory._sound


@pytest.mark.slow
def test_gradients_are_checked_once(monkeypatch):
    probed = []
    probe = memory._probe
    monkeypatch.setattr(memory, "_sound", set())
    monkeypatch.setattr(memory, "_probe", lambda *args: probed.append(args) or probe(*args))
    for size in (53, 54):
        jax.jit(jax.grad(lambda x: cubic(x, checkpoints=Plan(6, host=True))))(jnp.ones(size))
    assert len(probed) == 2  # with and without


@pytest.mark.slow
def test_all_loops_of_a_function_share_both_budgets():
    def f(x):
        for _ in range(2):
            x = jax.lax.scan(lambda x, _: (x - 0.01 * x**3, None), x, length=60)[0]
        return x.sum()

    x = jnp.linspace(0.1, 1, 5000)
    kept = loopkit.checkpointed(f, memory={"device": "800 kB", "host": "2 MB"})
    plans = [found.plan for found in loopkit.explain(kept, x).loops]
    assert [p.host for p in plans] == [True, True]
    assert sum(p.host_bytes for p in plans) <= 2_000_000
    assert_close(jax.grad(kept)(x), jax.grad(f)(x))


def test_the_hessian_of_rows_on_the_host():
    """Tangents of a row on the host have a batch, and JAX has no lanes of such a row."""
    memory, x = {"device": "2 kB", "host": "100 kB"}, jnp.cos(jnp.arange(4.0))

    def loss(x, scan=loopkit.scan):
        return jnp.sum(scan(lambda c, _: (jnp.sin(c) + 0.1 * c, c[0]), x, length=40)[0] ** 2)

    wanted = in_numpy(jax.hessian(lambda x: loss(x, jax.lax.scan)), x)
    assert_close(jax.hessian(lambda x: loss(x, ft.partial(loopkit.scan, memory=memory)))(x), wanted)
    replaced = loopkit.checkpointed(lambda x: loss(x, jax.lax.scan), memory=memory)
    assert_close(jax.jit(jax.hessian(replaced))(x), wanted)


@pytest.mark.parametrize("replaced", [False, True])
def test_more_bytes_on_the_device_never_take_longer(replaced):
    def planned(device):
        how = {"memory": {"device": device, "host": 30_000}}
        scan = loopkit.scan if not replaced else jax.lax.scan
        scan = scan if replaced else ft.partial(scan, **how)
        f = lambda x: jnp.sum(scan(lambda c, _: (jnp.sin(c) * c, None), x, length=60)[0] ** 2)
        f = loopkit.checkpointed(f, **how) if replaced else f
        return loopkit.explain(f, jnp.ones(500)).plan

    plans = [planned(device) for device in (60_000, 100_000, 300_000, 1_000_000, 10**9)]
    times = [plan.nanoseconds(60) for plan in plans]
    assert times == sorted(times, reverse=True)
    assert plans[-1].evaluations(60)[1] <= 60 < plans[0].evaluations(60)[1]
