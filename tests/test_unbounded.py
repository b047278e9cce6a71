"""Scans that grow outside jit, against a Python loop: every mode, every size of segment."""

import functools as ft
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from derivatives import assert_close, derivative
from loopkit._extras import growing
from loopkit._extras import unbounded as _unbounded
from loopkit._extras.growing import AT_ONCE, LONGEST_SEGMENT, segment_lengths, together
from program_of_loops import inexact_vector
from trials.in_numpy import eagerly
from turns import in_turn

FAST = {"segment": 2, "growth": 2.0}


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """These loops are all light; here they are run in segments, unless a test says otherwise."""
    monkeypatch.setattr(growing, "LIGHT", 0)


@pytest.fixture
def as_one(monkeypatch, apart):
    monkeypatch.undo()


def unbounded(f, init, xs=None, *, until, **options):
    return loopkit.unbounded_scan(f, init, xs, until=until, **FAST | options)


def python_loop(f, init, xs=None, *, until, **_):
    """Take as many steps as these values need; the results can be differentiated in anything."""
    length = 1000 if xs is None else len(jax.tree.leaves(xs)[0])
    carry, ys = jax.tree.map(jnp.asarray, init), []
    for t in range(length):
        carry, y = f(carry, jax.tree.map(lambda x, t=t: x[t], xs))
        ys.append(y)
        if until(carry, y):
            break
    return carry, jax.tree.map(lambda *y: jnp.stack(y), *ys)


def spiral(scan, x, **options):
    """Takes 12 steps from (0.3, 1.15), and closes over what is differentiated."""
    start, rate = x

    def f(carry, _):
        position, step = carry
        position = rate * position * (1 + 0.1 * jnp.sin(3 * position))
        return (position, step + 1), {"square": position**2, "step": step}

    return scan(f, (start, 0), until=lambda carry, _: carry[0] > 1.6, **options)


XS = jnp.cos(jnp.arange(9.0))


def over_rows(scan, x, **options):
    """Stops at the 6th of 9 rows, from (0.3, 0.9)."""

    def f(h, x):
        h = jnp.tanh(h + x) + 0.2
        return h, h * x

    xs = XS * x[1]
    return scan(f, x[0], xs, until=lambda h, y: (h > 0.2) & (h < 0.3), **options)


def to_the_last_row(scan, x, **options):
    def f(h, row):
        h = jnp.sin(h + row["x"][0]) * row["x"][1]
        return h, None

    xs = {"x": jnp.stack([XS * x[1], XS + x[0]], 1)}
    return scan(f, x[0], xs, until=lambda h, y: h > 100, **options)


PROGRAMS = {
    "spiral": (spiral, 1.15),
    "over_rows": (over_rows, 0.9),
    "to_the_last_row": (to_the_last_row, 0.7),
}


def function(name, scan, **options):
    program, _ = PROGRAMS[name]
    return lambda x: inexact_vector(program(scan, x, **options))


def point(name):
    return jnp.array([0.3, PROGRAMS[name][1]])


@ft.cache
def expected(name, pattern):
    with eagerly():
        return derivative(function(name, python_loop), pattern)(point(name))


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(("segment", "growth"), [(1, 1), (2, 2.0), (3, 1.5), (64, 2.0)])
def test_value(name, segment, growth):
    got = PROGRAMS[name][0](unbounded, point(name), segment=segment, growth=growth)
    with eagerly():
        wanted = PROGRAMS[name][0](python_loop, point(name))
    assert_close(got, wanted)


def test_the_programs_stop_where_they_say():
    with eagerly():
        assert spiral(python_loop, point("spiral"))[1]["step"].shape == (12,)
        assert over_rows(python_loop, point("over_rows"))[1].shape == (6,)


@pytest.mark.parametrize(
    ("name", "pattern"), in_turn(PROGRAMS, ["f", "r", "rr", "ff", "fr", "rf"], of=3)
)
def test_derivatives(name, pattern):
    got = derivative(function(name, unbounded), pattern)(point(name))
    assert_close(got, expected(name, pattern))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pattern"), in_turn(PROGRAMS, ["r", "rr", "f"], of=3))
def test_derivatives_of_segments_run_as_one(name, pattern, as_one):
    got = derivative(function(name, unbounded), pattern)(point(name))
    assert_close(got, expected(name, pattern))


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [1, 3, "all"])
def test_checkpoints(checkpoints):
    for name in ("spiral", "over_rows"):
        got = derivative(function(name, unbounded, checkpoints=checkpoints), "r")(point(name))
        assert_close(got, expected(name, "r"))


