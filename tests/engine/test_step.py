"""Within a segment: steps replayed and reversed, buffers brought back, and what is shown of it."""

import itertools

import jax.numpy as jnp
import pytest

from loopkit import Plan, _jax
from loopkit._engine import progress
from loopkit._progress.progress import check_progress
from recorded_bars import Plain

from .swept_loops import (
    GPUS,
    LENGTH,
    MIXED,
    TAKEN,
    assert_swept,
    decided,
    known,
    rewriting,
    written_out,
)

ENDS = [None, 6]
PLANS = {
    "every carry": [Plan(LENGTH)],
    "every segment": [Plan(4, 2), Plan(3, 3, "residuals"), Plan(3, 3, host=True)],
    "schedule": [Plan(3), Plan(2, 2), Plan(2, 3, "residuals")],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", PLANS)
def test_buffers_that_are_brought_back(strategy):
    """From the log: no row of theirs is saved."""
    for at, end in enumerate(ENDS):
        wanted = written_out(*rewriting(taken=end))
        ways = itertools.cycle(GPUS[at:] + GPUS[:at])
        for plan, on_gpu in zip(PLANS[strategy], ways, strict=False):
            found = assert_swept(*rewriting(taken=end, checkpoints=plan), wanted, on_gpu)
            assert found.both.how.plan.strategy == strategy
            assert found.both.how.undo is not None
            assert found.both.how.rereads
            assert all(t.size < 80 for t in found.both.stack_types)


@pytest.mark.exhaustive
@pytest.mark.parametrize("end", [None, 7])
def test_buffers_of_segments_that_are_longer_on_a_gpu(end):
    loops = lambda **how: rewriting(8, end, **how)
    wanted = written_out(*loops())
    for on_gpu in [*GPUS, *MIXED]:
        found = assert_swept(*loops(checkpoints=Plan(4)), wanted, on_gpu)
        assert found.both.how.undo is not None
        assert (found.both.how.layout_plan is not None) == on_gpu[1]


SHOWN = ["all", Plan(LENGTH), Plan(LENGTH, 1, "residuals"), Plan(3, 3), Plan(2)]


class Told:
    """The host: bars, each a list of the steps that it is told of at once, None in the end."""

    def __init__(self):
        self.bars, self.ways = [], []

    def tell(self, call, values, results):
        number, steps, *_ = map(int, values)
        if isinstance(call, progress.Opening):
            self.bars.append([])
            self.ways.append((number, call.backward))
            return list(map(jnp.int32, (len(self.bars) - 1, 1)))
        assert call.backward == self.ways[number][1]
        self.bars[number] += [steps] if isinstance(call, progress.Update) else [steps, None]
        return [jnp.int32(1 if isinstance(call, progress.Update) else 0)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("on_gpu", GPUS)
def test_each_step_is_shown_once(on_gpu, monkeypatch):
    """A step shows as it is taken and as it is reversed, and not when it runs again."""
    for make, steps in [(known, LENGTH), (decided, TAKEN)]:
        wanted = written_out(*make())
        for plan in SHOWN:
            told, (loop, given) = Told(), make(checkpoints=plan)
            monkeypatch.setattr(_jax, "tell", told.tell)
            loop = loop.replace(progress=check_progress(loop.name, Plain()))
            assert_swept(loop, given, wanted, on_gpu)
            assert told.ways == [(LENGTH, False), (steps, True)]
            assert [bar.pop() for bar in told.bars] == [None, None]
            assert list(map(sum, told.bars)) == [steps, steps]
