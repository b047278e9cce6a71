"""Calls that are replaced by what they evaluate."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from loopkit import _jax
from loopkit._jaxprs import equations
from loopkit._jaxprs.equations import inlined

X = jnp.linspace(0.1, 0.9, 4)


def names(jaxpr):
    return [eqn.primitive.name for eqn in _jax.open_jaxpr(jaxpr).eqns]


def traced(fun):
    return _jax.trace_closed(lambda *of: [fun(*of)], [jax.typeof(X)], "step")


@jax.jit
def squared(x):
    return x * x


@jax.jit
def twice(x):
    return squared(squared(x) + 1.0) * x


def assert_same(jaxpr, changed):
    for got, wanted in zip(_jax.call_jaxpr(changed)(X), _jax.call_jaxpr(jaxpr)(X), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_calls_in_calls_and_calls_that_are_shared():
    jaxpr = traced(lambda x: twice(x) + twice(jnp.sin(x)) + squared(x))
    changed = inlined(jaxpr)
    assert not {"jit", "pjit"} & set(names(changed))
    assert names(changed).count("sin") == 1
    assert_same(jaxpr, changed)
    made = [v for eqn in _jax.open_jaxpr(changed).eqns for v in eqn.outvars]
    assert len(set(made)) == len(made)


def test_a_call_that_passes_on_what_it_is_given():
    jaxpr = traced(lambda x: sum(jax.jit(lambda a: (a, 2.0, a))(x)))
    assert_same(jaxpr, inlined(jaxpr))


def test_without_calls_it_is_the_same_object():
    jaxpr = traced(jnp.sin)
    assert inlined(jaxpr) is jaxpr


def test_only_the_calls_that_are_asked_for():
    jaxpr = traced(lambda x: jax.checkpoint(twice)(x))
    changed = inlined(jaxpr, equations.is_remat)
    assert not any(map(equations.is_remat, _jax.open_jaxpr(changed).eqns))
    assert {"jit", "pjit"} & set(names(changed))
    assert_same(jaxpr, changed)


def test_a_call_that_says_where_its_results_lie_stays():
    mesh = Mesh(np.array(jax.devices()[:2]), ("device",))
    there = NamedSharding(mesh, PartitionSpec("device"))
    for call in (jax.jit(squared, out_shardings=there), jax.jit(squared, in_shardings=there)):
        jaxpr = traced(lambda x, call=call: call(x) + squared(x))
        changed = inlined(jaxpr)
        calls = [eqn for eqn in _jax.open_jaxpr(changed).eqns if equations.is_call(eqn)]
        assert len(calls) == 1
        assert _jax.is_laid_out(calls[0])