@pytest.mark.slow
def test_jacobians():
    f, reference = function("over_rows", unbounded), function("over_rows", python_loop)
    x = point("over_rows")
    assert_close(jax.jacrev(f)(x), jax.jacobian(reference)(x))
    assert_close(jax.jacfwd(f)(x), jax.jacobian(reference)(x))


STARTS = jnp.array([[0.3, 1.15], [1.5, 1.2], [0.7, 1.3], [0.2, 1.25]])


@pytest.mark.exhaustive
def test_lanes_stop_apart():
    carry, ys, info = jax.vmap(lambda x: spiral(unbounded, x, return_info=True))(STARTS)
    alone = [spiral(python_loop, x) for x in STARTS]
    steps = [len(y["step"]) for _, y in alone]
    assert len(set(steps)) == 4
    assert info.steps.tolist() == steps
    assert info.stopped.all()
    assert ys["square"].shape == (4, max(steps))
    for lane, (one_carry, one_ys) in enumerate(alone):
        assert_close(carry[0][lane], one_carry[0])
        assert_close(ys["square"][lane, : steps[lane]], one_ys["square"])
        assert not np.any(ys["square"][lane, steps[lane] :])


@pytest.mark.slow
def test_gradients_of_lanes():
    def loss(x, scan=unbounded):
        carry, ys = spiral(scan, x)
        return carry[0] ** 2 + jnp.sum(jnp.sin(ys["square"]))

    wanted = jnp.stack([jax.grad(lambda x: loss(x, python_loop))(x) for x in STARTS])
    assert_close(jax.vmap(jax.grad(loss))(STARTS), wanted)
    assert_close(jax.grad(lambda xs: jnp.sum(jax.vmap(loss)(xs)))(STARTS), wanted)
    nested = jax.vmap(jax.vmap(jax.grad(loss)))(STARTS.reshape(2, 2, 2))
    assert_close(nested, wanted.reshape(2, 2, 2))


@pytest.mark.slow
def test_gradient_of_rows():
    """`xs` is split once, and its gradient has all of its rows."""

    def loss(xs, scan=unbounded):
        carry, ys = scan(lambda h, x: (h + x * x, h * x), 0.3, xs, until=lambda h, _: h > 2.0)
        return carry + jnp.sum(ys)

    grad = jax.grad(loss)(XS)
    with eagerly():
        wanted = jax.grad(lambda xs: loss(xs, python_loop))(XS)
    assert_close(grad, wanted)
    assert not np.any(grad[-3:])
    assert_close(jax.vmap(jax.grad(loss))(jnp.stack([XS, 2 * XS]))[0], grad)


@pytest.mark.parametrize("fixture", [pytest.param("apart", marks=pytest.mark.slow), "as_one"])
def test_info_and_bounds(fixture, request):
    request.getfixturevalue(fixture)
    x = point("spiral")
    _, _, info = spiral(unbounded, x, return_info=True)
    assert (info.steps, info.stopped) == (12, True)
    _, ys, info = spiral(unbounded, x, max_segments=2, return_info=True)
    assert (info.steps, info.stopped, len(ys["step"])) == (6, False, 6)
    _, _, info = to_the_last_row(unbounded, point("to_the_last_row"), return_info=True)
    assert (info.steps, info.stopped) == (9, False)


def test_no_rows_no_steps():
    never = {"until": lambda c, y: False, "return_info": True}
    carry, ys, info = unbounded(lambda c, x: (c + x, c), 2.0, jnp.zeros(0), **never)
    assert (carry, ys.shape, info.steps, info.stopped) == (2.0, (0,), 0, False)


def test_progress():
    for disable in (False, True):
        seen = []
        with jax.disable_jit(disable):
            spiral(unbounded, point("spiral"), progress=seen.append)
        assert seen == [2, 6, 12]


@pytest.mark.slow
def test_without_jit():
    for name, (program, _) in PROGRAMS.items():
        with jax.disable_jit():
            got = program(unbounded, point(name), return_info=True)
        assert_close(got, program(unbounded, point(name), return_info=True))


def test_segments_grow_to_a_cap():
    assert list(itertools.islice(segment_lengths(64, 2.0, None), 3)) == [64, 128, 256]
    assert list(segment_lengths(10, 1.5, 4)) == [10, 15, 22, 33]
    assert list(segment_lengths(1000, 3.0, 4)) == [1000, 3000, LONGEST_SEGMENT, LONGEST_SEGMENT]
    assert list(segment_lengths(10_000, 3.0, 2)) == [10_000, 10_000]


