"""jax.transfer_guard: loops of loopkit move to the device what those of lax do, and no more."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import loopkit
from loopkit._extras import growing

STEP = lambda x, row: (jnp.sin(x) * row, x)


def decay(loops, x, count):
    return loops.while_loop(lambda s: s[0] < count, lambda s: (s[0] + 1, jnp.sin(s[1])), (count, x))


def pulled_back(loops, x, rows):
    _, pull = jax.vjp(lambda x: loops.scan(STEP, x, rows)[0], x)
    return pull(x)


def directional(loops, x, rows):
    pulled = lambda x: pulled_back(loops, x, rows)[0]
    return jax.jvp(pulled, (x,), (x,))


PROGRAMS = {
    "scan": lambda loops, x, rows, _: loops.scan(STEP, x, rows),
    "a number in the carry": lambda loops, x, rows, _: loops.scan(STEP, 0.5, rows),
    "while_loop": lambda loops, x, _, count: decay(loops, x, count),
    "a limit in the predicate": lambda loops, x, *_: decay(loops, x, 3),
    "fori_loop": lambda loops, x, _, count: loops.fori_loop(
        count, count, lambda _, x: jnp.sin(x), x
    ),
    "numbers as bounds": lambda loops, x, *_: loops.fori_loop(0, 3, lambda _, x: jnp.sin(x), x),
    "vmap": lambda loops, x, rows, _: jax.vmap(lambda x: loops.scan(STEP, x, rows))(rows),
    "jvp": lambda loops, x, _, count: jax.jvp(lambda x: decay(loops, x, count)[1], (x,), (x,)),
    "vjp": lambda loops, x, rows, _: pulled_back(loops, x, rows),
    "jvp of vjp": lambda loops, _, rows, __: directional(loops, rows, rows),
}


def values():
    return jax.block_until_ready((jnp.float64(0.4), jnp.linspace(0.5, 1, 3), jnp.int32(3)))


def is_refused(program, *args):
    """Whether the program moves something to the device that nobody has put there."""
    with jax.transfer_guard("disallow"):
        try:
            jax.block_until_ready(program(*args))
        except jax.errors.JaxRuntimeError as error:
            return "Disallowed host-to-device transfer" in str(error)
    return False


@pytest.mark.every_case
@pytest.mark.parametrize("name", PROGRAMS)
def test_loops_move_what_lax_moves(name):
    program, given = PROGRAMS[name], values()
    by_lax, own = (is_refused(lambda *v, l=l: program(l, *v), *given) for l in (lax, loopkit))
    assert own == by_lax


def test_a_compiled_gradient_moves_nothing():
    x, _, count = values()
    decayed = lambda x: decay(loopkit, x, count)[1]
    assert not is_refused(jax.jit(lambda x: jax.grad(decayed)(x)), x)


def test_unbounded_scan_moves_explicitly():
    growing.on_device.cache_clear()
    x, rows, _ = values()
    until = lambda x, _: x < rows[0] / rows[0] / 4
    scan = lambda x: loopkit.unbounded_scan(STEP, x, rows, until=until, segment=2, growth=1)
    assert not is_refused(scan, x)


@pytest.mark.parametrize("until", [None, lambda x, row: x < row / row / 4])
def test_ragged_scan_moves_explicitly(until):
    growing.on_device.cache_clear()
    x, rows, _ = values()
    sequences = jax.block_until_ready([jnp.ones(3), rows, jnp.ones(5)])
    scan = lambda x: loopkit.ragged_scan(STEP, x, sequences, until=until, return_info=True)
    assert not is_refused(scan, x)
