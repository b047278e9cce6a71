"""Errors of scans that grow outside jit: wrong arguments, and no memory left."""

import jax
import jax.numpy as jnp
import pytest

import loopkit
from loopkit._extras import growing
from loopkit._extras import unbounded as _unbounded
from test_unbounded import enough, point, spiral, step, unbounded


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """These loops are all light; here they are run in segments."""
    monkeypatch.setattr(growing, "LIGHT", 0)


def test_inside_jit_it_says_what_to_do():
    run = jax.jit(lambda x: spiral(unbounded, x))
    with pytest.raises(TypeError, match=r"outside jax.jit[.] Inside jit, use `loopkit.scan`"):
        run(point("spiral"))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"segment": 0}, ValueError, "`segment` must be an int >= 1 .steps.[.] .*Got: 0"),
        ({"segment": 2.5}, TypeError, "`segment` must be an int >= 1 .steps.[.] .*Got: 2.5"),
        ({"growth": 0.5}, ValueError, "`growth` must be a finite number >= 1 .* Got: 0.5"),
        ({"growth": "2"}, TypeError, "`growth` must be a finite number >= 1 .* Got: '2'"),
        ({"max_segments": 0}, ValueError, "`max_segments` must be an int >= 1 or None"),
        ({"checkpoints": 0}, ValueError, "`checkpoints` must be None, an int >= 1"),
        ({"progress": 3}, TypeError, '`progress` must be "tqdm", .*[.] .*Got: 3 of type int'),
        ({"until": True}, TypeError, "`until` must be a function[.] .*Got: True"),
        ({"until": lambda c, y: c[0]}, TypeError, r"`until` must return a scalar bool\[\]"),
        ({"xs": jnp.float64(1.0)}, ValueError, "`xs` must have a leading axis"),
    ],
)
def test_wrong_arguments(options, error, text):
    options = {"until": enough} | options
    with pytest.raises(error, match="loopkit.unbounded_scan: " + text):
        loopkit.unbounded_scan(step, (1.0, 0), **options)


def test_a_carry_of_another_type_is_named():
    with pytest.raises(TypeError, match=r"`init\['a'\]`: expected float64\[2\], got float64\[1\]"):
        loopkit.unbounded_scan(
            lambda c, _: ({"a": c["a"][:1]}, None), {"a": jnp.ones(2)}, until=lambda c, _: True
        )


def test_out_of_memory_says_what_would_fit():
    with pytest.raises(MemoryError, match=r"Got: 0 steps, then a segment of 64, .* 2.2e\+03 GB"):
        loopkit.unbounded_scan(
            lambda c, _: (c, jnp.zeros(1 << 38, jnp.float64)), 0.0, until=lambda c, _: False
        )


def failing_at(monkeypatch, call, text):
    compiled, calls = _unbounded.compiled, []

    def fails(*args):
        calls.append(1)
        if len(calls) == call:
            raise jax.errors.JaxRuntimeError(text)
        return compiled(*args)

    monkeypatch.setattr(_unbounded, "compiled", fails)


def test_out_of_memory_says_how_far_it_got(monkeypatch):
    failing_at(monkeypatch, 3, "RESOURCE_EXHAUSTED: Out of memory")
    with pytest.raises(
        MemoryError, match=r"ran out of memory[.] .*Got: 6 steps, then a segment of 8"
    ):
        loopkit.unbounded_scan(step, (1.0, 0), until=enough, segment=2)


@pytest.mark.parametrize("through", [lambda f: f, jax.grad, jax.vmap])
@pytest.mark.parametrize(("in_use", "rows", "carries"), [(400, 100, 76), (2400, 0, 0)])
def test_what_would_fit_is_counted_where_the_carry_lies(
    monkeypatch, in_use, rows, carries, through
):
    """21 bytes of carry, 8 of a row, which has to fit twice: in what others leave of 2000 bytes."""
    device = jax.devices()[2]
    full = {"bytes_limit": 10, "bytes_in_use": 10}
    stats = {device: {"bytes_limit": 2000, "bytes_in_use": in_use}}
    monkeypatch.setattr(growing, "memory_stats", lambda device: stats.get(device, full))
    failing_at(monkeypatch, 2, "RESOURCE_EXHAUSTED: Out of memory")
    start = jnp.ones(1) if through is jax.vmap else 1.0

    def loss(x):
        return loopkit.unbounded_scan(step, (x, 0), until=enough, segment=2)[0][0]

    text = f"enough for the `ys` of {rows} steps, 8 bytes each, or for {carries} carries of 21 "
    with pytest.raises(MemoryError, match=text):
        through(loss)(jax.device_put(start, device))


def test_what_would_fit_on_the_fullest_of_several_devices(monkeypatch):
    left = dict(zip(jax.devices(), [30, 70, 20, 90], strict=False))
    monkeypatch.setattr(
        growing, "memory_stats", lambda device: {"bytes_limit": left.get(device, 1000)}
    )
    sharding = jax.sharding.NamedSharding(
        jax.make_mesh((2,), "a", devices=jax.devices()[:2]), jax.sharding.PartitionSpec("a")
    )
    assert growing.memory_left([jax.device_put(jnp.zeros(4), sharding)]) == 30
    assert growing.memory_left([jax.device_put(jnp.zeros(4), jax.devices()[1])]) == 70
    assert growing.memory_left([]) == 30


def exhausting(where):
    """A step whose value, or whose derivative, finds no memory."""

    def fail(x):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    def unlucky(x):
        return jax.pure_callback(fail, jax.ShapeDtypeStruct((), x.dtype), x)

    @jax.custom_vjp
    def shrink(x):
        return x * 0.9

    forward, backward = (
        (unlucky, lambda g: g) if where == "forward" else (lambda x: x * 0.9, unlucky)
    )
    shrink.defvjp(lambda x: (forward(x), None), lambda _, g: (backward(g),))
    return lambda x, _: (shrink(x), x)


@pytest.mark.parametrize(
    ("where", "error", "text"),
    [
        ("forward", MemoryError, "ran out of memory[.] .*Got: 0 steps"),
        ("backward", jax.errors.JaxRuntimeError, "RESOURCE_EXHAUSTED"),
    ],
)
def test_out_of_memory_under_differentiation(where, error, text):
    f = exhausting(where)
    loss = lambda x: loopkit.unbounded_scan(f, x, until=lambda c, _: c < 0.1)[0]
    with pytest.raises(error, match=text):
        jax.block_until_ready(jax.grad(loss)(1.0))


def test_other_run_time_errors_pass(monkeypatch):
    failing_at(monkeypatch, 1, "INTERNAL: no luck")
    with pytest.raises(jax.errors.JaxRuntimeError, match="no luck"):
        loopkit.unbounded_scan(step, (1.0, 0), until=enough)
