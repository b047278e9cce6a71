"""The carry at the start of every segment."""

import functools as ft

import jax.numpy as jnp
import pytest

from loopkit import Plan
from loopkit._engine.derivative import deferred_products
from loopkit._engine.derivative.reversal import reversal
from loopkit._engine.facts.activity import forward_activity
from loopkit._engine.sweeps import segments, sweeps
from loopkit._engine.sweeps.segments import EverySegment
from loopkit._engine.sweeps.step import StepReversal

from .swept_loops import (
    GPUS,
    LENGTH,
    MIXED,
    TAKEN,
    assert_swept,
    decided,
    dense,
    known,
    loops_back,
    loops_there,
    moving,
    step_by_step,
    written_out,
)

LOOPS = {"known": (known, LENGTH), "decided": (decided, TAKEN)}


@ft.cache
def wanted(name):
    return written_out(*LOOPS[name][0]())


def assert_counts(name, plan, ways=GPUS, **how):
    make, steps = LOOPS[name]
    within = steps - -(-steps // plan.segment) if plan.store == "carries" else 0
    for on_gpu in ways:
        found = assert_swept(*make(checkpoints=plan, **how), wanted(name), on_gpu)
        assert type(found.both) is EverySegment
        assert found.runs == {"again": within, "replayed": steps, "reversed": steps}


@pytest.mark.exhaustive
@pytest.mark.parametrize("segment", [3, 5, 9])
def test_no_segment_is_run_to_get_to_another(segment, monkeypatch):
    """Not even as one; of those that are large, no step chooses whether to save."""
    plan = Plan(-(-LENGTH // segment), segment)
    for name in LOOPS:
        assert_counts(name, plan, [*GPUS, *MIXED])
    monkeypatch.setattr(segments, "LARGE_CARRY", -1)
    for name in LOOPS:
        assert_counts(name, plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_residuals(name):
    """Residuals of each step of a segment; and of segments of one step."""
    assert_counts(name, Plan(4, 2, "residuals"))
    assert_counts(name, Plan(LENGTH, 1, "residuals"))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_several_steps_to_an_iteration(name):
    assert_counts(name, Plan(3, 3), unroll=2)
    assert_counts(name, Plan(2, 4, "residuals"), unroll=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_on_the_host(name):
    assert_counts(name, Plan(LENGTH, 1, "residuals", host=True))
    assert_counts(name, Plan(3, 3, host=True))


@pytest.mark.slow
@pytest.mark.parametrize("length", [6, 7])
def test_of_a_known_number_of_steps_a_host_does_not_wait(length):
    """Elsewhere, a loop for the steps left over would cost more than not to know how many."""
    plan = Plan(3, 3)
    there = lambda on_gpu: loops_there(*known(length, checkpoints=plan), on_gpu)
    assert there(True) == [True, True]
    assert there(False) == [True, length == 6]


@pytest.mark.slow
def test_of_small_carries_a_host_waits_once_a_step(monkeypatch):
    """Not once a segment as well; large ones are not written over themselves for that."""
    there = lambda on_gpu: loops_there(*decided(checkpoints=Plan(3, 3)), on_gpu)
    assert there(True) == [False]
    assert there(False) == [False, False]
    monkeypatch.setattr(segments, "LARGE_CARRY", -1)
    assert there(True) == [False, False]


@pytest.mark.slow
def test_going_back_a_host_waits_once_a_segment():
    """Steps left over from an unknown number are reversed apart, so the other loops have a
    length."""

    def back(make, *plan, on_gpu=True):
        return loops_back(*make(checkpoints=Plan(*plan)), on_gpu)

    apart = [False] * 3  # whether there are any, replayed, reversed
    assert back(decided, 3, 3) == [*apart, False, True, True]
    assert back(decided, 4, 2) == [*apart, False, True]  # of two carries one is replayed
    assert back(decided, LENGTH, 1, "residuals") == [False]
    assert back(known, 3, 3) == [True, True, True]
    assert back(decided, 3, 3, on_gpu=False) == [False, False, False]
    assert back(known, 3, 3, on_gpu=False) == [True, False, False]
    assert back(lambda **how: known(6, **how), 3, 3, on_gpu=False) == [True, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("store", ["carries", "residuals"])
def test_products_are_summed_once_a_segment(store, monkeypatch):
    monkeypatch.setattr(deferred_products, "SMALLEST", 64)
    loop, given = dense(checkpoints=Plan(2, 4, store))
    wanted = written_out(loop, given)
    for on_gpu in GPUS:
        found = assert_swept(loop, given, wanted, on_gpu)
        assert found.both.how.products is not None
        assert not found.runs["reversed"], "but without the products"


def swept(plan, make=decided):
    loop, given = make(checkpoints=plan)
    how = reversal(loop, forward_activity(loop, moving(loop)))
    operands = loop.split(list(map(jnp.asarray, given.flat)))[0]
    return loop, operands, sweeps(how)


@pytest.mark.parametrize("host", [False, True])
def test_what_lies_on_the_host_is_brought_ahead(host):
    """While the segment after it is reversed: no other has two carries at once."""
    loop, operands, both = swept(Plan(3, 3, host=host))
    with step_by_step():
        outs = both.forward(loop, operands)
        stacks = outs[loop.carry_count + loop.ys_count :][: len(both.stack_types)]
        ahead = both.load_ahead(operands, stacks, jnp.int32(1))
        row = both.load(operands, stacks, jnp.int32(1))
        first = both.load_ahead(operands, stacks, jnp.int32(-1))
    assert len(ahead) == (len(row) if host else 0)
    for found, v in zip(ahead, row, strict=host):
        assert jnp.array_equal(found, v)
    for found, v in zip(first, [operands.init[0]] * len(row), strict=host):
        assert jnp.array_equal(found, v)


def test_a_segment_of_one_step_has_no_rows():
    _, operands, both = swept(Plan(LENGTH, 1, "residuals"))
    assert both.rows(StepReversal(both.how, operands, jnp.int32(TAKEN), None)) == []
