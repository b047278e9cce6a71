"""A jaxpr that is run, or transposed, with loops in it: each computes, and takes, what is used."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from loopkit import Plan, _jax
from loopkit._engine.derivative.reversal import reversal
from loopkit._engine.facts.activity import forward_activity
from loopkit._engine.loop import Operands
from loopkit._engine.passes.unused import to_run, to_transpose
from loopkit._engine.primitives import evaluated_p, forward_p, pushforward_p

from .small_loops import assert_same, make_loop, types_of

CONSTS, INIT = [0.9, 0.4], [0.3, 0.2, 1.0]


def small():
    """Nothing else in the carry needs `total`, and no derivative needs the constant `b`."""

    def body(consts, carry, x):
        (w, b), (h, k, total) = consts, carry
        return [jnp.sin(w * h * k) + b, k * 1.1, total + h + b], []

    loop, operands = make_loop(body, CONSTS, INIT, length=4, checkpoints=Plan(2))
    moving = Operands([], [True, False], [True, False, True], [])
    return loop, forward_activity(loop, moving), operands.flat


def names(jaxpr):
    return [eqn.primitive.name for eqn in _jax.open_jaxpr(jaxpr).eqns]


def only(jaxpr, primitive):
    (eqn,) = (e for e in _jax.open_jaxpr(jaxpr).eqns if e.primitive is primitive)
    return eqn


def same_results(new, old, values):
    results = [jax.jit(_jax.call_jaxpr(j))(*values) for j in (new, old)]
    assert_same(*results)


def saving(*values):
    """Its first result, what is saved of it, and more beside it."""
    loop, active, _ = small()
    outs = forward_p.bind(*values, loop=loop, active=active)
    return [jnp.cos(outs[0]) + values[1], *outs[3:], 2.0]


def alone(*values):
    loop, active, _ = small()
    outs = forward_p.bind(*values, loop=loop, active=active)
    return [outs[0], *outs[3:]]


@pytest.mark.parametrize("fun", [saving, alone])
def test_a_loop_computes_what_is_used(fun):
    _, _, values = small()
    old = _jax.trace_closed(fun, types_of(values), "step")
    new = to_run(old)
    assert type(new) is type(old)
    assert [n.replace("evaluated", "forward") for n in names(new)] == names(old)
    eqn = only(new, evaluated_p)
    j = _jax.open_jaxpr(new)
    # Not what the total begins with.
    assert [j.invars.index(v) for v in eqn.invars] == [0, 1, 2, 3]
    assert len(eqn.outvars) == len(only(old, forward_p).outvars) - 2
    same_results(new, old, values)


def test_where_all_is_used_it_stays():
    loop, active, values = small()
    every = lambda *values: forward_p.bind(*values, loop=loop, active=active)
    old = _jax.trace_closed(every, types_of(values), "step")
    assert names(to_run(old)) == names(old) == ["loopkit_forward"]
    without = _jax.trace_closed(lambda x: [jnp.sin(x)], types_of([0.3]), "step")
    assert to_run(without) is without


def test_loops_in_calls_and_branches():
    """Results that a call returns are all used."""
    _, _, values = small()

    def step(go, *values):
        called = jax.jit(lambda *v: saving(*v)[:2])(*values)
        chosen = lax.cond(go, lambda *v: alone(*v)[:1], lambda *v: [v[0]], *values)
        return [*called, *chosen]

    operands = [True, *values]
    old = _jax.trace_closed(step, types_of(operands), "step")
    new = to_run(old)
    assert names(new) == names(old)
    assert "loopkit_forward" in str(old)
    assert "loopkit_forward" not in str(new)
    same_results(new, old, operands)


# ---------------------------------------------------------------- to be transposed


def linear(held):
    """Tangents of the loop, of those of `w`, h and the total: its other operands are constants."""
    loop, active, _ = small()

    def tangents(*moved):
        params = {"layout": active, "active": active, "batch": None, "transpose_only": False}
        return pushforward_p.bind(*held, *moved, loop=loop, **params)

    return tangents


def with_residuals():
    loop, active, values = small()
    run = jax.jit(lambda *values: forward_p.bind(*values, loop=loop, active=active))
    return [*values, *run(*values)[3:]]


def transposed(jaxpr, held, moved):
    f = lambda *moved: _jax.call_jaxpr(jaxpr)(*held, *moved)
    return jax.jit(jax.linear_transpose(f, *moved))([0.7, -0.3])


def within(how):
    def tangents(*values):
        held, moved = values[: -len(MOVED)], values[-len(MOVED) :]
        return [v * 2.0 for v in how(linear(held))(*moved)]

    return tangents


MOVED = [0.1, 0.2, 0.3]
PLACES = {"alone": lambda f: f, "in a call": lambda f: jax.jit(f)}


@pytest.mark.slow
@pytest.mark.parametrize("how", PLACES)
def test_what_a_transpose_does_not_read_is_zeros(how):
    loop, active, _ = small()
    held = with_residuals()
    old = _jax.trace_closed(within(PLACES[how]), types_of([*held, *MOVED]), "tangents")
    new = to_transpose(old)
    found, j = only(new, pushforward_p), _jax.open_jaxpr(new)
    assert found.params["transpose_only"]
    reads = reversal(loop, active).reads
    assert 0 < sum(reads) < len(reads) == len(small()[2])
    taken = [v in j.invars for v in found.invars]
    assert taken == [*reads, *[True] * (len(held) - len(reads)), *[True] * len(MOVED)]
    wanted = transposed(old, held, MOVED)
    assert_same(transposed(new, held, MOVED), wanted)
    assert np.all(np.abs(np.asarray(wanted)) > 0.01)


@pytest.mark.slow
def test_branches_keep_their_operands():
    held = with_residuals()

    def tangents(*values):
        go = values[0] > 0
        held, moved = values[: -len(MOVED)], values[-len(MOVED) :]
        return lax.cond(go, lambda *m: list(linear(held)(*m)), lambda *m: [*m[1:]], *moved)

    old = _jax.trace_closed(tangents, types_of([*held, *MOVED]), "tangents")
    new = to_transpose(old)
    assert "transpose_only=True" not in str(new)
    assert_same(transposed(new, held, MOVED), transposed(old, held, MOVED))


def test_without_loops_a_jaxpr_stays():
    jaxpr = _jax.trace_closed(lambda x: [x * 2.0], types_of([0.3]), "tangents")
    assert to_transpose(jaxpr) is jaxpr


def test_what_is_run_may_have_lanes():
    """Lanes of a step that is spelled out, with the derivative of a loop in it."""
    _, _, values = small()
    jaxpr = to_run(_jax.trace_closed(alone, types_of(values), "step"))
    step = _jax.call_jaxpr(jaxpr)
    rows = jnp.linspace(0.2, 0.8, 3)
    run = jax.jit(lambda h: step(*values[:2], h, *values[3:])[0])
    assert_same([jax.jit(jax.vmap(run))(rows)], [jnp.stack([run(h) for h in rows])])
