"""An object for `progress` that notes what it is told, each bar for itself."""

from __future__ import annotations

import jax

from loopkit._progress import open_bars


class Recorded:
    def __init__(self, total, name, backward):
        self.total, self.name, self.backward = total, name, backward
        self.updates, self.closed, self.done = [], 0, []

    def update(self, steps):
        assert not self.closed, "updated after it was closed"
        assert type(steps) is int
        assert steps > 0
        self.updates.append(steps)

    def lanes(self, done, of):
        assert 0 <= done <= of
        self.done.append((done, of))

    def close(self):
        self.closed += 1

    @property
    def steps(self):
        return sum(self.updates)


class Recorder:
    def __init__(self):
        self.bars = []

    def start(self, total, *, name, backward):
        assert total is None or type(total) is int
        self.bars.append(Recorded(total, name, backward))
        return self.bars[-1]

    def update(self, steps):
        raise AssertionError("not the bar's own")

    def close(self):
        raise AssertionError("not the bar's own")

    def run(self, f, *args):
        """Return `f(*args)` once it is computed; every bar is then closed, once."""
        out = jax.block_until_ready(f(*args))
        assert [bar.closed for bar in self.bars] == [1] * len(self.bars)
        assert not open_bars._open
        return out

    def ways(self, of=lambda bar: bar.steps):
        """Split the bars into those that go forward and those that go backward."""
        return tuple([of(bar) for bar in self.bars if bar.backward is way] for way in (False, True))

    @property
    def totals(self):
        return self.ways(lambda bar: bar.total)


class Plain:
    """The three methods and no more."""

    def __init__(self):
        self.said = []

    def start(self, total):
        self.said.append(("start", total))

    def update(self, steps):
        self.said.append(steps)

    def close(self):
        self.said.append("close")
