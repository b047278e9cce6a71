"""The frame of every strategy: what sweeps hand over, and what costs a wait, a copy or memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from loopkit import Plan, _jax
from loopkit._engine.derivative.reversal import reversal
from loopkit._engine.facts.activity import forward_activity
from loopkit._engine.sweeps import STRATEGIES, strategy, sweeps

from .small_loops import assert_same, make_loop
from .swept_loops import (
    GPUS,
    LENGTH,
    TAKEN,
    assert_swept,
    decided,
    known,
    loops_back,
    moving,
    written_out,
)

SHOWN = ["all", Plan(LENGTH), Plan(LENGTH, host=True), Plan(0, keeps_all=True, host=True)]


def of(plan, make=decided):
    loop, _ = make(checkpoints=plan)
    return sweeps(reversal(loop, forward_activity(loop, moving(loop))))


@pytest.mark.exhaustive
@pytest.mark.parametrize("reverse", [False, True])
def test_cotangents_of_two(reverse):
    """Also with rows along other axes, first or last one first."""
    for make in (known, decided):
        wanted = written_out(*make(reverse=reverse))
        for plan in ["all", Plan(3, 3), Plan(2, 2, "residuals")]:
            assert_swept(*make(reverse=reverse, checkpoints=plan), wanted, batch=2)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["xs", "ys", "neither"])
def test_every_residual_of_rows_that_are_read_or_written(where):
    """From the end."""

    def body(consts, carry, x):
        h = jnp.sin(carry[0] * consts[0]) + sum(x)
        return [h, carry[1] + 1], [h * 2.0] if where == "ys" else []

    xs = [np.cos(np.arange(float(LENGTH)))] if where == "xs" else []
    below = lambda limit, carry: carry[1] < limit[0]
    ends = {}, {"cond": below, "cond_consts": [TAKEN], "unroll": 3}
    for end, on_gpu in zip(ends, GPUS, strict=True):
        how = {"length": LENGTH, "reverse": True, "checkpoints": "all", **end}
        loop, given = make_loop(body, [0.7], [0.3, 0], xs, **how)
        found = assert_swept(loop, given, on_gpu=on_gpu)
        assert type(found.both) is STRATEGIES["every residual"]


@pytest.mark.parametrize("host", [False, True])
def test_where_what_is_saved_lies(host):
    """Stored values are in the right memory from the start, and when they are handed over."""
    plans = Plan(LENGTH, host=host), Plan(LENGTH, 4, host=host), Plan(3, 3, host=host)
    for plan in (*plans, Plan(2, host=host), Plan(0, keeps_all=True, host=host)):
        both = of(plan)
        blank = jax.make_jaxpr(lambda both=both: both.blank_stacks())().out_avals
        types = both.residual_types[: len(both.stack_types)]
        assert list(map(_jax.is_on_host, blank)) == [host] * len(blank)
        assert list(map(_jax.is_on_host, types)) == [host] * len(blank)
        assert [t.shape for t in blank] == [t.shape for t in types]


def test_a_stack_of_one_row_on_the_host_has_two():
    rows = lambda **how: of(Plan(**how)).stack_types[0].shape[0]
    assert rows(slots=2) == 1
    assert rows(slots=2, host=True) == 2
    assert rows(slots=3, host=True) == 2
    assert rows(slots=4, host=True) == 3


def test_what_leaves_for_the_host_is_a_copy():
    """So that steps need not wait until it is there."""
    values = [jnp.ones(3)]
    here, there = (of(Plan(2, host=host)).leaving(values, jnp.int32(0)) for host in (False, True))
    assert here[0] is values[0]
    assert there[0] is not values[0]
    assert jnp.array_equal(there[0], values[0])


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["all", Plan(LENGTH)], ids=range(2))
def test_loops_back_over_all_steps(plan):
    """An unknown number of steps is cut into parts of known length, for a host that waits."""
    back = lambda make, on_gpu: loops_back(*make(checkpoints=plan), on_gpu)
    assert back(known, False) == back(known, True) == [True]
    assert back(decided, False) == [False]
    assert back(decided, True) == [False, True, False]


@pytest.mark.exhaustive
def test_parts_of_steps(monkeypatch):
    monkeypatch.setattr(strategy, "PART", 2)
    for plan in SHOWN:
        assert_swept(*decided(checkpoints=plan), on_gpu=(True, True))


@pytest.mark.slow
def test_rows_that_are_not_taken():
    """Their cotangents are zero, of each of several xs."""

    def body(consts, carry, x):
        return [jnp.sin(carry[0]) * x[0] + x[1], carry[1] + 1], []

    xs = [np.cos(np.arange(float(LENGTH))), np.sin(np.arange(float(LENGTH)))]
    below = lambda limit, carry: carry[1] < limit[0]
    loop, given = make_loop(body, [], [0.3, 0], xs, cond=below, cond_consts=[TAKEN])
    found = assert_swept(loop, given)
    for ct in found.cotangents[-2:]:
        assert jnp.all(ct[TAKEN:] == 0)
        assert jnp.all(ct[:TAKEN] != 0)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Plan(2), Plan(3, 3)], ids=range(2))
def test_no_steps_at_all(plan):
    """A loop without a length of its own, and one of length zero, take no steps."""
    loop, given = decided(taken=0, checkpoints=plan)
    for on_gpu in GPUS:
        assert_swept(loop, given, on_gpu=on_gpu)


def test_where_the_axis_of_lanes_is_in_what_is_handed_on():
    """Told to whoever has it before it goes back: here, each lane's pullback is taken out."""

    def total(rows, w):
        body = lambda i, rows: rows.at[i % 3].set(jnp.sin(rows[(i + 1) % 3] * w))
        rows = jnp.zeros((40, 2)).at[:3].set(rows)
        return loopkit.fori_loop(0, 7, body, rows, buffers=True, checkpoints=Plan(3)).sum()

    rows, w = jnp.sin(jnp.arange(18.0)).reshape(3, 3, 2), jnp.ones(3)
    back = jax.jit(jax.vmap(lambda *given: jax.vjp(total, *given)[1]))(rows, w)
    found = jax.jit(jax.vmap(lambda back: back(1.0)))(back)
    assert_same(found, jax.jit(jax.vmap(jax.grad(total, (0, 1))))(rows, w))
