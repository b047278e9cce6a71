"""Stored rows have room for the bound, and are touched only as far as the steps go."""

import os
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import pytest

import loopkit
from derivatives import assert_close


def gradient(bound, size=512, outer=None):
    """Return the gradient of a loop of n steps; `outer` puts it inside another of so many."""

    def loop(x, n):
        step = lambda c: (c[0] + 1, 1.01 * jnp.sin(c[1]) + 0.1)
        start, limits = (0, x), {"max_steps": bound, "checkpoints": "all"}
        return loopkit.while_loop(lambda c: c[0] < n, step, start, **limits)[1]

    def loss(x, n):
        if outer is None:
            return jnp.sum(loop(x, n))
        return jnp.sum(loopkit.scan(lambda x, _: (loop(x, n), None), x, None, outer)[0])

    return jax.jit(jax.grad(loss)), jnp.linspace(0.1, 1.0, size)


SCRIPT = """
import resource, test_rows_not_taken
gradient, x = test_rows_not_taken.gradient(1_000_000, outer=OUTER)
small = test_rows_not_taken.gradient(540, outer=OUTER)[0]
small(x, 540).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
gradient(x, 540).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads how much memory was touched as on Linux")
@pytest.mark.parametrize("outer", [None, 5])
def test_memory_follows_the_steps_taken(outer):
    """540 of a million steps: room for gigabytes, of which megabytes are touched."""
    function, x = gradient(1_000_000, outer=outer)
    memory = function.lower(x, 540).compile().memory_analysis()
    assert memory.temp_size_in_bytes > 10**9
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    script = SCRIPT.replace("OUTER", str(outer))
    ran = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 10**5, "kilobytes"


def made_blank(function, *args):
    return "dce_sink" in jax.jit(function).lower(*args).as_text()


@pytest.mark.slow
def test_where_memory_is_not_taken_as_it_is_found():
    """Memory is filled if all that comes out is read, or if the program is for another machine."""
    function, x = gradient(1000)
    assert made_blank(function, x, 7)
    with jax.debug_nans(True):
        assert not made_blank(gradient(1001)[0], x, 7)
    mesh = jax.make_mesh((2,), ("rows",), devices=jax.devices()[:2])
    spread = jax.device_put(x, jax.NamedSharding(mesh, jax.P("rows")))
    assert not made_blank(gradient(1002)[0], spread, 7)
    assert_close(gradient(1002)[0](spread, 7), function(x, 7))
    exported = jax.export.export(function)(x, jax.ShapeDtypeStruct((), int))
    again = jax.export.deserialize(exported.serialize())
    assert_close(again.call(x, 7), function(x, 7))


def test_debug_nans_after_the_loop_was_compiled():
    """Outside jit all rows come out, those of steps not taken among them."""
    loss = lambda x: loopkit.while_loop(
        lambda x: x < 4.0, lambda x: x * x, x, max_steps=5000, checkpoints="all"
    )
    for checked in (False, True):
        for _ in range(20):
            (jnp.full(5000, 1.0) * jnp.nan).delete()
            with jax.debug_nans(checked):
                assert_close(jax.grad(loss)(1.5), jnp.asarray(4 * 1.5**3))


def test_a_bound_that_there_is_no_room_for():
    function, x = gradient(2**31 - 1, 10**5)
    message = (
        r"loopkit\.while_loop: `checkpoints` can be \"all\" only if 2,147,483,647 steps of 800,000 "
        r"bytes, .* in all, fit in the memory\. Lower `max_steps`.* Got: .* of memory"
    )
    with pytest.raises(ValueError, match=message):
        function(x, 3)


def test_room_on_an_accelerator(monkeypatch):
    class Device:
        platform, device_kind = "tpu", "TPU v5 lite"
        memory_stats = staticmethod(lambda: {"bytes_limit": 1000})

    monkeypatch.setattr(jax, "local_devices", lambda **_: [Device])
    function, x = gradient(1000, 4)
    with pytest.raises(ValueError, match=r"steps of 32 bytes, 32 kB in all, .*Got: 4 kB"):
        function(x, 3)
