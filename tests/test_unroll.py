"""`unroll`: steps to an iteration, given or found by trying."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback

import loopkit
from derivatives import assert_close, derivative
from loopkit import Plan, _jax
from loopkit._engine.trials import unrolling, user_cache
from loopkit._engine.trials.unrolling import Trial
from loopkit._programs import cache
from problems import named

pytestmark = pytest.mark.slow

KEEPS_ALL = Plan(0, keeps_all=True, store="residuals")


@pytest.fixture(autouse=True)
def empty_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPKIT_CACHE_DIR", str(tmp_path / "cache"))
    forget()


def forget():
    """What a new process does not know."""
    for known in (unrolling._chosen, cache._traced, cache._programs):
        known.clear()
    jax.clear_caches()


@pytest.fixture
def trials(monkeypatch):
    """Trials that take no time: of 4 steps to an iteration the steps are fastest."""
    made = []

    def measure(loop, active, count):
        made.append((count, active is not None))
        return Trial(0.01 * count, {1: 8e-6, 2: 5e-6, 4: 2e-6, 8: 3e-6, 16: 4e-6}[count])

    monkeypatch.setattr(unrolling, "measure", measure)
    return made


def quadratic(x, factor, unroll="auto", steps=300):
    step = lambda x, _: (x + factor * x * x, None)
    return loopkit.scan(step, x, length=steps, unroll=unroll)[0]


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


@pytest.mark.parametrize("checkpoints", [Plan(100), Plan(4, segment=4), KEEPS_ALL])
@pytest.mark.parametrize("name", ["while_scalar", "scan_until", "scan_xs_ys"])
def test_derivatives_with_every_way_of_storing(name, checkpoints):
    (problem,) = named(name)
    x = problem.vector()
    got = derivative(problem.flat_loop(checkpoints, max_steps=100, unroll=3), "r")
    lanes = jnp.stack([x, 1.15 * x])
    each = [derivative(problem.flat_reference(row), "r")(row) for row in lanes]
    assert_close(jax.jit(got)(x), each[0])
    assert_close(jax.jit(jax.vmap(got))(lanes), jnp.stack(each))


def test_tried_once_for_the_value_and_once_for_the_gradient(trials):
    jax.jit(quadratic)(0.1, 0.2)
    assert trials == [(1, False), (2, False), (4, False), (8, False), (16, False)]
    del trials[:]
    jax.jit(lambda *args: 2 * quadratic(*args))(0.1, 0.2)
    assert not trials
    jax.jit(jax.grad(quadratic))(0.1, 0.2)
    assert trials == [(1, True), (2, True), (4, True), (8, True), (16, True)]


def test_kept_between_processes(trials):
    def in_another_process():
        forget()
        del trials[:]
        jax.jit(lambda *args: quadratic(*args) + 1)(0.1, 0.3)

    jax.jit(quadratic)(0.1, 0.3)
    (file,) = user_cache.folder().glob("unroll-*.json")
    in_another_process()
    assert not trials
    file.write_text("half a file")
    in_another_process()
    assert trials
    assert user_cache.load(file.stem)["unroll"] == 4


def test_what_is_kept_says_what_each_count_took(trials):
    jax.jit(quadratic)(0.1, 0.4)
    (file,) = user_cache.folder().glob("unroll-*.json")
    kept = user_cache.load(file.stem)
    assert kept["unroll"] == 4
    assert kept["seconds"]["1"] == pytest.approx(0.01 + 300 * unrolling.USES * 8e-6)


@pytest.mark.parametrize(
    ("trial", "wanted"),
    [
        (lambda n: Trial(0.1 * n, 1e-6 / n), 1),  # one run saves less than compiling costs
        (lambda n: Trial(0.1 * n, 1e-3 / n), 16),
        (lambda n: Trial(0.1, 1e-3 * (1 - 0.001 * n)), 1),  # within the noise
        (lambda n: Trial(3.0**n, 1e-3 / n), 2),  # compiling four takes longer than all steps
    ],
)
def test_time_to_compile_counts(trial, wanted, monkeypatch):
    monkeypatch.setattr(unrolling, "measure", lambda loop, active, count: trial(count))
    found = unrolling._try_all(None, None, 100)
    assert found["unroll"] == wanted


def test_no_more_than_the_steps_there_are(trials):
    jax.jit(lambda x: quadratic(x, 0.2, steps=3))(0.1)
    assert trials == [(1, False), (2, False)]


def inner_loop(x):
    return loopkit.while_loop(lambda y: y < 1, lambda y: y + x, x)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x + inner_loop(x),
        lambda x: jax.lax.while_loop(lambda y: y < 1, lambda y: y + x, x),
        lambda x: io_callback(lambda x: x, x, x),
        lambda x: jax.pure_callback(lambda x: x / 2, x, jax.lax.stop_gradient(x)),
    ],
    ids=["while_loop", "lax.while_loop", "callback", "pure callback"],
)
def test_steps_that_cannot_be_tried(step, trials):
    """On made-up values they may never end, or do what nobody asked for."""
    loop = lambda x: loopkit.scan(lambda x, _: (step(x), None), x, length=20, unroll="auto")[0]
    jax.jit(loop)(0.3)
    assert not trials


def test_a_gradient_of_steps_that_call_the_host():
    """Tried while JAX traces, their function would be called with tracers."""
    host = lambda x: jax.pure_callback(lambda x: x / 2, x, jax.lax.stop_gradient(x))
    step = lambda x, _: (jnp.sin(x) + host(x) * x, None)
    loop = lambda unroll: lambda x: loopkit.scan(step, x, length=20, unroll=unroll)[0].sum()
    x = jnp.full((3, 3), 0.3)
    assert_close(jax.jit(jax.grad(loop("auto")))(x), jax.jit(jax.grad(loop(1)))(x))


def test_steps_on_several_devices_are_not_tried(trials):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(8.0), jax.P("i"))
        got = jax.jit(jax.grad(lambda x: quadratic(x, 0.01).sum()))(x)
        shared = jax.shard_map(lambda x: quadratic(x, 0.01), out_specs=jax.P("i"))
        value = jax.jit(shared)(x)
    assert not trials
    wanted = jax.grad(lambda x: quadratic(x, 0.01, unroll=1).sum())(jnp.arange(8.0))
    assert_close(got, wanted)
    assert_close(value, quadratic(jnp.arange(8.0), 0.01, unroll=1))


def test_steps_that_write_into_buffers_are_not_tried(trials):
    def f(x):
        step = lambda c: (c[0] + 1, c[1].at[c[0]].set(x * c[0]))
        carry = (0, jnp.zeros(5))
        loop = loopkit.while_loop
        return loop(
            lambda c: c[0] < 5, step, carry, max_steps=5, buffers=lambda c: c[1], unroll="auto"
        )[1].sum()

    assert jax.jit(jax.grad(f))(2.0) == 10
    assert not trials


def test_printing_steps_print_once_each(capfd):
    def step(x, _):
        jax.debug.print("at {}", x)
        return x + 1, None

    jax.jit(lambda x: loopkit.scan(step, x, length=2, unroll="auto")[0])(0)
    jax.effects_barrier()
    assert capfd.readouterr().out == "at 0\nat 1\n"


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("name", ["while_scalar", "scan_until", "scan_xs_ys"])
def test_a_real_trial(name, gradient):
    """All lanes of it, in a traced function, with the file to show for it."""
    (problem,) = named(name)
    f = problem.flat_loop(unroll="auto")
    pattern = "r" if gradient else ""
    x = problem.vector()
    lanes = jnp.stack([x, 1.15 * x])
    each = [derivative(problem.flat_reference(row), pattern)(row) for row in lanes]
    assert_close(jax.jit(jax.vmap(derivative(f, pattern)))(lanes), jnp.stack(each))
    assert list(user_cache.folder().glob("unroll-*.json"))


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch, trials):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOOPKIT_CACHE_DIR", str(tmp_path / "file"))
    assert jax.jit(quadratic)(0.0, 0.5) == 0


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_the_folder_is_the_users(platform, monkeypatch, tmp_path):
    monkeypatch.delenv("LOOPKIT_CACHE_DIR")
    monkeypatch.setattr(user_cache.sys, "platform", platform)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    found = user_cache.folder()
    assert found.name == "loopkit"
    assert found.parent == tmp_path or platform == "darwin"


def test_what_is_no_unroll():
    with pytest.raises(TypeError, match=r'scan: `unroll` must be an int >= 0, .* or "auto", got'):
        quadratic(1.0, 1.0, unroll="fast")


def test_steps_without_work():
    _, ys = jax.jit(lambda x: loopkit.scan(lambda c, x: (c, x), 0.0, x, unroll="auto"))(jnp.ones(3))
    assert_close(ys, jnp.ones(3))


def steps_to_an_iteration(f, *args):
    """For a GPU, of a loop whose step has one sine."""
    with _jax.host_waits(True):
        text = jax.jit(f).lower(*args).as_text()
    return max(text.count("stablehlo.sine"), text.count("call @closed_call"))  # jax 0.10 calls it


def worked(x, work):
    x = jnp.sin(x)
    for k in range(work):
        x = x * k + 1
    return x


def known(x, work):
    return loopkit.fori_loop(0, 1000, lambda _, x: worked(x, work), x, unroll="auto")


def counting(x, work, say=False):
    def step(c):
        if say:
            jax.debug.print("at {}", c[0])
        return c[0] + 1, worked(c[1], work)

    return loopkit.while_loop(lambda c: abs(c[1]) < 1000, step, (0, x), unroll="auto")[1]


def test_for_a_gpu_launches_and_waits_are_counted(trials):
    works = 1, 5, 10, 15, 20, 40, 300
    of_known, of_counting = (
        [steps_to_an_iteration(lambda x, f=f, n=n: f(x, n), 0.5) for n in works]
        for f in (known, counting)
    )
    assert of_known == sorted(of_known, reverse=True), "what takes long to compile is short"
    assert of_known[0] > 1 == of_known[-1]
    assert of_counting != of_known, "a wait is longer than a launch"
    assert all(c >= k for c, k in zip(of_counting, of_known, strict=True))
    assert not trials


def test_for_a_gpu_steps_with_side_effects_are_not_guarded(trials):
    assert steps_to_an_iteration(lambda x: counting(x, 1, say=True), 0.5) == 1
    assert not trials


@pytest.mark.parametrize("name", ["while_scalar", "scan_until", "scan_xs_ys"])
def test_for_a_gpu_the_numbers_stay(name, trials):
    (problem,) = named(name)
    with _jax.host_waits(True):
        got = jax.jit(derivative(problem.flat_loop(unroll="auto"), "r"))(problem.vector())
    assert_close(got, derivative(problem.flat_reference(), "r")(problem.vector()))
