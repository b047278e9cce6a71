"""A loop made of another: with other jaxprs, without what it prints, of one lane or many."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback

from loopkit._engine.lanes.many_lanes import OneLane
from loopkit._engine.loop import Operands
from loopkit._programs import program_key

from .small_loops import make_loop


def spoken(y):
    jax.debug.print("at {}", y)
    return y + 1.0


def asked(y):
    return io_callback(lambda y: y, y, y) + 1.0


def stops(step):
    """A loop whose predicate does nothing beside."""
    body = lambda consts, carry, x: ([step(carry[0])], [])
    return make_loop(body, [], [0.5], cond=lambda _, carry: carry[0] < 3, length=9)[0]


def test_steps_that_are_taken_again():
    """They print nothing, and must not ask the host."""
    silent, speaks, asks = stops(jnp.sin), stops(spoken), stops(asked)
    assert silent.without_debug_effects() is silent
    quiet = speaks.without_debug_effects()
    assert speaks.effects
    assert not quiet.effects
    assert speaks.without_debug_effects() is quiet
    assert [loop.has_impure_callback for loop in (silent, speaks, asks)] == [False, False, True]
    speaks.check_repeats()
    with pytest.raises(NotImplementedError, match=r"loopkit\.while_loop: steps that run again"):
        asks.check_repeats()


def test_changed_jaxprs():
    """A loop with nothing to change stays the same; a loop of lanes is made of another of one
    lane."""
    loop, other = stops(jnp.sin), stops(jnp.cos)
    assert loop.map_jaxprs(lambda j: j) is loop
    swap = {id(loop.body): other.body, id(loop.cond): other.cond}
    for changed in ("body", "cond"):
        old = getattr(loop, changed)
        new = loop.map_jaxprs(lambda j, old=old: swap[id(j)] if j is old else j)
        for name in ("body", "cond"):
            assert getattr(new, name) is getattr(other if name == changed else loop, name)
    known = stops(jnp.sin).replace(cond=None, cond_const_count=0)
    assert known.map_jaxprs(lambda j: other.body).body is other.body
    assert known.map_jaxprs(lambda j: other.body).cond is None


def test_a_loop_of_lanes():
    """Whatever makes many of it: it is the same one lane."""
    loop, other = stops(jnp.sin), stops(jnp.cos)
    flags = Operands([], [], [True], [])
    one = OneLane(loop, 3, flags)
    assert one == OneLane(loop, 3, flags) != OneLane(loop, 4, flags)
    many = one.many
    assert (many.lane, many.lanes) == (one, (3,))
    assert many is one.many is OneLane(loop, 3, flags).many
    assert one.replaced(other).lane == OneLane(other, 3, flags)
    assert many.map_jaxprs(lambda j: j) is many
    halved = many.map_jaxprs(lambda j: other.body if j in (loop.body, many.body) else j)
    assert (halved.lane.loop.body, halved.lane.loop.cond) == (other.body, loop.cond)
    assert (halved.lane.count, halved.lane.flags) == (3, flags)
    assert many.replace().lane is None


def test_what_equal_programs_may_differ_in():
    """Whether a loop was met before, and what is derived from it."""
    loop = stops(jnp.sin)
    key = program_key(loop)
    assert program_key(loop.replace(lasting=True)) == key
    assert program_key(loop.replace(memory={"a": 1})) == key
    assert program_key(loop.replace(masks_itself=True)) != key