def test_light_segments_are_run_as_one():
    def sizes(first, growth, most, light, rows=sys.maxsize):
        return list(together(segment_lengths(first, growth, most), light, rows))

    assert sizes(2, 2.0, 5, 0) == [2, 4, 8, 16, 32]
    assert sizes(2, 2.0, 5, 14) == [14, 16, 32]
    assert sizes(2, 2.0, 5, 1000) == [62]
    assert sizes(2, 2.0, 5, 1000, rows=7) == [14, 16, 32]
    assert sizes(LONGEST_SEGMENT, 1.0, 9, AT_ONCE) == [AT_ONCE, AT_ONCE, LONGEST_SEGMENT]


def looks(f, x):
    """Count how often the host looks whether to go on."""
    counted = []
    original = _unbounded._on_host
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_unbounded, "_on_host", lambda *v: counted.append(1) or original(*v))
        f(x)
    return len(counted)


@pytest.mark.slow
def test_what_is_light(as_one):
    """Rows and checkpoints of all lanes count."""
    light = lambda x: spiral(unbounded, x)
    assert looks(light, point("spiral")) == 1
    assert looks(jax.grad(lambda x: light(x)[0][0]), point("spiral")) == 1
    assert looks(lambda x: spiral(unbounded, x, progress=lambda _: None), point("spiral")) == 3
    assert looks(lambda x: spiral(unbounded, x, checkpoints=2), point("spiral")) == 3
    lanes = jnp.broadcast_to(point("spiral"), (1000, 2))
    assert looks(jax.vmap(light), lanes) == 3
    assert looks(jax.vmap(jax.grad(lambda x: light(x)[0][0])), lanes) == 3


def step(carry, _):
    return (carry[0] * 1.01, carry[1] + 1), carry[0]


def enough(carry, _):
    return carry[1] >= 50


@pytest.mark.slow
def test_a_second_call_compiles_nothing(compilations):
    def loss(x):
        return loopkit.unbounded_scan(step, (x, 0), until=enough, segment=8)[1].sum()

    jax.value_and_grad(loss)(1.0)
    before = len(compilations)
    jax.value_and_grad(loss)(2.0)
    assert len(compilations) == before


@pytest.mark.slow
def test_other_lengths_compile_nothing(compilations):
    rows = lambda last: loopkit.unbounded_scan(
        lambda c, _: (c + 1, {"c": c}), 0, until=lambda c, _: c >= last, segment=8
    )[1]["c"]
    last = jnp.int32(3)
    assert rows(last).tolist() == [0, 1, 2]
    lengths = [jnp.int32(5), jnp.int32(30)]
    rows(lengths[1])
    compilations.clear()
    assert [len(rows(n)) for n in (jnp.int32(20), lengths[0])] == [20, 5]
    assert compilations == []


def test_rows_stay_on_their_device():
    device = jax.devices()[2]
    start = jax.device_put(1.0, device)
    carry, ys = loopkit.unbounded_scan(
        lambda c, _: (c * 2, c), start, until=lambda c, _: c > 9, segment=3
    )
    assert carry.devices() == ys.devices() == {device}
    assert ys.tolist() == [1, 2, 4, 8]


def test_small_floats_and_keys():
    """Rows of types that NumPy lacks."""

    def f(carry, _):
        key, x = carry
        return (jax.random.split(key)[0], x + 1), (key, x)

    start = jax.random.key(0), jnp.bfloat16(0)
    _, (keys, xs) = unbounded(f, start, until=lambda carry, _: carry[1] >= 5)
    assert keys.shape == (5,)
    assert keys[0] == start[0]
    assert xs.dtype == jnp.bfloat16
    assert xs.tolist() == [0, 1, 2, 3, 4]


def kept_bytes(checkpoints):
    """Return the bytes that the backward pass of 300 steps on 100 numbers holds."""
    first = jnp.linspace(0.1, 0.2, 100)

    def last(x):
        until = lambda carry, _: carry[1] >= 300
        rotate = lambda carry, _: ((jnp.sin(jnp.roll(carry[0], 1) * 1.1), carry[1] + 1), None)
        options = {"segment": 100, "growth": 1, "checkpoints": checkpoints}
        return loopkit.unbounded_scan(rotate, (x, 0), until=until, **options)[0][0]

    return sum(x.nbytes for x in jax.tree.leaves(jax.vjp(last, first)[1]))


def test_backward_memory_is_the_checkpoints_of_the_segments():
    carry = 100 * 8
    assert kept_bytes(2) < 3 * 8 * carry
    assert kept_bytes("all") > 300 * carry
