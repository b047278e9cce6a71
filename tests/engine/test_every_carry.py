"""The strategy that stores every carry: what runs again, and deferred products."""

import functools as ft

import pytest

from loopkit import Plan
from loopkit._engine.derivative import deferred_products
from loopkit._engine.sweeps.every_step import EveryCarry

from .swept_loops import GPUS, LENGTH, assert_swept, decided, dense, known, written_out

ends_early = ft.partial(decided, taken=4)
PLANS = [Plan(LENGTH), Plan(LENGTH, host=True)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("unroll", [1, 3])
def test_each_step_is_run_once_more(unroll):
    for make, steps in [(known, LENGTH), (ends_early, 4)]:
        wanted = written_out(*make(reverse=True))
        for plan in PLANS:
            loop, given = make(reverse=True, checkpoints=plan, unroll=unroll)
            for on_gpu in GPUS:
                found = assert_swept(loop, given, wanted, on_gpu)
                assert type(found.both) is EveryCarry
                assert found.runs == {"again": 0, "replayed": steps, "reversed": steps}
                assert found.taken == (steps if loop.cond is None else -(-steps // unroll) * unroll)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Plan(8, 4), Plan(8, 2), Plan(8, 4, host=True)], ids=range(3))
def test_products_are_summed_once_a_segment(plan, monkeypatch):
    monkeypatch.setattr(deferred_products, "SMALLEST", 64)
    loop, given = dense(checkpoints=plan)
    wanted = written_out(loop, given)
    for on_gpu in GPUS:
        found = assert_swept(loop, given, wanted, on_gpu)
        assert type(found.both) is EveryCarry
        assert found.both.how.products is not None
        assert not found.runs["reversed"], "but without the products"


@pytest.mark.slow
def test_a_single_step():
    """The first row of a single step is the last."""
    loop, given = decided(taken=1, checkpoints=Plan(LENGTH, host=True))
    assert_swept(loop, given)
