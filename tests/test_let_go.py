"""Caches let go of functions, arrays and tracers that are gone."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

import loopkit
from loopkit._programs import Recent


@pytest.mark.exhaustive
def test_functions_are_let_go():
    class Rate:
        value = 2.0

    def run():
        rate = Rate()

        def scaled(x):
            return x * rate.value

        loopkit.while_loop(lambda x: x < 5.0, scaled, 1.0)
        jax.grad(lambda x: loopkit.while_loop(lambda x: x < 5.0, scaled, x))(1.0)
        return weakref.ref(rate), weakref.ref(scaled)

    references = run()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@pytest.mark.exhaustive
def test_large_arrays_are_let_go():
    alive = []

    def run(size):
        table = jnp.ones(size)
        alive.append(weakref.ref(table))
        return loopkit.fori_loop(0, 2, lambda i, x: x + table[i], 0.0)

    for _ in range(3):
        run(1_000_000)
    gc.collect()
    assert [reference() for reference in alive] == [None, None, None]


@pytest.mark.exhaustive
def test_small_arrays_do_not_pile_up():
    """A cache of traces keeps a bounded number of arrays."""
    alive = []

    def run(k):
        table = jnp.full(10_000, float(k))
        alive.append(weakref.ref(table))
        return loopkit.fori_loop(0, 2, lambda i, x: x + table[i], 0.0)

    for k in range(300):
        run(k)
    gc.collect()
    kept = sum(reference() is not None for reference in alive)
    assert kept * 80_000 <= 2**24


@pytest.mark.slow
def test_tracers_are_let_go():
    """A trace of a loop inside jit cannot turn up outside it."""

    def f(w):
        return loopkit.while_loop(lambda x: x < 5.0, lambda x: x * w, 1.0)

    assert jax.jit(f)(2.0) == 8.0
    assert f(2.0) == 8.0
    assert jax.grad(f)(2.0) == 12.0
    assert f(2.0) == 8.0
    assert jax.vmap(f)(jnp.asarray([2.0, 3.0])).tolist() == [8.0, 9.0]
    assert f(jnp.asarray(2.0)) == 8.0


def test_an_entry_may_go_while_it_is_looked_up():
    """A function dies whenever the garbage collector runs, and takes its entry along."""
    recent = Recent(2)

    class Key:
        def __hash__(self):
            return 1

        def __eq__(self, other):
            recent.clear()
            return True

    recent.put(Key(), "value")
    recent.find(Key())
    assert len(recent) <= 1
